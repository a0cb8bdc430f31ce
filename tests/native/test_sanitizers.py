"""The kernels in C++ against the formula in double precision, under the sanitizers of the compiler."""

import shutil
import subprocess
from pathlib import Path

import pytest

from flax_attn import native

HERE = Path(__file__).parent
SOURCE = Path(native.__file__).parent / "source"
COMMON = ["-std=c++17", "-w", "-fno-math-errno", "-fno-trapping-math", "-pthread", f"-I{SOURCE}", f"-I{HERE}"]
ADDRESS = ["-Og", "-fsanitize=address,undefined", "-fno-sanitize=null", "-fno-sanitize-recover=all"]
THREAD = ["-O1", "-fsanitize=thread", "-DKERNELS=flax_attn::baseline_kernels()"]  # threads are the same at every level
LEVELS = ("amx", "avx512", "avx2", "baseline")


def compiler(tmp_path: Path, flags: list[str]) -> str:
    """Return the compiler; skip where there is none, or none that links with these flags."""
    found = shutil.which("g++") or shutil.which("c++")
    if found is None:
        pytest.skip("no C++ compiler on this machine")
    (tmp_path / "empty.cc").write_text("int main() {}")
    tried = subprocess.run([found, *flags, tmp_path / "empty.cc", "-o", tmp_path / "empty"], capture_output=True)
    if tried.returncode:
        pytest.skip(f"{found} has no {flags}")
    return found


def build(tmp_path: Path, flags: list[str], levels: tuple[str, ...]) -> Path:
    found, program = compiler(tmp_path, flags), tmp_path / "driver"
    sources = [HERE / "driver.cc", *(SOURCE / f"{level}.cc" for level in levels)]
    made = subprocess.run([found, *COMMON, *flags, *sources, "-o", program], capture_output=True, text=True)
    assert made.returncode == 0, made.stderr
    return program


def run(program: Path, *arguments: str) -> None:
    """Run the program; one that waits forever is stopped, and fails."""
    done = subprocess.run([program, *arguments], capture_output=True, text=True, timeout=300)
    if done.returncode == 2:  # before anything is computed
        assert f'no level "{arguments[0]}"' in done.stdout
        return
    assert done.returncode == 0, done.stdout + done.stderr


def test_addresses_and_undefined_behaviour_of_every_level(tmp_path):
    program = build(tmp_path, ADDRESS, LEVELS)
    for level in LEVELS:
        run(program, level)


def test_threads(tmp_path):
    run(build(tmp_path, THREAD, ("baseline",)), "baseline", "light")
