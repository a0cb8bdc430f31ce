"""Rows of the table run one by one, or from several processes: on one device, or on a mesh."""

import multiprocessing
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib.util import find_spec
from math import prod
from typing import Any

import jax
from jax.sharding import AxisType

from flax_attn.aot.simulated import simulated
from flax_attn.parity.adapters.recording import save
from flax_attn.parity.cpu import on_cpu
from flax_attn.parity.report.report import Report
from flax_attn.proof.on_mesh import prove_on_mesh
from flax_attn.proof.prove import pair_from, prove
from flax_attn.proof.rows import real
from flax_attn.proof.variants import VARIANTS, Variant, select, sizes_for, table


@dataclass(frozen=True)
class ProofRun:
    """How rows of the table are compared.

    Args:
        seed: seed of the weights and inputs.
        checks: names of checks, see `prove`.
        full: whether `checks=None` means all checks.
        export: folder to write the PyTorch results to, if any.
        against: folder of exported results that replace PyTorch, if any.
        mesh: axes of the mesh that the Flax modules run on; without any they run on one device.
        real: whether the rows are those of real sizes.
    """

    seed: int = 0
    checks: Sequence[str] | None = None
    full: bool = False
    export: str | None = None
    against: str | None = None
    mesh: Mapping[str, int] | None = None
    real: bool = False

    def select(self, names: list[str] | None) -> list[Variant]:
        """Return the rows of these names or classes, in sizes that the mesh divides.

        Raises:
            ValueError: if there is none of a name, or the table cannot be divided over the mesh.
        """
        if self.real:
            return select(names, real.rows())
        rows = table(sizes_for(self.mesh)) if self.mesh else VARIANTS
        return select(names, rows)

    def report(self, variant: Variant, device: Any = None) -> Report:
        """Return the report of a row; lower dtypes run on `device`."""
        judge = prove_on_mesh if self.mesh else prove
        with _mesh_in_use(self.mesh), on_cpu():
            pair = pair_from(variant, self.seed, self.export, self.against, device)
            report = judge(variant, pair=pair, seed=self.seed, checks=self.checks, full=self.full)
        if self.export:
            save(report, self.export)
        # A process may map 65530 pieces of memory on Linux, and a few hundred programs of eight
        # devices are as many.
        jax.clear_caches()
        return report

    def reports(
        self, names: Sequence[str], workers: int, watch: Callable[[], None] = lambda: None
    ) -> list[Report]:
        """Return the reports of several rows, from as many processes as there are workers.

        Args:
            names: names of the rows.
            workers: how many processes.
            watch: called after each report.
        """
        with _pool(min(workers, len(names))) as pool:
            # Of the processes that start here; this one is told of them.
            with _interrupts_held():
                # The last rows of the table take longest, so they start first.
                running = {
                    name: pool.submit(_report_in_worker, self, name) for name in reversed(names)
                }
            for _ in as_completed(running.values()):
                watch()
            return [running[name].result() for name in names]


@contextmanager
def _pool(workers: int) -> Iterator[ProcessPoolExecutor]:
    """Yield a pool whose processes end after their work, or at once after an error."""
    # JAX has threads, which a fork does not copy.
    context = multiprocessing.get_context("spawn")
    others = set(multiprocessing.active_children())
    pool = ProcessPoolExecutor(workers, context, initializer=_one_thread)
    try:
        yield pool
    except BaseException:
        pool.shutdown(wait=False, cancel_futures=True)
        for process in set(multiprocessing.active_children()) - others:
            process.terminate()
        raise
    finally:
        pool.shutdown()


@contextmanager
def _interrupts_held() -> Iterator[None]:
    """Block interrupts here and in the processes that start meanwhile, which keep them blocked."""
    # Not on Windows.
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _one_thread() -> None:
    if find_spec("torch"):
        import torch

        # The matrices are small, and each core has a process.
        torch.set_num_threads(1)


def _report_in_worker(run: ProofRun, name: str) -> Report:
    (variant,) = (variant for variant in run.select(None) if variant.name == name)
    # Modules stay in the process that made them.
    return replace(run.report(variant), pair=None)


@contextmanager
def _mesh_in_use(axes: Mapping[str, int] | None) -> Iterator[None]:
    if not axes:
        yield
        return
    sizes = tuple(axes.values())
    # Newer versions of JAX make Explicit axes by default.
    kinds = (AxisType.Auto,) * len(axes)
    mesh = jax.make_mesh(sizes, tuple(axes), kinds, devices=simulated(prod(sizes)))
    with jax.set_mesh(mesh):
        yield
