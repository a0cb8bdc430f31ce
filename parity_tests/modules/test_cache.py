"""Modules with a cache: one call, prefill and steps, and chunks are equal on both sides.

For rows of different lengths, and masks and ring buffers that the table of variants has not. The
calls are eager: the table proves that compiled ones are equal.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import pytest

import torch_ref
from flax_attn import convert
from flax_attn.proof import variants as table
from parity_tests.asserts import assert_near
from parity_tests.chunks import is_padding, places, store

B, T, D = 3, 7, 6
# Tokens of each row.
TOTALS = np.array([7, 4, 6])
# How many tokens of each row come in each call, and how wide the call is: few widths, so that
# little is compiled.
STEPS = (((4, 1, 3), 4), ((1, 1, 1), 1), ((1, 1, 1), 1), ((1, 1, 1), 1))
CHUNKS = (((3, 0, 2), 4), ((2, 2, 0), 4), ((2, 2, 4), 4))
RANDOM = np.random.default_rng(0)
X = RANDOM.normal(size=(B, T, D))
IDS = np.array([[0, 0, 0, 1, 1, 1, 1], [5, 5, 2, 2, 2, 2, 2], [3, 3, 3, 3, 3, 4, 4]])
POSITIONS = np.array([[0, 1, 2, 0, 1, 2, 3], [0, 1, 0, 1, 2, 3, 4], [7, 9, 12, 13, 14, 0, 1]])
# A mask for each row and head.
DENSE = RANDOM.random((B, 4, T, T)) < 0.6


@dataclass(frozen=True)
class Case:
    """A module, and the options of its calls.

    Args:
        variant: name of the class.
        arguments: arguments of the constructor, or functions that make them from a side.
        options: function that makes the masks and biases of a call from a side and the size of a
            mask of the whole sequence.
        positions: positions of the tokens, where they are given.
        capacity: capacity of the cache.
    """

    variant: str
    arguments: Mapping[str, Any]
    options: Callable[[Any, int], Mapping[str, Any]] = field(default=lambda side, size: {})
    positions: Any = None
    capacity: int = 9

    def build(self, side):
        made = {
            name: value(side) if callable(value) else value
            for name, value in self.arguments.items()
        }
        module = side.build(self.variant, **made)
        module.eval()
        return module


def heads(*, options=lambda side, size: {}, positions=None, capacity=9, **arguments):
    defaults = {
        "d_in": D,
        "d_out": 16,
        "context_length": 11,
        "dropout": 0.3,
        "num_heads": 4,
        "num_kv_heads": 2,
    }
    return Case("MultiHeadAttention", {**defaults, **arguments}, options, positions, capacity)


def block(**arguments):
    capacity, options = (
        arguments.pop("capacity", 9),
        arguments.pop("options", lambda side, size: {}),
    )
    defaults = {"d_model": D, "context_length": 11, "dropout": 0.3, "num_heads": 3}
    return Case("TransformerBlock", {**defaults, **arguments}, options, None, capacity)


def rope(scaling=None, numbers=(), **keywords):
    return lambda side: side.RoPE(
        50.0, scaling=scaling and getattr(side, scaling)(*numbers), **keywords
    )


def padded(array, size, axes):
    """Return a mask or ids of the whole sequence: of at least as many tokens as the cache holds."""
    return np.pad(
        array, [(0, max(size - n, 0) if axis in axes else 0) for axis, n in enumerate(array.shape)]
    )


def head_norms(width):
    return {name: lambda side: side.build("RMSNorm", width, 1e-3) for name in ("q_norm", "k_norm")}


def segments(side, size):
    return {"mask": side.Mask.segments(padded(IDS, size, (1,)))}


def dense(array, *axes):
    return lambda side, size: {"mask": side.array(padded(array, size, axes))}


def packed_window(side, size):
    mask = side.Mask.segments(padded(IDS, size, (1,))) & side.Mask.dense(
        padded(DENSE, size, (2, 3))
    )
    return {"mask": mask & side.Mask.window(1, None)}


# Parts of blocks.
LLAMA = {"norm": "RMSNorm", "ff": ("GatedFeedForward", {"d_hidden": 10}), "out_bias": False}
EXACT = ("FeedForward", {"d_hidden": 10, "activation": "gelu_exact"})

# Rows of the table whose mask alone makes them causal.
CAUSAL_BY_MASK = ("multi_head_function_mask", "multi_head_packed_window", "multi_head_prefix_dense")
VARIANTS = {
    "rope dynamic": heads(rope=rope("DynamicNTKScaling", (4.0, 8))),
    "window mask": heads(options=lambda side, size: {"mask": side.Mask.sliding_window(3)}),
    "lengths": heads(
        options=lambda side, size: {"mask": side.Mask.lengths(key=np.array([5, 4, 0]), query=6)}
    ),
    "segments": heads(options=segments, rope=rope(), positions=POSITIONS),
    "prefix and segments": heads(
        causal=False,
        options=lambda side, size: {
            "mask": (
                side.Mask.prefix(np.array([3, 1, 2]))
                & side.Mask.segments(padded(IDS[0], size, (0,)))
            )
        },
    ),
    "dense": heads(options=dense(DENSE, 2, 3)),
    "dense (t, s)": heads(options=dense(DENSE[0, 0], 0, 1)),
    "dense keys": heads(options=dense(DENSE[:, :1, :1], 3)),
    "dense queries": heads(options=dense(DENSE[..., :1], 2)),
    "all masks": heads(options=packed_window),
    "window 3 in 3": heads(window=3, capacity=3),
    "window 3 in 4": heads(window=3, capacity=4, rope=rope()),
    "window 3 in 6": heads(
        window=3, capacity=6, **head_norms(4), rope=rope("YaRNScaling", (4.0, 6))
    ),
    "window 1": heads(window=1, capacity=2),
    "window and alibi": heads(
        window=3, capacity=4, options=lambda side, size: {"bias": lambda q, k: side.alibi(4, q, k)}
    ),
    "window and all masks": heads(
        window=4, capacity=5, options=packed_window, rope=rope(), positions=POSITIONS
    ),
    "block mistral": block(**LLAMA, rope=rope(), window=3, head_dim=4, capacity=5),
    "block post-norm": block(norm_first=False, ff=EXACT, options=segments),
}


def same_weights(case, sides):
    """Return the module of each side, with the same random weights in both."""
    ours, theirs = (case.build(side) for side in sides)
    random = np.random.default_rng(1)
    weights = {name: random.normal(0, 0.4, a.shape) for name, a in convert.state_dict(ours).items()}
    convert.load_state_dict(ours, weights)
    theirs.load_state_dict({name: sides[1].array(weight) for name, weight in weights.items()})
    return zip(sides, (ours, theirs), strict=True)


def calls(plan):
    """Yield, for each call of a plan, the number of real tokens in each row and their indices."""
    held = np.zeros(B, int)
    for counts, width in plan:
        yield np.array(counts), places(held, width, T)
        held = held + counts


def chunks(side, plan, *arrays):
    """Yield the tokens of each call and the other arrays, with NaN as padding, and the lengths."""
    for counts, index in calls(plan):
        x, *rest = (array[index] for array in arrays)
        x[is_padding(x.shape[1], counts)] = np.nan
        yield [*map(side.array, (x, *rest, counts))]


def joined(plan, outputs):
    """Return the outputs of all calls at the positions of their tokens; padding is 0."""
    whole = np.zeros((B, T, outputs[0].shape[-1]))
    held = np.zeros(B, int)
    for (counts, _), output in zip(plan, outputs, strict=True):
        held = store(whole, output, held, np.array(counts))
    return whole


def full(side, case, module):
    """Return the outputs of one call."""
    options = dict(case.options(side, T))
    if case.positions is not None:
        options["positions"] = side.array(case.positions)
    call = side.jit(lambda x, lengths: module(x, lengths=lengths, **options))
    output = call(side.array(X), side.array(TOTALS))
    return joined(((TOTALS, T),), [side.numpy(output)])


def attend(module, options, cache, x, *rest):
    """Return the output and the cache; the rest are the positions, if given, and the lengths."""
    *positions, lengths = rest
    placed = {"positions": positions[0]} if positions else {}
    attended = module.attend(x, lengths=lengths, cache=cache, **placed, **options)
    return attended.output, attended.cache


def in_calls(side, case, cache, call, plan):
    """Return the outputs of the calls of a plan, from an empty cache."""
    outputs = []
    given = [] if case.positions is None else [case.positions]
    for chunk in chunks(side, plan, X, *given):
        output, cache = call(cache, *chunk)
        outputs.append(side.numpy(output))
    return joined(plan, outputs)


def all_outputs(side, case, module):
    # Compiled once for both plans.
    call = side.jit(partial(attend, module, case.options(side, case.capacity)))
    run = partial(in_calls, side, case, module.init_cache(B, case.capacity), call)
    outputs = {"full": full(side, case, module), "steps": run(STEPS), "chunks": run(CHUNKS)}
    return {f"{side.name}: {name}": output for name, output in outputs.items()}


@pytest.mark.parametrize("case", VARIANTS.values(), ids=VARIANTS)
def test_steps_and_chunks_equal_the_full_forward(sides, case):
    found = {}
    for side, module in same_weights(case, sides):
        found |= all_outputs(side, case, module)
    truth = found["torch_ref: full"]
    assert np.abs(truth).max() > 0.1
    assert_near(found, dict.fromkeys(found, truth))


def test_every_causal_row_of_the_table_is_computed_in_steps():
    rows = [row for row in table.VARIANTS if len(row.inputs) == 1]
    for row in rows:
        assert bool(row.chunks) == has_steps(row), row.name
        totals = sum(np.array(chunk) for chunk in row.chunks)
        # The chunks of the longest row are all of its tokens.
        assert not row.chunks or np.max(totals) == row.inputs[0][1], row.name


def has_steps(row):
    """Whether the module of a row is causal, and can be given a cache."""
    module = row.build(torch_ref)
    attention = getattr(module, "att", module)
    causal = getattr(attention, "causal", True) or row.name in CAUSAL_BY_MASK
    rope = getattr(attention, "rope", None)
    # This scaling rotates the keys of a cache anew.
    rotates_anew = isinstance(getattr(rope, "scaling", None), torch_ref.LongRoPEScaling)
    return hasattr(module, "init_cache") and causal and not rotates_anew
