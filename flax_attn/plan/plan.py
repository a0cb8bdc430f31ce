"""A job planned: what a device holds, its programs, whether they fit, and what would."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from flax_attn.plan.estimate import SuggestedChange, changes
from flax_attn.plan.job import Job
from flax_attn.plan.phases import Phase, compiled
from flax_attn.plan.placement import Held, held_bytes


@dataclass(frozen=True)
class Plan:
    """The result of `plan`.

    Args:
        job: job that was planned.
        held: bytes on one device that follow from shapes.
        phases: programs of the job.
        changes: changes that would fit, tried one after another, where this does not.
    """

    job: Job
    held: Held
    phases: Sequence[Phase]
    changes: Sequence[SuggestedChange] = ()

    @property
    def largest(self) -> Phase:
        """The phase that takes most memory."""
        return max(self.phases, key=lambda phase: phase.peak)

    @property
    def fits(self) -> bool | None:
        """Whether all of it fits in the memory of a device; None where that is not known."""
        memory = self.job.topology.chip.memory
        # Refused by the compiler, a program does not fit whatever the published memory is.
        if not all(phase.compiled for phase in self.phases):
            return False
        return None if memory is None else self.largest.peak <= memory

    def as_dict(self) -> dict[str, Any]:
        """Return all of it as JSON has it."""
        job, chip = self.job, self.job.topology.chip
        # With the times beside each, which follow from it and the chip.
        phases = []
        for phase in self.phases:
            phases.append(asdict(phase) | {"seconds_at_most_rates": phase.times(chip)})
        return {
            "model": job.name,
            "topology": job.topology.name,
            "devices": job.topology.size,
            "mesh": dict(job.mesh),
            "rules": dict(job.rules),
            "batch": job.batch,
            "tokens": job.tokens,
            "train": job.train,
            "remat": job.remat,
            "dtype": job.dtype or job.model.dtype,
            "memory": chip.memory,
            "fits": self.fits,
            "held": asdict(self.held),
            "phases": phases,
            "changes": [change.as_dict() for change in self.changes],
        }


def plan(job: Job, tell: Callable[[str], object] = lambda step: None) -> Plan:
    """Compile the programs of a job, and look for what would fit if they do not.

    Args:
        job: job that is planned.
        tell: called with what is done next, in words, before each step that takes long.

    Raises:
        ImportError: if what describes the devices is not installed.
        ValueError: if there are no such devices.
    """
    with job.table():
        tell(f"building {job.name} from shapes")
        now = held_bytes(job)
        return _with_changes(Plan(job, now, compiled(job, now, tell)))


def _with_changes(found: Plan) -> Plan:
    """Return a plan with what would fit, where it does not."""
    memory = found.job.topology.chip.memory
    # Where it is not known whether it fits, nothing can be said of what would.
    if found.fits is not False or memory is None:
        return found
    return replace(found, changes=changes(found.job, found.held, found.largest, memory))
