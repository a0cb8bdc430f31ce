"""Print runs of equal code lines in flax_attn and torch_ref: python tools/equal_runs.py [N].

A run is at least N (30 by default) lines that follow one another in a file of each package.
Docstrings, comments and blank lines are left out.
"""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
PACKAGES = ("flax_attn", "torch_ref")
SHORTEST = 30
Line = tuple[int, str]  # its number in the file, and its text


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
    docstrings = docstring_lines(ast.parse(text))
    numbered = enumerate(text.splitlines(), 1)
    candidates = [(i, line.rstrip()) for i, line in numbered if i not in docstrings]
    return [(i, line) for i, line in candidates if line and not line.lstrip().startswith("#")]


def packages(root: Path = ROOT) -> list[dict[str, list[Line]]]:
    """Return the code lines of every file of the two packages, by path."""
    found = []
    for package in PACKAGES:
        paths = sorted((root / package).rglob("*.py"))
        texts = {str(path.relative_to(root)): path.read_text(encoding="utf-8") for path in paths}
        found.append({path: code_lines(text) for path, text in texts.items()})
    return found


def windows(lines: list[Line], size: int) -> Iterator[tuple[int, tuple[str, ...]]]:
    """Yield the text of every window of this many lines, with its place in the list."""
    texts = tuple(text for _, text in lines)
    for start in range(len(texts) - size + 1):
        yield start, texts[start : start + size]


def equal_runs(
    ours: dict[str, list[Line]], theirs: dict[str, list[Line]], shortest: int = SHORTEST
) -> list[EqualRun]:
    """Return the runs of at least this many equal lines, the longest first."""
    index: dict[tuple[str, ...], list[tuple[str, int]]] = {}
    for path, lines in ours.items():
        for start, window in windows(lines, shortest):
            index.setdefault(window, []).append((path, start))
    # What has been counted as the inside of a run: the next window begins one line further.
    inside: set[tuple[str, int, str, int]] = set()
    found = []
    for path, lines in theirs.items():
        for start, window in windows(lines, shortest):
            for other, begin in index.get(window, ()):
                if (other, begin, path, start) in inside:
                    continue
                size = shortest
                left, right = ours[other][begin:], lines[start:]
                while size < min(len(left), len(right)) and left[size][1] == right[size][1]:
                    size += 1
                for step in range(1, size - shortest + 1):
                    inside.add((other, begin + step, path, start + step))
                places = f"{other}:{left[0][0]}", f"{path}:{right[0][0]}"
                found.append(EqualRun(size, places, left[0][1]))
    return sorted(found, key=lambda run: -run.size)


if __name__ == "__main__":
    shortest = int(sys.argv[1]) if len(sys.argv) > 1 else SHORTEST
    ours, theirs = packages()
    for run in equal_runs(ours, theirs, shortest):
        print(run)
