"""Every variant climbs the ladder, and the ladder catches the bugs that ports are known for."""

from copy import copy, deepcopy
from functools import partial

import jax.numpy as jnp
import pytest
import torch
from einops import rearrange

import flax_attn.functional.reference
import torch_ref.functional.reference
import torch_ref.modules.multi_head
from flax_attn.convert.rules import Entry
from flax_attn.parity import ladder
from flax_attn.parity.cases import CASES, select
from flax_attn.parity.pair import Pair
from torch_ref.functional.masks import Causal, Lengths

REFERENCE = torch_ref.functional.reference
RUNGS = {"forward", "gradients", "float32", "jit = eager", "dropout", "unbatched", "layouts", "training"}


def lines(checks):
    return "\n".join(f"{c.name}: error {c.error:.3g}, limit {c.limit:.3g}, worst {c.worst} {c.note}" for c in checks)


PAIRS = {}


def built(case, seed=0):
    """Return a pair that is compiled once, for the climb and for the faults planted in copies of it."""
    return PAIRS.get(case.name) or PAIRS.setdefault(case.name, Pair(case, seed))


def copy_to_plant_in(case):
    assert built(case).flax64
    pair = copy(built(case))
    pair.torch = deepcopy(pair.torch)
    vars(pair).pop("truth", None)
    return pair


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_every_variant_climbs_the_ladder(case, monkeypatch):
    monkeypatch.setattr(ladder, "Pair", built)
    checks = ladder.climb(case)
    failed = [check for check in checks if not check.passed]
    assert not failed, f"{case.name}\n{lines(failed)}"
    assert {check.name for check in checks} == RUNGS - not_for(case)


def not_for(case):
    """Return the rungs that say nothing about a case."""
    skipped = set() if case.arguments.get("dropout") else {"dropout"}
    skipped |= set() if case.unbatched else {"unbatched"}
    return skipped | ({"layouts", "training"} if case.variant == "SimplifiedSelfAttention" else set())


def test_every_public_module_has_a_case():
    variants = {case.variant for case in CASES}
    modules = {name for name in torch_ref.__all__ if isinstance(getattr(torch_ref, name), type)}
    modules = {name for name in modules if issubclass(getattr(torch_ref, name), torch.nn.Module)}
    assert modules - {"Linear", "Dropout"} <= variants


def wrong_epsilon(pair, monkeypatch):
    pair.torch.norm1.eps *= 1.01


def exact_gelu_for_tanh(pair, monkeypatch):
    pair.torch.layers[1] = torch.nn.GELU()


def tanh_gelu_for_exact(pair, monkeypatch):
    pair.torch.layers[1] = torch.nn.GELU(approximate="tanh")


def scale_by_the_whole_width(pair, monkeypatch):
    scaled = partial(torch_ref.dot_product_attention, scale=pair.torch.d_out**-0.5)
    monkeypatch.setattr(torch_ref.modules.multi_head, "dot_product_attention", scaled)


def tile_for_repeat(pair, monkeypatch):
    def tiled(x, pattern, **axes):
        return rearrange(x, pattern.replace("(k g)", "(g k)"), **axes)

    monkeypatch.setattr(REFERENCE, "rearrange", tiled)


def see_one_token_ahead(pair, monkeypatch):
    monkeypatch.setattr(Causal, "allow", lambda self, rows, cols: cols <= self.position(rows) + 1)


def not_see_oneself(pair, monkeypatch):
    monkeypatch.setattr(Causal, "allow", lambda self, rows, cols: cols < self.position(rows))


def top_left_for_offset(pair, monkeypatch):
    monkeypatch.setattr(Causal, "position", lambda self, rows: rows)


def one_key_too_many(pair, monkeypatch):
    monkeypatch.setattr(Lengths, "allow", lambda self, rows, cols: cols <= self.key.reshape(-1, 1, 1, 1))


def transposed_square_kernel(pair, monkeypatch):
    weight = pair.torch.W_value.weight
    weight.data = weight.data.T.contiguous()


def swapped_query_and_key(pair, monkeypatch):
    pair.torch.W_query, pair.torch.W_key = pair.torch.W_key, pair.torch.W_query


def forgotten_bias(pair, monkeypatch):
    pair.torch.out_proj.bias.data.zero_()


def dropout_not_rescaled(pair, monkeypatch):
    monkeypatch.setattr(REFERENCE, "drop", lambda weights, keep, rate: torch.where(keep, weights, 0))


def dropout_shared_by_heads(pair, monkeypatch):
    keep_grid = REFERENCE.keep_grid
    monkeypatch.setattr(REFERENCE, "keep_grid", lambda *arguments: keep_grid(*arguments)[:, :1])


