"""The kernels in C++ against the formula in double precision, under the sanitizers of the compiler.

`FLAX_ATTN_BORDER_CALLS` is how many calls are drawn that reach them by way of XLA,
`FLAX_ATTN_BORDER_SEED` from what.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import jaxlib
import pytest

from flax_attn import native

HERE = Path(__file__).parent
SOURCE = Path(native.__file__).parent / "source"
COMMON = [
    "-std=c++17",
    "-w",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-pthread",
    f"-I{SOURCE}",
    f"-I{HERE}",
]
ADDRESS = ["-Og", "-fsanitize=address,undefined", "-fno-sanitize=null", "-fno-sanitize-recover=all"]
# Threads are the same at every level.
THREAD = ["-O1", "-fsanitize=thread", "-DKERNELS=flax_attn::baseline_kernels()"]
LEVELS = ("amx", "avx512bf16", "avx512", "avx2", "baseline")


def compiler(tmp_path: Path, flags: list[str]) -> str:
    """Return the compiler; skip where there is none, or none that links with these flags."""
    found = shutil.which("g++") or shutil.which("c++")
    if found is None:
        pytest.skip("no C++ compiler on this machine")
    (tmp_path / "empty.cc").write_text("int main() {}")
    tried = subprocess.run(
        [found, *flags, tmp_path / "empty.cc", "-o", tmp_path / "empty"], capture_output=True
    )
    if tried.returncode:
        pytest.skip(f"{found} has no {flags}")
    return found


def compiled(arguments: list) -> None:
    made = subprocess.run(arguments, capture_output=True, text=True)
    assert made.returncode == 0, made.stderr


def build(tmp_path: Path, flags: list[str], sources: list[Path]) -> Path:
    program = tmp_path / "driver"
    compiled(
        [compiler(tmp_path, flags), *COMMON, *flags, HERE / "driver.cc", *sources, "-o", program]
    )
    return program


@pytest.fixture(scope="module")
def kernels(tmp_path_factory) -> list[Path]:
    """Return the objects of all levels, compiled to check addresses and undefined behaviour."""
    folder = tmp_path_factory.mktemp("kernels")
    found = compiler(folder, ADDRESS)
    for level in LEVELS:
        own = ["-c", SOURCE / f"{level}.cc", "-o", folder / f"{level}.o"]
        compiled([found, *COMMON, *ADDRESS, "-fPIC", *own])
    return [folder / f"{level}.o" for level in LEVELS]


def run(program: Path, *arguments: str) -> None:
    """Run the program; one that waits forever is stopped, and fails."""
    done = subprocess.run([program, *arguments], capture_output=True, text=True, timeout=300)
    if done.returncode == 2:  # before anything is computed
        assert f'no level "{arguments[0]}"' in done.stdout
        return
    assert done.returncode == 0, done.stdout + done.stderr


def test_addresses_and_undefined_behaviour_of_every_level(kernels, tmp_path):
    program = build(tmp_path, ADDRESS, kernels)
    for level in LEVELS:
        run(program, level)


def test_addresses_and_undefined_behaviour_of_calls_by_way_of_xla(kernels, tmp_path):
    found, library = compiler(tmp_path, ADDRESS), tmp_path / "library.so"
    headers = Path(jaxlib.__file__).parent / "include"
    source = [SOURCE / "ffi.cc", *kernels, "-isystem", headers]
    compiled(
        [found, *COMMON, *ADDRESS, "-fno-sanitize=vptr", "-fPIC", "-shared", *source, "-o", library]
    )
    environment = os.environ | {
        "LD_PRELOAD": " ".join(runtime(found, name) for name in ("libasan.so", "libstdc++.so")),
        "ASAN_OPTIONS": "detect_leaks=0",  # Python keeps much until it ends
        "JAX_ENABLE_COMPILATION_CACHE": "0",
    }
    calls, seed = (os.environ.get(f"FLAX_ATTN_BORDER_{name}", "") for name in ("CALLS", "SEED"))
    command = [sys.executable, HERE / "border.py", library, calls or "200", seed or "0"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr


def runtime(found: str, name: str) -> str:
    """Return where the compiler has a library that is loaded before Python."""
    path = subprocess.run(
        [found, f"-print-file-name={name}"], capture_output=True, text=True
    ).stdout.strip()
    if not Path(path).is_absolute():
        pytest.skip(f"{found} has no {name}")
    return path


def test_threads(tmp_path):
    run(build(tmp_path, THREAD, [SOURCE / "baseline.cc"]), "baseline", "light")
