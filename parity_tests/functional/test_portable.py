"""Settings that configs store are the same in both packages, unless a class changes them."""

import numpy as np
import pytest
from flax import nnx

import flax_attn
import torch_ref
from attn_spec.rope import RotaryPositions
from attn_spec.swiglu import SwiGLUBounds
from flax_attn.models import GptOssConfig, LlamaConfig

SIZES = {"context_length": 8, "vocab_size": 11}


@pytest.mark.parametrize(
    ("name", "plain", "number"),
    [("RoPE", RotaryPositions, 500.0), ("ClampedSwiGLU", SwiGLUBounds, 3.0)],
)
def test_settings_of_the_packages_are_equal_where_their_fields_are(name, plain, number):
    classes = [getattr(flax_attn, name), getattr(torch_ref, name), plain]
    same, other = ({cls(value) for cls in classes} for value in (number, number + 1))
    assert (len(same), len(other)) == (1, 1)
    assert same != other
    assert {type(cls.of(plain(number))) for cls in classes[:2]} == set(classes[:2])
    # Not equal to all that has the same fields.
    assert plain(number) != (number,)


class Backwards(flax_attn.RoPE):
    """A class of one package alone, which computes something else."""

    def __call__(self, x, positions=None):
        return super().__call__(x, -positions)


def test_a_class_that_may_compute_something_else_is_equal_to_itself_alone():
    assert Backwards(500.0) == Backwards(500.0) != flax_attn.RoPE(500.0)
    assert type(flax_attn.RoPE.of(Backwards(500.0))) is Backwards
    with pytest.raises(ValueError, match=r"must be RoPE or RotaryPositions; got Backwards, which"):
        torch_ref.RoPE.of(Backwards(500.0))


def test_settings_of_another_kind_are_refused(side):
    with pytest.raises(
        ValueError, match=r"must be RoPE or RotaryPositions; got str, .*RoPE\(\.\.\."
    ):
        side.RoPE.of("linear")
    with pytest.raises(ValueError, match="must be RoPE or RotaryPositions; got SwiGLUBounds"):
        side.RoPE.of(SwiGLUBounds())


def llama(package):
    return "Llama", LlamaConfig(8, 12, 4, 2, rope=package.RoPE(500.0), **SIZES)


def gpt_oss(package):
    settings = {"rope": package.RoPE(500.0), "swiglu": package.ClampedSwiGLU(3.0)}
    return "GptOss", GptOssConfig(8, 12, 4, 2, num_experts=3, top_k=2, **settings, **SIZES)


@pytest.mark.parametrize("family", [llama, gpt_oss])
@pytest.mark.parametrize("package", [flax_attn, torch_ref])
def test_a_config_with_settings_of_either_package_makes_a_model(side, package, family):
    name, config = family(package)
    streams = {"rngs": nnx.Rngs(0)} if side.is_flax else {}
    model = getattr(side.models, name)(config, **streams)
    # The settings are those of the package that computes.
    assert type(model.trf_blocks[0].att.rope) is side.RoPE
    assert side.numpy(model(side.array(np.ones((3, 5), int)))).shape == (3, 5, 11)
