"""Checks that both packages share, with the same messages: the rule, the values, the remedy.

Pure Python on sizes and names. They run at construction where the values are known there, and
otherwise at trace time, before any work is done.
"""

import math
from numbers import Integral, Real
from typing import Any

DTYPES = ("float64", "float32", "bfloat16", "float16")  # that a call may have


def check_positive(**sizes: int) -> None:
    """Raise unless every size is a positive integer."""
    for name, size in sizes.items():
        if isinstance(size, bool) or not isinstance(size, Integral) or size < 1:
            raise ValueError(f"{name} must be a positive integer; got {name}={size!r}")


def check_number(**numbers: float) -> None:
    """Raise unless every value is one real number of Python or NumPy."""
    for name, number in numbers.items():
        if isinstance(number, bool) or not isinstance(number, Real):
            raise ValueError(
                f"{name} must be one real number; got {name}={number!r}. Pass a float of Python"
            )


def check_odd(**sizes: int) -> None:
    """Raise unless every size is a positive odd integer."""
    check_positive(**sizes)
    for name, size in sizes.items():
        if size % 2 == 0:
            raise ValueError(
                f"{name} must be odd, so that a window has a middle; got {name}={size}. Use"
                f" {size + 1}"
            )


def check_features(shape: tuple[int, ...], channels: int, frames: int) -> None:
    """Raise unless `shape` is `(channels, frames)`, or a batch of them."""
    if len(shape) not in (2, 3) or shape[-2:] != (channels, frames):
        raise ValueError(
            f"features must have shape (mel, frames) or (b, mel, frames) with mel={channels},"
            f" frames={frames}; got shape {shape}. Pad or cut the sound, as the feature extractor"
            " of the model does"
        )


def check_context_length(context_length: int | None) -> None:
    """Raise unless it is a positive integer, or None for no limit."""
    if context_length is not None:
        check_positive(context_length=context_length)


def check_type(name: str, value: object, kind: Any, remedy: str) -> None:
    """Raise unless `value` is an instance of `kind`, a class or a union of them."""
    if not isinstance(value, kind):
        kinds = [one.__name__ for one in getattr(kind, "__args__", (kind,))]
        expected = " or ".join(kinds).replace("NoneType", "None")
        raise ValueError(f"{name} must be {expected}; got {type(value).__name__}. Pass {remedy}")


def check_eps(eps: float) -> None:
    """Raise unless `eps` is at least 0."""
    if not eps >= 0:
        raise ValueError(
            f"eps is added to a variance and must be at least 0; got eps={eps!r}. Usual is 1e-5"
        )


def check_rate(dropout: float) -> None:
    """Raise unless `dropout` is a probability below one."""
    if not isinstance(dropout, Real) or not 0 <= dropout < 1:
        raise ValueError(
            "dropout must be in [0, 1), the probability that a weight is dropped; got"
            f" dropout={dropout!r}. For no dropout pass 0.0"
        )


def check_key_data(shape: tuple[int, ...], dtype: str) -> None:
    """Raise unless it is the data of one dropout key."""
    if len(shape) != 1 or shape[0] < 2 or not dtype.startswith(("int", "uint")):
        raise ValueError(
            f"a dropout key must be one key, of at least two integers; got shape {shape}, dtype"
            f" {dtype}. Of a batch of keys pass one"
        )


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
    last = min(math.isqrt(number), 10**5)  # which is all of them, unless the number is absurd
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
    if not set(layers) <= set(range(num_layers)):
        raise ValueError(
            f"{name} must be numbers of layers, 0 to {num_layers - 1}; got {layers}. Leave out"
            " those beyond num_layers"
        )


def check_block_norms(
    norm_first: bool, norm1: object, norm2: object, post_norm1: object, post_norm2: object
) -> None:
    """Raise unless a block that normalises the sums has a norm for each, and no others."""
    norms = {"norm1": norm1, "norm2": norm2, "post_norm1": post_norm1, "post_norm2": post_norm2}
    given = [name for name, norm in norms.items() if norm is not None]
    if norm_first or given == ["norm1", "norm2"]:
        return
    raise ValueError(
        "norm_first=False normalises the two sums, with norm1 and norm2 and no post norms; "
        f"got {', '.join(given) or 'no norm'}. For any other norms pass norm_first=True"
    )


def check_block_widths(
    d_model: int, attention: dict[str, int], parts: dict[str, int | None]
) -> None:
    """Raise unless all parts of a block are as wide as the input of its attention.

    A width of None is not known, and not checked.
    """
    wrong = {f"att.{name}": width for name, width in attention.items() if width != d_model}
    wrong |= {
        f"{name}.d_model": width for name, width in parts.items() if width not in (None, d_model)
    }
    if wrong:
        raise ValueError(
            f"all parts of a block have one width; got att.d_in={d_model},"
            f" {', '.join(f'{name}={width}' for name, width in wrong.items())}. Construct them with"
            " one d_model"
        )


