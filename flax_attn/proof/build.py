"""Modules of either package from names and numbers, so that one row of a table describes both."""

from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import Any

import jax
import numpy as np
from flax import nnx

from flax_attn.proof.variant import accepted
from flax_attn.sharding.parameters import abstract


def build(
    package: ModuleType,
    module: str,
    *arguments: Any,
    numerics: Mapping[str, Any] | None = None,
    **options: Any,
):
    """Return a module of a package, whose parts take the `numerics` that their constructors accept.

    Args:
        package: `flax_attn` or `torch_ref`.
        module: name of the class or factory; for a `TransformerBlock` the options are those of
            `build_block`.
        arguments: positional arguments of the constructor.
        numerics: keywords such as `rngs`, `param_dtype` and `backend`.
        options: keyword arguments of the constructor.

    Example:
        >>> import flax_attn
        >>> from flax import nnx
        >>> block = build(
        ...     flax_attn, "TransformerBlock", numerics={"rngs": nnx.Rngs(0)}, d_model=6,
        ...     context_length=9, dropout=0.0, num_heads=2, norm="RMSNorm",
        ...     norms=("post_norm1", "post_norm2"),
        ... )
        >>> block.norm1 is None, block.post_norm1.d_model
        (True, 6)
    """
    if module == "TransformerBlock":
        return build_block(package, numerics or {}, **options)
    made = getattr(package, module)
    return made(*arguments, **{**accepted(made, numerics or {}), **options})


def build_block(
    package: ModuleType,
    numerics: Mapping[str, Any],
    *,
    d_model: int,
    dropout: float,
    ff: tuple[str, Mapping[str, Any]] = ("FeedForward", {"d_hidden": 10}),
    norm: str = "LayerNorm",
    eps: float = 1e-5,
    norms: Sequence[str] = ("norm1", "norm2"),
    norm_first: bool = True,
    **attention: Any,
):
    """Return a `TransformerBlock` and its parts.

    Args:
        package: `flax_attn` or `torch_ref`.
        numerics: keywords of all parts.
        d_model: width of all parts.
        dropout: dropout rate of the attention weights and of the outputs of both layers.
        ff: name and options of the feed-forward layer.
        norm: class name of the norms.
        eps: epsilon of the norms.
        norms: names of those of the four norms that the block has.
        norm_first: argument `norm_first` of the block.
        attention: options of the attention.
    """

    def part(module, *arguments, **options):
        return build(package, module, *arguments, numerics=numerics, **options)

    own = {name: part(norm, d_model, eps) for name in norms}
    name, arguments = ff
    return package.TransformerBlock(
        part("MultiHeadAttention", d_in=d_model, d_out=d_model, dropout=dropout, **attention),
        part(name, d_model, **arguments),
        **{"norm1": None, "norm2": None, **own},
        norm_first=norm_first,
        drop_shortcut=part("Dropout", dropout),
    )


def drawn(make: Callable[[], nnx.Module], seed: int = 0) -> nnx.Module:
    """Return the module that `make` returns, with parameters drawn from the normal distribution.

    It is made from its shapes alone, with numpy: as constructed, JAX would compile a random
    function for each shape.

    Args:
        make: function that constructs the module.
        seed: seed of the parameters, and of the streams that dropout draws its keys from.

    Example:
        >>> from flax_attn import LayerNorm
        >>> drawn(lambda: LayerNorm(4)).scale.shape
        (4,)
    """
    return draw_parameters(abstract(make), seed)


def draw_parameters(module: nnx.Module, seed: int = 0) -> nnx.Module:
    """Return a module with its parameters drawn anew, from their shapes alone; see `drawn`."""
    state = nnx.state(module)
    draw = np.random.default_rng(seed)
    for i, (_, leaf) in enumerate(nnx.to_flat_state(state)):
        if isinstance(leaf, nnx.RngKey):
            leaf.set_value(_key(1000 * seed + i, leaf.shape))
        elif isinstance(leaf, nnx.RngCount):
            leaf.set_value(jax.device_put(np.zeros(leaf.shape, np.uint32)))
        else:
            values = draw.normal(0, 0.4, leaf.shape).astype(leaf.dtype)
            leaf.set_value(jax.device_put(values))
    nnx.update(module, state)
    return module


def _key(seed: int, shape: tuple[int, ...]) -> jax.Array:
    # Stacked layers have a key each.
    key = jax.random.key(seed)
    return jax.random.split(key, shape) if shape else key
