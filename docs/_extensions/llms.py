"""Write the site for language models (llmstxt.org).

`llms.txt` lists the pages, and `llms-full.txt` holds them as Markdown.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import docstrings
import symbols
from docutils import nodes
from sphinx.addnodes import toctree

FRONT_MATTER = re.compile(r"\A---\n.*?\n---\n+", re.DOTALL)
TOCTREE = re.compile(r"```{toctree}\n.*?```\n*", re.DOTALL)
INCLUDE = re.compile(r"```{include} (\S+)\n.*?```\n", re.DOTALL)
LONG = re.compile(r"(?:^\|.*\n){40,}", re.MULTILINE)
SYMBOLS = re.compile(r"```{symbols}\n(.*?)```\n", re.DOTALL)


def markdown(source: Path) -> str:
    """Return a page as plain Markdown, with its includes and API entries written out."""
    text = TOCTREE.sub("", FRONT_MATTER.sub("", source.read_text()))
    text = INCLUDE.sub(lambda match: (source.parent / match[1]).read_text(), text)
    return SYMBOLS.sub(lambda match: "\n".join(map(_entry, match[1].split())), text).strip() + "\n"


def shortened(name: str, text: str) -> str:
    r"""Return a page with the beginning of each long table, and where all of it is.

    Example:
        >>> rows = "| a |\n| --- |\n" + "| 1 |\n" * 50
        >>> print(shortened("field", rows))
        | a |
        | --- |
        | 1 |
        49 more rows are in field.md.
        <BLANKLINE>
    """

    def one(match: re.Match[str]) -> str:
        lines = match[0].splitlines(keepends=True)
        return f"{''.join(lines[:3])}{len(lines) - 3} more rows are in {name}.md.\n"

    return LONG.sub(one, text)


def _entry(name: str) -> str:
    found = symbols.find(name)
    signature = (
        docstrings.sign("class" if inspect.isclass(found) else "function", found)
        if callable(found)
        else None
    )
    head = name.rpartition(".")[2] + " -> ".join(part for part in signature or () if part)
    return f"### {name}\n\n```text\n{head}\n\n{symbols.docstring(name)}\n```\n"


def pages(env: Any, name: str) -> Iterator[str]:
    """Yield the names of the pages under one, in the order of the tables of contents."""
    for child in env.toctree_includes.get(name, ()):
        yield from (child, *pages(env, child))


def about(env: Any, name: str) -> str:
    """Return the first sentence of a page's text."""
    paragraphs = [
        node
        for node in env.get_doctree(name).findall(nodes.paragraph)
        if node.parent.tagname == "section"
    ]
    return (
        re.split(r"(?<=[.!?])\s", " ".join(paragraphs[0].astext().split()))[0] if paragraphs else ""
    )


def listed(env: Any, root: str) -> Iterator[str]:
    """Yield the lines of llms.txt."""
    yield from (f"# {env.titles[root].astext()}", "", f"> {about(env, root)}", "")
    yield from ("All pages in one file: [llms-full.txt](llms-full.txt)", "")
    for contents in env.get_doctree(root).findall(toctree):
        yield from (f"## {contents['caption']}", "")
        for name in (
            inner for page in contents["includefiles"] for inner in (page, *pages(env, page))
        ):
            yield f"- [{env.titles[name].astext()}]({name}.md): {about(env, name)}"
        yield ""


def write(app: Any, exception: Exception | None) -> None:
    """Write both files, and each page as Markdown beside its HTML."""
    if exception or app.builder.name != "html":
        return
    root = app.config.root_doc
    texts = {name: markdown(Path(app.env.doc2path(name))) for name in (root, *pages(app.env, root))}
    for name, text in texts.items():
        (app.outdir / f"{name}.md").write_text(text)
    (app.outdir / "llms.txt").write_text("\n".join(listed(app.env, root)))
    whole = (shortened(name, text) for name, text in texts.items())
    (app.outdir / "llms-full.txt").write_text("\n\n".join(whole))


def setup(app: Any) -> dict[str, bool]:
    """Register the hook, as Sphinx asks of an extension."""
    app.connect("build-finished", write)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
