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
    places = (jnp if isinstance(x, jax.Array) else torch).arange(x.shape[1])
    return places[None, :, None] >= (x.shape[1] if lengths is None else lengths[:, None, None])


def attend(x):
    return torch.softmax(x @ x.mT, dim=-1) @ x


def attend_in_jax(x):
    return jax.nn.softmax(x @ x.mT, axis=-1) @ x


def attend_without_the_largest_taken_off(x):
    weights = jnp.exp(x @ x.mT)
    return weights / weights.sum(axis=-1, keepdims=True) @ x


def unit(x, least=1e-12):
    return x / jnp.maximum(jnp.linalg.norm(x, axis=-1, keepdims=True), least)


def normed(x):
    return torch.nn.functional.layer_norm(x, (D,))


def normed_in_two_passes(x):
    centred = x - x.mean(axis=-1, keepdims=True)
    return centred / jnp.sqrt((centred**2).mean(axis=-1, keepdims=True) + 1e-5)


def normed_in_one_pass(x):
    variance = (x**2).mean(axis=-1, keepdims=True) - x.mean(axis=-1, keepdims=True) ** 2
    return (x - x.mean(axis=-1, keepdims=True)) / jnp.sqrt(variance + 1e-5)


def gaps_in_torch(x):
    return torch.linalg.vector_norm(x - x.roll(1, 1), dim=-1)


def gaps(x):
    squares = ((x - jnp.roll(x, 1, axis=1)) ** 2).sum(axis=-1)
    return jnp.where(squares > 0, jnp.sqrt(jnp.where(squares > 0, squares, 1)), 0)


def gaps_without_a_gradient_at_0(x):
    return jnp.sqrt(((x - jnp.roll(x, 1, axis=1)) ** 2).sum(axis=-1))


def waves(x, last=10**6):
    return x * jnp.cos(jnp.minimum(jnp.arange(x.shape[1]), last).astype(x.dtype))[None, :, None]


def waves_in_torch(x):
    return x * torch.arange(x.shape[1]).to(x.dtype).cos()[:, None]


def mean(x, lengths=None):
    return jnp.where(hidden(x, lengths), 0, x).sum(axis=1) / jnp.maximum(
        (~hidden(x, lengths)).sum(axis=1), 1
    )


def mean_of_all_where_nothing_is_seen(x, lengths=None):
    empty = hidden(x, lengths).all(axis=1)
    return jnp.where(empty, x.mean(axis=1), mean(x, lengths))


def mean_that_multiplies_by_the_mask(x, lengths=None):
    seen = ~hidden(x, lengths)
    return (x * seen.astype(x.dtype)).sum(axis=1) / jnp.maximum(seen.sum(axis=1), 1)


def mean_in_torch(x, lengths=None):
    seen = ~hidden(x, lengths)
    return torch.where(seen, x, 0).sum(1) / seen.sum(1).clamp(min=1)


