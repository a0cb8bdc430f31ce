"""Mixtures of experts on a mesh: outputs and gradients of one device.

Experts are divided over an axis of their own.
"""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from safetensors.numpy import load_file

from flax_attn import (
    ClampedSwiGLU,
    Experts,
    GatedFeedForward,
    MixtureOfExperts,
    Router,
    from_pretrained,
)
from flax_attn.models.mixtral import Mixtral, MixtralConfig
from flax_attn.parity import tolerance
from flax_attn.proof.build import drawn
from flax_attn.sharding.parameters import shard, shardings

pytestmark = pytest.mark.usefixtures("x64")
X = np.random.default_rng(0).normal(size=(4, 6, 8))
COTANGENT = np.random.default_rng(1).normal(size=X.shape)
MESHES = [
    ("dense", AxisType.Auto, {"data": 2, "tensor": 2, "expert": 2}),
    ("sorted", AxisType.Auto, {"data": 2, "tensor": 2, "expert": 2}),
    ("sorted", AxisType.Explicit, {"fsdp": 2, "context": 2, "expert": 2}),
    ("sorted", AxisType.Auto, {"expert": 8}),  # one expert each
]


def mixture(form):
    def make():
        numerics = {"param_dtype": jnp.float64, "rngs": nnx.Rngs(0)}
        router = Router(
            8, 8, 3, "sigmoid", selection_bias=True, groups=4, top_groups=2, bias=True, **numerics
        )
        experts = Experts(8, 8, 12, ClampedSwiGLU(0.8), bias=True, form=form, **numerics)
        return MixtureOfExperts(router, experts, GatedFeedForward(8, 6, **numerics))

    return drawn(make)


def both(model, x):
    """Return the output, and all gradients."""

    def weighed(model, x):
        y = model(x)
        return (y * COTANGENT).sum(), y

    gradients, y = nnx.jit(nnx.grad(weighed, argnums=(0, 1), has_aux=True))(model, jnp.asarray(x))
    leaves = jax.tree_util.tree_leaves_with_path(gradients)
    return {"output": np.asarray(y)}, {str(path): np.asarray(leaf) for path, leaf in leaves}


@pytest.fixture(scope="module")
def reference():
    with jax.enable_x64(True):
        return both(mixture("dense"), X)


@pytest.mark.parametrize(("form", "kind", "axes"), MESHES)
def test_outputs_and_gradients_are_those_of_one_device(form, kind, axes, reference):
    mesh = jax.make_mesh(tuple(axes.values()), tuple(axes), (kind,) * len(axes))
    with jax.set_mesh(mesh):
        model = shard(mixture(form), mesh)
        assert model.experts.W_down.kernel[...].sharding.spec[0] == "expert"
        output, gradients = both(model, X)
    errors = tolerance.relative(output, reference[0])
    assert max(errors.values()) <= tolerance.FORWARD, errors
    errors = tolerance.gradient_errors(gradients, reference[1])
    assert max(errors.values()) <= tolerance.GRADIENT, errors


def test_experts_that_a_mesh_does_not_divide_are_whole():
    mesh = jax.sharding.AbstractMesh((3, 2), ("expert", "tensor"))
    found = shardings(mixture("dense"), mesh)["experts"]["W_gate"]["kernel"].get_value()
    assert found.spec == P(None, None, "tensor")


@pytest.mark.parametrize("scan_layers", [False, True])
def test_experts_go_onto_a_mesh_and_back_into_the_same_files(scan_layers, tmp_path):
    config = MixtralConfig(
        8, 12, num_heads=4, num_layers=2, vocab_size=11, context_length=8, num_experts=4
    )
    model = Mixtral(config, rngs=nnx.Rngs(0))
    model.save_pretrained(tmp_path / "one")
    mesh = jax.make_mesh((2, 2, 2), ("fsdp", "expert", "tensor"), (AxisType.Auto,) * 3)
    loaded = from_pretrained(tmp_path / "one", mesh=mesh, scan_layers=scan_layers)
    kernels = [array for path, array in nnx.to_flat_state(nnx.state(loaded)) if path[-2] == "W_up"]
    parts = {kernel[...].sharding.shard_shape(kernel.shape) for kernel in kernels}
    assert parts == {(2, 2, 4, 6) if scan_layers else (2, 4, 6)}
    loaded.save_pretrained(tmp_path / "back")
    one, back = (load_file(tmp_path / name / "model.safetensors") for name in ("one", "back"))
    assert one.keys() == back.keys()
    assert all((one[name] == back[name]).all() for name in one)


@pytest.mark.parametrize("axes", [{"data": 2, "expert": 2, "tensor": 2}, {"expert": 8}])
def test_a_stack_that_is_closed_over_runs_on_a_mesh(axes):
    """Each layer is a slice of all parameters, which are constants on one device."""
    config = MixtralConfig(
        8, 16, num_heads=4, num_layers=2, vocab_size=16, context_length=8, num_experts=8
    )
    model = drawn(
        lambda: Mixtral(config, scan_layers=True, param_dtype=jnp.float64, rngs=nnx.Rngs(0))
    )
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, 16, (8, 5)))
    alone = jax.jit(lambda tokens: model(tokens))(tokens)
    with jax.set_mesh(
        jax.make_mesh(tuple(axes.values()), tuple(axes), (AxisType.Auto,) * len(axes))
    ):
        logits = jax.jit(lambda tokens: model(tokens))(tokens)
    errors = tolerance.relative({"logits": np.asarray(logits)}, {"logits": np.asarray(alone)})
    assert max(errors.values()) <= tolerance.FORWARD, errors


def test_devices_that_share_the_experts_exchange_tokens_and_no_parameters():
    mesh = jax.make_mesh((2, 4), ("data", "expert"), (AxisType.Auto,) * 2)
    x = jnp.asarray(np.tile(X, (2, 1, 1)))
    with jax.set_mesh(mesh):
        model = shard(mixture("dense"), mesh)
        program = jax.jit(
            lambda x, state: nnx.merge(nnx.graphdef(model), state)(x),
            in_shardings=(P(("data", "expert")), None),
        )
        text = program.lower(x, nnx.state(model)).compile().as_text()
    sent = {
        kind: re.findall(rf" = f64\[([\d,]+)\]\S* {kind}\(", text)
        for kind in ("all-gather", "reduce-scatter", "all-reduce")
    }
    assert sent == {"all-gather": ["4,6,8", "4,6,3"], "reduce-scatter": ["1,6,8"], "all-reduce": []}
