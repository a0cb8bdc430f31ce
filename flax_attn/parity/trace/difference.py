"""Where the two sides of a pair differ, read from their programs and proven by repair."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from flax_attn.parity import tolerance
from flax_attn.parity.adapters.adapter import NotRun
from flax_attn.parity.adapters.jax_adapter import JaxAdapter
from flax_attn.parity.check import finite
from flax_attn.parity.pair import Pair
from flax_attn.parity.trace import compiler, runs, sentences
from flax_attn.parity.trace.align import Alignment
from flax_attn.parity.trace.builder import Builder
from flax_attn.parity.trace.explain import WHOLE, parted
from flax_attn.parity.trace.hypothesis import Hypothesis
from flax_attn.parity.trace.numbers import SAME
from flax_attn.parity.trace.patterns import LAYOUT
from flax_attn.parity.trace.program import Place
from flax_attn.parity.trace.search import Search, search
from flax_attn.parity.trace.stops import stopped_gradients

# The hypotheses that are written out in a text.
WRITTEN = 5
# So many differences have a cause that none of them names.
MANY = 5
# Attention weights of JAX and of PyTorch, by submodule.
Attention = dict[str, tuple[np.ndarray, np.ndarray]]


@dataclass(frozen=True)
class Step:
    """One operation of the JAX run beside the same quantity in PyTorch.

    Args:
        name: path of the submodule, and the operation.
        place: line of source.
        error: relative error of its value.
        shape: shape of its value.
        dtype: dtype of its value.
    """

    name: str
    place: Place | None
    error: float
    shape: tuple[int, ...]
    dtype: str

    @property
    def limit(self) -> float:
        """The largest error of a value that both sides have."""
        return SAME

    @property
    def differs(self) -> bool:
        """Whether its value differs."""
        return self.error > self.limit

    def as_dict(self) -> dict[str, Any]:
        """Return the step for JSON."""
        return finite(
            {
                "name": self.name,
                "place": str(self.place or ""),
                "error": self.error,
                "shape": list(self.shape),
                "dtype": self.dtype,
                "differs": self.differs,
            }
        )


@dataclass(frozen=True)
class Difference:
    """Where two sides differ, and whether that is all.

    Args:
        hypotheses: what both sides compute differently, in the order of the run.
        remaining: names of the outputs that still differ when PyTorch's values replace those of JAX
            at all hypotheses; none if the hypotheses explain the whole difference.
        steps: error of every operation that has a counterpart, in the order of the run.
        backward: whether the outputs agree, and gradients differ.
        unproven: whether the hypotheses are where the programs part, with no value replaced.
        attention: attention weights `(b, n, t, s)` of JAX and of PyTorch, by submodule.
        miscompiled: program that XLA computes wrongly, if both sides agree operation by operation.
        ended: whether outputs still differ as the search ended before it had tried all.
    """

    hypotheses: tuple[Hypothesis, ...] = ()
    remaining: tuple[str, ...] = ()
    steps: tuple[Step, ...] = ()
    backward: bool = False
    unproven: bool = False
    attention: Attention = field(default_factory=dict, repr=False)
    miscompiled: compiler.Miscompiled | None = None
    ended: bool = False

    @property
    def repaired(self) -> bool:
        """Whether the hypotheses explain the whole difference."""
        return bool(self.hypotheses) and not self.remaining

    @property
    def agrees(self) -> bool:
        """Whether no operation differs, so that the checks say what does."""
        return not (self.hypotheses or self.remaining or self.miscompiled)

    @property
    def unnamed(self) -> bool:
        """Whether the cause is before so many hypotheses, and not among them."""
        return self.repaired and _causes(self.hypotheses) >= MANY

    @property
    def first(self) -> Step | None:
        """The first operation whose value differs."""
        return next((step for step in self.steps if step.differs), None)

    @property
    def causes(self) -> list[str]:
        """A sentence for each hypothesis."""
        if self.miscompiled:
            return [sentences.miscompiled(self.miscompiled)]
        return [sentences.headline(found) for found in self.hypotheses]

    def lines(self) -> Iterator[str]:
        """Yield the hypotheses with both sides, then what they prove."""
        if self.miscompiled:
            yield from sentences.lines_of_miscompiled(self.miscompiled)
            return
        for found in self.hypotheses[:WRITTEN]:
            yield from sentences.lines(found)
        left = len(self.hypotheses) - WRITTEN
        if left > 0:
            yield f"and {left} more"
        yield sentences.proof(self)

    def documents(self) -> list[dict[str, Any]]:
        """Return the hypotheses for JSON."""
        proven = None if self.unproven else self.repaired
        found = []
        for one in self.hypotheses:
            words = {"sentence": sentences.headline(one), "edit": sentences.edit(one)}
            found.append({**one.as_dict(), **words, "repairs": proven})
        return found

    def as_dict(self) -> dict[str, Any]:
        """Return what is known beside the hypotheses, for JSON."""
        return {
            "repaired": self.repaired,
            "remaining": list(self.remaining),
            "backward": self.backward,
            "ended": self.ended,
            "miscompiled": self.miscompiled and self.miscompiled.as_dict(),
            "steps": [step.as_dict() for step in self.steps],
        }

    def __str__(self) -> str:
        """Return a few lines."""
        return "\n".join(self.lines())


def difference(pair: Pair) -> Difference:
    """Return where the two sides of a pair differ. JAX must have x64 enabled.

    Both run once, and the values of all their operations are compared. Where one computes something
    else from the same values, the value of PyTorch replaces that of JAX, and the rest runs again:
    the smallest set of places after which all agrees is the difference.

    Raises:
        NotRun: if a side is the recording of an earlier run, which holds no intermediate values.

    Example:
        >>> import jax, torch
        >>> from flax_attn.parity import compare
        >>> gelu = torch.nn.GELU(approximate="tanh").eval()
        >>> found = compare(jax.nn.silu, gelu, [(5, 3)], checks=["forward"]).difference
        >>> len(found.hypotheses), found.repaired
        (1, True)
    """
    from flax_attn.parity.adapters.torch_adapter import TorchAdapter

    if not isinstance(pair.flax, JaxAdapter) or not isinstance(pair.torch, TorchAdapter):
        raise NotRun(
            "the difference is found by running both sides, and one of these is the recording of an"
            " earlier run. Compare where both frameworks are installed"
        )
    traced, flax = runs.flax_forward(pair)
    found = search(flax, runs.torch_forward(pair))
    if found.hypotheses or found.wrong:
        return _difference(found)
    miscompiled = compiler.of_outputs(pair)
    if miscompiled:
        return replace(_difference(found), miscompiled=miscompiled)
    return _backward(pair, traced, found)


def _difference(found: Search, backward: bool = False) -> Difference:
    wrong = tuple(found.wrong)
    steps = tuple(_steps(found.alignment))
    if wrong and not found.hypotheses:
        # No value of PyTorch could replace one of JAX: this is only where the programs part.
        parting = parted(found.alignment, wrong)
        vague = [replace(one, doubtful=one.parameter == "layout") for one in parting]
        return Difference(tuple(vague), wrong, steps, backward, unproven=True, ended=found.ended)
    still_wrong = bool(wrong)
    doubtful = still_wrong or _causes(found.hypotheses) >= MANY
    hypotheses = []
    for one in _told(found.hypotheses, still_wrong):
        hypotheses.append(replace(one, backward=backward, doubtful=doubtful))
    attention = {} if backward else _attention(found.alignment)
    return Difference(
        tuple(hypotheses), wrong, steps, backward, attention=attention, ended=found.ended
    )


def _causes(hypotheses: Sequence[Hypothesis]) -> int:
    """Return how many causes hypotheses may have: the same setting at several places is one."""
    causes: set[tuple] = set()
    for one in hypotheses:
        is_setting = one.parameter not in (*WHOLE, "expression", "layout")
        causes.add((one.operation, one.parameter) if is_setting else one.kind)
    return len(causes)


def _told(hypotheses: Sequence[Hypothesis], doubtful: bool) -> Sequence[Hypothesis]:
    """Return hypotheses without the orders of numbers among others, if outputs still differ.

    What takes other values has them in another order as well, as rows that are sorted have.
    """
    if not doubtful:
        return hypotheses
    return [one for one in hypotheses if one.parameter != "layout"] or hypotheses


def _backward(pair: Pair, traced: Any, forward: Search) -> Difference:
    """Return where the gradients differ, if they do: the outputs agree."""
    same = _difference(forward)
    expected = pair.shared(pair.reference.gradients)
    actual = pair.shared(pair.flax64.gradients)
    errors = tolerance.gradient_errors(actual, expected).values()
    if not any(error > tolerance.GRADIENT for error in errors):
        return same
    stopped = tuple(stopped_gradients(pair, traced, forward.alignment))
    if stopped:
        return Difference(stopped, steps=same.steps, backward=True, attention=same.attention)
    flax, torch, values = runs.backward(pair)
    found = _difference(search(flax, torch, values), backward=True)
    if found.hypotheses or found.remaining:
        return found
    # What differs only once it is compiled is no operation of either program.
    return replace(found, miscompiled=compiler.miscompiled(pair))


def _steps(alignment: Alignment) -> Iterator[Step]:
    for node in alignment.flax.nodes:
        shared = node in alignment.torch_of and alignment.numbers(node).telling
        if not shared or node.operation in LAYOUT or not node.operands:
            continue
        yield Step(
            f"{node.module}/{node.operation}" if node.module else node.operation,
            node.place,
            tolerance.relative({"": node.value}, {"": alignment.value(node)})[""],
            tuple(node.value.shape),
            str(node.value.dtype),
        )


def _attention(alignment: Alignment) -> Attention:
    """Return the results of every softmax over keys, `(b, n, t, s)`."""
    build = Builder({}, alignment.flax.varying)
    found: Attention = {}
    counts: Counter[str] = Counter()
    for node in alignment.flax.nodes:
        # The last operation of a softmax is its division.
        if node.operation != "div" or node.value.ndim != 4:
            continue
        if build(node).operation != "softmax":
            continue
        label = node.module or "attention"
        counts[label] += 1
        # A submodule that is called again has weights of each call.
        key = label if counts[label] == 1 else f"{label}#{counts[label]}"
        found[key] = np.asarray(node.value), np.asarray(alignment.value(node))
    return found
