"""Write the generated tables of the documentation: python tools/tables.py [--check].

These are the tables of backends, of predicted times, and of the variants and faults of the proof.
With `--check` nothing is written, and it exits with 1 if a file is out of date.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from flax_attn.backends.registry import markdown_table
from flax_attn.bench import predicted
from flax_attn.convert.replacing import replacing
from flax_attn.proof.faults import FAULTS, mesh
from flax_attn.proof.variants import VARIANTS

DOCS = Path(__file__).parents[1] / "docs"
NOTE = "<!-- Written by tools/tables.py. Do not edit. -->\n"
WRITER = "tools/tables.py"


class VariantRow(NamedTuple):
    """A variant of the proof: its name, and how it is built and called."""

    name: str
    built: str
    call: str


class FaultRow(NamedTuple):
    """A planted fault: what goes wrong, in which variant, and which check detects it."""

    what: str
    variant: str
    check: str


def main(arguments: Sequence[str] | None = None) -> int:
    """Write what is out of date, or name it, and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing, only compare")
    parser.add_argument("--folder", type=Path, default=DOCS, help="folder of the documentation")
    options = parser.parse_args(arguments)
    # All pages are made before the first is written: half of them would be worse than none.
    return bring_up_to_date(list(pages(options.folder)), options.check)


def bring_up_to_date(pages: Sequence[tuple[Path, str]], check: bool) -> int:
    """Write each file whose text is another, or only name it, and return the exit code."""
    outdated = 0
    for path, text in pages:
        if path.is_file() and path.read_text("utf-8") == text:
            continue
        outdated += 1
        if check:
            print(f"{path} is out of date. Run `make tables` and commit it", file=sys.stderr)
        else:
            with replacing(path) as whole:
                whole.write_text(text, encoding="utf-8")
            print(f"wrote {path}")
    return 1 if check and outdated else 0


def pages(folder: Path) -> Iterator[tuple[Path, str]]:
    """Yield the path and the text of each page that has a generated table.

    Raises:
        SystemExit: if the folder lacks a page that has a table, or there is no place for it there.
    """
    # Where a table is missing shows before any is made.
    tables = {"backends.md": markdown_table, "performance.md": times}
    texts = {name: _text(folder, name) for name in tables}
    yield folder / "appendix.md", appendix()
    for name, make in tables.items():
        yield folder / name, between_markers(texts[name], make())


def _text(folder: Path, name: str) -> str:
    path = folder / name
    if not path.is_file():
        sys.exit(f"{folder} has no {name}. Pass the folder of the documentation as --folder")
    text = path.read_text("utf-8")
    try:
        between_markers(text, "")
    except ValueError as error:
        sys.exit(f"{path}: {error}")
    return text


def times() -> str:
    """Return the predicted times on each chip, a table for each."""
    return "\n".join(map(times_on, predicted.CHIPS)).rstrip()


def times_on(chip: str) -> str:
    """Return the predicted times on a chip, under its name."""
    rows = predicted.predicted_times(chip)
    names = predicted.columns(rows)
    heading = ["call", "auto", "in order", *(f"`{name}`" for name in names)]
    cells = [predicted.cells(row, names) for row in rows]
    return f"**{chip.upper()}**\n\n{markdown(heading, cells)}"


def appendix() -> str:
    """Return the page of all variants and all faults."""
    variants, faults, on_mesh = _variants(), _faults(), _mesh_faults()
    return f"""{NOTE}
# Appendix: variants and planted faults

You can look up here what [the proof](proof.md) covers: each variant that is tested against PyTorch,
and each fault that its checks detect.

## Variants

`flax-attn parity` compares these {len(variants)} variants with their PyTorch twins. A row says how
either package builds the variant, and which options you see in its calls. `--variant NAME` selects
one row, or all rows of a class.

{markdown(("variant", "built as", "called with"), variants)}
## Planted faults

`make faults` plants these {len(faults)} known porting faults, one at a time, into the PyTorch
module of a variant. The last column is the check that detects the fault first. If that is `forward`
or `gradients`, the report shows you the lines of both sides. The other checks name the condition
under which both sides differ.

{markdown(("fault", "planted in", "detected by"), faults)}
## Faults on several devices

`tests/sharding/test_faults.py` plants these {len(on_mesh)} faults into attention over tokens that
are split among four devices. The last column is what then differs from one device, in float64.

{markdown(("fault", "what differs"), on_mesh)}"""


