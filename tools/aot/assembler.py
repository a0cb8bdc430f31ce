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
        flags = os.environ.get("XLA_FLAGS", "")
        os.environ["XLA_FLAGS"] = f"{flags} {FLAGS.format(folder=name)}".strip()
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
        text = file.read_text()
        entry = _ENTRY.search(text)
        if entry is not None and entry[1].startswith("attention_"):
            found.append(_assemble(entry[1], text, file, folder))
    for file in folder.iterdir():
        file.unlink()
    # Forward, and of the gradients those of keys first.
    return sorted(found, key=lambda kernel: (kernel.name != "attention_forward", kernel.name))


def _assemble(name: str, text: str, file: Path, folder: Path) -> Assembled:
    target = _TARGET.search(text)
    assert target is not None, "every PTX names its target"
    command = [_assembler(), "-v", f"--gpu-name={target[1]}", "-o", "/dev/null", str(file)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    report = done.stdout + done.stderr
    spills = [int(number) for found in _SPILLS.findall(report) for number in found]
    registers = [int(number) for number in _REGISTERS.findall(report)]
    products = len(_PRODUCT.findall(text))
    return Assembled(name, max(registers), sum(spills), _shared(name, folder), products)


def _shared(name: str, folder: Path) -> int:
    # A kernel gets it where it is launched: the assembler does not see it.
    pattern = re.compile(rf"\b{name} grid: .* shared_memory: (\d+) bytes")
    texts = (file.read_text() for file in folder.glob("*.thunk_sequence.txt"))
    sizes = [int(size) for text in texts for size in pattern.findall(text)]
    return max(sizes)


def _assembler() -> str:
    spec = find_spec("nvidia.cu13") if find_spec("nvidia") else None
    folders = [] if spec is None else list(spec.submodule_search_locations or ())
    found = shutil.which("ptxas", path=":".join(f"{folder}/bin" for folder in folders))
    if found is None:
        raise ImportError("reading kernels needs ptxas: pip install nvidia-cuda-nvcc")
    return found
