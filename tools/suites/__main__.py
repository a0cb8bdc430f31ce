"""Run the targets' own tests of attention under `flax_attn.everywhere`: `make everywhere`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from tools.suites.run import Result, folder_of, run
from tools.suites.table import SUITES, Suite

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
    suites = [suite for suite in SUITES if not chosen.only or suite.target in chosen.only]
    results = list(_results(suites, checkouts))
    print(table(results))
    problems = []
    for result in results:
        problems += result.problems
    print(*problems, sep="\n")
    # Nothing that was run is no success.
    return 1 if problems or not results else 0


def _results(suites: Sequence[Suite], checkouts: dict[str, Path]) -> Iterator[Result]:
    for suite in suites:
        folder = folder_of(suite, checkouts, _BUILD)
        if folder is None:
            print(f"{suite.target}: not run; {suite.package} has no tests on PyPI: pass --checkout")
        else:
            yield run(suite, folder, _BUILD)


def table(results: list[Result]) -> str:
    """Return what was found as a table in Markdown, with the expected differences below it."""
    lines = [
        "| target | tests that pass without | of these under it | calls computed here | left |"
    ]
    lines.append("|---|---|---|---|---|")
    for result in results:
        passed = len(result.passed)
        kept = passed - len(result.lost)
        left = sum(result.left_alone.values())
        numbers = f"{passed} | {kept} | {result.taken} | {left}"
        target = result.suite.target
        lines.append(f"| {target} | {numbers} |")
    for result in results:
        lines += _differences(result)
    return "\n".join(lines)


def _differences(result: Result) -> Iterator[str]:
    target = result.suite.target
    for reason, count in sorted(result.left_alone.items()):
        yield f"{target}: left alone {count} times: {reason}"
    for test, reason in result.suite.expected.items():
        yield f"{target}: {test}: {reason}"


if __name__ == "__main__":
    sys.exit(main())
