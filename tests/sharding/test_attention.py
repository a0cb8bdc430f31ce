"""Attention on a mesh equals attention on one device.

For every strategy, balance, kind of mask, argument and head ratio.
"""

from collections import Counter
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from flax_attn import Mask, Unsupported, dot_product_attention, explain
from flax_attn.functional.mask_part import MaskPart
from flax_attn.parity import tolerance
from flax_attn.plan.collectives import KINDS
from flax_attn.plan.hlo import read
from flax_attn.sharding import constrain, context_parallel, rules, unzigzag, zigzag
from flax_attn.sharding.ring_schedule import make_route

from ..backends.conformance import FAST
from .cases import MASKS, MESHES, Case, drawn

pytestmark = pytest.mark.usefixtures("x64")
jit = partial(jax.jit, compiler_options=FAST)
AXES = ("data", "tensor", "context")


@pytest.fixture
def mesh(mesh_like):
    return lambda name, kind="auto": mesh_like(kind, **dict(zip(AXES, MESHES[name], strict=True)))


def assert_equal(found, expected):
    for name, ours in found.items():
        allowed = tolerance.FORWARD if name == "output" else tolerance.GRADIENT
        theirs = np.asarray(expected[name])
        assert np.abs(np.asarray(ours) - theirs).max() <= allowed * max(np.abs(theirs).max(), 1), (
            name
        )


@pytest.mark.parametrize("case", drawn(), ids=str)
def test_outputs_and_gradients_are_those_of_one_device(case, mesh):
    arrays = case.arrays()
    expected = jit(partial(case.both, backend="reference"))(arrays)
    with jax.set_mesh(mesh(case.mesh)), context_parallel(case.strategy, case.balance):
        assert_equal(jit(case.both)(arrays), expected)


@pytest.mark.parametrize("t", [1, 8])
@pytest.mark.parametrize(
    "lines", [{"batch": "tensor"}, {"tokens": "tensor"}, {"batch": "context"}], ids=str
)
def test_of_two_axes_that_ask_for_the_same_mesh_axis_the_first_gets_it(lines, t, mesh_like):
    k, v = jnp.asarray(np.random.default_rng(0).normal(size=(2, 4, 8, 2, 4)))
    q = k[:, :t] + 1
    expected = dot_product_attention(q, k, v)
    with jax.set_mesh(mesh_like(tensor=2, context=2)), rules(**lines):
        assert_equal({"output": jit(dot_product_attention)(q, k, v)}, {"output": expected})


@pytest.mark.parametrize("strategy", ["all_gather", "ulysses", "ring", "ulysses+ring"])
@pytest.mark.parametrize("rows", [8, 1])
def test_a_bias_of_one_token_a_device(strategy, rows, mesh_like):
    # A row of the bias on each device is that of its query, unless there is one row for all.
    random = np.random.default_rng(0)
    q, k, v = jnp.asarray(random.normal(size=(3, 2, 8, 8, 4)))
    bias = jnp.asarray(random.normal(size=(8, rows, 8)))
    expected = dot_product_attention(q, k, v, bias=bias)
    with jax.set_mesh(mesh_like(context=8)), context_parallel(strategy):
        found = jit(lambda *arrays: dot_product_attention(*arrays[:3], bias=arrays[3]))(
            q, k, v, bias
        )
    assert_equal({"output": found}, {"output": expected})


@pytest.mark.parametrize("kind", ["auto", "explicit"])
@pytest.mark.parametrize(
    "sizes", [{"data": 8}, {"data": 2, "tensor": 4}, {"fsdp": 2, "data": 2, "tensor": 2}], ids=str
)
def test_rows_and_heads_are_computed_where_they_are(sizes, kind, mesh_like, collectives):
    case = Case("documents", "", "auto", "auto", 4, "everything", n=8)
    arrays = {**case.arrays(), "query": jnp.tile(case.arrays()["query"], (2, 1, 1, 1))}
    arrays |= {name: jnp.tile(arrays[name], (2, 1, 1, 1)) for name in ("key", "value")}
    mask = Mask.causal() & Mask.segments(np.tile(MASKS["documents"].parts[1].query, (2, 1)))
    call = partial(dot_product_attention, mask=mask, soft_cap=1.5)
    expected = jit(partial(call, backend="blocked"))(**arrays)
    with jax.set_mesh(mesh_like(kind, **sizes)):
        compiled = jit(partial(call, backend="blocked")).lower(**place(arrays)).compile()
        np.testing.assert_allclose(
            compiled(**place(arrays)), expected, rtol=0, atol=tolerance.FORWARD
        )
    assert collectives(compiled) == {}


