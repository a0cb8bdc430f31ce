"""The whole check of a device, within a time."""

from collections.abc import Callable, Sequence
from contextlib import nullcontext

import jax

from flax_attn.backends.choose import runs_on
from flax_attn.backends.fused import interpreted
from flax_attn.backends.registry import BACKENDS, load
from flax_attn.bench import machine
from flax_attn.bench.calls import MODEL_CALLS, ModelCall
from flax_attn.device.calls import CALLS
from flax_attn.device.clock import Clock
from flax_attn.device.conformance import judgements
from flax_attn.device.report import DeviceReport
from flax_attn.device.tiles import tried_tiles
from flax_attn.device.times import timings

# Of the time, when each part ends at the latest.
JUDGED, TIMED, TRIED = 0.4, 0.75, 1.0


def check(
    minutes: float,
    save: Callable[[DeviceReport], None],
    show: Callable[[str], None] = lambda line: None,
    calls: Sequence[ModelCall] = CALLS,
) -> DeviceReport:
    """Check the device at hand, and return what was found.

    On a CPU `fused` is judged in Pallas's interpreter; the small calls are timed in place of those
    of models, and no tiles are tried.

    Args:
        minutes: minutes that it may take.
        save: function that keeps what was found, called at each finding: a driver may end the run.
        show: function that shows a line of progress.
        calls: small calls.
    """
    clock = Clock(60 * minutes)
    platform = jax.default_backend()
    on_cpu = platform == "cpu"
    report = DeviceReport(machine.describe(), interpreted=on_cpu)
    backends = [name for name in BACKENDS if runs_on(load(name), platform)]
    # Tokamax is compared alone: it may take minutes to compile.
    ours = [name for name in backends if name != "tokamax"]
    judged = [*ours, "fused"] if on_cpu else ours
    # What the interpreter computes shows whether it is right, and not how fast it is.
    with interpreted() if on_cpu else nullcontext():
        for one in judgements(judged, clock, JUDGED, calls):
            report.judgements.append(one)
            save(report)
            show(f"{one.status}: {one.backend}, {one.call}, {one.dtype}")
    # On a processor the calls of models take too long.
    timed = calls if on_cpu else MODEL_CALLS
    for one in timings(backends, timed, clock, TIMED):
        report.timings.append(one)
        save(report)
        show(f"{one.status}: {one.kernel}, {one.call}")
    if on_cpu:
        return report
    for one in tried_tiles(MODEL_CALLS, clock, TRIED):
        report.tiles.append(one)
        save(report)
        show(f"tiles: {one.row}")
    return report
