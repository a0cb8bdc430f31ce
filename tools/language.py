"""Measure the language of the project: python tools/language.py [--check] [FILE ...].

It prints how often 1,000 words of the pages, the docstrings and the messages hold "you", "that of",
a semicolon and "alone", and each place of a phrase that has a plainer one. With `--check` it fails
if there is such a phrase, or if the pages miss a goal. A file that is given is read by itself.
"""

from __future__ import annotations

import argparse
import ast
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
PAGES = ("README.md", "CONTRIBUTING.md", "AGENTS.md", "docs/*.md", "docs/api/*.md")
PACKAGES = ("attn_spec", "flax_attn", "torch_ref")
# Written by programs, from what others said or from names.
GENERATED = ("docs/field.md", "docs/appendix.md")

# What is hard to read, and what to write instead.
PHRASES: Mapping[str, str] = {
    r"\bhonou?r(s|ed|ing)?\b": "supports",
    r"\binsist(s|ed|ing)?\b": "runs, or raises",
    r"\band\s+no\s+(others|more)\b": "only",
    r"\bbut\s+for\b": "except",
    r"\bof\s+one's\s+own\b": "your own",
    r"\bmend(s|ed|ing)?\b": "fix",
    r"\bquick(er|est)\b": "faster, fastest",
    r"\bspeaks?\s+of\b": "is about",
    r"\b(stands?|stood)\s+(in|on|at|there|behind|below|above|beside)\b": "is in",
    r"(?:\A|[.:]\s+|\n\s*)Who\s(?![^.]*\?)": "you, or the name of the reader",
}

# How often, in 1,000 words. The least of "you" and the most of the others are goals for pages.
COUNTED: Mapping[str, str] = {
    "you": r"\b(you|your|yours|yourself)\b",
    "that of": r"\b(that|those)\s+of\b",
    "semicolons": r";",
    "alone": r"(?<!leave )(?<!left )(?<!leaves )\balone\b",
}
LEAST = {"you": 9.0}
MOST = {"that of": 0.2, "semicolons": 3.0, "alone": 0.3}

WORD = re.compile(r"[A-Za-z][A-Za-z'-]*")
# Names in backticks.
CODE = re.compile(r"`+[^`]*`+")
# What may have a docstring.
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
# What is no prose in Markdown: it is blanked, so that lines keep their numbers.
NO_PROSE = (
    re.compile(r"\A---\n.*?\n---\n", re.DOTALL),
    re.compile(r"<!--.*?-->", re.DOTALL),
    re.compile(r"^( *)(`{3,}).*?^\1\2 *$", re.DOTALL | re.MULTILINE),
    re.compile(r"^(    .*|:[\w-]+:.*|:{3,}.*|\(\S+\)=)$", re.MULTILINE),
    re.compile(r"<[^<>\n]+>"),
    re.compile(r"(?<=\])\([^()\s]*(\([^()]*\))?[^()\s]*\)"),
    re.compile(r"`+[^`]+`+"),
)


class Place(NamedTuple):
    """A phrase that has a plainer one, and where it is."""

    file: Path
    line: int
    phrase: str
    plainer: str

    def __str__(self) -> str:
        name = self.file.relative_to(ROOT) if self.file.is_relative_to(ROOT) else self.file
        return f"{name}:{self.line}: write {self.plainer!r} for {self.phrase!r}"


class Prose(NamedTuple):
    """Some text of a file, without code, that begins at this line."""

    file: Path
    line: int
    text: str


def blank(match: re.Match[str]) -> str:
    """Return as many line breaks as the match has."""
    return " " + "\n" * match[0].count("\n")


def markdown(text: str) -> str:
    r"""Return the prose of Markdown, each sentence at its line.

    Example:
        >>> markdown("You call `f`;\nsee [this](page.md).")
        'You call  ;\nsee [this] .'
    """
    for pattern in NO_PROSE:
        text = pattern.sub(blank, text)
    return text