@pytest.fixture
def collectives():
    """Return a function that counts what a compiled program sends, by kind."""

    def count(compiled):
        program = read(compiled.as_text())
        kinds = (
            run.instruction.opcode.removesuffix("-start")
            for run in program.runs()
            for _ in range(run.times)
        )
        return {kind: times for kind, times in Counter(kinds).items() if kind in KINDS}

    return count


def place(arrays):
    """Return a call's arrays as the table has them on the mesh in use."""
    names = {"sinks": ("heads",), "bias": (None, "heads", None, None)}
    return {
        name: constrain(x, *names.get(name, ("batch", "tokens", "heads", None)))
        for name, x in arrays.items()
    }


def arrays_of(t, n=8, k=8, h=4, b=1, dtype="float64"):
    draw = np.random.default_rng(t).normal
    return {
        name: jnp.asarray(draw(size=(b, t, heads, h)), dtype)
        for name, heads in (("query", n), ("key", k), ("value", k))
    }


def compiled_on(mesh, arrays, strategy, balance, mask, gradients=False):
    def call(arrays):
        return dot_product_attention(**arrays, mask=mask)

    def both(arrays):
        output, pull = jax.vjp(call, arrays)
        return output, pull(output)

    with jax.set_mesh(mesh), context_parallel(strategy, balance):
        return jit(both if gradients else call).lower(place(arrays)).compile()


SENT = {  # of a causal call on 8 devices: what is sent, and how often
    ("all_gather", "none"): {"all-gather": 2},
    ("all_gather", "zigzag"): {"all-gather": 2, "collective-permute": 8},
    ("ulysses", "none"): {"all-to-all": 4},
    ("ring", "none"): {"collective-permute": 2 * 7},
    ("ring", "zigzag"): {"collective-permute": 2 * 7 + 8},
    ("ulysses+ring", "none"): {"all-to-all": 4, "collective-permute": 2},
}


@pytest.mark.parametrize(("strategy", "balance"), SENT, ids=str)
def test_nothing_is_sent_that_a_strategy_does_not_own(strategy, balance, mesh_like, collectives):
    heads = 4 if strategy == "ulysses+ring" else 8  # two groups of four
    compiled = compiled_on(
        mesh_like(context=8), arrays_of(64, heads, heads), strategy, balance, Mask.causal()
    )
    assert collectives(compiled) == SENT[strategy, balance]


@pytest.mark.parametrize(("window", "sent"), [(8, 1), (9, 1), (10, 2), (33, 4)])
def test_pieces_that_nobody_sees_are_not_sent(window, sent, mesh_like, collectives):
    compiled = compiled_on(
        mesh_like(context=8), arrays_of(64), "ring", "none", Mask.sliding_window(window)
    )
    assert collectives(compiled) == {
        "collective-permute": 2 * sent
    }  # keys and values of pieces of 8 tokens


def test_causal_pieces_do_not_go_around():
    route = make_route(("context",), 4, 1, False, Mask.causal(), 8, 8)
    assert route.hops == (3, 0)
    assert route._pairs(1, 3) == [(0, 1), (1, 2), (2, 3)]
    assert make_route(("context",), 4, 1, True, Mask.causal(), 8, 8)._pairs(1, 3) == [
        (0, 1),
        (1, 2),
        (2, 3),
        (3, 0),
    ]
    assert make_route(("context",), 4, 1, True, Mask.window(2, 0), 8, 8).hops == (1, 1)


def test_memory_of_a_ring_does_not_grow_with_the_devices(mesh_like):
    def temporaries(devices):
        arrays = arrays_of(256 * devices, n=2, k=2, dtype="float32")
        return compiled_on(
            mesh_like(context=devices), arrays, "ring", "none", Mask.causal(), True
        ).memory_analysis()

    two, eight = (temporaries(devices).temp_size_in_bytes for devices in (2, 8))
    assert eight <= 1.1 * two


def test_decoding_over_divided_keys_merges_softmaxes(mesh_like, collectives):
    arrays = arrays_of(64, n=8, k=2, b=4) | {
        "query": arrays_of(1, n=8, b=4)["query"],
        "sinks": jnp.linspace(-1, 1, 8),
    }
    lengths = np.array([64, 9, 1, 0])
    call = partial(dot_product_attention, mask=Mask.lengths(key=lengths))

    def both(arrays):
        output, pull = jax.vjp(lambda arrays: call(**arrays), arrays)
        return {"output": output, **pull(jnp.sin(output))[0]}

    expected = jit(both)(arrays)
    with jax.set_mesh(mesh_like(data=2, tensor=2, context=2)):
        assert_equal(jit(both)(arrays), expected)
        sent = collectives(jit(lambda arrays: call(**arrays)).lower(arrays).compile())
    assert sent == {"all-reduce": 3}  # of a maximum, a sum and an output a head


