"""The entries of a model by the names that its weights have in files."""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path

from flax import nnx

from attn_spec.checks import DTYPES
from flax_attn.convert.api import axes_of
from flax_attn.convert.entry import Entry
from flax_attn.convert.headers import Stored
from flax_attn.convert.planning import plan
from flax_attn.convert.problems import problems
from flax_attn.convert.rules import ConversionError, Layout
from flax_attn.convert.stacked import Tensor
from flax_attn.models.hugging_face.family import Family


def plan_entries(model: nnx.Module, own: Mapping[str, Tensor], layout: Layout) -> list[Entry]:
    """Return the entries of a model by the names of a layout, in the order of these names."""
    shapes = {name: tensor.shape for name, tensor in own.items()}
    entries = plan(shapes, layout, axes_of(model, layout))
    return sorted(entries, key=lambda entry: entry.theirs)


def match(
    model: nnx.Module,
    own: Mapping[str, Tensor],
    family: Family,
    stored: Mapping[str, Stored],
    weights: Path,
) -> list[Entry]:
    """Return the entries of a model by their names in the files, or raise with all that is wrong.

    Of the layouts of the family it is the one that has the fewest names that are not there.
    """
    plans = []
    for layout in (family.layout, *family.others):
        entries = plan_entries(model, own, layout)
        plans.append((layout, _named_as_in(stored, entries, family)))
    layout, entries = min(plans, key=lambda plan: len(names_of(plan[1]) - stored.keys()))
    shapes = {name: entry.shape for name, entry in stored.items()}
    wrong = problems(entries, shapes, layout)
    # Names that are missing are reported already.
    for name in sorted(names_of(entries) & stored.keys()):
        dtype = stored[name].dtype
        if dtype not in DTYPES:
            wrong.append(f"not readable {name}: its dtype is {dtype}")
    if wrong:
        heading = (
            f"{weights} does not hold the weights of the {type(model).__name__} that config.json"
            " describes:"
        )
        raise ConversionError("\n  ".join([heading, *wrong]))
    return entries


def names_of(entries: list[Entry]) -> set[str]:
    """Return the names of all that is stored of some entries."""
    return {name for entry in entries for name in entry.tensors}


def _named_as_in(names: Iterable[str], entries: list[Entry], family: Family) -> list[Entry]:
    """Return the entries under the prefix that the anchor of the family has among these names.

    Files of a model without its head lack the base, and those of a model inside another module have
    a longer prefix.
    """
    base = family.base
    anchored = next(entry for entry in entries if family.anchor in entry.ours)
    anchor = anchored.theirs.removeprefix(base)
    starts = [name.removesuffix(anchor) for name in names if name.endswith(anchor)]
    # Without the anchor all names are those of the layout.
    if not starts:
        return entries
    start = starts[0]
    outer = start.removesuffix(base)
    placed = []
    for entry in entries:
        # The head stands beside the base, and not in it.
        if entry.theirs.startswith(base):
            name = start + entry.theirs.removeprefix(base)
        else:
            name = outer + entry.theirs
        placed.append(replace(entry, theirs=name))
    return placed
