"""A factor that each side has at a place of its own, said once.

Where PyTorch scales the queries and JAX the scores, by another number, the queries lack one factor
and the scores have one too many. What differs is the number.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from flax_attn.parity.trace.align import Alignment, Repair
from flax_attn.parity.trace.hypothesis import Hypothesis

NONE = "1"
# Factors are written with six digits.
WRITTEN = 1e-4


def with_joined_factors(
    hypotheses: Sequence[Hypothesis], repairs: Mapping[tuple, Repair], before: Alignment
) -> tuple[Hypothesis, ...]:
    """Return hypotheses in which a factor that is missed here and is too much there is one.

    Args:
        hypotheses: what differs.
        repairs: the first replacement for each kind of hypothesis.
        before: the alignment before any replacement.
    """
    factors = [one for one in hypotheses if one.parameter == "factor" and one.kind in repairs]
    missed = [one for one in factors if one.flax.value == NONE != one.torch.value]
    surplus = [one for one in factors if one.torch.value == NONE != one.flax.value]
    joined: dict[int, Hypothesis] = {}
    covered: dict[int, set[str]] = {id(one): set() for one in missed}
    for extra in surplus:
        for lack in missed:
            within = _modules(extra) <= _modules(lack)
            if within and _is_one(extra, lack, repairs[extra.kind], before):
                joined[id(extra)] = replace(extra, torch=lack.torch)
                covered[id(lack)] |= _modules(extra)
    found = []
    for one in hypotheses:
        if id(one) in covered and covered[id(one)] >= _modules(one):
            continue
        said = joined.get(id(one), one)
        # The same number at another place is no difference.
        if id(one) not in joined or said.flax.value != said.torch.value:
            found.append(said)
    return tuple(found)


def _modules(one: Hypothesis) -> set[str]:
    return {one.node, *one.also}


def _is_one(extra: Hypothesis, lack: Hypothesis, repair: Repair, before: Alignment) -> bool:
    """Whether the factor that is missed is a part of what has one too many."""
    ratio = float(lack.torch.value) / float(extra.flax.value)
    expected = before.value(repair.flax) * ratio
    return np.allclose(expected, repair.value, rtol=WRITTEN, atol=WRITTEN * np.abs(expected).max())
