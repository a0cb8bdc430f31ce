"""Faults of rotary and relative positions."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from flax_attn.proof.faults.fault import Plant, fault
from flax_attn.proof.faults.formulas import FIRST_CHUNK, ROPE_CHUNKS, T5
from flax_attn.proof.faults.scores import call_with
from flax_attn.proof.variants import select
from torch_ref.functional import positions as torch_positions
from torch_ref.functional.positions import RoPE
from torch_ref.modules import multi_head

# Positions with gaps: scores go by differences, so that positions without gaps are as good as none.
GAPS = replace(
    *select(["multi_head_rope"]),
    name="multi_head_rope_gaps",
    call=lambda package: {"positions": np.array([0, 1, 3, 4, 8])},
)


@fault(GAPS)
def rope_base(plant: Plant) -> None:
    """RoPE has the base 500000, not 10000."""
    _rope(plant, base=500_000.0)


@fault(GAPS)
def rope_order(plant: Plant) -> None:
    """RoPE pairs neighbouring features, not the halves."""
    _rope(plant, interleaved=True)


@fault(GAPS)
def rope_width(plant: Plant) -> None:
    """RoPE turns half of the features, not all."""
    _rope(plant, width=2)


@fault(GAPS)
def rope_sign(plant: Plant) -> None:
    """RoPE turns the other way."""

    def backwards(original, *arguments):
        cos, sin = original(*arguments)
        return [cos, -sin]

    plant.wrap(RoPE, "_cos_sin", backwards)


@fault(GAPS)
def rope_of_queries_alone(plant: Plant) -> None:
    """RoPE does not turn the keys."""
    heads = plant.module.num_heads
    plant.wrap(RoPE, "__call__", lambda turn, rope, x, where: turn(rope, x, where) if x.shape[-2] == heads else x)


@fault(GAPS)
def rope_of_values_too(plant: Plant) -> None:
    """RoPE turns the values as well."""

    def attend(original, query, key, value, *arguments, **options):
        return original(query, key, plant.module.rope(value), *arguments, **options)

    plant.wrap(multi_head, "dot_product_attention", attend)


@fault(GAPS)
def ignored_positions(plant: Plant) -> None:
    """RoPE ignores the positions it is given."""
    plant.wrap(RoPE, "__call__", lambda turn, rope, x, where: turn(rope, x))


@fault(ROPE_CHUNKS, check="cache = full")
def rope_one_step_too_far(plant: Plant) -> None:
    """Under a cache, RoPE turns queries one step too far."""

    def turned(turn, rope, x, where=None):
        if where is not None and where[0] == FIRST_CHUNK:  # keys begin at 0
            where = where + 1
        return turn(rope, x, where)

    plant.wrap(RoPE, "__call__", turned)


@fault("multi_head_rope_yarn_packed")
def no_rope_scaling(plant: Plant) -> None:
    """The scaling of RoPE is missing."""
    _rope(plant, scaling=None)


@fault("multi_head_rope_yarn_packed")
def no_yarn_temperature(plant: Plant) -> None:
    """YaRN's factor on what is rotated is missing."""
    _rope(plant, scaling=replace(plant.module.rope.scaling, attention_factor=1.0))


@fault("multi_head_alibi")
def reversed_alibi_slopes(plant: Plant) -> None:
    """ALiBi's slopes are in reverse order."""
    plant.wrap(torch_positions, "alibi_slopes", lambda slopes, count: slopes(count)[::-1].copy())


@fault("multi_head_alibi")
def alibi_sign(plant: Plant) -> None:
    """ALiBi favours keys that are far."""
    plant.wrap(torch_positions, "alibi_slopes", lambda slopes, count: -slopes(count))


@fault(T5)
def scaled_scores_in_t5(plant: Plant) -> None:
    """T5's scores are scaled."""
    call_with(plant, scale=None)


@fault(T5)
def t5_direction(plant: Plant) -> None:
    """T5's buckets go by query minus key position."""
    plant.wrap(torch_positions, "t5_buckets", lambda buckets, query, key, **options: buckets(-query, -key, **options))


@fault(T5)
def t5_max_distance(plant: Plant) -> None:
    """T5's last bucket begins at 128, not max_distance."""

    def buckets(original, *positions, **options):
        return original(*positions, **{**options, "max_distance": 128})

    plant.wrap(torch_positions, "t5_buckets", buckets)


def _rope(plant: Plant, **changes: Any) -> None:
    plant.module.rope = replace(plant.module.rope, **changes)
