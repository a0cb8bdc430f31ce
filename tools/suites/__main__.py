"""Run the targets' own tests of attention under `flax_attn.everywhere`: `make everywhere`."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from tools.suites.run import Result, folder_of, run
from tools.suites.table import SUITES

_BUILD = Path("build/everywhere")


def main(arguments: list[str] | None = None) -> int:
    """Run the suites, print a table, and return 1 if a test is lost that may not be."""
    parser = argparse.ArgumentParser(prog="tools.suites", description=__doc__)
    names = [suite.target for suite in SUITES]
    parser.add_argument("--only", nargs="+", choices=names, help="targets whose tests are run")
    parser.add_argument(
        "--checkout",
        nargs="+",
        default=[],
        metavar="PACKAGE=FOLDER",
        help="repositories with the tests of packages whose distributions have none: jax, equinox",
    )
    chosen = parser.parse_args(arguments)
    checkouts = {}
    for pair in chosen.checkout:
        package, _, folder = pair.partition("=")
        checkouts[package] = Path(folder)
    results = []
    for suite in SUITES:
        if chosen.only and suite.target not in chosen.only:
            continue
        folder = folder_of(suite, checkouts, _BUILD)
        if folder is None:
            print(f"{suite.target}: not run; {suite.package} has no tests on PyPI: pass --checkout")
            continue
        results.append(run(suite, folder, _BUILD))
    print(table(results))
    problems = [problem for result in results for problem in result.problems]
    print(*problems, sep="\n")
    return 1 if problems or not results else 0


def table(results: list[Result]) -> str:
    """Return what was found as a table in Markdown, with the expected differences below it."""
    lines = [
        "| target | tests that pass without | of these under it | calls computed here | left |"
    ]
    lines.append("|---|---|---|---|---|")
    for result in results:
        kept = len(result.passed) - len(result.lost)
        left = sum(result.left_alone.values())
        numbers = f"{len(result.passed)} | {kept} | {result.taken} | {left}"
        lines.append(f"| {result.suite.target} | {numbers} |")
    for result in results:
        for reason, count in sorted(result.left_alone.items()):
            lines.append(f"{result.suite.target}: left alone {count} times: {reason}")
        for test, reason in result.suite.expected.items():
            lines.append(f"{result.suite.target}: {test}: {reason}")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
