"""`flax-attn verify`: whether what a report claims holds on other seeds and shapes."""

from __future__ import annotations

import argparse
import json
import secrets
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from flax_attn.cli import common, inputs
from flax_attn.cli.request import RECORDED, Request
from flax_attn.cli.specs import CannotCompareError, Loader, sha256

if TYPE_CHECKING:
    from flax_attn.parity.pair import Pair
    from flax_attn.parity.report.report import Report

DESCRIPTION = (
    "Read a report that flax-attn compare --json wrote, and compare again what it names: once with"
    " a fresh seed, and on other\nshapes, where PyTorch takes them. The files that it names must be"
    " unchanged. They are imported: run it on code you trust.\n\nExit codes: 0 equal, 1 different"
    " or the claim does not stand, 2 equal where tested, 3 could not compare, as where a"
    " file has changed, 64 bad usage."
)
# What is compared on other shapes.
_CHECKS = ["shapes", "forward", "gradients"]
_SHAPES = 4  # the most that are tried
# What is read of a report.
_KEYS = ("name", "state", "loosened", "environment", "request")


def add(commands: Any) -> None:
    """Add the command."""
    parser = commands.add_parser(
        "verify",
        help="compare again what a report names, on other seeds and shapes",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("file", metavar="FILE", help="report of flax-attn compare --json")
    parser.add_argument(
        "--seed", type=common.seed, help="of the weights and inputs (default: a fresh one)"
    )
    parser.add_argument(
        "--json", metavar="FILE", help="write the result as JSON; - prints it instead of the text"
    )
    parser.set_defaults(run=_verify)


def _verify(options: argparse.Namespace) -> int:
    if options.json != "-":
        common.check_writable(options.json)
    report, request = _read(options.file)
    common.need_torch("verify")
    from flax_attn.parity.cpu import on_cpu
    from flax_attn.parity.report import document
    from flax_attn.parity.report.state import EXIT_CODES

    changed = _changed(request)
    runs, notes = [], []
    if changed:
        notes.append(f"changed since the report was made, or not here: {', '.join(changed)}")
    else:
        notes += _other_versions(report["environment"])
        seed = secrets.randbelow(2**32) if options.seed is None else options.seed
        with on_cpu():
            for run in _runs(request, seed, report["name"], notes):
                runs.append(run)
    result = _result(options.file, report, runs, notes)
    if options.json:
        document.write(result, "/dev/stdout" if options.json == "-" else options.json)
    if options.json != "-":
        print("\n".join(_lines(result)))
    # A difference that is not there is no success either.
    refuted = runs and not result["stands"] and result["state"] != "not compared"
    return 1 if refuted else EXIT_CODES[result["state"]]


def _read(path: str) -> tuple[dict[str, Any], Request]:
    """Return a report, and what it was asked for."""
    from flax_attn.parity.report.document import VERSION

    try:
        report = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise common.UsageError(f"cannot read {path}: {error}") from None
    kind = report.get("kind") if isinstance(report, dict) else None
    if kind != "comparison" or report.get("version") != VERSION:
        raise common.UsageError(
            f"{path} is no report of version {VERSION} that flax-attn compare --json writes"
        )
    missing = [key for key in _KEYS if key not in report]
    if missing:
        raise common.UsageError(
            f"{path} has no {', '.join(map(repr, missing))}, which flax-attn compare --json writes:"
            " make the report again"
        )
    if report["request"] is None:
        raise common.UsageError(
            f"{path} was written from Python, and does not say what to compare: make it with"
            " flax-attn compare --json"
        )
    try:
        request = Request(**report["request"])
    except TypeError as error:
        raise common.UsageError(f"{path} asks for what is not known here: {error}") from None
    if request.torch.startswith(RECORDED):
        raise common.UsageError(
            f"{path} compares with an export, which has no results for other inputs: verify a"
            " report on PyTorch itself"
        )
    return report, request


def _changed(request: Request) -> list[str]:
    # Else the claim would be judged by other code than it was made of.
    changed = []
    for name, digest in request.files.items():
        file = Path(name)
        if not file.is_file() or sha256(file) != digest:
            changed.append(name)
    return changed


def _other_versions(before: Mapping[str, str]) -> list[str]:
    from flax_attn.parity.report.report import PACKAGES, environment

    now, notes = environment(), []
    for package in PACKAGES:
        if before.get(package) != now[package]:
            notes.append(f"made with {package} {before.get(package)}, here {now[package]}")
    return notes


def _runs(request: Request, seed: int, name: str, notes: list[str]) -> Iterator[dict[str, Any]]:
    """Yield the result of each comparison, and note what could not be compared."""
    from flax_attn.convert import ConversionError
    from flax_attn.parity.adapters.adapter import PairingError
    from flax_attn.parity.compare import report_on

    try:
        with Loader() as loader:
            pair = request.pair(loader, seed)
            yield _run(pair, report_on(pair, name, request.checks, locate=False))
            for other in _other_shapes(request, pair, seed, notes):
                # A side that does not take this shape differs: PyTorch does.
                found = report_on(other, name, _CHECKS, locate=False, call_first=False)
                yield _run(other, found)
    except (CannotCompareError, PairingError, ConversionError) as error:
        notes.append(str(error))


def _run(pair: Pair, report: Report) -> dict[str, Any]:
    return {
        "seed": pair.seed,
        "shapes": {name: list(array.shape) for name, array in pair.inputs.items()},
        "loosened": list(report.loosened),
        "state": report.state,
        "failed": [check.explain() for check in report.failed],
    }


def _other_shapes(request: Request, pair: Pair, seed: int, notes: list[str]) -> Iterator[Pair]:
    """Yield the pair on inputs in which one size is another, wherever it occurs."""
    from flax_attn.parity.adapters.adapter import AdapterError

    # Axes of one size are taken for one axis, as the tokens of an input and of its mask are.
    specs = [inputs.parse(text) for text in request.inputs]
    sizes = sorted({size for spec in specs for size in spec.sizes})
    fixed = []
    for size in sizes[:_SHAPES]:
        # Of patches and heads, a multiple alone may fit.
        for other in (size + 1, 2 * size):
            changed = [spec.resized({size: other}) for spec in specs]
            varied = pair.with_inputs(_named(inputs.draw(changed, seed)), pair.extras)
            try:
                varied.run("torch", varied.uncompiled)
            except AdapterError:
                continue
            yield varied
            break
        else:
            fixed.append(size)
    if fixed:
        notes.append(f"PyTorch takes no other size than {', '.join(map(str, fixed))}")


def _named(values: Any) -> dict[str, np.ndarray]:
    from flax_attn.parity.inputs import named_inputs

    return named_inputs(values, 0)


def _result(
    path: str, report: Mapping[str, Any], runs: list[dict[str, Any]], notes: list[str]
) -> dict[str, Any]:
    from flax_attn.parity.report.document import VERSION

    # The first run is of all that was claimed, the others of a share: they can only refute it.
    found = [run["state"] for run in runs] or ["not compared"]
    state = "different" if "different" in found else found[0]
    # More may be tested now.
    stronger = (state, report["state"]) == ("equal", "equal where tested")
    stands = state == report["state"] or stronger
    return {
        "kind": "verification",
        "version": VERSION,
        "report": path,
        "claimed": report["state"],
        "stands": bool(runs) and stands,
        "state": state,
        # What was compared now: the report may have been edited.
        "loosened": runs[0]["loosened"] if runs else report["loosened"],
        "notes": notes,
        "runs": runs,
    }


def _lines(result: Mapping[str, Any]) -> Iterator[str]:
    verdict = "stands" if result["stands"] else "does not stand"
    loosened = "; ".join(result["loosened"])
    weaker = f" (loosened by the caller: {loosened})" if loosened else ""
    yield f"{result['report']}: the claim {result['claimed']!r} {verdict}{weaker}"
    for run in result["runs"]:
        shapes = ", ".join(f"{name} {tuple(shape)}" for name, shape in run["shapes"].items())
        yield f"  seed {run['seed']}, {shapes}: {run['state']}"
        yield from (f"    {line}" for line in run["failed"])
    yield from (f"  {note}" for note in result["notes"])
