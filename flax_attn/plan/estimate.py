"""Estimates of what would fit where a job does not, from compiled programs and model shapes."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from typing import Any

from flax_attn.plan.job import Job
from flax_attn.plan.phases import Phase
from flax_attn.plan.placement import Held, held_bytes
from flax_attn.plan.topology import Topology

# The most devices that are suggested.
_MOST = 2**14


@dataclass(frozen=True)
class SuggestedChange:
    """A change of a job, and what it would take.

    Args:
        what: description of the change, with all that was changed before it.
        job: job after the change.
        peak: estimated bytes on one device.
        fits: whether that is less than its memory.
    """

    what: str
    job: Job
    peak: int
    fits: bool

    def as_dict(self) -> dict[str, Any]:
        """Return it as JSON has it."""
        return {
            "what": self.what,
            "mesh": dict(self.job.mesh),
            "remat": self.job.remat,
            "peak": self.peak,
            "fits": self.fits,
        }


def changes(job: Job, now: Held, phase: Phase, memory: int) -> list[SuggestedChange]:
    """Return changes that may make a job fit, up to the first that does.

    In this order, each on top of those before: remat, more of the data axis given to fsdp, more of
    the tensor axis given to context, twice the chips and so on. What would take no less is left
    out.

    Args:
        job: job that does not fit.
        now: bytes that a device holds in it.
        phase: program that takes most memory.
        memory: memory of a device, in bytes.
    """
    found: list[SuggestedChange] = []
    least = phase.peak
    current = job
    for what, change in _CHANGES:
        # Of a kind of change as much is taken as helps.
        changed = change(current)
        while changed is not None:
            peak = _peak(job, now, phase, changed)
            if peak >= least:
                break
            fits = peak <= memory
            found.append(SuggestedChange(what, changed, peak, fits))
            if fits:
                return found
            least = peak
            current = changed
            changed = change(current)
    return found


def _recomputed(job: Job) -> Job | None:
    return replace(job, remat=True) if job.model.has_remat else None


def _moved(job: Job, source: str, target: str) -> Job | None:
    """Return the job with a factor of one mesh axis given to another, or None if that cannot be."""
    size = job.axis(source)
    if size == 1:
        return None
    # The least prime: as little as possible changes at once.
    factor = next(i for i in range(2, size + 1) if size % i == 0)
    return _with(job, job.topology, {source: size // factor, target: job.axis(target) * factor})


def _grown(job: Job) -> Job | None:
    """Return the job on twice the chips, given to fsdp or else context; None if neither divides."""
    if job.topology.size >= _MOST:
        return None
    larger = _twice(job.topology)
    for axis in ("fsdp", "context"):
        grown = _with(job, larger, {axis: 2 * job.axis(axis)})
        if grown is not None:
            return grown
    return None


def _twice(topology: Topology) -> Topology:
    *rest, last = topology.shape
    chip = topology.name.partition(":")[0]
    name = f"{chip}, {2 * topology.size} devices"
    return replace(topology, name=name, shape=(*rest, 2 * last))


def _with(job: Job, topology: Topology, sizes: dict[str, int]) -> Job | None:
    try:
        return replace(job, topology=topology, mesh={**job.mesh, **sizes})
    # The axes do not divide something.
    except ValueError:
        return None


_CHANGES: tuple[tuple[str, Callable[[Job], Job | None]], ...] = (
    ("remat", _recomputed),
    ("more fsdp", partial(_moved, source="data", target="fsdp")),
    ("more context", partial(_moved, source="tensor", target="context")),
    ("more chips", _grown),
)


def _peak(job: Job, now: Held, phase: Phase, changed: Job) -> int:
    """Return the bytes of the changed job: what it holds, and the rest scaled like activations."""
    then = held_bytes(changed)
    activations = max(0, phase.peak - now.total - now.gradients)
    ratio = _activations(changed) / _activations(job)
    return then.total + then.gradients + round(activations * ratio)


def _activations(job: Job) -> float:
    """Return how many numbers of activations a device keeps, up to a factor."""
    split = prod(job.axis(axis) for axis in ("data", "fsdp", "expert", "context"))
    return job.batch * job.tokens / split * job.model.activations(job)
