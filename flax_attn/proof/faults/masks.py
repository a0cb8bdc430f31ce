"""Faults of the masks."""

from __future__ import annotations

from dataclasses import replace

import torch

from flax_attn.proof.faults.fault import Plant, fault
from torch_ref.functional import reference
from torch_ref.functional.mask_parts import Causal, Dense, Lengths, Prefix, Segments, Window
from torch_ref.functional.masks import Mask


@fault("multi_head_causal")
def one_token_ahead_is_seen(plant: Plant) -> None:
    """Tokens see one token ahead."""
    plant.replace(Causal, "allow", lambda self, rows, cols: cols <= self.position(rows) + 1)


@fault("multi_head_causal")
def oneself_is_not_seen(plant: Plant) -> None:
    """Tokens do not see themselves."""
    plant.replace(Causal, "allow", lambda self, rows, cols: cols < self.position(rows))


@fault("multi_head_causal")
def no_causal_mask(plant: Plant) -> None:
    """The causal mask is missing."""
    plant.module.causal = False


@fault("multi_head_cross_causal")
def top_left_for_an_offset(plant: Plant) -> None:
    """A causal mask stands at the top left, not at its offset."""
    plant.replace(Causal, "position", lambda self, rows: rows)


@fault("multi_head_padding")
def one_padded_key_is_seen(plant: Plant) -> None:
    """One padded key is seen."""
    plant.wrap(Lengths, "allow", lambda allow, part, *index: allow(replace(part, key=part.key + 1), *index))


@fault("multi_head_padding")
def padded_queries_attend(plant: Plant) -> None:
    """Padded queries attend, and give no zeros."""
    plant.wrap(Lengths, "allow", lambda allow, part, *index: allow(replace(part, query=None), *index))


@fault("multi_head_causal", check="poisoned padding")
def nan_passes_a_weight_of_zero(plant: Plant) -> None:
    """NaN in the padding reaches tokens, as 0 * NaN is NaN."""
    plant.replace(reference, "_finite", lambda x: (x, torch.ones_like(x[..., 0], dtype=torch.bool)))


@fault("multi_head_packed_window")
def window_one_too_wide(plant: Plant) -> None:
    """A sliding window has one key too many."""
    plant.wrap(Window, "allow", lambda allow, part, *index: allow(replace(part, left=part.left + 1), *index))


@fault("multi_head_packed_window")
def segment_0_is_padding(plant: Plant) -> None:
    """Segment 0 is taken for padding."""

    def allow(original, part, rows, cols):
        return original(part, rows, cols) & (part.query[rows.reshape(-1)] != 0)[None, None, :, None]

    plant.wrap(Segments, "allow", allow)


@fault("multi_head_packed_window")
def any_mask_lets_through(plant: Plant) -> None:
    """Of two masks either lets through, not both."""

    def block(mask, rows, cols):
        parts = [part.allow(rows[None, None, :, None], cols[None, None, None, :]) for part in mask.parts]
        return torch.stack(torch.broadcast_tensors(*parts)).any(dim=0)

    plant.replace(Mask, "block", block)


@fault("multi_head_prefix_dense")
def polarity(plant: Plant) -> None:
    """True in a boolean mask hides."""
    plant.wrap(Dense, "allow", lambda allow, *arguments: ~allow(*arguments))


@fault("multi_head_prefix_dense")
def transposed_mask(plant: Plant) -> None:
    """A mask has keys by queries, not queries by keys."""
    plant.wrap(Dense, "allow", lambda allow, part, *index: allow(Dense(part.array.mT), *index))


@fault("multi_head_prefix_dense")
def causal_prefix(plant: Plant) -> None:
    """The prefix of a prefix-LM is causal."""
    plant.replace(Prefix, "allow", lambda self, rows, cols: cols <= self.position(rows))
