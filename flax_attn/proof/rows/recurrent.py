"""The rows of recurrent attention, whose cache is a state."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from flax_attn.proof.rows.row import DOCUMENTS, fitted, of_rows
from flax_attn.proof.variant import TableSizes, Variant


def _delta(
    sizes: TableSizes,
    name: str,
    module: str = "GatedDeltaNet",
    call: Callable[[Any], Mapping[str, Any]] = lambda p: {},
    chunks: tuple[int | tuple[int, ...], ...] | None = None,
    **arguments: Any,
) -> Variant:
    """Return a row of a recurrent attention."""
    arguments = {"d_in": 6, "d_out": 7, "num_heads": 4, "head_dim": 3, **arguments}
    for heads in ("num_heads", "num_key_heads"):
        if heads in arguments:
            arguments[heads] *= sizes.times(2)
    return Variant(
        name,
        module,
        lambda p: getattr(p, module)(**arguments),
        ((sizes.b, sizes.t, 6),),
        call,
        chunks=sizes.chunks if chunks is None else chunks,
    )


def rows(sizes: TableSizes) -> tuple[Variant, ...]:
    """Return the rows."""
    delta = partial(_delta, sizes)
    t = sizes.t
    return (
        delta("gated_delta_net", num_key_heads=2, value_dim=5),
        delta(
            "gated_delta_net_packed",
            call=lambda p: {"mask": p.Mask.segments(fitted(sizes, DOCUMENTS))},
            kernel_size=3,
        ),
        delta(
            "gated_delta_net_ragged",
            chunks=(of_rows(sizes, 3, 1, 2), of_rows(sizes, t - 3, t - 1, t - 2)),
            num_key_heads=1,
        ),
        delta("kimi_delta_attention", "KimiDeltaAttention", value_dim=5),
        delta(
            "kimi_delta_attention_packed",
            "KimiDeltaAttention",
            call=lambda p: {"mask": p.Mask.segments(fitted(sizes, DOCUMENTS)) & p.Mask.causal()},
            num_heads=2,
        ),
    )
