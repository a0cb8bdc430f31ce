"""Shared by the tests of one side: variants as Flax modules, and how results are compared."""

import inspect
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import flax_attn
from flax_attn.parity import tolerance
from flax_attn.proof import variants as table
from flax_attn.proof.build import draw_parameters
from flax_attn.proof.variants import VARIANTS, Package
from flax_attn.sharding.parameters import abstract


class AtRate(Package):
    """The package with one rate of dropout in place of that of every row."""

    def __init__(self, dropout: float, **numerics: Any):
        super().__init__(flax_attn, **numerics)
        self.rate = {"dropout": dropout}

    def __getattr__(self, name: str):
        part = super().__getattr__(name)
        if name == "Dropout":
            return lambda rate: part(self.rate["dropout"])
        return lambda *arguments, **options: part(
            *arguments, **options | (self.rate if "dropout" in options else {})
        )


# Modules without values, which take most of the time to make.
SHAPES: dict[tuple, tuple] = {}


def surroundings():
    """Return what else the shapes of a module may depend on."""
    return jax.config.jax_enable_x64, jax.sharding.get_abstract_mesh()


@dataclass(frozen=True)
class Variant:
    """A row of the table as a Flax module, without dropout unless a rate is given."""

    row: table.Variant

    @property
    def name(self) -> str:
        return self.row.name

    @property
    def drops(self) -> bool:
        return self.row.dropout

    @property
    def weighs(self) -> bool:
        attend = getattr(getattr(flax_attn, self.row.module), "attend", None)
        return attend is not None and "return_weights" in inspect.signature(attend).parameters

    def takes(self, name: str) -> bool:
        module = "MultiHeadAttention" if self.row.module == "TransformerBlock" else self.row.module
        return name in inspect.signature(getattr(flax_attn, module).__init__).parameters

    def create(self, seed: int = 0, **arguments: Any) -> nnx.Module:
        """Return the module as constructed; arguments that a part does not take are left out."""
        return self.construct(**arguments, rngs=nnx.Rngs(seed))

    def construct(self, *, rngs: nnx.Rngs, dropout: float = 0.0, **numerics: Any) -> nnx.Module:
        return self.row.make(AtRate(dropout, rngs=rngs, **numerics))

    def build(self, seed: int = 0, **arguments: Any) -> nnx.Module:
        """Return the module with every parameter random: biases, scales and shifts included."""
        key = self.name, seed, *arguments.items(), *surroundings()
        if key not in SHAPES:
            SHAPES[key] = nnx.split(abstract(lambda: self.create(seed, **arguments)))
        graph, state = SHAPES[key]
        # Each module has variables of its own, which are not those that are kept.
        own = jax.tree.map(lambda shape: shape, state)
        return draw_parameters(nnx.merge(graph, own), seed)

    def inputs(self, dtype: Any = jnp.float32) -> list[jax.Array]:
        drawn = self.row.draw(np.random.default_rng(7)).values()
        return [jax.device_put(x.astype(jnp.dtype(dtype))) for x in drawn]


ROWS = (  # one of each class, and of each way that classes differ under a transform
    *(
        "simplified",
        "self_attention_d_key",
        "causal_d_key",
        "multi_head_wrapper",
        "multi_head_gqa",
        "multi_head_cross",
    ),
    *("block_gpt2", "block_llama", "layer_norm", "rms_norm", "feed_forward_exact"),
)
SELECTED = tuple(Variant(row) for name in ROWS for row in VARIANTS if row.name == name)
KINDS = {
    "variant": SELECTED,
    "learning": [variant for variant in SELECTED if variant.name != "simplified"],
    "typical": [
        variant for variant in SELECTED if variant.name in ("causal_d_key", "multi_head_gqa")
    ],
    "dropping": [variant for variant in SELECTED if variant.drops],
    "weighing": [variant for variant in SELECTED if variant.weighs],
}


def pytest_generate_tests(metafunc):
    for name, variants in KINDS.items():
        if name in metafunc.fixturenames:
            metafunc.parametrize(name, variants, ids=[variant.name for variant in variants])


@pytest.fixture
def variants():
    return {variant.name: variant for variant in SELECTED}


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
            {
                jax.tree_util.keystr(path): np.asarray(leaf)
                for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
            }
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


def _first_of(targets: Generator) -> Iterator:
    try:
        yield next(targets)
    # What describes the chip is not installed.
    except ImportError as error:
        pytest.skip(str(error))
    targets.close()


@pytest.fixture(scope="module")
def gpu_target():
    """Return what compiles for an H200 that is not at hand; skip where that is not installed."""
    from tools.aot import gpu

    yield from _first_of(gpu.targets())


@pytest.fixture(scope="module", params=["gpu", "tpu"])
def target(request):
    """Return what compiles for an H200, then for a v5e, neither of them at hand."""
    from tools.aot import gpu, tpu

    yield from _first_of(gpu.targets() if request.param == "gpu" else tpu.targets(("v5e",)))