def test_second_derivatives_go_around_the_ring(mesh_like):
    arrays = arrays_of(32, n=2, k=1)

    def curvature(arrays):
        def slope(arrays):
            return jax.grad(
                lambda a: jnp.sin(dot_product_attention(**a, mask=Mask.causal())).sum()
            )(arrays)

        return jax.jvp(slope, (arrays,), (arrays,))[1]

    expected = jit(curvature)(arrays)
    with jax.set_mesh(mesh_like(context=4)), context_parallel("ring"):
        found = jit(curvature)(arrays)
    for name, ours in found.items():
        np.testing.assert_allclose(ours, expected[name], rtol=0, atol=tolerance.SECOND)


@pytest.mark.parametrize("strategy", ["ring", "all_gather", "ulysses+ring"])
def test_what_is_not_finite_stays_in_the_rows_that_see_it(strategy, mesh_like):
    arrays = arrays_of(32, n=4, k=2)
    arrays["value"] = arrays["value"].at[0, 13, 1].set(np.nan)
    arrays["query"] = arrays["query"].at[0, 3, 0].set(np.inf)
    case = Case("causal", "", strategy, "none", 2, "none", t=32)
    expected = jit(partial(case.both, backend="reference"))(arrays)
    with jax.set_mesh(mesh_like(context=4)), context_parallel(strategy):
        found = jit(case.both)(arrays)
    assert np.isnan(expected["output"]).any()
    for name in ("output", "query", "key"):
        np.testing.assert_allclose(
            found[name], expected[name], rtol=0, atol=tolerance.GRADIENT, equal_nan=True
        )


def test_tokens_in_zigzag_order_stay_where_they_are(mesh_like, collectives):
    arrays, devices = arrays_of(64), 4
    expected = jit(partial(dot_product_attention, mask=Mask.sliding_window(20)))(**arrays)
    moved = {name: zigzag(x, devices) for name, x in arrays.items()}
    with jax.set_mesh(mesh_like(context=devices)), context_parallel("ring", order="zigzag"):
        compiled = (
            jit(partial(dot_product_attention, mask=Mask.sliding_window(20)))
            .lower(**place(moved))
            .compile()
        )
        found = unzigzag(compiled(**place(moved)), devices)
    np.testing.assert_allclose(found, expected, rtol=0, atol=tolerance.FORWARD)


@pytest.mark.parametrize("devices", [1, 2, 3, 8])
def test_zigzag_and_back_is_exact(devices):
    x = np.arange(2 * 48 * 3).reshape(2, 48, 3)
    order = zigzag(x, devices)
    assert np.array_equal(unzigzag(order, devices), x)
    size = 48 // (2 * devices)
    first = order.reshape(2, devices, 2, size, 3)[0, :, :, 0, 0] // (3 * size)
    assert first.tolist() == [[i, 2 * devices - 1 - i] for i in range(devices)]


def test_explain_answers_for_one_device(mesh_like):
    x = jax.ShapeDtypeStruct((4, 8192, 6, 64), jnp.float32)
    key = jax.ShapeDtypeStruct((4, 8192, 2, 64), jnp.float32)
    with jax.set_mesh(mesh_like(data=2, context=4)):
        found = explain(x, key, key, mask=Mask.causal())
        near = explain(x, key, key, mask=Mask.sliding_window(2000))
        gathered = explain(x, key, key, mask=Mask.causal(), backend="reference")
    one = explain(x, key, key, mask=Mask.causal(), backend="blocked")
    assert (found.backend, found.division.strategy, found.division.within) == (
        "blocked",
        "ulysses+ring",
        2,
    )
    assert found.memory["blocked"] < one.memory["blocked"]
    assert one.division is None
    assert "2 neighbours divide the 6 query and 2 key/value heads" in str(found)
    assert near.division.strategy == "ring"
    assert "only pieces of neighbours of 2048 tokens" in str(near)
    assert (gathered.backend, gathered.division.strategy) == ("reference", "all_gather")