def check_tokens(
    name: str, x: Any, width_name: str, width: int, context_length: int | None
) -> None:
    """Raise unless an array is `(t, width)` or `(b, t, width)` with `t <= context_length`.

    Its dtype must be one that a call may have.
    """
    shape = shape_of(name, x)
    if len(shape) not in (2, 3):
        raise ValueError(
            f"{name} must have shape (t, {width_name}) or (b, t, {width_name}); got rank"
            f" {len(shape)}, shape {shape}. For more batch axes use jax.vmap or torch.vmap, or"
            " reshape them into one"
        )
    check_width(name, x, width_name, width)
    if context_length is not None and shape[-2] > context_length:
        raise ValueError(
            f"{name} must not be longer than context_length={context_length} tokens; got"
            f" {shape[-2]} tokens, shape {shape}. Cut the input or construct the module with a"
            " larger context_length"
        )


def check_image(shape: tuple[int, ...], channels: int, height: int, width: int) -> None:
    """Raise unless `shape` is `(channels, rows, columns)`, or a batch of them.

    Patches of this height and width must fill the images.
    """
    if (
        len(shape) not in (3, 4)
        or shape[-3] != channels
        or shape[-2] % height
        or shape[-1] % width
        or 0 in shape[-2:]
    ):
        raise ValueError(
            f"images must have shape (c, rows, columns) or (b, c, rows, columns), with c={channels}"
            f" channels, and patches of {height} x {width} pixels must fill them; got shape"
            f" {shape}. Resize them first; of images with channels last move these to the front"
        )


def check_image_size(got: tuple[int, ...], wanted: tuple[int, int]) -> None:
    """Raise unless images have the size that a table of positions is for."""
    if got != wanted:
        raise ValueError(
            f"positions are learned for images of {wanted[0]} x {wanted[1]} pixels; got {got[0]} x"
            f" {got[1]}. Resize the images first"
        )


def shape_of(name: str, x: Any) -> tuple[int, ...]:
    """Return the shape of an array, or raise where an argument is none."""
    if not hasattr(x, "shape") or not hasattr(x, "dtype"):
        raise ValueError(
            f"{name} must be an array; got {type(x).__name__}. Make it one before the call"
        )
    return tuple(x.shape)


def check_width(name: str, x: Any, width_name: str, width: int) -> None:
    """Raise unless the last axis of an array is `width` wide, and its dtype one for calls."""
    shape = shape_of(name, x)
    if not shape or shape[-1] != width:
        raise ValueError(
            f"the last axis of {name} must be {width_name}={width}; got shape {shape}. "
            f"Pass an input of that width or construct the module with another {width_name}"
        )
    check_dtype(name, x)


def check_dtype(
    names: str, *arrays: Any, remedy: str = "Cast to one of them before the call"
) -> None:
    """Raise unless all arrays, or names of dtypes, are of one that a call may have."""
    found = [str(getattr(x, "dtype", x)).removeprefix("torch.") for x in arrays]
    wrong = [dtype for dtype in found if dtype not in DTYPES]
    if wrong:
        raise ValueError(
            f"{names} must be {', '.join(DTYPES[:-1])} or {DTYPES[-1]}; got {wrong[0]}. {remedy}"
        )


def check_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    """Raise unless `value` is one of the choices."""
    if not isinstance(value, str) or value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, choices))}; got {value!r}")


def check_inputs(
    query: tuple[int, ...], key: tuple[int, ...], value: tuple[int, ...], dtypes: tuple[str, ...]
) -> None:
    """Raise unless the three shapes and dtypes belong to one attention call."""
    shapes = f"got query {query}, key {key}, value {value}"
    if len(query) not in (3, 4) or not len(query) == len(key) == len(value):
        raise ValueError(
            "query, key and value must have shape (b, t, n, h), (b, s, k, h), (b, s, k, v), or all"
            f" three without b; {shapes}"
        )
    if 0 in key[-3:] or 0 in query[-2:] or value[-1] == 0:
        raise ValueError(
            "there must be at least one key token, one head and a head width of at least 1;"
            f" {shapes}"
        )
    if len(query) == 4 and not query[0] == key[0] == value[0]:
        raise ValueError(
            f"query, key and value must have one batch size; {shapes}. Repeat the smaller batch"
            " first"
        )
    if key[-3] != value[-3] or key[-2] != value[-2]:
        raise ValueError(
            f"key and value must have the same number of tokens s and of heads k; {shapes}"
        )
    if query[-1] != key[-1]:
        raise ValueError(f"query and key must have one head width h; {shapes}")
    if query[-2] % key[-2]:
        raise ValueError(
            "the key/value heads must divide the query heads: query head i reads key/value head i"
            f" // (n / k); {shapes}"
        )
    if len(set(dtypes)) > 1:
        raise ValueError(
            f"query, key and value must have one dtype; got {', '.join(dtypes)}. Cast them before"
            " the call"
        )
    check_dtype("query, key and value", *dtypes)