def markdown(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    r"""Return a table in Markdown.

    Example:
        >>> print(markdown(("name", "size"), [("a|b", "2")]), end="")
        | name | size |
        | --- | --- |
        | a\|b | 2 |
    """
    # A bar in a cell would end it.
    escaped = [[cell.replace("|", "\\|") for cell in row] for row in rows]
    lines = [columns, ["---"] * len(columns), *escaped]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def between_markers(page: str, table: str, writer: str = WRITER) -> str:
    """Return a page with the text between the two markers of a writer replaced by a table.

    Raises:
        ValueError: if a marker is missing or repeated.
    """
    begin = f"<!-- {writer}: begin -->\n"
    end = f"<!-- {writer}: end -->\n"
    if page.count(begin) != 1 or page.count(end) != 1:
        raise ValueError(
            f"the table must be between one line {begin.strip()} and one line {end.strip()}"
        )
    head, _, rest = page.partition(begin)
    _, _, tail = rest.partition(end)
    return f"{head}{begin}\n{table}\n\n{end}{tail}"


class Written:
    """A stand-in for a package, whose calls are written down instead of made.

    Example:
        >>> p = Written()
        >>> p.MultiHeadAttention(6, 8, rope=p.RoPE(500.0), q_norm=None)
        MultiHeadAttention(6, 8, rope=RoPE(500.0))
        >>> p.Mask.lengths(key=np.arange(3)) & p.Mask.causal()
        Mask.lengths(key=array(3)) & Mask.causal()
    """

    def __init__(self, text: str = ""):
        self._text = text

    def __getattr__(self, name: str) -> Written:
        # What Python and numpy look for is not there.
        if name.startswith("__"):
            raise AttributeError(name)
        return Written(f"{self._text}.{name}" if self._text else name)

    def __call__(self, *arguments: Any, **options: Any) -> Written:
        given = {name: value for name, value in options.items() if value is not None}
        parts = [*map(_value, arguments), *_named(given)]
        return Written(f"{self._text}({', '.join(parts)})")

    def __and__(self, other: Written) -> Written:
        return Written(f"{self} & {other}")

    def __repr__(self) -> str:
        return self._text


def _value(value: Any) -> str:
    if isinstance(value, np.ndarray):
        return f"array({', '.join(map(str, value.shape))})"
    # A function has no text that says what it does.
    is_function = callable(value) and not isinstance(value, Written)
    return "..." if is_function else repr(value)


def _named(options: Mapping[str, Any]) -> list[str]:
    return [f"{name}={_value(value)}" for name, value in options.items()]


def _variants() -> list[VariantRow]:
    # The functions of a row are called with a package that writes down what is asked of it.
    written = Written()
    rows = []
    for variant in VARIANTS:
        built, call = variant.make(written), _options(variant.call(written))
        rows.append(VariantRow(f"`{variant.name}`", f"`{built}`", call))
    return rows


def _options(options: Mapping[str, Any]) -> str:
    # A call without options is shown as nothing, and no pair of empty quotes.
    return f"`{', '.join(_named(options))}`" if options else ""


def _faults() -> list[FaultRow]:
    rows = []
    for fault in FAULTS:
        what = fault.what.removesuffix(".")
        rows.append(FaultRow(what, f"`{fault.variant.name}`", fault.check))
    return rows


def _mesh_faults() -> list[tuple[str, str]]:
    rows = []
    for fault in mesh.FAULTS:
        what = fault.what.removesuffix(".")
        rows.append((what, ", ".join(sorted(fault.wrong))))
    return rows


if __name__ == "__main__":
    sys.exit(main())
