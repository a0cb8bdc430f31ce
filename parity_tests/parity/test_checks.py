"""Every check detects what it is there for.

Faults of the PyTorch side are in `flax_attn.proof.faults`. Here are those of the Flax side and of
the harness.
"""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx

import flax_attn.functional.reference
import torch_ref
from flax_attn.convert.entry import Entry
from flax_attn.parity import CHECKS, compare, tolerance
from flax_attn.parity.check import Check, worst_of
from flax_attn.parity.report.state import next_steps
from flax_attn.proof import prove
from flax_attn.proof.faults import FAULTS
from flax_attn.proof.many_rows import takes_many_rows
from flax_attn.proof.variants import VARIANTS, select

LOWER = {"float32": 23, "bfloat16": 7, "float16": 10}  # bits of the mantissa


@pytest.mark.parametrize(
    "variant", select(["multi_head_padding", "gpt2"]), ids=lambda variant: variant.name
)
def test_a_variant_is_proven(variant):
    """A layer and a model: `make parity` proves them all."""
    report = prove.prove(variant)
    assert report.passed, report.explain()
    expected = {*prove.QUICK_CHECKS, "layouts"} - not_for(variant)
    if takes_many_rows(variant):
        expected.add("many rows")
    # A check that was left out would pass as well.
    assert {check.name for check in report.checks if check.ran} == expected


def not_for(variant):
    """Return the checks that do not apply to a variant."""
    skipped = set() if variant.dropout else {"dropout"}
    skipped |= set() if variant.chunks else {"cache = full"}
    return skipped | ({"unbatched"} if variant.name == "multi_head_padding" else set())


def test_every_public_module_has_a_variant():
    """Itself, as a part of another, or what it is a base of."""
    parts = {type(part) for variant in VARIANTS for part in variant.build(torch_ref).modules()}
    variants = {base.__name__ for part in parts for base in part.__mro__}
    modules = {name for name in torch_ref.__all__ if isinstance(getattr(torch_ref, name), type)}
    modules = {name for name in modules if issubclass(getattr(torch_ref, name), torch.nn.Module)}
    # Made from the weights of a layer; parity_tests/modules/test_quantized.py proves it.
    assert modules - {"QuantizedLinear"} <= variants


# A fault beside what is right, for every check that a fault of the PyTorch side cannot fail first.
# Each stands the float64 forward pass on easy inputs, in batches and compiled.


@jax.custom_jvp
def flat_sine(x):
    return jnp.sin(x)


@flat_sine.defjvp
def _(primals, tangents):
    return jnp.sin(primals[0]), jnp.cos(jax.lax.stop_gradient(primals[0])) * tangents[0]


def doubled_if_eager(x):
    return x if isinstance(x, jax.core.Tracer) else 2 * x


def one_pass(x):
    mean = x.mean(axis=-1, keepdims=True)
    return x / jnp.sqrt((x**2).mean(axis=-1, keepdims=True) - mean**2 + 0.1)


def two_passes(x):
    return x / torch.sqrt(x.var(dim=-1, keepdim=True, correction=0) + 0.1)


def rms_norm_with_a_floor(x):
    return x / jnp.sqrt(jnp.maximum((x**2).mean(axis=-1, keepdims=True), 1e-5))


def all_of_the_largest(x):
    return jnp.where(x == x.max(axis=1, keepdims=True), x, 0)


def first_of_the_largest(x):
    return torch.zeros_like(x).scatter(1, *(part for part in x.max(dim=1, keepdim=True)[::-1]))


def table_of_100_positions(x):
    return x * jnp.minimum(jnp.arange(x.shape[1]), 99)[None, :, None].astype(x.dtype)


