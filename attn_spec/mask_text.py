"""Masks as text: the expression that builds one, and a picture of what it lets through.

The same text in both packages: it needs no framework.
"""

from contextlib import suppress
from dataclasses import fields, is_dataclass
from math import prod
from typing import Any

_PRINTED_TOKENS = 64
_PRINTED_VALUES = 16


def check_printable(t: int, s: int) -> None:
    """Raise unless a picture of this size can be read."""
    if not 1 <= min(t, s) <= max(t, s) <= _PRINTED_TOKENS:
        raise ValueError(
            f"a mask is printed for 1 to {_PRINTED_TOKENS} queries and keys; got t={t}, s={s}. "
            "Print it at a smaller size, or take a part of it with mask.block(rows, cols)"
        )


def expression(parts: tuple[Any, ...]) -> str:
    """Return the expression that builds a mask; large or traced arrays are abbreviated."""
    return " & ".join(_call(part) for part in parts) or "Mask()"


def _call(part: Any) -> str:
    # A part that no constructor builds says how it is written.
    if hasattr(part, "expression"):
        return part.expression
    # A part of a kind that is not known here is shown as it shows itself.
    if not is_dataclass(part):
        return f"Mask(({part!r},))"
    values = [(field, getattr(part, field.name)) for field in fields(part) if field.repr]
    # Arguments with a default of None are options, written by name where they are given.
    arguments = [_literal(value) for field, value in values if field.default is not None]
    arguments += [
        f"{f.name}={_literal(value)}"
        for f, value in values
        if f.default is None and value is not None
    ]
    return f"Mask.{type(part).__name__.lower()}({', '.join(arguments)})"


def _literal(value: Any) -> str:
    shape = getattr(value, "shape", None)
    if shape is None:
        # A function is shown by its name.
        return getattr(value, "__name__", repr(value))
    # An array may be traced, abstract, deleted or on other hosts, and a repr never fails.
    with suppress(Exception):
        if prod(shape) <= _PRINTED_VALUES:
            return str(value.tolist())
    return f"<array {tuple(shape)}>"


def picture(table: list) -> str:
    """Return nested booleans `(b, n, t, s)` as marks; batch rows and heads are labelled.

    Where all rows or all heads are the same, one of them is shown, without a label.

    Example:
        >>> print(picture([[[[True, False]], [[True, True]]]]))
        n=0
          0 1
        0 ■ ·
        <BLANKLINE>
        n=1
          0 1
        0 ■ ■
    """
    # Where all are alike one picture says it.
    by_row = any(heads != table[0] for heads in table)
    by_head = any(head != heads[0] for heads in table for head in heads)
    pictures = []
    for b, heads in enumerate(table if by_row else table[:1]):
        for n, head in enumerate(heads if by_head else heads[:1]):
            label = _label(b=b if by_row else None, n=n if by_head else None)
            pictures.append("\n".join([*label, *_lines(head)]))
    return "\n\n".join(pictures)


def _label(**indices: int | None) -> list[str]:
    label = ", ".join(f"{axis}={index}" for axis, index in indices.items() if index is not None)
    return [label] if label else []


def _lines(table: list) -> list[str]:
    margin, keys = len(str(len(table) - 1)), range(len(table[0]))
    heading = [" ".join(str(j % 10) for j in keys)]
    if len(keys) > 10:
        # The tens stand above the units, and above every tenth key alone.
        tens = [str(j // 10) if j and j % 10 == 0 else " " for j in keys]
        heading.insert(0, " ".join(tens).rstrip())
    lines = [f"{'':{margin}} {digits}" for digits in heading]
    for i, row in enumerate(table):
        marks = " ".join("■" if seen else "·" for seen in row)
        lines.append(f"{i:{margin}} {marks}")
    return lines
