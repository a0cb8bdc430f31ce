"""Write the table of platforms: python -m tools.platforms [--check].

It says of each backend where it was run, interpreted, compiled and measured, and is in the
README and on two pages. What was compiled follows from what `make tpu` and `make gpu` compile. With
`--check` nothing is written, and it exits with 1 if a table is out of date.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from flax_attn.aot.gpu import GPUS
from flax_attn.backends.registry import BACKENDS, load
from tools.aot import gpu, models, tpu
from tools.tables import between_markers, bring_up_to_date, markdown

ROOT = Path(__file__).parents[1]
FILES = ("README.md", "docs/index.md", "docs/accelerators.md")
PLATFORMS = {"cpu": "CPU", "gpu": "NVIDIA GPU", "tpu": "TPU"}
# The tests that run kernels for an accelerator in Pallas's interpreter.
INTERPRETED = {
    "fused": "tests/backends/test_fused.py",
    "splash": "tests/backends/test_splash.py",
}
# The tables of docs/performance.md have times of these on CPUs,
MEASURED = ("native", "decode", "blocked")
# and of these on an H100, where the small calls of `flax-attn device-check` were judged.
ON_AN_H100 = {"reference": "measured on H100"} | dict.fromkeys(
    ("cudnn", "fused"), "judged and measured on H100"
)
IMPOSSIBLE, UNTESTED = "-", "untested"


def chips(backend: str, platform: str) -> list[str]:
    """Return the chips that a backend was compiled for.

    Example:
        >>> chips("splash", "tpu")
        ['v5e', 'v5p', 'v6e']
    """
    # `fused` is compiled for every chip, by `--models`; the others for a few.
    if backend == "fused":
        return [chip.upper() for chip in GPUS] if platform == "gpu" else list(models.TOPOLOGIES)
    if platform == "gpu":
        return ["H200"] if backend in gpu.KERNELS else []
    return list(tpu.TOPOLOGIES) if backend in tpu.KERNELS else []


def cell(backend: str, platform: str) -> str:
    """Return what is known of a backend on a platform.

    Example:
        >>> cell("native", "cpu"), cell("native", "tpu")
        ('run, measured', '-')
    """
    platforms = load(backend).platforms
    if platforms is not None and platform not in platforms:
        return IMPOSSIBLE
    if platform == "cpu":
        return "run, measured" if backend in MEASURED else "run"
    known = _on_accelerator(backend, platform)
    text = ", ".join(known)
    return text or UNTESTED


def _on_accelerator(backend: str, platform: str) -> list[str]:
    known = []
    if platform == "gpu" and backend in ON_AN_H100:
        known.append(ON_AN_H100[backend])
    if backend in INTERPRETED:
        known.append("interpreted")
    compiled = ", ".join(chips(backend, platform))
    if compiled:
        known.append(f"compiled for {compiled}")
    return known


def table() -> str:
    """Return the table in Markdown."""
    rows = []
    for backend in BACKENDS:
        cells = [cell(backend, platform) for platform in PLATFORMS]
        rows.append((f"`{backend}`", *cells))
    return markdown(("backend", *PLATFORMS.values()), rows).rstrip()


def pages(root: Path) -> Iterator[tuple[Path, str]]:
    """Yield each file that has the table, and its text with the right one.

    Raises:
        SystemExit: if a file has no place for the table.
    """
    shown = table()
    for name in FILES:
        path = root / name
        text = path.read_text("utf-8")
        try:
            yield path, between_markers(text, shown, "tools/platforms.py")
        except ValueError as error:
            sys.exit(f"{path}: {error}")


def main(arguments: Sequence[str] | None = None) -> int:
    """Write what is out of date, or name it, and return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tools.platforms", description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing, only compare")
    parser.add_argument("--root", type=Path, default=ROOT, help="folder of the repository")
    options = parser.parse_args(arguments)
    return bring_up_to_date(list(pages(options.root)), options.check)


if __name__ == "__main__":
    sys.exit(main())