WRONG = {
    "shapes": (lambda x: {"output": x, "more": x}, lambda x: {"output": x}),
    "second": (flat_sine, torch.sin),
    "jit = eager": (doubled_if_eager, lambda x: 1 * x),
    "unbatched": (lambda x: jnp.cumsum(x, axis=1), lambda x: torch.cumsum(x, dim=-2)),
    "small activations": (
        rms_norm_with_a_floor,
        lambda x: x * torch.rsqrt(x.square().mean(dim=-1, keepdim=True)),
    ),
    "mean offset": (one_pass, two_passes),
    "duplicate tokens": (all_of_the_largest, first_of_the_largest),
    "single token": (lambda x: jnp.squeeze(x.sum(axis=-1)), lambda x: x.sum(dim=-1)),
    "long sequence": (table_of_100_positions, lambda x: x * torch.arange(x.shape[1])[:, None]),
}


def caught(check, *sides, **options):
    """Return whether a check, and not the forward pass, sees that two functions differ."""
    report = compare(*sides, [(3, 5, 4)], checks=["forward", check], locate=False, **options)
    assert report.check("forward").passed, report.explain()
    return not report.check(check).passed and report.check(check).ran


@pytest.mark.parametrize("check", WRONG)
def test_a_fault_of_the_flax_side_is_caught(check):
    assert caught(check, *WRONG[check])


@pytest.mark.parametrize("dtype", LOWER)
def test_a_loss_of_four_bits_is_caught(dtype):
    def rounded(x):
        return jnp.sin(jax.lax.reduce_precision(x, 8, LOWER[dtype] - 4) if x.dtype == dtype else x)

    assert caught(dtype, rounded, torch.sin)
    assert not caught(dtype, jnp.sin, torch.sin)


def raising(error, dtype="float16"):
    """Return a sine that raises an error in one dtype."""

    def sine(x):
        if x.dtype == dtype:
            raise error
        return jnp.sin(x)

    return sine


def check_of(name, flax, theirs, inputs=((3, 5),)):
    """Return one check of a pair."""
    return compare(flax, theirs, inputs, checks=[name], locate=False).check(name)


MISSING = "XLA has no such float16 product on a CPU: flax raised "


def test_a_product_that_jax_refuses_in_float16_on_a_cpu_is_not_run():
    def attend(*inputs):
        heads_first = (x.transpose(1, 2) for x in inputs)
        return torch.nn.functional.scaled_dot_product_attention(*heads_first).transpose(1, 2)

    with jax.numpy_dtype_promotion("standard"):
        check = check_of("float16", jax.nn.dot_product_attention, attend, [(2, 5, 3, 4)] * 3)
    reason = f"{MISSING}ValueError: The precision 'F16_F16_F32' is not supp"
    assert check.skipped.startswith(reason)


@pytest.mark.parametrize(
    "message",
    ["Unsupported element type in DotThunk::Execute: f16", "no dot of operands of type F16"],
)
def test_a_product_that_xla_refuses_in_float16_on_a_cpu_is_not_run(message):
    error = jax.errors.JaxRuntimeError(f"UNIMPLEMENTED: {message}")
    check = check_of("float16", raising(error), torch.sin)
    raised = f"JaxRuntimeError: UNIMPLEMENTED: {message}"
    assert check.skipped == f"{MISSING}{raised}. Pass device= to use a GPU or TPU"


@pytest.mark.parametrize(
    ("error", "dtype"),
    [
        (ValueError("no dot of operands of type F16"), "float16"),
        (jax.errors.JaxRuntimeError("UNIMPLEMENTED: no sort of F16"), "float16"),
        (jax.errors.JaxRuntimeError("UNIMPLEMENTED: no dot of BF16"), "float16"),
        (jax.errors.JaxRuntimeError("INTERNAL: no dot of F16"), "float16"),
        (jax.errors.JaxRuntimeError("UNIMPLEMENTED: no dot of F16"), "bfloat16"),
    ],
    ids=str,
)
def test_every_other_error_in_a_lower_dtype_is_a_failure(error, dtype):
    check = check_of(dtype, raising(error, dtype), torch.sin)
    assert check.ran
    assert not check.passed
    assert check.raised