def check_bias(shape: tuple[int, ...], dtype: str, to: tuple[int, ...]) -> None:
    """Raise unless the bias is made of numbers to add, and broadcasts to `to`."""
    if dtype == "bool":
        raise ValueError(
            "bias is added to the scores; got dtype bool. Pass a boolean mask as mask="
        )
    check_dtype("bias", dtype)
    check_broadcast("bias", shape, to)


def check_broadcast(name: str, shape: tuple[int, ...], to: tuple[int, ...]) -> None:
    """Raise unless `shape` broadcasts to `to`, the sizes of (b, n, t, s)."""
    padded = (1,) * (len(to) - len(shape)) + shape
    if len(shape) > len(to) or any(
        size not in (1, full) for size, full in zip(padded, to, strict=True)
    ):
        raise ValueError(
            f"{name} must broadcast to (b, n, t, s) = {to}; got shape {shape}. Over (t, s) it is"
            " used as it is; from (b, s) write [:, None, None, :], from (b, t, s) write [:, None]"
        )


def check_ring_buffer(window: int | None, capacity: int) -> None:
    """Raise unless a cache of this capacity keeps all keys of a sliding window."""
    if window is None:
        return
    check_positive(window=window)
    if window > capacity:
        raise ValueError(
            "a ring buffer must keep at least the window, all keys that a query attends to; got"
            f" window={window}, capacity={capacity}. Use a capacity of at least {window}"
        )


def check_lengths(lengths: int, t: int) -> None:
    """Raise unless `lengths` counts some of the tokens of a call."""
    if not 0 <= lengths <= t:
        raise ValueError(
            f"lengths counts the real tokens of a call of t={t} tokens; got lengths={lengths}. Use"
            f" 0 to {t}"
        )


def check_rows_of_lengths(shape: tuple[int, ...], b: int) -> None:
    """Raise unless there is one length for all rows of a batch, or one for each."""
    if shape not in ((), (1,), (b,)):
        raise ValueError(
            f"lengths must be one integer or one a row, shape ({b},); got shape {shape}. "
            "Pass how many tokens of each row are real"
        )


def check_fits(capacity: int, cached: int, new: int) -> None:
    """Raise if new tokens do not fit behind the cached ones."""
    if cached + new > capacity:
        raise ValueError(
            f"the cache has a capacity of {capacity} tokens; got {new} new tokens, {cached} cached."
            f" Make it larger, as in KVCache.zeros(b, {cached + new}, ...), or a ring buffer with"
            " window="
        )


def check_causal_window(window: int | None, causal: bool) -> None:
    """Raise unless a module with a window is causal."""
    if window is None:
        return
    check_positive(window=window)
    if not causal:
        raise ValueError(
            f"window is how many keys a token of a causal module attends to; got window={window},"
            " causal=False. For one in both directions pass mask=Mask.window(left, right)"
        )


def check_capacity(capacity: int, context_length: int | None) -> None:
    """Raise unless a cache keeps no more tokens than the module takes."""
    if context_length is not None and capacity > context_length:
        raise ValueError(
            f"capacity must not exceed context_length; got capacity={capacity},"
            f" context_length={context_length}. Make the cache smaller or construct the module with"
            " a larger context_length"
        )


def check_ids(dtype: str) -> None:
    """Raise unless ids are integers."""
    if not dtype.startswith(("int", "uint")):
        raise ValueError(f"ids must be integers; got dtype {dtype}. Cast them before the call")


def check_no_start(start: object) -> None:
    """Raise unless a model without an encoder is given no tokens to start from."""
    if start is not None:
        raise ValueError(
            f"start is what the decoder of an encoder-decoder begins with; got start={start} for a"
            " model without an encoder. Put these tokens in front of the prompt"
        )


def check_prompt(
    i: int,
    length: int,
    ends: tuple[int, int] | None,
    vocab_size: int,
    context_length: int,
    max_new_tokens: int,
    capacity: int | None,
) -> None:
    """Raise unless prompt `i` fits a model and its cache.

    `ends` are the smallest and the largest id of the prompt; None is an empty prompt.
    """
    if ends is None:
        raise ValueError(
            f"a prompt holds at least one token; prompt {i} is empty. Begin with the model's start"
            " token"
        )
    if ends[0] < 0 or ends[1] >= vocab_size:
        raise ValueError(
            f"token ids lie in the vocabulary, 0 to {vocab_size - 1}; got"
            f" {ends[0] if ends[0] < 0 else ends[1]} in prompt {i}. Encode text with the tokenizer"
            " of this model"
        )
    if length > context_length:
        raise ValueError(
            f"a prompt is at most context_length={context_length} tokens; prompt {i} has {length}."
            " Cut it"
        )
    for name, limit in (("context_length", context_length), ("capacity", capacity)):
        if limit is not None and length + max_new_tokens > limit:
            raise ValueError(
                f"a prompt and its new tokens together are at most {name}={limit}; prompt {i} has"
                f" {length} tokens and max_new_tokens={max_new_tokens}. Pass"
                f" max_new_tokens={max(limit - length, 0)}, or a shorter prompt"
            )