def one_key_for_every_dropout(pair, monkeypatch):
    monkeypatch.setattr("torch_ref.modules.block.fold_in", lambda key, index: key)


def norm_after_for_norm_before(pair, monkeypatch):
    pair.torch.norm_first = False


def mean_of_values_for_an_empty_row(pair, monkeypatch):
    def softmax(scores, visible, sinks=None):
        return torch.softmax(torch.where(visible, scores, torch.finfo(scores.dtype).min), dim=-1)

    monkeypatch.setattr(REFERENCE, "masked_softmax", softmax)


def softmax_in_float32(pair, monkeypatch):
    def softmax(scores, visible, sinks=None):
        scores = torch.where(visible, scores, -torch.inf)
        return torch.softmax(scores, dim=-1, dtype=torch.float32).to(scores.dtype)

    monkeypatch.setattr(REFERENCE, "masked_softmax", softmax)


class WithoutResidual(torch_ref.TransformerBlock):
    def forward(self, x, *, return_weights=False):
        x, weights = self.att(self.norm1(x), return_weights=True)
        return x + self.ff(self.norm2(x)), weights


def missing_residual(pair, monkeypatch):
    pair.torch.__class__ = WithoutResidual


def half_of_a_gradient(pair, monkeypatch):
    masked_softmax = REFERENCE.masked_softmax

    def softmax(*arguments):
        weights = masked_softmax(*arguments)
        return (weights + weights.detach()) / 2

    monkeypatch.setattr(REFERENCE, "masked_softmax", softmax)


def another_optimizer(pair, monkeypatch):
    monkeypatch.setattr(torch.optim, "AdamW", lambda parameters, **options: torch.optim.Adam(parameters, **options))


def swapped_parts_of_a_fused_entry(pair, monkeypatch):
    split = Entry.split

    def swapped(entry, array):
        parts = split(entry, array)
        return dict(zip(parts, reversed(parts.values()), strict=True))

    monkeypatch.setattr(Entry, "split", swapped)


def sums_in_bfloat16(pair, monkeypatch):
    case = pair.case
    vars(pair).clear()  # nothing compiled before the fault may serve after it
    pair.__init__(case)

    def low(dtype):
        return jnp.dtype(jnp.bfloat16) if dtype == jnp.float32 else dtype

    monkeypatch.setattr(flax_attn.functional.reference, "accumulation_dtype", low)


FAULTS = [
    (wrong_epsilon, "block_gpt2", "forward"),
    (exact_gelu_for_tanh, "feed_forward_tanh", "forward"),
    (tanh_gelu_for_exact, "feed_forward_exact", "forward"),
    (scale_by_the_whole_width, "multi_head_causal", "forward"),
    (tile_for_repeat, "multi_head_gqa", "forward"),
    (see_one_token_ahead, "causal", "forward"),
    (not_see_oneself, "causal", "forward"),
    (top_left_for_offset, "multi_head_cross_causal", "forward"),
    (one_key_too_many, "multi_head_padding", "forward"),
    (transposed_square_kernel, "multi_head_square", "forward"),
    (swapped_query_and_key, "self_attention", "forward"),
    (forgotten_bias, "multi_head_causal", "forward"),
    (dropout_not_rescaled, "causal", "dropout"),
    (dropout_shared_by_heads, "multi_head_causal", "dropout"),
    (one_key_for_every_dropout, "block_gpt2", "dropout"),
    (norm_after_for_norm_before, "block_gpt2", "forward"),
    (missing_residual, "block_gpt2", "forward"),
    (mean_of_values_for_an_empty_row, "multi_head_padding", "forward"),
    (softmax_in_float32, "multi_head_bidirectional", "forward"),
    (half_of_a_gradient, "self_attention", "gradients"),
    (another_optimizer, "self_attention", "training"),
    (swapped_parts_of_a_fused_entry, "multi_head_square", "layouts"),
    (sums_in_bfloat16, "self_attention", "float32"),
]


@pytest.mark.parametrize(("plant", "case", "rung"), FAULTS, ids=[f"{plant.__name__}" for plant, *_ in FAULTS])
def test_a_planted_fault_is_caught(plant, case, rung, monkeypatch):
    pair = copy_to_plant_in(*select([case]))
    plant(pair, monkeypatch)
    check = getattr(ladder, rung)(pair)
    assert not check.passed, lines([check])
    assert check.name == rung
    assert check.worst


def test_a_check_passes_at_its_limit_and_never_with_nan():
    assert ladder.Check("rule", 1.0, 1.0).passed
    assert not ladder.Check("rule", 1.0000001, 1.0).passed
    assert not ladder.Check("rule", float("nan"), 1.0).passed
    assert not ladder.Check("rule", float("inf"), 1.0).passed