def test_a_port_that_raises_in_bfloat16_alone():
    def norm(x):
        return torch.nn.functional.rms_norm(x, x.shape[-1:])

    sine = raising(ValueError("no bfloat16 here"), "bfloat16")
    report = compare(sine, norm, [(3, 5)], checks=["bfloat16", "precision"], locate=False)
    first, *_ = next_steps(report)
    reason = "bfloat16: flax raised ValueError: no bfloat16 here"
    assert first == f"make this call run, as it does on the other side: {reason}"
    skipped = report.check("precision").skipped
    assert skipped == "JAX does not run in bfloat16: ValueError: no bfloat16 here"
    # What the dtype would have computed in is not asked.
    assert not any("which dtypes" in sentence for sentence in report.coverage.untested)


@pytest.mark.parametrize("side", ["flax", "torch"])
def test_a_cache_that_forgets_is_caught(side):
    options = {f"{side}_cached": lambda function, x: function(x[:, 3:])}
    checks = ["cache = full"]
    report = compare(jnp.sin, torch.sin, [(3, 5, 4)], checks=checks, locate=False, **options)
    assert not report.passed
    assert report.check("cache = full").worst == f"{side}: output"


def test_swapped_parts_of_a_fused_entry_are_caught(monkeypatch):
    split = Entry.split

    def swapped(entry, array):
        parts = split(entry, array)
        return dict(zip(parts, reversed(parts.values()), strict=True))

    monkeypatch.setattr(Entry, "split", swapped)
    layer = flax_attn.MultiHeadAttention(8, 8, None, 0.0, 4, True, causal=False, rngs=nnx.Rngs(0))
    published = torch.nn.MultiheadAttention(8, 4, batch_first=True).eval()
    found = compare(
        *(layer, published, [(3, 5, 8)]),
        layout="torch_mha",
        torch_call=lambda module, x: module(x, x, x)[0],
        checks=["weights"],
        locate=False,
    )
    assert [check.worst for check in found.failed] == ["in_proj_weight"]
    assert not prove.layouts(layer).passed


def test_a_row_is_called_without_jit_where_a_check_asks_for_it_alone():
    (variant,) = select(["rms_norm"])
    quick, eager = prove.prove(variant), prove.prove(variant, checks=["jit = eager"])
    # What is computed without jit is kept under this name.
    assert ("flax", "outputs") not in quick.pair._results
    assert ("flax", "outputs") in eager.pair._results


def test_a_row_that_cannot_be_called_fails_each_check(monkeypatch):
    (variant,) = select(["rms_norm"])
    pair = prove.pair_of(variant)
    monkeypatch.setattr(pair.flax, "run", lambda spec: 1 / 0)
    report = prove.prove(variant, pair=pair)
    for name in ("forward", "gradients", "float32"):
        check = report.check(name)
        assert check is not None
        assert not check.passed
    assert "ZeroDivisionError" in report.checks[0].note


def test_sums_in_bfloat16_are_caught(monkeypatch):
    def low(dtype):
        return jnp.dtype(jnp.bfloat16) if dtype == jnp.float32 else dtype

    monkeypatch.setattr(flax_attn.functional.reference, "accumulation_dtype", low)
    report = prove.prove(*select(["self_attention"]), checks=["forward", "float32"])
    assert [check.name for check in report.failed] == ["float32"]


def test_a_second_derivative_that_pytorch_lacks_is_not_run():
    check = check_of("second", jax.nn.hard_sigmoid, torch.nn.Hardsigmoid())
    expected = (
        "PyTorch, the reference, gives no second derivative: torch raised RuntimeError: deriv"
    )
    assert check.skipped.startswith(expected)


