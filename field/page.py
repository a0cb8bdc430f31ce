"""Write docs/field.md from verdicts and manual findings: `python -m field.page [--check]`."""

from __future__ import annotations

import argparse
import fnmatch
import re
import tomllib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from field.by_hand import lines, verdict

HERE = Path(__file__).parent
PAGE = HERE.parent / "docs" / "field.md"
UNJUDGED = "does not run"
# What docs/_static/site.js filters the tables by.
SEARCH = [
    "## Every port",
    "",
    "A row is one configuration of one class. Type a part of a name, a verdict or a cause to see"
    " only the rows that have it.",
    "",
    "```{raw} html",
    '<p><label for="field-search">Search</label> <input type="search" id="field-search">'
    ' <span id="field-count" role="status"></span></p>',
    "```",
    "",
]
# The tables need the width of the sidebar.
FRONT_MATTER = ["---", "html_theme.sidebar_secondary.remove: true", "---", ""]
KINDS = {
    "fault": "Faults, each with a reproduction that runs without this library:",
    "documented": "Other functions by default, or by documentation:",
    "undefined": "Cases on which nothing says what is right:",
    "float32": "Casts to float32 and smaller roundings, which are no fault:",
}
COLUMNS = (
    *("port", "configuration", "verdict", "outputs", "gradients", "by hand", "where"),
    *("cause, by the harness", "found"),
)
SHOWN = 3  # causes of a port
# How the weights cross where the verdicts are reached a second time, by library.
CROSSING = {
    "transformers": "by its own converter, `convert_pytorch_state_dict_to_flax`",
    "diffusers": "by its own renaming, `rename_key_and_reshape_tensor`",
    "keras": "by the paths that Keras gives its variables",
    "jax": "there are none",
}
MEANING = {
    "equal": (
        "all checks hold in float64: outputs within 1e-12, gradients of all parameters within 1e-11"
    ),
    "equal up to float32": (
        "some of one side runs in float32 whatever is asked for, and differs by no more than that"
        " loses: outputs within 64 roundings, 8e-6, gradients within 3e-4. Built in float32 it is"
        " as close to the float64 result as PyTorch itself (factor 2, gradients 3), or a cast is"
        " all that the harness names. No fault"
    ),
    "differs in empty rows": (
        "equal, except for rows in which every token is padding. What such a row should give is not"
        " agreed on. No fault"
    ),
    "different": (
        "another function, or other gradients: what is wrong, and on which side, follows below"
    ),
    "other parameters": (
        "one side has parameters that the other lacks, so that weights cannot be carried over in"
        " full"
    ),
    "Flax raises": "an error in Flax, for a configuration that PyTorch takes",
    UNJUDGED: "neither side could be compared here, and it is not counted",
}


def load_by_hand() -> dict[str, dict[str, Any]]:
    """Return what was measured without the harness, by port."""
    return {record["port"]: record for record in lines.read(HERE / "by_hand" / "results")}


def reproduced(
    rows: Iterable[Mapping[str, Any]], records: Mapping[str, Mapping[str, Any]]
) -> list[str]:
    """Return the ports whose verdict was reached without the harness too."""
    return [
        row["port"]
        for row in rows
        if row["port"] in records and verdict.verdict(records[row["port"]]) == row["verdict"]
    ]


