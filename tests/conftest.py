import inspect
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import flax_attn
from flax_attn.parity import tolerance
from flax_attn.proof.build import build

_B, _T, _S, _D_IN, _D_MODEL, _HEADS = 3, 5, 9, 7, 24, 4
_HEAD = {"d_in": _D_IN, "d_out": 6, "context_length": 8, "dropout": 0.0, "qkv_bias": True, "d_key": 10}
_MULTI = {"d_in": _D_IN, "d_out": _D_MODEL, "context_length": 11, "dropout": 0.0, "num_heads": _HEADS}
_BLOCK = {"d_model": _D_MODEL, "context_length": 11, "dropout": 0.0, "num_heads": _HEADS}
_EXACT = ("FeedForward", {"d_hidden": 10, "activation": "gelu_exact"})
_POST = {"norm": "RMSNorm", "norm_first": False, "causal": False, "ff": _EXACT}


@dataclass(frozen=True, eq=False)
class Variant:
    """A module with arguments and the shapes of its inputs."""

    name: str
    cls: type
    arguments: Mapping[str, Any] = field(default_factory=dict)
    shapes: tuple[tuple[int, ...], ...] = ((_B, _T, _D_IN),)

    @property
    def drops(self) -> bool:
        return "dropout" in self.arguments

    @property
    def weighs(self) -> bool:
        return "return_weights" in inspect.signature(self.cls.__call__).parameters

    def takes(self, name: str) -> bool:
        part = flax_attn.MultiHeadAttention if self.cls is flax_attn.TransformerBlock else self.cls
        return name in inspect.signature(part.__init__).parameters

    def create(self, seed: int = 0, **arguments: Any) -> nnx.Module:
        """Return the module as constructed; arguments that the class does not take are left out."""
        return self.construct(**arguments, rngs=nnx.Rngs(seed))

    def construct(self, *, rngs: nnx.Rngs, **arguments: Any) -> nnx.Module:
        numerics = {**arguments, "rngs": rngs}
        changed = {name: value for name, value in arguments.items() if name in self.arguments}
        return build(flax_attn, self.cls.__name__, numerics=numerics, **{**self.arguments, **changed})

    def build(self, seed: int = 0, **arguments: Any) -> nnx.Module:
        """Return the module with every parameter random: biases, scales and shifts included.

        Made from its shapes alone, with numpy: to compile a random function for each shape would take most of the time.
        """
        module = nnx.eval_shape(lambda: self.create(seed, **arguments))
        draw = np.random.default_rng(seed)
        state = nnx.state(module)
        for i, (_, leaf) in enumerate(nnx.to_flat_state(state)):
            if isinstance(leaf, nnx.RngKey):
                leaf.set_value(jax.random.key(1000 * seed + i))
            elif isinstance(leaf, nnx.RngCount):
                leaf.set_value(jnp.uint32(0))
            else:
                leaf.set_value(jnp.asarray(draw.normal(0, 0.4, leaf.shape), leaf.dtype))
        nnx.update(module, state)
        return module

    def inputs(self, dtype: Any = jnp.float32) -> list[jax.Array]:
        draw = np.random.default_rng(7)
        return [jnp.asarray(draw.normal(size=shape), dtype) for shape in self.shapes]


VARIANTS = (
    Variant("simplified", flax_attn.SimplifiedSelfAttention),
    Variant("self_attention", flax_attn.SelfAttention, {"d_in": _D_IN, "d_out": 6, "qkv_bias": True, "d_key": 10}),
    Variant("causal", flax_attn.CausalAttention, _HEAD),
    Variant(
        "wrapper",
        flax_attn.MultiHeadAttentionWrapper,
        {"d_in": _D_IN, "d_out": 6, "context_length": 8, "dropout": 0.0, "num_heads": 2, "qkv_bias": True},
    ),
    Variant("multi_head", flax_attn.MultiHeadAttention, {**_MULTI, "qkv_bias": True, "num_kv_heads": 2}),
    Variant(
        "cross",
        flax_attn.MultiHeadAttention,
        {**_MULTI, "causal": False, "out_bias": False, "kdim": 13, "vdim": 14},
        ((_B, _T, _D_IN), (_B, _S, 13), (_B, _S, 14)),
    ),
    Variant("block", flax_attn.TransformerBlock, {**_BLOCK, "qkv_bias": True}, ((_B, _T, _D_MODEL),)),
    Variant("block_post", flax_attn.TransformerBlock, {**_BLOCK, **_POST, "num_kv_heads": 1}, ((_B, _T, _D_MODEL),)),
    Variant("layer_norm", flax_attn.LayerNorm, {"d_model": _D_IN}),
    Variant("rms_norm", flax_attn.RMSNorm, {"d_model": _D_IN}),
    Variant("feed_forward", flax_attn.FeedForward, {"d_model": _D_IN, "d_hidden": 10}),
)


def pytest_generate_tests(metafunc):
    kinds = {
        "variant": VARIANTS,
        "learning": [v for v in VARIANTS if v.cls is not flax_attn.SimplifiedSelfAttention],
        "typical": [v for v in VARIANTS if v.name in ("causal", "multi_head")],
        "dropping": [v for v in VARIANTS if v.drops],
        "weighing": [v for v in VARIANTS if v.weighs],
    }
    for name, variants in kinds.items():
        if name in metafunc.fixturenames:
            metafunc.parametrize(name, variants, ids=[v.name for v in variants])


@pytest.fixture
def variants():
    return {variant.name: variant for variant in VARIANTS}


@pytest.fixture
def x64():
    with jax.enable_x64(True):
        yield


@pytest.fixture
def close():
    """Equal but for the order of sums."""

    def check(actual, expected):
        assert jax.tree.structure(actual) == jax.tree.structure(expected)
        sides = (
            {jax.tree_util.keystr(path): np.asarray(leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}
            for tree in (actual, expected)
        )
        errors = tolerance.reordered(*sides)
        assert max(errors.values()) <= 1, errors

    return check


@pytest.fixture
def equations():
    """All equations of a jaxpr, those of inner jaxprs included."""

    def walk(jaxpr) -> Iterator[Any]:
        for equation in jaxpr.eqns:
            yield equation
            for inner in jax.tree.leaves(list(equation.params.values()), is_leaf=_is_jaxpr):
                if _is_jaxpr(inner):
                    yield from walk(getattr(inner, "jaxpr", inner))

    return walk


def _is_jaxpr(value) -> bool:
    return hasattr(value, "eqns") or hasattr(getattr(value, "jaxpr", None), "eqns")