ERRORS = {
    "rows": (
        {"data": 8},
        {},
        {},
        r"the mesh splits batch over data=8, which must divide the 4 rows. Pass a batch",
    ),
    "heads": (
        {"tensor": 8},
        {"n": 4, "k": 4},
        {},
        r"splits heads over tensor=8, which must divide the 4 query heads",
    ),
    "tokens": (
        {"context": 8},
        {"t": 60},
        {},
        r"must divide the 60 query tokens. Add 4 tokens of padding",
    ),
    "pieces": (
        {"context": 4},
        {"t": 60},
        {"strategy": "ring", "balance": "zigzag"},
        r"pieces a device; got 60 tokens on 4 devices",
    ),
    "Ulysses": (
        {"context": 8},
        {"n": 4, "k": 4},
        {"strategy": "ulysses"},
        r"got 4 query and 4 key/value heads",
    ),
    "both": (
        {"context": 8},
        {"n": 3, "k": 3},
        {"strategy": "ulysses+ring"},
        r'for 8 devices. Use strategy="ring"',
    ),
}


@pytest.mark.parametrize("name", ERRORS)
def test_what_does_not_divide_is_said_with_the_remedy(name, mesh_like):
    sizes, shape, options, message = ERRORS[name]
    with (
        jax.set_mesh(mesh_like(**sizes)),
        context_parallel(**options),
        pytest.raises(ValueError, match=message),
    ):
        dot_product_attention(**arrays_of(**{"t": 64, "b": 4, **shape}), mask=Mask.causal())


def test_a_backend_that_needs_all_keys_refuses_a_part(mesh_like):
    message = "'reference' does not support this call: strategy 'ring' attends to parts of the"
    mesh = mesh_like(context=4)
    with jax.set_mesh(mesh), context_parallel("ring"), pytest.raises(Unsupported, match=message):
        dot_product_attention(**arrays_of(64), mask=Mask.causal(), backend="reference")


def test_options_that_contradict_one_another_are_refused():
    with pytest.raises(ValueError, match='order="zigzag" is balanced; got balance="none"'):
        context_parallel(order="zigzag", balance="none").__enter__()
    with pytest.raises(ValueError, match="strategy must be one of"):
        context_parallel("rings").__enter__()


def test_zigzag_of_two_sequences_is_refused(mesh_like):
    arrays = arrays_of(64) | {"query": arrays_of(32)["query"]}
    message = "the zigzag order is that of one sequence; got t=32, s=64"
    mesh = mesh_like(context=4)
    with (
        jax.set_mesh(mesh),
        context_parallel("ring", "zigzag"),
        pytest.raises(ValueError, match=message),
    ):
        dot_product_attention(**arrays)


@pytest.mark.parametrize(
    ("sizes", "t"), [({"data": 1}, 64), ({"context": 4}, 1)], ids=["no axis", "decoding"]
)
def test_zigzag_of_tokens_that_are_whole_is_refused(sizes, t, mesh_like):
    arrays = arrays_of(64) | {"query": arrays_of(t)["query"]}
    message = (
        f"tokens in zigzag order are those of a sequence that a mesh splits; got t={t}, s=64 and a"
        " mesh with axes"
    )
    mesh = mesh_like(**sizes)
    with (
        jax.set_mesh(mesh),
        context_parallel(order="zigzag"),
        pytest.raises(ValueError, match=message),
    ):
        dot_product_attention(**arrays)


def test_axes_without_a_name_are_left_to_xla(mesh_like):
    arrays = arrays_of(64, b=4)
    with jax.set_mesh(mesh_like(x=4)):
        assert explain(**arrays).division is None
        with rules(batch="x"):
            assert explain(**arrays).division.batch == ("x",)


class OddDistance(MaskPart):
    """A part that nobody here knows."""

    def allow(self, rows, cols):
        return (rows - cols) % 2 == 1


@dataclass(frozen=True)
class Periodic(MaskPart):
    """A part that nobody here knows, with an array inside of another tree."""

    tree: dict[str, dict[str, jax.Array]]

    def allow(self, rows, cols):
        return (rows - cols) % self.tree["numbers"]["period"] == 0


PARTS = {"odd distance": OddDistance(), "tree": Periodic({"numbers": {"period": jnp.array(3)}})}


@pytest.mark.parametrize("part", PARTS.values(), ids=PARTS)
@pytest.mark.parametrize("strategy", ["ring", "ulysses"])
def test_a_mask_of_an_unknown_kind_is_kept(strategy, part, mesh_like):
    mask = Mask((part,)) & Mask.causal()
    call = partial(dot_product_attention, **arrays_of(32, b=2), mask=mask)
    expected = jit(call)()
    with jax.set_mesh(mesh_like(data=2, context=4)), context_parallel(strategy):
        np.testing.assert_allclose(jit(call)(), expected, rtol=0, atol=tolerance.FORWARD)
