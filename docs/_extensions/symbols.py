"""`{symbols}`: a table of public names with one line each, then their full docstrings."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

import docstrings
from docutils import nodes
from sphinx.pycode import ModuleAnalyzer
from sphinx.util.docutils import SphinxDirective


def find(name: str) -> Any:
    """Return what a dotted name names: everything but its last part is a module."""
    module, _, attribute = name.rpartition(".")
    return getattr(import_module(module), attribute)


def is_data(found: object) -> bool:
    """Whether this is a value, whose docstring is that of its type."""
    return not inspect.isclass(found) and not callable(found)


def docstring(name: str) -> str:
    """Return the docstring of a class or function, or the comment `#:` above data."""
    if not is_data(found := find(name)):
        return "\n".join(docstrings.complete(found, (inspect.getdoc(found) or "").split("\n")))
    module, _, attribute = name.rpartition(".")
    comments = ModuleAnalyzer.for_module(_defined_in(module, attribute)).find_attr_docs()
    return "\n".join(comments.get(("", attribute), ())).strip()


def _defined_in(module: str, attribute: str) -> str:
    """Return the module that defines an imported name, following stubs where they exist."""
    path = Path(str(import_module(module).__file__))
    stub = path.with_suffix(".pyi")
    for node in ast.parse((stub if stub.is_file() else path).read_text()).body:
        if isinstance(node, ast.ImportFrom) and attribute in {alias.name for alias in node.names}:
            return _defined_in(
                f"{module}.{node.module}" if node.level else str(node.module), attribute
            )
    return module


def page(names: list[str]) -> Iterator[str]:
    """Yield the lines of a table and of the entries, as reStructuredText."""
    yield from (".. list-table::", "   :class: symbols", "")
    for name in names:
        line = docstrings.code(docstring(name).split("\n")[0], name)
        yield from (f"   * - :py:obj:`~{name}`", f"     - {line}")
    yield ""
    for name in names:
        yield from (*_entry(name), "")


def _entry(name: str) -> Iterator[str]:
    found = find(name)
    if is_data(found):
        yield from (f".. py:data:: {name}", "")
        text = docstrings.code(docstring(name), name)
        yield from (f"   {line}" for line in text.split("\n"))
        if isinstance(found, Mapping):
            yield from ("", "   Its names: " + ", ".join(f"``{key}``" for key in found) + ".")
    elif inspect.isclass(found):
        yield from (f".. autoclass:: {name}", "   :members:", "   :member-order: bysource")
        hidden = docstrings.HIDDEN.get(name)
        yield from ([f"   :exclude-members: {', '.join(hidden)}"] if hidden else [])
        yield ""
        yield from (f"   .. automethod:: {name}.{call}" for call in _calls(found))
    else:
        yield f".. autofunction:: {name}"


def _calls(found: type) -> Iterator[str]:
    """Yield the call methods that `:members:` leaves out: `__call__`, an undocumented `forward`."""
    for name in ("__call__", "forward"):
        method = vars(found).get(name)
        if method and (name == "__call__" or not method.__doc__):
            yield name


class Symbols(SphinxDirective):
    """The directive. Its content is one name a line."""

    has_content = True

    def run(self) -> list[nodes.Node]:
        """Return the nodes of the table and of the entries."""
        lines = page([line.strip() for line in self.content if line.strip()])
        return self.parse_text_to_nodes("\n".join(("`````{eval-rst}", *lines, "`````")))


def setup(app: Any) -> dict[str, bool]:
    """Register the directive, as Sphinx asks of an extension."""
    app.add_directive("symbols", Symbols)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
