"""Ports that agree on the inputs they were given, and on no others."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx

from flax_attn.convert import Rule
from flax_attn.parity import Recipe, compare
from flax_attn.parity.adapters.recording import Recording

B, T, D = 2, 5, 4


def judged(ours, theirs, inputs, checks, **options):
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        return compare(ours, theirs, inputs, checks=checks, locate=False, **options)


# Calls.


class Counter(nnx.Module):
    """A port that adds the number of its calls."""

    def __init__(self):
        self.calls = nnx.Variable(jnp.zeros(()))

    def __call__(self, x):
        self.calls[...] += 1
        return x * self.calls[...]


class Remembering(nnx.Module):
    """A port that returns again what it computed first."""

    def __init__(self):
        self.cached = nnx.data(None)

    def __call__(self, x):
        if self.cached is None:
            self.cached = jnp.sin(x)
        return self.cached


class TorchCounter(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        return x * self.calls


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [(Counter(), lambda x: x), (Remembering(), torch.sin), (lambda x: x, TorchCounter())],
)
def test_a_state_that_one_side_keeps_between_calls(ours, theirs):
    # Where they are called once they are the same function.
    report = judged(ours, theirs, [(B, D)], ["forward", "twice"], layout=None)
    assert [check.name for check in report.failed] == ["twice"]


def test_a_state_that_both_keep_is_the_same_and_named():
    report = judged(Counter(), TorchCounter(), [(B, D)], ["forward", "twice"], layout=None)
    assert report.passed, report.explain()
    note = "a call of PyTorch changes what the next one returns"
    assert report.check("twice").note == note


# Shapes.


CAUSAL = np.tri(T, dtype=bool)


def softmax_in_torch(x):
    return torch.softmax(x, dim=-1)


def attend(x):
    scores = x @ x.mT / x.shape[1] ** 0.5
    return torch.softmax(scores, dim=-1) @ x


def attend_at_length_5(x):
    scores = x @ x.mT / 5**0.5
    return jax.nn.softmax(scores, axis=-1) @ x


def attend_in_jax(x):
    scores = x @ x.mT / x.shape[1] ** 0.5
    return jax.nn.softmax(scores, axis=-1) @ x


@pytest.mark.parametrize(("ours", "failed"), [(attend_in_jax, []), (attend_at_length_5, [True])])
def test_a_scale_that_fits_one_length(ours, failed):
    report = judged(ours, attend, [(B, T, D)], ["forward", "other shapes"])
    assert [check.name == "other shapes" for check in report.failed] == failed


def pooled(x):
    return torch.nn.functional.avg_pool2d(x, 2)


def halves(x, height, width):
    b, c = x.shape[:2]
    rows, columns = height // 2, width // 2
    # A last odd row or column is left out, as in PyTorch.
    even = x[:, :, : rows * 2, : columns * 2]
    return even.reshape(b, c, rows, 2, columns, 2).mean(axis=(3, 5))


IMAGES = [(B, 3, 6, 6)]


def test_a_port_that_is_right_for_one_image_size():
    def at_size_6(x):
        return halves(x, 6, 6)

    report = judged(at_size_6, pooled, IMAGES, ["forward", "other shapes"])
    (check,) = report.failed
    assert check.name == "other shapes"


def test_a_port_that_is_right_for_all_image_sizes():
    def at_each_size(x):
        return halves(x, *x.shape[2:])

    report = judged(at_each_size, pooled, IMAGES, ["forward", "other shapes"])
    assert report.passed, report.explain()
    # All axes doubled; then channels and height longer by one, which is no square.
    shapes = "input 0 (4, 6, 12, 12)", "input 0 (2, 4, 7, 6)"
    assert report.check("other shapes").covers == shapes


def test_a_length_that_jax_refuses():
    report = judged(lambda x: x.reshape(B, T, D), lambda x: x, [(B, T, D)], ["other shapes"])
    assert report.check("other shapes").error == np.inf
    assert "PyTorch takes input 0 (4, 10, 8), and flax raised" in report.check("other shapes").note


def test_a_size_whose_rest_pytorch_drops_may_be_refused():
    def pooled(x):
        patches = torch.nn.functional.avg_pool1d(x, 4)
        return patches * torch.ones(3, dtype=x.dtype)

    def of_patches(x):
        return x.reshape(*x.shape[:-1], 3, 4).mean(-1)

    report = compare(of_patches, pooled, [(2, 5, 12)], checks=["forward", "other shapes"])
    assert report.passed, report.explain()
    check = report.check("other shapes")
    assert any("input 0 (4, 10, 13)" in sentence for sentence in check.untested)
    # The axes that are read are compared all the same.
    assert "input 0 (4, 10, 12)" in check.covers


def test_an_uneven_size_that_jax_refuses_is_not_tested():
    def even(x):
        b, t, d = x.shape
        return x.reshape(b, t // 2, 2, d).mean(axis=2)

    def pairs(x):
        b, t, d = x.shape
        even = x[:, : t // 2 * 2]
        return even.reshape(b, t // 2, 2, d).mean(2)

    # Only doubled lengths, here 12, must be taken.
    report = judged(even, pairs, [(B, 6, D)], ["forward", "other shapes"])
    assert report.passed, report.explain()
    assert "PyTorch takes input 0 (2, 7, 5), and flax raised" in report.coverage.untested[0]


def test_tokens_of_several_inputs_grow_together():
    def masked(softmax, where):
        def call(x, mask):
            scores = where(mask, x @ x.mT, -1e30)
            return softmax(scores) @ x

        return call

    ours = masked(jax.nn.softmax, jnp.where)
    theirs = masked(softmax_in_torch, torch.where)
    inputs = [(B, T, D), CAUSAL]
    report = judged(ours, theirs, inputs, ["forward", "other shapes"])
    assert report.passed, report.explain()
    # A mask of 5 tokens fits no 10.
    shapes = "input 0 (4, 10, 8), input 1 (10, 10)"
    assert report.check("other shapes").covers[0] == shapes


def test_lengths_grow_with_the_rows():
    def ours(x, lengths=None):
        return x if lengths is None else x * lengths[:, None]

    extras = {"lengths": [1, 3]}
    report = judged(ours, ours, [(B, D)], ["other shapes"], extras=extras)
    assert report.passed, report.explain()
    assert report.check("other shapes").covers[0] == "input 0 (4, 8), lengths (4,)"


def test_sizes_that_pytorch_refuses_are_not_free():
    report = judged(lambda x: x, lambda x: x.reshape(B, D) + 0, [(B, D)], ["other shapes"])
    assert report.check("other shapes").skipped == "PyTorch takes inputs of these sizes only"


# Masks.


def shown(x, mask):
    scores = torch.where(mask, x @ x.mT, -torch.inf)
    return torch.softmax(scores, dim=-1) @ x


def shown_in_jax(x, mask):
    scores = jnp.where(mask, x @ x.mT, -jnp.inf)
    return jax.nn.softmax(scores, axis=-1) @ x


def without_a_mask(x, mask):
    return jax.nn.softmax(x @ x.mT, axis=-1) @ x


def transposed(x, mask):
    return shown_in_jax(x, mask.mT)


SEEN = np.ones((T, T), bool)


@pytest.mark.parametrize(
    ("ours", "mask", "passed"),
    [
        (shown_in_jax, SEEN, True),
        (without_a_mask, SEEN, False),
        (transposed, SEEN, False),
        # Symmetric, though it hides most.
        (transposed, np.eye(T, dtype=bool), False),
    ],
)
def test_masks_are_tried_with_both_values_and_of_several_kinds(ours, mask, passed):
    report = judged(ours, shown, [(B, T, D), mask], ["forward", "masks"])
    assert report.check("forward").passed
    tried = report.check("masks")
    assert tried.passed == passed
    assert tried.covers == ("input 1 as random, lower triangle, one hidden column",)
    assert not any("input 1" in sentence for sentence in report.coverage.untested)


def causal(softmax, where, seen, hidden):
    """Return attention under a mask whose True hides, and a causal one."""

    def attend(x, mask):
        scores = where(mask, hidden, x @ x.mT)
        causal = where(seen, scores, -1e30)
        return softmax(causal) @ x

    return attend


def test_the_value_that_hides_is_found_so_that_nobody_is_left_without_a_key():
    # They differ where someone sees nothing.
    ours = causal(jax.nn.softmax, jnp.where, CAUSAL, -1e20)
    theirs = causal(softmax_in_torch, torch.where, torch.tensor(CAUSAL), -1e30)
    none_hidden = np.zeros((B, 1, T), bool)
    report = judged(ours, theirs, [(B, T, D), none_hidden], ["forward", "masks"])
    assert report.passed, report.explain()
    # Of one row there is no triangle.
    assert report.check("masks").covers == ("input 1 as random, one hidden column",)


def test_a_mask_that_hides_nothing_is_not_tested():
    def ignored(x, mask):
        return 2 * x

    report = judged(ignored, ignored, [(B, T, D), SEEN], ["forward", "masks"])
    assert "input 1 has no effect on the outputs" in report.coverage.untested


def test_a_mask_that_is_refused_is_not_tested():
    def all_seen(x, mask):
        if not mask.all():
            raise ValueError("only masks that hide nothing")
        return x

    report = judged(lambda x, mask: x, all_seen, [(B, T, D), SEEN], None)
    assert report.check("masks").skipped.startswith("input 1, random: PyTorch refuses it")
    assert report.state == "equal where tested"


# Ids.


class Embed(nnx.Module):
    """A port that looks up one row less."""

    def __init__(self, rows):
        self.table = nnx.Embed(7, D, rngs=nnx.Rngs(0))
        self.rows = rows

    def __call__(self, ids):
        return self.table(jnp.minimum(ids, self.rows - 1))


class TorchEmbed(torch.nn.Module):
    def __init__(self, **options):
        super().__init__()
        self.table = torch.nn.Embedding(7, D, **options)

    def forward(self, ids):
        return self.table(ids)


# Neither the first row, which padding takes, nor the last ones are looked up.
IDS = [np.array([[1, 2, 3], [3, 4, 2]])]


@pytest.mark.parametrize("rows", [7, 6])
def test_ids_cover_the_table(rows):
    report = judged(Embed(rows), TorchEmbed(), IDS, ["forward", "ids"])
    assert report.check("forward").passed
    assert report.check("ids").passed == (rows == 7)
    assert report.check("ids").covers == ("7 of 7 ids of input 0",)


def test_padding_occurs_among_the_ids():
    report = judged(Embed(7), TorchEmbed(padding_idx=0), IDS, ["gradients", "ids"])
    assert [check.name for check in report.failed] == ["ids"]
    assert report.check("ids").note == "the row 0, padding_idx, gets no gradient"
    # Which row that is says where the two differ, too.
    located = compare(Embed(7), TorchEmbed(padding_idx=0), IDS, checks=["gradients", "ids"])
    (cause,) = located.causes
    assert "torch 0" in cause
    assert "padding_idx" in cause


def test_ids_that_never_occurred_are_not_tested():
    # An input holds one id, and four inputs are drawn at most.
    report = judged(Embed(7), TorchEmbed(), [np.array([[5]])], ["ids"])
    assert report.check("ids").covers == ("5 of 7 ids of input 0",)
    assert "2 of 7 ids of input 0 never occurred" in report.coverage.untested


# Scores.


class Normed(nnx.Module):
    """Attention behind a norm, whose hidden scores are a number."""

    def __init__(self, least):
        self.norm = nnx.LayerNorm(D, epsilon=1e-5, use_fast_variance=False, rngs=nnx.Rngs(0))
        self.query = nnx.Linear(D, D, use_bias=False, rngs=nnx.Rngs(1))
        self.key = nnx.Linear(D, D, use_bias=False, rngs=nnx.Rngs(1))
        self.least = least

    def __call__(self, x):
        x = self.norm(x)
        causal = np.tri(x.shape[1], dtype=bool)
        scores = self.query(x) @ self.key(x).mT
        scores = jnp.where(causal, scores, self.least)
        return jax.nn.softmax(scores, axis=-1) @ x


class TorchNormed(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = torch.nn.LayerNorm(D)
        self.query = torch.nn.Linear(D, D, bias=False)
        self.key = torch.nn.Linear(D, D, bias=False)

    def forward(self, x):
        x = self.norm(x)
        t = x.shape[1]
        later = torch.ones(t, t, dtype=torch.bool).triu(1)
        scores = self.query(x) @ self.key(x).mT
        scores = scores.masked_fill(later, -torch.inf)
        return torch.softmax(scores, dim=-1) @ x


@pytest.mark.parametrize("least", [-jnp.inf, -1e4, -1e9])
def test_a_large_negative_number_for_minus_infinity_behind_a_norm(least):
    # Large inputs make no large scores, since the norm takes their size away.
    checks = ["forward", "huge logits", "huge scores"]
    report = judged(Normed(least), TorchNormed(), [(B, T, D)], checks, recipe=Recipe(steps=1))
    expected = [] if least == -jnp.inf else ["huge scores"]
    assert [check.name for check in report.failed] == expected
    holds_its_weights(report.pair)


def holds_its_weights(pair):
    """Assert that a check that loads larger weights puts back those of the comparison."""
    assert pair.flax.weights().keys() == pair.weights.keys()
    for name, array in pair.torch.weights().items():
        np.testing.assert_array_equal(array, pair.weights[name])


# Recordings.


class Tokens(nnx.Module):
    def __init__(self):
        self.table = nnx.Embed(7, D, rngs=nnx.Rngs(0))
        self.linear = nnx.Linear(D, D, rngs=nnx.Rngs(0))

    def __call__(self, ids, mask):
        rows = self.table(ids)
        return shown_in_jax(self.linear(rows), mask)


class TorchTokens(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.table = torch.nn.Embedding(7, D)
        self.linear = torch.nn.Linear(D, D)

    def forward(self, ids, mask):
        rows = self.table(ids)
        return shown(self.linear(rows), mask)


def test_a_recording_holds_all_that_is_tried_beside_the_inputs(tmp_path):
    ids = np.random.default_rng(0).integers(0, 5, (B, T))
    checks = ["forward", "twice", "other shapes", "masks", "ids", "huge scores"]
    live = judged(Tokens(), TorchTokens(), [ids, SEEN], checks, record=True)
    assert live.passed, live.explain()
    # PyTorch is not called any more: what a check needs it must find in the recording.
    recording = Recording(live.export(tmp_path))
    replayed = judged(Tokens(), recording, recording.inputs, checks)
    assert replayed.passed, replayed.explain()
    assert replayed.coverage == live.coverage
    assert covers(replayed) == covers(live)


def covers(report):
    return [check.covers for check in report.checks]


class TorchExponential(torch.nn.Module):
    """A module whose outputs overflow with larger weights."""

    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(D, D)

    def forward(self, x):
        return self.linear(x).exp()


class TorchChaotic(TorchExponential):
    """A module that makes large numbers of rounding."""

    def forward(self, x):
        return (1e14 * self.linear(x)).sin()


LINEAR = [Rule(("kernel",), "linear.weight", "i o -> o i"), Rule(("bias",), "linear.bias")]


@pytest.mark.parametrize("theirs", [TorchExponential(), TorchChaotic()])
def test_scores_at_which_rounding_decides_are_not_tested(theirs):
    ours = nnx.Linear(D, D, rngs=nnx.Rngs(0))
    inputs = [100 * np.ones((B, D))]
    report = judged(ours, theirs, inputs, ["huge scores"], layout=LINEAR)
    assert report.check("huge scores").skipped.startswith("with larger weights rounding alone")
    assert report.coverage.untested[0].startswith("huge scores: with larger weights")