class WronglyDifferentiatedTwice(torch.autograd.Function):
    """A cube whose derivative takes its own derivative to be half of what it is."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        half = 1.5 * x**2
        return gradient * (half + half.detach())


def cube(x):
    return WronglyDifferentiatedTwice.apply(x)


def test_a_second_derivative_that_pytorch_has_wrong_is_compared_with_differences():
    check = check_of("second", lambda x: x**3, cube)
    assert check.passed, check.line
    assert check.limit == tolerance.DIFFERENCES
    assert check.note == (
        "PyTorch's own derivatives of its gradients of input 0 are wrong: those of JAX are compared"
        " with differences of PyTorch's gradients"
    )


def test_differences_move_parameters_as_well():
    linear = nnx.Linear(5, 4, rngs=nnx.Rngs(0), param_dtype=jnp.float64)
    report = compare(
        linear,
        torch.nn.Linear(5, 4),
        [(3, 5)],
        flax_call=lambda module, x: module(x) ** 3,
        torch_call=lambda module, x: cube(module(x)),
        checks=["second"],
    )
    assert report.passed, report.explain()
    assert "bias, input 0, weight" in report.check("second").note


@pytest.mark.parametrize("theirs", [cube, lambda x: x**3])
def test_a_second_derivative_that_jax_has_wrong_is_caught(theirs):
    @jax.custom_jvp
    def ours(x):
        return x**3

    @ours.defjvp
    def _(primals, tangents):
        (x,), (tangent,) = primals, tangents
        constant = jax.lax.stop_gradient(x**2)
        return ours(x), (x**2 + 2 * constant) * tangent

    check = check_of("second", ours, theirs)
    assert not check.passed
    assert check.limit == tolerance.SECOND


@pytest.mark.parametrize("whole", [True, False])
def test_a_function_of_integers_is_compared_in_its_outputs(whole):
    constant = torch.ones((), dtype=torch.float64, requires_grad=True)

    def ours(x):
        return x % 2 if whole else (x % 2).astype(jnp.float64)

    def theirs(x):
        # What requires a gradient need not be a parameter.
        return x % 2 if whole else x % 2 * constant

    inputs = [np.arange(6).reshape(2, 3)]
    report = compare(ours, theirs, inputs)
    assert report.passed, report.explain()
    assert report.check("forward").ran
    assert not report.check("gradients").ran
    assert compare(lambda x: 1 - ours(x), theirs, inputs, locate=False).differs


def test_every_check_catches_something():
    here = {*WRONG, *LOWER, "cache = full", "weights"}
    # In test_precision.py, test_running_statistics.py and test_other_inputs.py.
    there = {
        "precision",
        "running statistics",
        "twice",
        "other shapes",
        "masks",
        "ids",
        "huge scores",
    }
    assert here | there | {fault.check for fault in FAULTS} == set(CHECKS)


# One measurement beside its rule.


def test_a_check_passes_at_its_limit_and_never_with_nan():
    assert Check("rule", 1.0, 1.0).passed
    assert not Check("rule", 1.0000001, 1.0).passed
    assert not Check("rule", float("nan"), 1.0).passed
    assert not Check("rule", float("inf"), 1.0).passed


@pytest.mark.parametrize("wanted", [True, False])
def test_a_check_that_is_not_run_fails_if_it_was_asked_for(wanted):
    check = Check("rule", 0.0, 1.0, skipped="there is nothing", wanted=wanted)
    assert check.passed is not wanted
    assert check.explain() == "rule: not run: there is nothing"


def test_the_worst_of_several_errors_is_nan_or_else_the_largest():
    errors = {"small": 0.1, "large": 7.0, "nan": float("nan")}
    for order in itertools.permutations(errors):
        assert worst_of("rule", {name: errors[name] for name in order}, 1.0).worst == "nan"
    assert worst_of("rule", {"small": 0.1, "large": 7.0}, 1.0).worst == "large"
    assert not worst_of("rule", {}, 1.0).passed


def test_a_failure_says_where_and_how_far():
    ours, theirs = np.arange(6.0).reshape(2, 3), np.arange(6.0).reshape(2, 3)
    theirs[1, 0] = 3.5
    check = worst_of(
        "forward", {"output": 0.1}, 1e-12, "a note", flax={"output": ours}, torch={"output": theirs}
    )
    line = (
        "forward: error 0.1 at 'output', the rule is 1e-12; worst element (1, 0): flax 3, torch 3.5"
    )
    assert check.explain() == f"{line} (a note)"