def load() -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return the verdicts, and what was found by hand; of each library a file."""
    rows = lines.read(HERE / "results")
    files = sorted((HERE / "findings").glob("*.toml"))
    return rows, [
        finding for file in files for finding in tomllib.loads(file.read_text())["finding"]
    ]


def findings_of(
    row: Mapping[str, Any], findings: Iterable[Mapping[str, Any]]
) -> list[Mapping[str, Any]]:
    """Return what was found by hand on a port that is not equal."""
    if row["verdict"] == "equal":
        return []
    return [
        finding
        for finding in findings
        if any(fnmatch.fnmatch(row["port"], name) for name in finding["ports"])
    ]


def text() -> str:
    """Return the page."""
    rows, findings = load()
    records = load_by_hand()
    parts = (
        FRONT_MATTER,
        _head(rows),
        _contents(findings),
        _sections(rows, findings),
        SEARCH,
        _tables(rows, findings, records),
        _second(rows, records),
    )
    return "\n".join(line for part in parts for line in part).rstrip() + "\n"


def _head(rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    counts = Counter(row["verdict"] for row in rows)
    judged = len(rows) - counts[UNJUDGED]
    yield "# The field: ports of other people"
    yield ""
    yield (
        f"You see here whether a JAX port that you use equals its PyTorch original: {judged} ports"
        " that other people wrote were compared with the harness of this library. Both sides have"
        " the same random weights, in float64. Outputs, gradients of every parameter and padding"
        " are compared. Sizes are small, so the function is compared and not a checkpoint."
        " You can search the table of [every port](#every-port). `make field` repeats it."
    )
    yield ""
    yield "| verdict | ports | meaning |"
    yield "|---|---|---|"
    yield from (
        f"| {verdict} | {counts[verdict]} | {meaning} |" for verdict, meaning in MEANING.items()
    )
    yield ""


def _second(rows: Sequence[Mapping[str, Any]], records: Mapping[str, Any]) -> Iterator[str]:
    again = set(reproduced(rows, records))
    yield "## The same verdicts without the harness"
    yield ""
    yield (
        f"{len(again)} of these verdicts were reached a second time by `make field-by-hand`. Its"
        " code, `field/by_hand`, imports nothing of this library, and only shares the"
        " configurations of transformers' models. Other random weights cross by the port's own"
        " converter, or are placed by hand. Both sides are differentiated with respect to the same"
        " arrays, all parameters and floating inputs. They are equal if outputs agree within 1e-12"
        " and gradients within 1e-11, or within 16 times what one rounding of all weights and"
        " inputs does to the PyTorch side. If they are not, both run again with every float32 in"
        " the source of the libraries written as float64. If they are equal then, only float32"
        " made the difference. The column *by hand* has the errors of outputs and gradients, and"
        " after the arrow the errors without float32. If only other than plain inputs differ, it"
        " has the errors of these."
    )
    yield ""
    yield "| library | how weights cross | verdicts reproduced |"
    yield "|---|---|---|"
    for library in dict.fromkeys(row["port"].partition("/")[0] for row in rows):
        own = [row["port"] for row in rows if row["port"].startswith(f"{library}/")]
        count = f"{len(again.intersection(own))} of {len(own)}"
        yield f"| {library} | {CROSSING.get(library, 'placed by hand')} | {count} |"
    yield ""


def _by_hand(record: Mapping[str, Any]) -> str:
    """Return the errors that were measured without the harness."""
    if "measures" not in record:
        return verdict.verdict(record) if record else ""
    measures = record["measures"]
    plain = measures[0]
    failed = [measure for measure in measures if not verdict.holds(measure)]
    raising = [measure for measure in failed if "raises" in measure]
    shown = [*raising, *(failed if plain not in failed else ()), plain][0]
    words = "" if shown is plain else f"{shown['inputs']}: "
    if "raises" in shown:
        return f"{words}raises"
    wide = [
        measure for measure in record.get("widened") or [] if measure["inputs"] == shown["inputs"]
    ]
    return words + " → ".join(
        _errors(measure) for measure in (shown, *wide) if "raises" not in measure
    )


def _errors(measure: Mapping[str, Any]) -> str:
    return ", ".join(_error({"error": measure[kind]}) for kind in ("outputs", "gradients"))


def _contents(findings: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    for kind, head in KINDS.items():
        found = [
            f"- [{finding['title']}](#{finding['id']})"
            for finding in findings
            if finding["kind"] == kind
        ]
        yield from (head, "", *found, "") if found else ()


def _tables(
    rows: Sequence[Mapping[str, Any]],
    findings: Sequence[Mapping[str, Any]],
    records: Mapping[str, Any],
) -> Iterator[str]:
    libraries = list(dict.fromkeys(row["package"] for row in rows))
    for library in libraries:
        own = [row for row in rows if row["package"] == library]
        yield f"### {library} {own[0]['version']}"
        yield ""
        yield f"| {' | '.join(COLUMNS)} |"
        yield "|---" * len(COLUMNS) + "|"
        yield from (
            _line(row, findings_of(row, findings), records.get(row["port"], {})) for row in own
        )
        yield ""


def _line(
    row: Mapping[str, Any], found: Sequence[Mapping[str, Any]], record: Mapping[str, Any]
) -> str:
    errors = {check["name"]: check for check in row.get("checks", [])}
    links = ", ".join(f"[{finding['id']}](#{finding['id']})" for finding in found)
    cells = (
        row["port"].partition("/")[2],
        row["configuration"],
        row["verdict"],
        _error(errors.get("forward")),
        _error(errors.get("gradients")),
        _by_hand(record),
        _where(row),
        _causes(row) or (_raised(row) if row.get("checks") else _first_line(row)),
        links,
    )
    return "| " + " | ".join(_cell(cell) for cell in cells) + " |"


def _error(check: Mapping[str, Any] | None) -> str:
    if check is None:
        return ""
    return "not finite" if check["error"] is None else f"{check['error']:.0e}"


def _where(row: Mapping[str, Any]) -> str:
    """Return the node with the largest local error, or the first where a pass differs."""
    wrong = sorted(row.get("local", []), key=lambda node: -verdict.number(node["error"]))
    node = wrong[0]["node"] if wrong else row.get("first") or row.get("backward")
    return f"`{node}`".replace("`.`", "the whole") if node else ""


def _causes(row: Mapping[str, Any]) -> str:
    """Return the first distinct causes that the harness names, casts last."""
    found: dict[str, str] = {}
    for cause in row.get("causes", []):
        found.setdefault(re.sub(r" \(also .*\)$", "", cause.partition(": ")[2]), cause)
    causes = sorted(found.values(), key=lambda cause: "float32" in cause)
    return "; ".join(causes[:SHOWN])


def _raised(row: Mapping[str, Any]) -> str:
    """Return what a side raised in a check, if one did."""
    failed = [
        check for check in row["checks"] if not verdict.number(check["error"]) <= check["limit"]
    ]
    notes = {check["name"]: check.get("note", "") for check in failed}
    return next((f"{name}: {note}" for name, note in notes.items() if " raised " in note), "")


def _first_line(row: Mapping[str, Any]) -> str:
    return " ".join(row.get("reason", "").split())[:160]


def _cell(value: str) -> str:
    return value.replace("|", "\\|").replace("\n", " ")


def _sections(
    rows: Sequence[Mapping[str, Any]], findings: Sequence[Mapping[str, Any]]
) -> Iterator[str]:
    yield "## What was found"
    yield ""
    for finding in findings:
        ports = [row["port"] for row in rows if finding in findings_of(row, [finding])]
        yield f"({finding['id']})="
        yield f"### {finding['title']}"
        yield ""
        yield finding["cause"].strip()
        yield ""
        yield f"- Kind: {finding['kind']}. Documented: {finding['documented']}."
        yield f"- Ports: {', '.join(ports)}."
        yield f"- Upstream: {finding['upstream']}"
        if "reproduction" in finding:
            yield f"- `field/reproductions/{finding['reproduction']}`, without this library, prints"
            yield ""
            yield from (f"      {line}" for line in finding["printed"].strip().splitlines())
        yield ""


def main() -> None:
    """Write the page, or say whether it is up to date."""
    parser = argparse.ArgumentParser(prog="python -m field.page", description=__doc__)
    parser.add_argument(
        "--check",
        action="store_true",
        help="fail if the page is not what follows from the verdicts",
    )
    new = text()
    if not parser.parse_args().check:
        PAGE.write_text(new)
    elif PAGE.read_text() != new:
        raise SystemExit(f"{PAGE} is out of date: run python -m field.page")


if __name__ == "__main__":
    main()
