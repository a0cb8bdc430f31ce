"""Render our docstrings in Sphinx: plain text, code between backticks, and indented formulas."""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from collections.abc import Iterator
from importlib import import_module
from typing import Any

from sphinx import addnodes
from sphinx.transforms import SphinxTransform

CODE = re.compile(r"(?<![`:\\])`([^`]+)`(?!`)")
SECTION = re.compile(r"[A-Z]\w+:$")

# Where a name between backticks is looked up, in this order.
PACKAGES = (
    "flax_attn",
    "flax_attn.parity",
    "flax_attn.convert",
    "flax_attn.training",
    "flax_attn.sharding",
)


def public_name(text: str, package: str) -> str | None:
    """Return the full name of a public object, or None if no searched package has it."""
    first, *rest = text.removesuffix("()").split(".")
    of_twin = package == "torch_ref" and not _is_shared(first)
    for name in ("torch_ref",) if of_twin else PACKAGES:
        if first in import_module(name).__all__:
            return ".".join([name, first, *rest]) if _has(name, first, rest) else None
    return None


def _is_shared(name: str) -> bool:
    """Return whether both packages export a class of attn_spec, which the pages have once."""
    found = getattr(import_module("torch_ref"), name, None)
    return str(getattr(found, "__module__", "")).startswith("attn_spec.")


def _has(package: str, first: str, rest: list[str]) -> bool:
    found = getattr(import_module(package), first)
    return (
        all(hasattr(found := getattr(found, part, None), "__doc__") for part in rest)
        and found is not None
    )


def code(text: str, package: str, own: str) -> str:
    """Return the text with backticks as code, linked where it names another public object."""

    def one(match: re.Match[str]) -> str:
        inner = match[1]
        target = public_name(inner, package)
        written = f":py:obj:`{inner} <{target}>`" if target and target != own else f"``{inner}``"
        # As in a plural.
        joined = text[match.end() : match.end() + 1].isalpha()
        return written + ("\\ " if joined else "")

    return CODE.sub(one, text)


def formulas(lines: list[str]) -> Iterator[str]:
    """Yield the lines with each formula, a paragraph that is indented, as a block that may wrap."""
    after_blank, inside = False, False
    for line in lines:
        if SECTION.match(line):
            inside = True  # whose content is indented and no formula
        elif line and not line.startswith(" "):
            inside = False
        if after_blank and line.startswith("    ") and not inside:
            yield from (".. code-block:: text", "    :class: formula", "")
            inside = True  # up to the next line that is not indented
        yield line
        after_blank = not line


def read(app: Any, kind: str, name: str, obj: object, options: Any, lines: list[str]) -> None:
    """Change a docstring in place, before napoleon reads its sections."""
    package = "torch_ref" if name.startswith("torch_ref") else "flax_attn"
    text = "\n".join(formulas(lines))
    # Code inside literal blocks and examples has no backticks, so the whole text can be changed at
    # once.
    lines[:] = code(text, package, name).split("\n")
    if kind in ("attribute", "property"):
        # A comment: in the first line napoleon would take all before a colon for a type.
        lines[:0] = "..", ""


def sign(kind: str, obj: Any) -> tuple[str, str] | None:
    """Return a signature as the source has it, of a class that of its constructor.

    What Sphinx finds is that of a metaclass for NNX modules, and has types spelled out that have a
    name in the source.
    """
    if kind == "class":
        obj = vars(obj).get("__init__")
    if not inspect.isfunction(obj := inspect.unwrap(obj)) or obj.__name__ == "<lambda>":
        return None
    try:
        function = ast.parse(textwrap.dedent(inspect.getsource(obj))).body[0]
    except OSError:  # the constructor of a dataclass
        return None
    assert isinstance(function, ast.FunctionDef)
    first = function.args.posonlyargs + function.args.args
    if first and first[0].arg in ("self", "cls"):
        first.pop(0)
        function.args.posonlyargs, function.args.args = [], first
    returned = ast.unparse(function.returns) if function.returns and kind != "class" else ""
    return f"({ast.unparse(function.args)})", returned


class Types(SphinxTransform):
    """Link types in signatures, and errors, to the public objects that they name."""

    default_priority = 900

    def apply(self, **kwargs: Any) -> None:
        """Change the document."""
        package = "torch_ref" if self.env.docname.endswith("torch_ref") else "flax_attn"
        for node in list(self.document.findall(addnodes.pending_xref)):
            if node["refdomain"] == "py" and node["reftype"] in ("class", "exc"):
                target = public_name(node["reftarget"], package)
                if target:
                    node["refspecific"], node["reftarget"] = False, target
                else:
                    node.replace_self(node.children)


def setup(app: Any) -> dict[str, bool]:
    """Register the hook, as Sphinx asks of an extension."""
    app.setup_extension("sphinx.ext.autodoc")
    app.connect("autodoc-process-docstring", read, priority=400)
    app.connect("autodoc-process-signature", lambda app, kind, name, obj, *rest: sign(kind, obj))
    app.add_transform(Types)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