def docstrings(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield the line and the prose of each docstring."""
    documented = (node for node in ast.walk(tree) if isinstance(node, DOCUMENTED))
    for node in documented:
        # Not cleaned: lines keep their numbers.
        text = ast.get_docstring(node, clean=False)
        if text:
            lines = map(without_code, text.split("\n"))
            yield node.body[0].lineno, "\n".join(lines)


def without_code(line: str) -> str:
    """Return a line of a docstring without examples and names in backticks."""
    if line.lstrip().startswith((">>>", "...")):
        return ""
    # The name of an argument begins its description.
    description = re.sub(r"^ +\w+: ", "", line)
    return CODE.sub(" ", description)


def messages(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield the line and the text of what errors and warnings say."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Raise) and node.exc is not None:
            yield node.lineno, " ".join(strings(node.exc))
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("warn"):
            yield node.lineno, " ".join(strings(node))


def strings(node: ast.AST) -> Iterator[str]:
    """Yield the pieces of text below a node of the syntax tree."""
    for inner in ast.walk(node):
        if isinstance(inner, ast.Constant) and isinstance(inner.value, str):
            yield CODE.sub(" ", inner.value)


def read(files: Iterable[Path]) -> dict[str, list[Prose]]:
    """Return the prose of these files by its kind."""
    pages, documented, said = [], [], []
    for file in files:
        text = file.read_text("utf-8")
        if file.suffix != ".py":
            page = Prose(file, 1, markdown(text))
            pages.append(page)
            continue
        tree = ast.parse(text)
        documented += [Prose(file, line, docstring) for line, docstring in docstrings(tree)]
        said += [Prose(file, line, message) for line, message in messages(tree)]
    return {"pages": pages, "docstrings": documented, "messages": said}


def places(prose: Prose) -> Iterator[Place]:
    """Yield each phrase in this text that has a plainer one."""
    for phrase, plainer in PHRASES.items():
        for match in re.finditer(phrase, prose.text):
            before = prose.text[: match.start()]
            line = prose.line + before.count("\n")
            # A phrase may go over the end of a line.
            found = " ".join(match[0].split())
            yield Place(prose.file, line, found, plainer)


def rates(texts: Iterable[str]) -> dict[str, float]:
    """Return how often 1,000 words of these texts hold what is counted.

    Example:
        >>> rates(["You call it; you read that of others."])["you"]
        250.0
    """
    whole = "\n".join(texts)
    # Of no words nothing is held.
    thousands = max(len(WORD.findall(whole)), 1) / 1000
    hits = {name: re.findall(rule, whole, re.IGNORECASE) for name, rule in COUNTED.items()}
    return {name: len(found) / thousands for name, found in hits.items()}


def missed(found: Mapping[str, float]) -> Iterator[str]:
    """Yield the goals that the rates of the pages miss."""
    for name, least in LEAST.items():
        if found[name] < least:
            yield f"pages say {name!r} {found[name]:.2f} times in 1,000 words: at least {least}"
    for name, most in MOST.items():
        if found[name] > most:
            yield f"pages have {name!r} {found[name]:.2f} times in 1,000 words: at most {most}"


def written(root: Path = ROOT) -> Iterator[Path]:
    """Yield the files of the project that people read."""
    generated = {root / name for name in GENERATED}
    patterns = [*PAGES, *(f"{package}/**/*.py" for package in PACKAGES), "flax_attn/**/*.md"]
    for pattern in patterns:
        files = set(root.glob(pattern)) - generated
        yield from sorted(files)


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the rates and the phrases, and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="fail where a goal is missed")
    parser.add_argument("files", nargs="*", type=Path, help="files (default: the project)")
    options = parser.parse_args(arguments)
    prose = read(options.files or written())
    found = {kind: rates(one.text for one in texts) for kind, texts in prose.items()}
    print_rates(found)
    wrong = []
    for one in chain(*prose.values()):
        wrong += map(str, places(one))
    # A file of Python that is read by itself has no page, which cannot miss a goal.
    if prose["pages"]:
        wrong += missed(found["pages"])
    for line in wrong:
        print(line, file=sys.stderr)
    return 1 if options.check and wrong else 0


def print_rates(found: Mapping[str, Mapping[str, float]]) -> None:
    """Print how often each kind of prose holds what is counted."""
    names = [f"{name:>12}" for name in COUNTED]
    print(f"{'in 1,000 words':16}", *names, sep="")
    for kind, row in found.items():
        figures = [f"{rate:12.2f}" for rate in row.values()]
        print(f"{kind:16}", *figures, sep="")


if __name__ == "__main__":
    sys.exit(main())