FAULTS = {
    "huge logits": (attend, attend_in_jax, attend_without_the_largest_taken_off),
    "small activations": (
        lambda x: torch.nn.functional.normalize(x, dim=-1),
        unit,
        lambda x: unit(x, 0.05),
    ),
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
    assert [check.name for check in report.failed] == [stress]


@pytest.mark.parametrize(
    ("inputs", "stress", "reason"),
    [
        ([np.arange(6).reshape(2, 3)], "huge logits", "no input is floating"),
        ([(4,)], "single token", "tokens are the second axis of floats of rank 3"),
        (
            [(2, 3)],
            "padded rows",
            "the calls take no lengths: give both a call with a keyword `lengths`",
        ),
    ],
)
def test_regimes_that_say_nothing(inputs, stress, reason):
    check = compare(jnp.negative, torch.neg, inputs, checks=[stress]).check(stress)
    assert check.skipped.startswith(reason)


@pytest.mark.parametrize(
    ("inputs", "reason"),
    [
        ([(2, 3), (2, 4)], r"lengths are those of one sequence; the inputs have [(2, 3), (2, 4)]"),
        ([np.arange(6).reshape(2, 3)] * 2, "no input is floating, so none can hold NaN"),
    ],
)
def test_padding_that_says_nothing(inputs, reason):
    def first(x, y, lengths=None):
        return x

    assert (
        compare(first, first, inputs, checks=["non-finite padding"])
        .check("non-finite padding")
        .skipped
        == reason
    )


def test_a_gradient_that_rounding_makes_is_allowed():
    # 1 - tanh**2 is a few roundings of 1 here, and JAX has (1 - tanh) (1 + tanh).
    pair = compare(jnp.tanh, torch.tanh, [(B, T, D)], checks=["forward"]).pair
    x = np.full((B, T, D), 15.5)
    found = stress._judged("flat", pair, stress.Situation({"input 0": x}, {}), {})
    assert found.passed, found.explain()
    (said,) = found.untested
    assert said.startswith(
        "flat: gradient of input 0: rounding alone moves that of PyTorch as much"
    )
    ours, theirs = (pair.run(side, pair.run_spec("flat")) for side in ("flax", "torch"))
    error = tolerance.gradient_errors(ours.gradients, theirs.gradients)["input 0"]
    assert error > 1e-4


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
    recipe = Recipe(steps=20, eps=1e-12)  # Adam makes rounding as large as any other step
    with jax.numpy_rank_promotion("allow"):
        report = compare(
            Packed(),
            TorchPacked(),
            [(B, T, D)],
            layout="torch",
            checks=["gradients", "training"],
            recipe=recipe,
        )
    assert report.passed, report.explain()
    assert (
        report.check("gradients").note
        == f"no effect on the outputs: {D} of {2 * D} elements of bias"
    )
    ours, theirs = report.pair.trained
    halves = zip(np.split(ours["bias"], 2), np.split(theirs["bias"], 2), strict=True)
    unfelt, nonzero_gradient = (
        tolerance.relative({"half": a}, {"half": b})["half"] for a, b in halves
    )
    assert nonzero_gradient <= tolerance.TRAINING < unfelt


def test_a_mask_of_a_long_sequence_stays_boolean():
    def flax(x, mask):
        return jnp.where(mask[..., None], x, 0.0)

    def torch_(x, mask):
        return torch.where(mask[..., None], x, 0.0)

    inputs = {"x": np.ones((2, 5, 3)), "mask": np.array([[True, False] * 2 + [True]] * 2)}
    report = compare(flax, torch_, inputs, layout=None, checks=["long sequence"])
    check = report.check("long sequence")
    assert check.ran, check.missing
    assert check.passed, check.explain()


def test_a_gradient_that_rounding_moves_less_is_held_to_its_cap():
    reference = {"x": np.ones(3)}
    moved = stress.Result({}, {"x": 1 + np.full(3, 1e-4)})
    errors, drowned = stress._excesses(
        stress.Result({}, {"x": 1 + np.full(3, 1e-3)}), stress.Result({}, reference), [moved]
    )
    assert errors == {}
    assert len(drowned) == 1
    # What agrees to the cap is compared, and what rounding does not explain fails.
    for off, holds in ((tolerance.MOST_GRADIENT / 2, True), (0.1, False)):
        ours = stress.Result({}, {"x": 1 + np.full(3, off)})
        errors, drowned = stress._excesses(ours, stress.Result({}, reference), [moved])
        assert (errors["x"] <= 1) == holds
        assert not drowned


def best(x):
    """Return how often each of the scores is one of the two largest."""
    _, chosen = jax.lax.top_k(jax.nn.softmax(x, axis=-1), 2)
    return jax.nn.one_hot(chosen, x.shape[-1], dtype=x.dtype).mean(axis=(0, 1, 2))


def best_in_torch(x):
    chosen = torch.topk(x.softmax(-1), 2).indices
    return torch.nn.functional.one_hot(chosen, x.shape[-1]).to(x.dtype).mean((0, 1, 2))


def sorted_rows(x):
    return jnp.sort(x, axis=-1)


def sorted_rows_in_torch(x):
    return torch.sort(x, -1).values


def judged_on_ties(flax, theirs):
    pair = compare(flax, theirs, [(B, T, 6)], checks=["forward"], locate=False).pair
    # A softmax of scores of 1e4 is 0 for all but one.
    x = np.zeros((B, T, 6))
    x[..., 3] = 1e4
    return stress._judged("tied", pair, stress.Situation({"input 0": x}, {}), {})


def test_what_depends_on_which_of_equal_values_is_taken_is_not_judged():
    with pytest.raises(stress.Untested, match="selects among equal values"):
        judged_on_ties(best, best_in_torch)


def test_a_fault_beside_equal_values_that_change_nothing_fails():
    def outputs(x):
        return (jax.lax.stop_gradient(1.01 * sorted_rows(x)),)

    def outputs_in_torch(x):
        return (sorted_rows_in_torch(x.detach()) + 0 * x.sum(),)

    assert not judged_on_ties(outputs, outputs_in_torch).passed


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
        report = compare(
            Product(), TorchProduct(), [(2, T, D)], layout=layout, checks=["non-finite padding"]
        )
    assert report.passed, report.explain()
    said = "non-finite padding: PyTorch lets padding reach real tokens of gradient of weight"
    assert said in report.coverage.untested


def with_a_wrong_tail(x):
    return jnp.where(x > 14, x, jax.nn.softplus(x))


@pytest.mark.parametrize(("flax", "passes"), [(jax.nn.softplus, True), (with_a_wrong_tail, False)])
def test_a_softplus_of_all_digits_is_right(flax, passes):
    # That of PyTorch is the identity beyond 20, which is exact in float32 alone.
    pair = compare(flax, torch.nn.functional.softplus, [(B, T, D)], checks=["forward"]).pair
    x = np.linspace(13, 30, B * T * D).reshape(B, T, D)
    found = stress._judged("tail", pair, stress.Situation({"input 0": x}, {}), {})
    assert found.passed is passes, found.explain()


def clipped(x):
    return jax.nn.softmax(jnp.clip(x, -50, 50)) + jnp.tanh(x)


def test_what_large_scores_alone_see_is_named():
    def theirs(x):
        return torch.softmax(x, -1) + torch.tanh(x)

    report = compare(clipped, theirs, [(B, T, D)], checks=["forward", "huge logits"])
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
        return torch.softmax(self.q(x) @ self.k(x).mT, -1)


@pytest.mark.usefixtures("as_a_user_has_jax")
def test_what_large_weights_alone_see_is_named():
    checks = ["forward", "huge scores"]
    report = compare(Scores(), TorchScores().eval(), [(B, T, D)], checks=checks)
    assert [check.name for check in report.failed] == ["huge scores"]
    (one,) = report.difference.hypotheses
    assert "max(" in one.flax.value
    assert "clip" in one.flax.places[0].source
