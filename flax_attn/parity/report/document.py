"""A report as JSON, as `schema.json` beside this file describes it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flax_attn.convert.entry import Entry
from flax_attn.convert.replacing import replacing
from flax_attn.parity.check import Check, finite
from flax_attn.parity.report.state import next_steps

if TYPE_CHECKING:
    from flax_attn.parity.report.findings import Findings

VERSION = 1
SCHEMA = Path(__file__).with_name("schema.json")


def document(report: Findings) -> dict[str, Any]:
    """Return everything that was found; infinities and NaN become None."""
    difference = report.difference
    lines = report.coverage.lines
    return {
        "kind": "comparison",
        "version": VERSION,
        "name": report.name,
        "state": report.state,
        "loosened": list(report.loosened),
        "passed": report.passed,
        "error": report.error or None,
        "coverage": {"lines": [lines] if lines else [], "untested": list(report.coverage.untested)},
        "next": next_steps(report),
        "hypotheses": difference.documents() if difference else [],
        "difference": difference and difference.as_dict(),
        "checks": [check_document(check) for check in report.checks],
        "mutants": report.mutants and report.mutants.as_dict(),
        "weights": [_entry(entry) for entry in report.entries],
        "notes": report.notes,
        "seed": report.seed,
        "environment": report.environment,
        "command": report.command,
        "request": report.request,
    }


def table(reports: Sequence[Findings]) -> dict[str, Any]:
    """Return the document on several comparisons that were made in one run."""
    return {
        "kind": "table",
        "version": VERSION,
        "passed": all(report.passed for report in reports),
        "seed": reports[0].seed,
        "environment": reports[0].environment,
        "variants": [document(report) for report in reports],
    }


def write_one(reports: Sequence[Findings], path: str) -> None:
    """Write the document on one report."""
    (report,) = reports
    write(document(report), path)


def write_table(reports: Sequence[Findings], path: str) -> None:
    """Write the document on the reports of one run."""
    write(table(reports), path)


def write(content: dict[str, Any], path: str) -> None:
    """Write a document to a file, as a whole or not at all."""
    with replacing(path) as whole:
        whole.write_text(text(content), encoding="utf-8")


def text(content: dict[str, Any]) -> str:
    """Return a document as text."""
    return json.dumps(content, indent=1, allow_nan=False) + "\n"


def check_document(check: Check) -> dict[str, Any]:
    """Return one check."""
    return {
        "name": check.name,
        "result": _result(check),
        "error": finite(check.error) if check.ran else None,
        "limit": finite(check.limit) if check.ran else None,
        "margin": finite(check.margin) if check.ran else None,
        "worst": check.worst,
        "where": finite(check.where),
        "note": check.note,
        "reason": check.nothing or check.skipped,
        "errors": finite(check.errors),
    }


def _result(check: Check) -> str:
    if check.ran:
        return "holds" if check.passed else "fails"
    # Neither may pass as done: it had nothing to compare, or was asked for and cannot run.
    if check.nothing or check.wanted:
        return "nothing compared"
    return "does not apply"


def _entry(entry: Entry) -> dict[str, Any]:
    return {
        "flax": list(entry.ours),
        "torch": entry.theirs,
        "shapes": [list(shape) for shape in entry.shapes],
        "shape": list(entry.shape),
        "pattern": entry.rule.change or "unchanged",
    }
