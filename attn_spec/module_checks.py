"""Checks of the parts that layers, blocks and models are built of."""

import math

from attn_spec.checks import check_positive, kind_of


def given_heads(layer: str, num_heads: int | None) -> int:
    """Return the number of heads, or raise where it was left out."""
    # It has a default only because arguments that have one stand before it.
    if num_heads is None:
        raise TypeError(
            f"{layer} needs num_heads, the number of its heads; got none. Pass it by name:"
            f" {layer}(768, 768, num_heads=12)"
        )
    return num_heads


def check_heads(d_out: int, num_heads: int, num_kv_heads: int, head_dim: int | None = None) -> None:
    """Raise unless all heads have one width, and the key/value heads divide the query heads."""
    check_positive(d_out=d_out, num_heads=num_heads, num_kv_heads=num_kv_heads)
    if head_dim is not None:
        check_positive(head_dim=head_dim)
    elif d_out % num_heads:
        raise ValueError(
            f"num_heads must divide d_out, so that all heads have one width; got d_out={d_out},"
            f" num_heads={num_heads}. num_heads may be {_divisors(d_out)}, or give the width as"
            " head_dim"
        )
    if num_heads % num_kv_heads:
        raise ValueError(
            "num_kv_heads must divide num_heads, so that every key/value head serves equally many"
            f" query heads; got num_heads={num_heads}, num_kv_heads={num_kv_heads}. num_kv_heads"
            f" may be {_divisors(num_heads)}"
        )


def _divisors(number: int) -> str:
    # Which is all of them, unless the number is absurd.
    last = min(math.isqrt(number), 10**5)
    small = [i for i in range(1, last + 1) if number % i == 0]
    return ", ".join(map(str, sorted({*small, *(number // i for i in small)})))


def check_head_norm(name: str, width: int | None, head_dim: int, num_heads: int) -> None:
    """Raise unless the norm of queries or keys is as wide as a head, or as all heads together."""
    if width not in (head_dim, num_heads * head_dim):
        raise ValueError(
            f"{name} is a norm of each head, head_dim={head_dim} wide, or of all heads together,"
            f" {num_heads} * head_dim = {num_heads * head_dim} wide; got one of d_model={width}."
            f" Pass {name}=RMSNorm({head_dim})"
        )


def check_layers(name: str, layers: tuple[int, ...], num_layers: int) -> None:
    """Raise unless a model has all these layers, counted from 0."""
    # Numbers from the end are refused: a layer has one number.
    if not set(layers) <= set(range(num_layers)):
        raise ValueError(
            f"{name} must be numbers of layers, 0 to {num_layers - 1}; got {layers}. Leave out"
            " those beyond num_layers"
        )


def check_block_norms(
    norm_first: bool, norm1: object, norm2: object, post_norm1: object, post_norm2: object
) -> None:
    """Raise unless a block that normalises the sums has a norm for each, and only these."""
    norms = {"norm1": norm1, "norm2": norm2, "post_norm1": post_norm1, "post_norm2": post_norm2}
    # Only which norms there are matters, not what they are.
    given = [name for name, norm in norms.items() if norm is not None]
    if norm_first or given == ["norm1", "norm2"]:
        return
    raise ValueError(
        "norm_first=False normalises the two sums, with norm1 and norm2 and no post norms; "
        f"got {', '.join(given) or 'no norm'}. For any other norms pass norm_first=True"
    )


def check_parts(**parts: object) -> None:
    """Raise unless the parts of a block are modules or functions, or None for a norm left out."""
    for name, part in parts.items():
        if part is None and name != "ff":
            continue
        # A class can be called as well, and would make a module of the tokens.
        if isinstance(part, type) or not callable(part):
            made = "FeedForward" if name == "ff" else "LayerNorm"
            raise ValueError(
                f"{name} must be a module or a function of tokens; got {kind_of(part)}. Pass an"
                f" instance, such as {name}={made}(d_model)"
            )


def check_block_widths(
    d_model: int, attention: dict[str, int], parts: dict[str, int | None]
) -> None:
    """Raise unless all parts of a block are as wide as the input of its attention.

    A width of None is not known, and not checked.
    """
    wrong = {f"att.{name}": width for name, width in attention.items() if width != d_model}
    # What a norm of one's own does not say cannot be compared.
    wrong |= {
        f"{name}.d_model": width for name, width in parts.items() if width not in (None, d_model)
    }
    if wrong:
        raise ValueError(
            f"all parts of a block have one width; got att.d_in={d_model},"
            f" {', '.join(f'{name}={width}' for name, width in wrong.items())}. Construct them with"
            " one d_model"
        )
