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
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import median, quantiles

# Measured by the folder where none is given.
PACKAGES = ("flax_attn", "torch_ref", "attn_spec", "parity_tests", "tools", "examples")
# Lines of a function that is measured.
SHORTEST = 8
WIDTH = 100
GOALS = {"median": 9.0, "90th": 14.0, "comments": 0.03, "wide": 0.0}
Function = ast.FunctionDef | ast.AsyncFunctionDef


def comment_lines(text: str) -> set[int]:
    """Return the numbers of the lines that hold nothing but a comment."""
    # A sign in a string begins no comment, which only the tokenizer knows.
    lines = text.splitlines()
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    comments = [token for token in tokens if token.type == tokenize.COMMENT]
    return {
        token.start[0] for token in comments if lines[token.start[0] - 1].lstrip().startswith("#")
    }


def densities(text: str) -> list[float]:
    """Return the nodes a line of every function that is long enough."""
    skipped = comment_lines(text) | blank_lines(text)
    functions = [node for node in ast.walk(ast.parse(text)) if isinstance(node, Function)]
    measured = [density(function, skipped) for function in functions]
    return [one for one in measured if one is not None]


def density(function: Function, skipped: set[int]) -> float | None:
    """Return the nodes a line of a function without the skipped lines; None if it is short."""
    docstring, body = split_docstring(function)
    code = lines_of(function) - docstring - skipped
    if len(code) < SHORTEST:
        return None
    return count_nodes(function, body) / len(code)


def blank_lines(text: str) -> set[int]:
    """Return the numbers of the lines that hold nothing: spreading code out is no merit."""
    lines = text.splitlines()
    return {number for number, line in enumerate(lines, 1) if not line.strip()}


def split_docstring(function: Function) -> tuple[set[int], list[ast.stmt]]:
    """Return the numbers of the lines of the docstring, and the statements behind it."""
    if ast.get_docstring(function) is None:
        return set(), function.body
    return lines_of(function.body[0]), function.body[1:]


def lines_of(node: ast.stmt) -> set[int]:
    """Return the numbers of the lines of a statement."""
    assert node.end_lineno is not None, "the parser sets it"
    return set(range(node.lineno, node.end_lineno + 1))


def count_nodes(function: Function, body: Iterable[ast.stmt]) -> int:
    """Return the nodes of a function with this body, itself included."""
    parts = [function.args, *function.decorator_list, *body]
    if function.returns is not None:
        parts.append(function.returns)
    # `ast.walk` counts the contexts of names as well, which is how the goals were measured.
    return 1 + sum(1 for part in parts for _ in ast.walk(part))


def folder_of(path: Path) -> str:
    """Return the package and the top folder in it that a file belongs to."""
    package, *rest = path.parts
    return f"{package}/{rest[0]}" if len(rest) > 1 else package


def files(given: Sequence[str]) -> dict[str, list[Path]]:
    """Return the Python files of each given folder, or without one of each top folder.

    Raises:
        SystemExit: if git knows no Python file in a folder.
    """
    found = defaultdict(list)
    for name in given:
        paths = listed(name)
        # Else a misspelt folder would miss no goal.
        if not paths:
            sys.exit(f"git knows no Python file in {name}. Pass a folder of the repository")
        found[name] = paths
    if not given:
        for path in listed(*PACKAGES):
            folder = folder_of(path)
            found[folder].append(path)
    return found


def listed(*names: str) -> list[Path]:
    """Return the Python files in some folders that git knows and that are there."""
    # Not what is ignored, such as environments and builds.
    command = ["git", "ls-files", "--", *names]
    output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    paths = [Path(name) for name in output.splitlines() if name.endswith(".py")]
    return [path for path in paths if path.exists()]


def figures_of(paths: Sequence[Path]) -> dict[str, float]:
    """Return the figures of some files together."""
    found, lines, comments = [], [], 0
    for path in paths:
        text = path.read_text(encoding="utf-8")
        found += densities(text)
        lines += text.splitlines()
        comments += len(comment_lines(text))
    wide = sum(len(line) > WIDTH for line in lines)
    count = max(len(lines), 1)
    # A folder without a long function has nothing to miss.
    return {
        "median": median(found) if found else 0.0,
        "90th": quantiles(found, n=10)[-1] if len(found) > 1 else 0.0,
        "comments": comments / count,
        "wide": wide / count,
        "lines": len(lines),
    }


def misses(figures: dict[str, float]) -> list[str]:
    """Return which goals a folder misses."""
    # Comments are wanted, all others are bounds from above.
    at_most = [name for name in ("median", "90th", "wide") if figures[name] > GOALS[name]]
    return at_most + ["comments"] * (figures["comments"] < GOALS["comments"])


def main() -> None:
    """Print the figures, and fail where asked to and a goal is missed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="fail where a goal is missed")
    parser.add_argument("folder", nargs="*", help="folder or file to measure (default: all)")
    options = parser.parse_args()
    print(row("folder", "lines", "median", "90th", "comments", "wide", "misses"))
    # All rows are printed before it fails.
    failed = False
    for folder, paths in sorted(files(options.folder).items()):
        figures = figures_of(paths)
        missed = misses(figures)
        failed |= bool(missed)
        print(row_of(folder, figures, missed))
    if options.check and failed:
        sys.exit(
            f"goals: nodes a line at most {GOALS['median']} and {GOALS['90th']}, comments at least"
            " 3 %, width 100"
        )


def row_of(folder: str, figures: dict[str, float], missed: Sequence[str]) -> str:
    """Return the figures of a folder as a row of the table."""
    return row(
        folder,
        f"{figures['lines']:.0f}",
        f"{figures['median']:.1f}",
        f"{figures['90th']:.1f}",
        f"{figures['comments']:.1%}",
        f"{figures['wide']:.1%}",
        ", ".join(missed),
    )


def row(folder: str, *cells: str) -> str:
    """Return a row of the table."""
    *figures, last = cells
    return f"{folder:32}{''.join(f'{cell:>9}' for cell in figures)}  {last}"


if __name__ == "__main__":
    main()
