"""The table of variants: how each is built from the parts of either package, and called.

The two packages mirror each other, so one row serves both. Sizes within a row are pairwise
different, so that a swapped axis shows.
"""

from flax_attn.proof.rows import attention, decoders, encoders, layers
from flax_attn.proof.variant import Package, Sizes, Variant, sizes_for

__all__ = ["VARIANTS", "Package", "Sizes", "Variant", "select", "sizes_for", "table"]


def table(sizes: Sizes = Sizes()) -> tuple[Variant, ...]:  # noqa: B008 (frozen)
    """Return all rows."""
    return tuple(
        row for kind in (attention, layers, decoders, encoders) for row in kind.rows(sizes)
    )


VARIANTS = table()


def select(names: list[str] | None, variants: tuple[Variant, ...] = VARIANTS) -> list[Variant]:
    """Return the rows of these names, or of these classes; all rows for None.

    Raises:
        ValueError: for a name that is neither, with the list of those that are.

    Example:
        >>> [variant.name for variant in select(["CausalAttention"])]
        ['causal', 'causal_d_key']
    """
    if names is None:
        return list(variants)
    known = {name for variant in variants for name in (variant.name, variant.module)}
    unknown = [name for name in names if name not in known]
    if unknown:
        raise ValueError(
            f"no variant is called {', '.join(unknown)}. Known are: {', '.join(sorted(known))}"
        )
    return [variant for variant in variants if variant.name in names or variant.module in names]
