"""What NVIDIA's assembler says about the kernels of a program that XLA compiled."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import jax

# XLA writes the PTX of each kernel, and how it is launched, to the folder.
FLAGS = "--xla_dump_to={folder} --xla_dump_emitter_re=ptx"
_PRODUCT = re.compile(r"\b(?:wgmma\.mma_async|mma\.sync|tcgen05\.mma)\b")
_ENTRY = re.compile(r"\.entry (\w+)")
_TARGET = re.compile(r"^\.target (\w+)", re.MULTILINE)
_REGISTERS = re.compile(r"Used (\d+) registers")
_SPILLS = re.compile(r"(\d+) bytes spill stores, (\d+) bytes spill loads")


@dataclass(frozen=True)
class Assembled:
    """One kernel of ours as the assembler made it.

    Args:
        name: name of the kernel.
        registers: registers of a thread.
        spills: bytes of a thread that are stored outside of registers and loaded again.
        shared: bytes of shared memory of a program.
        products: number of instructions for tensor cores.
    """

    name: str
    registers: int
    spills: int
    shared: int
    products: int


@contextmanager
def dumped() -> Iterator[Path]:
    """Return a folder to which XLA writes what it compiles; call it before JAX starts."""
    with tempfile.TemporaryDirectory() as name:
        given = os.environ.get("XLA_FLAGS", "")
        own = FLAGS.format(folder=name)
        os.environ["XLA_FLAGS"] = f"{given} {own}".strip()
        # A program of the cache is not written again.
        jax.config.update("jax_enable_compilation_cache", False)
        yield Path(name)


def assembled(folder: Path) -> list[Assembled]:
    """Return the kernels of `fused` among what XLA wrote, and empty the folder.

    Raises:
        ImportError: if the assembler is not installed.
    """
    found = []
    for file in sorted(folder.glob("*.ptx")):
        found += _assembled_from(file)
    for file in folder.iterdir():
        file.unlink()
    # Forward, and of the gradients those of keys first.
    return sorted(found, key=lambda kernel: (kernel.name != "attention_forward", kernel.name))


def _assembled_from(file: Path) -> Iterator[Assembled]:
    entry = _ENTRY.search(file.read_text())
    # XLA makes others of its own, for what is around attention.
    if entry is not None and entry[1].startswith("attention_"):
        yield _assemble(entry[1], file)


def _assemble(name: str, file: Path) -> Assembled:
    text = file.read_text()
    report = _report(file, text)
    registers = map(int, _REGISTERS.findall(report))
    spills = 0
    for stored, loaded in _SPILLS.findall(report):
        spills += int(stored) + int(loaded)
    return Assembled(
        name=name,
        registers=max(registers),
        spills=spills,
        shared=_shared(name, file.parent),
        products=len(_PRODUCT.findall(text)),
    )


def _report(file: Path, text: str) -> str:
    target = _TARGET.search(text)
    assert target is not None, "every PTX names its target"
    command = [_assembler(), "-v", f"--gpu-name={target[1]}", "-o", "/dev/null", str(file)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return done.stdout + done.stderr


def _shared(name: str, folder: Path) -> int:
    # A kernel gets it where it is launched: the assembler does not see it.
    pattern = re.compile(rf"\b{name} grid: .* shared_memory: (\d+) bytes")
    sizes = []
    for file in folder.glob("*.thunk_sequence.txt"):
        sizes += map(int, pattern.findall(file.read_text()))
    return max(sizes)


def _assembler() -> str:
    folders = []
    # A part of a package that is not there cannot be asked for.
    spec = find_spec("nvidia.cu13") if find_spec("nvidia") else None
    if spec is not None:
        folders += spec.submodule_search_locations or ()
    path = ":".join(f"{folder}/bin" for folder in folders)
    found = shutil.which("ptxas", path=path)
    if found is None:
        raise ImportError("reading kernels needs ptxas: pip install nvidia-cuda-nvcc")
    return found
