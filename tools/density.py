"""Measure how much the lines of the packages hold: python tools/density.py [--check] [FOLDER ...].

Of every function of at least 8 lines, without its docstring: the nodes of its syntax tree over its
lines that are neither blank nor comment. Printed are the median and the 90th percentile of each top
folder, the share of lines that are comments, and the share that is wider than 100 characters. With
`--check` it fails where a goal is missed. A folder or a file that is given is measured as one.
"""

import argparse
import ast
import io
import subprocess
import sys
import tokenize
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from statistics import median, quantiles

PACKAGES = ("flax_attn", "torch_ref", "attn_spec", "parity_tests", "tools", "examples")
SHORTEST = 8  # lines of a function that is measured
WIDTH = 100
GOALS = {"median": 9.0, "90th": 14.0, "comments": 0.03, "wide": 0.0}


def comment_lines(text: str) -> set[int]:
    """Return the numbers of the lines that hold nothing but a comment."""
    lines = text.splitlines()
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    comments = [token for token in tokens if token.type == tokenize.COMMENT]
    return {
        token.start[0] for token in comments if lines[token.start[0] - 1].lstrip().startswith("#")
    }


def densities(text: str) -> list[float]:
    """Return the nodes a line of every function that is long enough."""
    lines = text.splitlines()
    comments = comment_lines(text)
    found = []
    for node in ast.walk(ast.parse(text)):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        body = node.body
        skipped = set(comments)
        if ast.get_docstring(node) is not None:
            docstring = body[0]
            body = body[1:]
            skipped.update(range(docstring.lineno, docstring.end_lineno + 1))
        numbers = range(node.lineno, node.end_lineno + 1)
        code = [i for i in numbers if i not in skipped and lines[i - 1].strip()]
        if len(code) < SHORTEST:
            continue
        head = [node.args, *node.decorator_list, *filter(None, [node.returns])]
        nodes = 1 + sum(1 for part in (*head, *body) for _ in ast.walk(part))
        found.append(nodes / len(code))
    return found


def folder_of(path: Path) -> str:
    """Return the package and the top folder in it that a file belongs to."""
    return "/".join(path.parts[:2]) if len(path.parts) > 2 else path.parts[0]


def files(given: Sequence[str]) -> dict[str, list[Path]]:
    """Return the Python files of each given folder, or without one of each top folder.

    Raises:
        SystemExit: if git knows no Python file in a folder.
    """
    found = defaultdict(list)
    for name in given:
        found[name] += listed(name)
        if not found[name]:
            sys.exit(f"git knows no Python file in {name}. Pass a folder of the repository")
    if not given:
        for path in listed(*PACKAGES):
            found[folder_of(path)].append(path)
    return found


def listed(*names: str) -> list[Path]:
    """Return the Python files in some folders that git knows and that are there."""
    command = ["git", "ls-files", "--", *names]
    output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    paths = [Path(name) for name in output.splitlines() if name.endswith(".py")]
    return [path for path in paths if path.exists()]


def figures_of(paths: Sequence[Path]) -> dict[str, float]:
    """Return the figures of some files together."""
    found, lines, comments, wide = [], 0, 0, 0
    for path in paths:
        text = path.read_text(encoding="utf-8")
        rows = text.splitlines()
        found += densities(text)
        lines += len(rows)
        comments += len(comment_lines(text))
        wide += sum(len(row) > WIDTH for row in rows)
    return {
        "median": median(found) if found else 0.0,
        "90th": quantiles(found, n=10)[-1] if len(found) > 1 else 0.0,
        "comments": comments / max(lines, 1),
        "wide": wide / max(lines, 1),
        "lines": lines,
    }


def misses(figures: dict[str, float]) -> list[str]:
    """Return which goals a folder misses."""
    at_most = [name for name in ("median", "90th", "wide") if figures[name] > GOALS[name]]
    return at_most + ["comments"] * (figures["comments"] < GOALS["comments"])


def main() -> None:
    """Print the figures, and fail where asked to and a goal is missed."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="fail where a goal is missed")
    parser.add_argument("folder", nargs="*", help="folder or file to measure (default: all)")
    options = parser.parse_args()
    heading = f"{'folder':32} {'lines':>7} {'median':>7} {'90th':>7} {'comments':>9} {'wide':>6}"
    print(f"{heading}  misses")
    failed = False
    for folder, paths in sorted(files(options.folder).items()):
        figures = figures_of(paths)
        missed = misses(figures)
        failed |= bool(missed)
        print(
            f"{folder:32} {figures['lines']:7.0f} {figures['median']:7.1f} {figures['90th']:7.1f}"
            f" {figures['comments']:9.1%} {figures['wide']:6.1%}  {', '.join(missed)}"
        )
    if options.check and failed:
        sys.exit(
            f"goals: nodes a line at most {GOALS['median']} and {GOALS['90th']}, comments at least"
            " 3 %, width 100"
        )


if __name__ == "__main__":
    main()
