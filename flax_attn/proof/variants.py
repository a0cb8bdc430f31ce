"""The table of variants: how each is built from the parts of either package, and called.

The two packages mirror each other, so one row serves both. TableSizes within a row are pairwise
different, so that a swapped axis shows.
"""

import difflib
from itertools import chain

from flax_attn.proof.rows import attention, decoders, encoders, latent, layers, recurrent
from flax_attn.proof.variant import Package, TableSizes, Variant, sizes_for

__all__ = ["VARIANTS", "Package", "TableSizes", "Variant", "select", "sizes_for", "table"]


def table(sizes: TableSizes = TableSizes()) -> tuple[Variant, ...]:  # noqa: B008 (frozen)
    """Return all rows."""
    kinds = (attention, recurrent, latent, layers, decoders, encoders)
    return tuple(chain.from_iterable(kind.rows(sizes) for kind in kinds))


VARIANTS = table()


def select(names: list[str] | None, variants: tuple[Variant, ...] = VARIANTS) -> list[Variant]:
    """Return the rows of these names, or of these classes; all rows for None.

    Raises:
        ValueError: for a name that is neither, with the nearest ones.

    Example:
        >>> [variant.name for variant in select(["CausalAttention"])]
        ['causal', 'causal_d_key']
    """
    if names is None:
        return list(variants)
    wanted = set(names)
    known = {variant.name for variant in variants} | {variant.module for variant in variants}
    unknown = [name for name in names if name not in known]
    if unknown:
        near = difflib.get_close_matches(unknown[0], sorted(known), 3, cutoff=0.0)
        raise ValueError(
            f"no variant is called {unknown[0]}; the nearest are {', '.join(near)}. Leave the name"
            " out for all of them"
        )
    return [variant for variant in variants if wanted & {variant.name, variant.module}]
