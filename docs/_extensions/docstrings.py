"""Render our docstrings in Sphinx: plain text, code between backticks, and indented formulas."""

from __future__ import annotations

import ast
import dataclasses
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
ARGUMENT = re.compile(r"    (\w+): ")
# What a class has for backends, which its page leaves out.
HIDDEN = {
    "flax_attn.Mask": (
        *("resolve", "sized", "block", "kv_range", "summarised", "tiles", "split_band"),
        *("split_intervals", "row", "at", "shift", "check_whole"),
    ),
}

# Where a name between backticks is looked up, in this order.
PACKAGES = (
    "flax_attn",
    "flax_attn.parity",
    "flax_attn.convert",
    "flax_attn.training",
    "flax_attn.sharding",
)


def public_name(text: str) -> str | None:
    """Return the full name of a public object, or None if no searched package has it."""
    first, *rest = text.removesuffix("()").split(".")
    for name in PACKAGES:
        if first in import_module(name).__all__:
            if rest and rest[0] in HIDDEN.get(f"{name}.{first}", ()):
                return None
            return ".".join([name, first, *rest]) if _has(name, first, rest) else None
    return None


def _has(package: str, first: str, rest: list[str]) -> bool:
    found = getattr(import_module(package), first)
    return (
        all(hasattr(found := getattr(found, part, None), "__doc__") for part in rest)
        and found is not None
    )


def code(text: str, own: str) -> str:
    """Return the text with backticks as code, linked where it names another public object."""

    def one(match: re.Match[str]) -> str:
        inner = match[1]
        target = public_name(inner)
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


def complete(obj: object, lines: list[str]) -> list[str]:
    """Return a docstring, of a dataclass with the arguments of its bases before its own."""
    if not (inspect.isclass(obj) and dataclasses.is_dataclass(obj)):
        return lines
    own = dict(arguments(lines))
    found: dict[str, list[str]] = {}
    for base in reversed(obj.__mro__[1:]):
        if dataclasses.is_dataclass(base):
            found |= arguments(inspect.cleandoc(base.__doc__ or "").split("\n"))
    inherited = [line for name, text in found.items() if name not in own for line in text]
    if not inherited:
        return lines
    if "Args:" in lines:
        start = lines.index("Args:") + 1
        return [*lines[:start], *inherited, *lines[start:]]
    return [lines[0], "", "Args:", *inherited, *lines[1:]]


def arguments(lines: list[str]) -> Iterator[tuple[str, list[str]]]:
    """Yield the names and the lines of what a docstring lists under Args."""
    inside, name, text = False, "", []
    for line in [*lines, "end"]:
        match = ARGUMENT.match(line)
        if name and (match or not line.startswith("     ")):
            yield name, text
            name = ""
        if line and not line.startswith(" "):
            inside = line == "Args:"
        elif inside and match:
            name, text = match[1], [line]
        elif name:
            text.append(line)


def read(app: Any, kind: str, name: str, obj: object, options: Any, lines: list[str]) -> None:
    """Change a docstring in place, before napoleon reads its sections."""
    text = "\n".join(formulas(complete(obj, lines)))
    # Code inside literal blocks and examples has no backticks, so the whole text can be changed at
    # once.
    lines[:] = code(text, name).split("\n")
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
    spell_options(function.args, obj.__globals__)
    returned = ast.unparse(function.returns) if function.returns and kind != "class" else ""
    return f"({ast.unparse(function.args)})", returned


def spell_options(signature: ast.arguments, names: dict[str, Any]) -> None:
    """Write the keywords of `**options: Unpack[Options]` out, where `Options` is a TypedDict."""
    kwarg = signature.kwarg
    written = ast.unparse(kwarg.annotation) if kwarg and kwarg.annotation else ""
    if not written.startswith("Unpack["):
        return
    options = names[written[len("Unpack[") : -1]]
    body = ast.parse(textwrap.dedent(inspect.getsource(options))).body[0]
    for node in ast.walk(body):
        if isinstance(node, ast.AnnAssign):
            signature.kwonlyargs.append(ast.arg(ast.unparse(node.target), node.annotation))
            # A keyword that may be left out: what it is then, the described function says.
            signature.kw_defaults.append(ast.Constant(...))
    signature.kwarg = None


class Types(SphinxTransform):
    """Link types in signatures, and errors, to the public objects that they name."""

    default_priority = 900

    def apply(self, **kwargs: Any) -> None:
        """Change the document."""
        for node in list(self.document.findall(addnodes.pending_xref)):
            if node["refdomain"] == "py" and node["reftype"] in ("class", "exc"):
                target = public_name(node["reftarget"])
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
