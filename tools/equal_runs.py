"""Print runs of equal code lines in flax_attn and torch_ref: python tools/equal_runs.py [N].

A run is at least N (30 by default) lines that follow one another in a file of each package.
Docstrings, comments and blank lines are left out.
"""

import ast
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
PACKAGES = ("flax_attn", "torch_ref")
SHORTEST = 30
# Where a window of lines begins: the path of its file, and its place among the lines of code.
Start = tuple[str, int]
Window = tuple[str, ...]


class Line(NamedTuple):
    """A line of code: its number in the file, and its text."""

    number: int
    text: str


# The lines of code of each file, by its path.
Files = dict[str, list[Line]]


class EqualRun(NamedTuple):
    """A run of equal lines: its size, and where it begins in each package."""

    size: int
    places: tuple[str, str]
    first: str

    def __str__(self) -> str:
        ours, theirs = self.places
        return f"{self.size:4} lines: {ours} {theirs}  {self.first.strip()}"


def docstring_lines(tree: ast.AST) -> set[int]:
    """Return the numbers of the lines of all docstrings."""
    found: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            found.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return found


def code_lines(text: str) -> list[Line]:
    """Return the lines that are code, with their numbers."""
    tree = ast.parse(text)
    docstrings = docstring_lines(tree)
    # Indentation stays: the same words at another depth are another line.
    lines = [Line(i, line.rstrip()) for i, line in enumerate(text.splitlines(), 1)]
    return [line for line in lines if is_code(line.text) and line.number not in docstrings]


def is_code(text: str) -> bool:
    """Return whether a line is neither blank nor a comment."""
    code = text.strip()
    return bool(code) and not code.startswith("#")


def packages(root: Path = ROOT) -> list[Files]:
    """Return the code lines of every file of the two packages, by path."""
    return [files_of(root / package, root) for package in PACKAGES]


def files_of(folder: Path, root: Path) -> Files:
    """Return the code lines of every file in a folder, by its path from the root."""
    found = {}
    for path in sorted(folder.rglob("*.py")):
        name = str(path.relative_to(root))
        found[name] = code_lines(path.read_text(encoding="utf-8"))
    return found


def windows(files: Files, size: int) -> Iterator[tuple[Start, Window]]:
    """Yield the text of every window of this many lines, with the place where it begins."""
    for path, lines in files.items():
        texts = tuple(line.text for line in lines)
        for start in range(len(texts) - size + 1):
            yield (path, start), texts[start : start + size]


def equal_runs(ours: Files, theirs: Files, shortest: int = SHORTEST) -> list[EqualRun]:
    """Return the runs of at least this many equal lines, the longest first."""
    found = []
    for (one, begin), (other, start) in equal_windows(ours, theirs, shortest):
        before = equal_lines(ours[one][:begin][::-1], theirs[other][:start][::-1])
        # It began with the first of the lines before that are equal as well.
        if before:
            continue
        left = ours[one][begin:]
        right = theirs[other][start:]
        size = equal_lines(left, right)
        first, second = left[0], right[0]
        places = f"{one}:{first.number}", f"{other}:{second.number}"
        found.append(EqualRun(size, places, first.text))
    return sorted(found, key=lambda run: -run.size)


def equal_windows(ours: Files, theirs: Files, size: int) -> Iterator[tuple[Start, Start]]:
    """Yield where windows of equal lines begin, in the order of their lines."""
    index: defaultdict[Window, list[Start]] = defaultdict(list)
    for start, window in windows(ours, size):
        index[window].append(start)
    for start, window in windows(theirs, size):
        # Asked by `get`, which adds nothing to the index.
        for same in index.get(window, ()):
            yield same, start


def equal_lines(ours: list[Line], theirs: list[Line]) -> int:
    """Return how many lines are equal from the first on."""
    count = 0
    for left, right in zip(ours, theirs, strict=False):
        if left.text != right.text:
            break
        count += 1
    return count


def main() -> None:
    """Print the runs, those of at least as many lines as the command line says."""
    shortest = int(sys.argv[1]) if len(sys.argv) > 1 else SHORTEST
    ours, theirs = packages()
    for run in equal_runs(ours, theirs, shortest):
        print(run)


if __name__ == "__main__":
    main()
