"""Hard inputs: each shows a fault that easy ones hide, and fails no function that is the same."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx

from flax_attn.convert import Rule
from flax_attn.parity import Recipe, compare, stress, tolerance

B, T, D = 3, 5, 4


def hidden(x, lengths):
    library = jnp if isinstance(x, jax.Array) else torch
    places = library.arange(x.shape[1])
    ends = x.shape[1] if lengths is None else lengths[:, None, None]
    return places[None, :, None] >= ends


def attend(x):
    return torch.softmax(x @ x.mT, dim=-1) @ x


def attend_in_jax(x):
    return jax.nn.softmax(x @ x.mT, axis=-1) @ x


def attend_without_the_largest_taken_off(x):
    # Overflows where scores are large.
    weights = jnp.exp(x @ x.mT)
    return weights / weights.sum(axis=-1, keepdims=True) @ x


def unit(x, least=1e-12):
    norms = jnp.linalg.norm(x, axis=-1, keepdims=True)
    return x / jnp.maximum(norms, least)


def unit_in_torch(x):
    return torch.nn.functional.normalize(x, dim=-1)


def normed(x):
    return torch.nn.functional.layer_norm(x, (D,))


def normed_in_two_passes(x):
    centred = x - x.mean(axis=-1, keepdims=True)
    variance = (centred**2).mean(axis=-1, keepdims=True)
    return centred / jnp.sqrt(variance + 1e-5)


def normed_in_one_pass(x):
    mean = x.mean(axis=-1, keepdims=True)
    # A difference of large numbers where the mean is large.
    variance = (x**2).mean(axis=-1, keepdims=True) - mean**2
    return (x - mean) / jnp.sqrt(variance + 1e-5)


def gaps_in_torch(x):
    return torch.linalg.vector_norm(x - x.roll(1, 1), dim=-1)


def squared_gaps(x):
    return ((x - jnp.roll(x, 1, axis=1)) ** 2).sum(axis=-1)


def gaps(x):
    squares = squared_gaps(x)
    # The root of 0 is hidden twice: its gradient times 0 would be NaN.
    positive = jnp.where(squares > 0, squares, 1)
    return jnp.where(squares > 0, jnp.sqrt(positive), 0)


def gaps_without_a_gradient_at_0(x):
    return jnp.sqrt(squared_gaps(x))


def waves(x, last=10**6):
    places = jnp.minimum(jnp.arange(x.shape[1]), last)
    return x * jnp.cos(places.astype(x.dtype))[None, :, None]


def waves_in_torch(x):
    places = torch.arange(x.shape[1]).to(x.dtype)
    return x * places.cos()[:, None]


def mean(x, lengths=None):
    seen = ~hidden(x, lengths)
    total = jnp.where(seen, x, 0).sum(axis=1)
    return total / jnp.maximum(seen.sum(axis=1), 1)


def mean_of_all_where_nothing_is_seen(x, lengths=None):
    empty = hidden(x, lengths).all(axis=1)
    return jnp.where(empty, x.mean(axis=1), mean(x, lengths))


def mean_that_multiplies_by_the_mask(x, lengths=None):
    seen = ~hidden(x, lengths)
    # NaN times 0 is NaN.
    total = (x * seen.astype(x.dtype)).sum(axis=1)
    return total / jnp.maximum(seen.sum(axis=1), 1)


def mean_in_torch(x, lengths=None):
    seen = ~hidden(x, lengths)
    total = torch.where(seen, x, 0).sum(1)
    return total / seen.sum(1).clamp(min=1)


# A function of PyTorch, the same in JAX, and one with a fault.
FAULTS = {
    "huge logits": (attend, attend_in_jax, attend_without_the_largest_taken_off),
    "small activations": (unit_in_torch, unit, lambda x: unit(x, 0.05)),
    "mean offset": (normed, normed_in_two_passes, normed_in_one_pass),
    "duplicate tokens": (gaps_in_torch, gaps, gaps_without_a_gradient_at_0),
    "single token": (lambda x: x.sin(), jnp.sin, lambda x: jnp.sin(x).squeeze()),
    "long sequence": (waves_in_torch, waves, lambda x: waves(x, 127)),
    "padded rows": (mean_in_torch, mean, mean_of_all_where_nothing_is_seen),
    "non-finite padding": (mean_in_torch, mean, mean_that_multiplies_by_the_mask),
}


@pytest.mark.parametrize("stress", FAULTS)
def test_a_fault_that_easy_inputs_hide(stress):
    theirs, sound, faulty = FAULTS[stress]
    with jax.numpy_dtype_promotion("standard"):
        report = compare(sound, theirs, [(B, T, D)], checks=["forward", stress], locate=False)
        assert report.passed, report.explain()
        report = compare(faulty, theirs, [(B, T, D)], checks=["forward", stress], locate=False)
    # Its forward pass holds: easy inputs do not show it.
    assert [check.name for check in report.failed] == [stress]


WHOLE_NUMBERS = np.arange(6).reshape(2, 3)
NO_LENGTHS = "the calls take no lengths: give both a call with a keyword `lengths`"


@pytest.mark.parametrize(
    ("inputs", "stress", "reason"),
    [
        ([WHOLE_NUMBERS], "huge logits", "no input is floating"),
        ([(4,)], "single token", "tokens are the second axis of floats of rank 3"),
        ([(2, 3)], "padded rows", NO_LENGTHS),
    ],
)
def test_regimes_that_say_nothing(inputs, stress, reason):
    check = compare(jnp.negative, torch.neg, inputs, checks=[stress]).check(stress)
    assert check.skipped.startswith(reason)


@pytest.mark.parametrize(
    ("inputs", "reason"),
    [
        ([(2, 3), (2, 4)], r"lengths are those of one sequence; the inputs have [(2, 3), (2, 4)]"),
        ([WHOLE_NUMBERS] * 2, "no input is floating, so none can hold NaN"),
    ],
)
def test_padding_that_says_nothing(inputs, reason):
    def first(x, y, lengths=None):
        return x

    report = compare(first, first, inputs, checks=["non-finite padding"])
    assert report.check("non-finite padding").skipped == reason


def judged_on(pair, name, x):
    """Judge a pair of functions of one input on another one."""
    situation = stress.Situation({"input 0": x}, {})
    return stress._judged(name, pair, situation, {})


def test_a_gradient_that_rounding_makes_is_allowed():
    # 1 - tanh**2 is a few roundings of 1 here, and JAX has (1 - tanh) (1 + tanh).
    pair = compare(jnp.tanh, torch.tanh, [(B, T, D)], checks=["forward"]).pair
    found = judged_on(pair, "flat", np.full((B, T, D), 15.5))
    assert found.passed, found.explain()
    reason = "gradient of input 0: rounding alone moves that of PyTorch as much"
    assert found.note.startswith(reason)
    assert not found.untested
    # Without the allowance it would fail.
    assert gradient_error(pair, pair.run_spec("flat")) > 1e-4


def gradient_error(pair, spec):
    ours = pair.run("flax", spec).gradients
    theirs = pair.run("torch", spec).gradients
    return tolerance.gradient_errors(ours, theirs)["input 0"]


class Packed(nnx.Module):
    """A packed bias of which the function feels one half."""

    def __init__(self):
        self.bias = nnx.Param(jnp.zeros(2 * D))

    def __call__(self, x):
        unfelt, bias = jnp.split(self.bias[...], 2)
        return jax.nn.softmax(x + unfelt.sum()) * bias


class TorchPacked(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.bias = torch.nn.Parameter(torch.zeros(2 * D))

    def forward(self, x):
        unfelt, bias = self.bias.chunk(2)
        return torch.softmax(unfelt.sum() + x, dim=-1) * bias


def test_the_part_of_a_packed_parameter_without_effect_is_named_and_left_out_of_training():
    options = {
        "layout": "torch",
        "checks": ["gradients", "training"],
        # Adam makes rounding as large as any other step.
        "recipe": Recipe(steps=20, eps=1e-12),
    }
    with jax.numpy_rank_promotion("allow"):
        report = compare(Packed(), TorchPacked(), [(B, T, D)], **options)
    assert report.passed, report.explain()
    note = f"no effect on the outputs: {D} of {2 * D} elements of bias"
    assert report.check("gradients").note == note
    unfelt, felt = errors_of_halves(*report.pair.trained)
    assert felt <= tolerance.TRAINING < unfelt


def errors_of_halves(ours, theirs):
    """Return the errors of the first and the second half of a trained bias."""
    halves = "first", "second"
    ours = np.split(ours["bias"], 2)
    theirs = np.split(theirs["bias"], 2)
    errors = tolerance.relative(
        dict(zip(halves, ours, strict=True)), dict(zip(halves, theirs, strict=True))
    )
    return errors["first"], errors["second"]


def test_a_mask_of_a_long_sequence_stays_boolean():
    def flax(x, mask):
        return jnp.where(mask[..., None], x, 0.0)

    def torch_(x, mask):
        return torch.where(mask[..., None], x, 0.0)

    row = [True, False, True, False, True]
    inputs = {"x": np.ones((2, 5, 3)), "mask": np.array([row, row])}
    report = compare(flax, torch_, inputs, layout=None, checks=["long sequence"])
    check = report.check("long sequence")
    assert check.ran, check.missing
    assert check.passed, check.explain()


def excesses(off):
    """Return the errors of a gradient that is off, where rounding moves it by 1e-4."""
    reference = stress.Result({}, {"x": np.ones(3)})
    moved = stress.Result({}, {"x": np.full(3, 1 + 1e-4)})
    ours = stress.Result({}, {"x": np.full(3, 1 + off)})
    return stress._excesses(ours, reference, [moved])


def test_a_gradient_that_rounding_explains_is_not_compared():
    errors, drowned = excesses(1e-3)
    assert errors == {}
    assert len(drowned) == 1


# What agrees to the cap is compared, and what rounding does not explain fails.
@pytest.mark.parametrize(("off", "holds"), [(tolerance.MOST_GRADIENT / 2, True), (0.1, False)])
def test_a_gradient_that_rounding_moves_less_is_held_to_its_cap(off, holds):
    errors, drowned = excesses(off)
    assert (errors["x"] <= 1) == holds
    assert not drowned


def best(x):
    """Return how often each of the scores is one of the two largest."""
    _, chosen = jax.lax.top_k(jax.nn.softmax(x, axis=-1), 2)
    counted = jax.nn.one_hot(chosen, x.shape[-1], dtype=x.dtype)
    return counted.mean(axis=(0, 1, 2))


def best_in_torch(x):
    chosen = torch.topk(x.softmax(-1), 2).indices
    counted = torch.nn.functional.one_hot(chosen, x.shape[-1])
    return counted.to(x.dtype).mean((0, 1, 2))


def sorted_rows(x):
    return jnp.sort(x, axis=-1)


def sorted_rows_in_torch(x):
    return torch.sort(x, -1).values


def judged_on_ties(flax, theirs):
    pair = compare(flax, theirs, [(B, T, 6)], checks=["forward"], locate=False).pair
    # A softmax of scores of 1e4 is 0 for all but one.
    x = np.zeros((B, T, 6))
    x[..., 3] = 1e4
    return judged_on(pair, "tied", x)


def test_what_depends_on_which_of_equal_values_is_taken_is_not_judged():
    with pytest.raises(stress.Untested, match="selects among equal values"):
        judged_on_ties(best, best_in_torch)


def test_a_fault_beside_equal_values_that_change_nothing_fails():
    # Without gradients, which would tell which of the equal values was taken.
    def outputs(x):
        return (jax.lax.stop_gradient(1.01 * sorted_rows(x)),)

    def outputs_in_torch(x):
        return (sorted_rows_in_torch(x.detach()) + 0 * x.sum(),)

    assert not judged_on_ties(outputs, outputs_in_torch).passed


# At an offset of 1000 the exponential of the first is infinite in float64.
RATES = np.array([0.8, 1e-3, 1e-3, 1e-3])


def overflowing(x):
    """Sum what grows without its last step, which a scan differentiates as well."""

    def step(h, now):
        return h + jnp.exp(now * RATES), h

    start = jnp.zeros_like(x[:, 0])
    return jax.lax.scan(step, start, jnp.swapaxes(x, 0, 1))[1].sum(0)


def overflowing_in_torch(x):
    h = torch.zeros_like(x[:, 0])
    total = 0
    for i in range(x.shape[1]):
        total = total + h
        h = h + torch.exp(x[:, i] * torch.from_numpy(RATES))
    return total


def test_gradients_are_not_compared_where_those_of_pytorch_are_not_finite():
    checks = ["forward", "mean offset"]
    with jax.numpy_rank_promotion("allow"):
        report = compare(overflowing, overflowing_in_torch, [(B, T, D)], checks=checks)
    assert report.passed, report.explain()
    said = "mean offset: gradients: those of PyTorch are not finite here"
    assert said in report.coverage.untested


@pytest.mark.parametrize("rows", [1, 2, 3])
def test_a_row_of_each_batch_is_padded_in_part(rows):
    theirs, sound, faulty = FAULTS["non-finite padding"]
    with jax.numpy_dtype_promotion("standard"):
        for flax, passed in ((sound, True), (faulty, False)):
            report = compare(flax, theirs, [(rows, T, D)], checks=["non-finite padding"])
            assert report.check("non-finite padding").passed == passed, report.explain()


class Product(nnx.Module):
    """A product whose padding is hidden after it, so that its gradient is 0 times NaN."""

    def __init__(self):
        self.weight = nnx.Param(jnp.zeros((D, D)))

    def __call__(self, x, lengths=None):
        return jnp.where(hidden(x, lengths), 0, x @ self.weight[...])


class TorchProduct(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(D, D))

    def forward(self, x, lengths=None):
        return torch.where(hidden(x, lengths), 0, x @ self.weight)


def test_padding_that_reaches_gradients_of_both_is_said():
    layout = [Rule(("weight",), "weight", "")]
    with jax.numpy_dtype_promotion("standard"):
        sides = Product(), TorchProduct()
        report = compare(*sides, [(2, T, D)], layout=layout, checks=["non-finite padding"])
    assert report.passed, report.explain()
    said = "non-finite padding: PyTorch lets padding reach real tokens of gradient of weight"
    assert said in report.coverage.untested


def with_a_wrong_tail(x):
    return jnp.where(x > 14, x, jax.nn.softplus(x))


@pytest.mark.parametrize(("flax", "passes"), [(jax.nn.softplus, True), (with_a_wrong_tail, False)])
def test_a_softplus_of_all_digits_is_right(flax, passes):
    # In PyTorch it is the identity beyond 20, which is exact only in float32.
    pair = compare(flax, torch.nn.functional.softplus, [(B, T, D)], checks=["forward"]).pair
    x = np.linspace(13, 30, B * T * D).reshape(B, T, D)
    found = judged_on(pair, "tail", x)
    assert found.passed is passes, found.explain()


def clipped(x):
    scores = jnp.clip(x, -50, 50)
    return jax.nn.softmax(scores) + jnp.tanh(x)


def unclipped(x):
    return torch.softmax(x, -1) + torch.tanh(x)


def test_what_large_scores_alone_see_is_named():
    report = compare(clipped, unclipped, [(B, T, D)], checks=["forward", "huge logits"])
    assert [check.name for check in report.failed] == ["huge logits"]
    (one,) = report.difference.hypotheses
    assert one.flax.value == "min(50, max(input 0, -50))"
    assert "clip" in one.flax.places[0].source


class Scores(nnx.Module):
    def __init__(self):
        self.norm = nnx.LayerNorm(D, epsilon=1e-5, rngs=nnx.Rngs(0))
        self.q = nnx.Linear(D, D, rngs=nnx.Rngs(0))
        self.k = nnx.Linear(D, D, rngs=nnx.Rngs(0))

    def __call__(self, x):
        x = self.norm(x)
        scores = jnp.clip(self.q(x) @ self.k(x).mT, -100, 100)
        return jax.nn.softmax(scores)


class TorchScores(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = torch.nn.LayerNorm(D)
        self.q = torch.nn.Linear(D, D)
        self.k = torch.nn.Linear(D, D)

    def forward(self, x):
        x = self.norm(x)
        scores = self.q(x) @ self.k(x).mT
        return torch.softmax(scores, -1)


@pytest.mark.usefixtures("as_a_user_has_jax")
def test_what_large_weights_alone_see_is_named():
    checks = ["forward", "huge scores"]
    report = compare(Scores(), TorchScores().eval(), [(B, T, D)], checks=checks)
    assert [check.name for check in report.failed] == ["huge scores"]
    (one,) = report.difference.hypotheses
    assert "max(" in one.flax.value
    assert "clip" in one.flax.places[0].source
