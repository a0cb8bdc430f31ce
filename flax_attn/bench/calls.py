"""The attention calls of well-known models, as data: to ask for their backends and compile them."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import ShapeDtypeStruct
from jaxtyping import Array
from rich.table import Table
from rich.text import Text

from flax_attn.attention import dot_product_attention
from flax_attn.functional.dropout import KeyedDropout
from flax_attn.functional.masks import Mask
from flax_attn.sharding.explain import explain


@dataclass(frozen=True)
class ModelCall:
    """One call of `dot_product_attention`, without numbers.

    Args:
        name: model, and what is special about its attention.
        arrays: arguments that hold arrays, each a tree of `jax.ShapeDtypeStruct`: query, key,
            value, and of bias, mask, sinks and dropout what the model passes.
        options: other arguments.
        learned: names of the arrays that training differentiates.

    Example:
        >>> from flax_attn import explain
        >>> refusals = explain(**MODEL_CALLS[0].arguments, platform="cpu").refusals
        >>> print(refusals["decode"])
        decode takes no dropout; got rate 0.1
    """

    name: str
    arrays: dict[str, Any]
    options: dict[str, Any] = field(default_factory=dict)
    learned: tuple[str, ...] = ("query", "key", "value")

    @property
    def arguments(self) -> dict[str, Any]:
        """The keyword arguments of `dot_product_attention` and of `explain`."""
        return self.arrays | self.options

    @property
    def cotangent(self) -> ShapeDtypeStruct:
        """Of the output."""
        query, value = self.arrays["query"], self.arrays["value"]
        return ShapeDtypeStruct((*query.shape[:3], value.shape[3]), query.dtype)


def forward(call: ModelCall, backend: str = "auto") -> Callable[[dict[str, Any]], Array]:
    """Return the function of `call.arrays` that computes the output.

    Example:
        >>> jax.eval_shape(forward(MODEL_CALLS[0]), MODEL_CALLS[0].arrays).shape
        (8, 1024, 12, 64)
    """
    return lambda arrays: dot_product_attention(**arrays, **call.options, backend=backend)


def forward_and_backward(
    call: ModelCall, backend: str = "auto"
) -> Callable[[dict[str, Any], Array], tuple]:
    """Return the function from `call.arrays` and `call.cotangent` to output and gradients.

    Example:
        >>> call = MODEL_CALLS[0]
        >>> run = forward_and_backward(call)
        >>> _, gradients = jax.eval_shape(run, call.arrays, call.cotangent)
        >>> list(gradients)
        ['key', 'query', 'value']
    """
    return with_gradients(call, forward(call, backend))


def with_gradients(
    call: ModelCall, function: Callable[[dict[str, Any]], Array]
) -> Callable[..., tuple]:
    """Return the function of `call.arrays` and `call.cotangent` to `function` and its gradients."""
    return partial(_with_gradients, call, function)


def _with_gradients(
    call: ModelCall,
    function: Callable[[dict[str, Any]], Array],
    arrays: dict[str, Any],
    cotangent: Array,
) -> tuple[Array, dict[str, Array]]:
    # Masks hold integers, and have no gradient.
    learned = {name: arrays[name] for name in call.learned}
    output, pullback = jax.vjp(lambda learned: function(arrays | learned), learned)
    (gradients,) = pullback(cotangent)
    return output, gradients


def _bfloat16(*shape: int) -> ShapeDtypeStruct:
    return ShapeDtypeStruct(shape, jnp.bfloat16)


def _arrays(
    t: int,
    n: int,
    h: int,
    *,
    b: int = 1,
    s: int | None = None,
    k: int | None = None,
    v: int | None = None,
):
    # Where not given: as many keys as queries, as many key/value heads as heads, values as wide as
    # queries.
    s, k, v = s or t, k or n, v or h
    return {
        "query": _bfloat16(b, t, n, h),
        "key": _bfloat16(b, s, k, h),
        "value": _bfloat16(b, s, k, v),
    }


def _integers(make: Callable[[Any], Mask], *shape: int) -> Mask:
    # A mask of integers known only at run time.
    return jax.eval_shape(make, ShapeDtypeStruct(shape, jnp.int32))


_CAUSAL = {"mask": Mask.causal()}
_DROPOUT = KeyedDropout(0.1, ShapeDtypeStruct((2,), jnp.uint32))
_PACKED = _integers(lambda ids: Mask.causal() & Mask.segments(ids), 2, 4096)
_PADDED = _integers(lambda rows: Mask.causal() & Mask.lengths(key=rows), 8)

MODEL_CALLS = (
    ModelCall(
        "GPT-2 small, training with dropout",
        _arrays(1024, 12, 64, b=8) | _CAUSAL | {"dropout": _DROPOUT},
    ),
    ModelCall("Llama 3.1 8B, 8192 tokens", _arrays(8192, 32, 128, k=8) | _CAUSAL),
    ModelCall(
        "Llama 3.1 8B, packed documents", _arrays(4096, 32, 128, b=2, k=8) | {"mask": _PACKED}
    ),
    ModelCall("Llama 3.1 8B, padded batch", _arrays(1024, 32, 128, b=8, k=8) | {"mask": _PADDED}),
    # No multiple of any tile.
    ModelCall("Llama 3.1 8B, 5000 tokens", _arrays(5000, 32, 128, k=8) | _CAUSAL),
    ModelCall(
        "Llama 3.1 8B, decoding over 8192 keys",
        _arrays(1, 32, 128, b=8, s=8192, k=8)
        | {"mask": _integers(lambda rows: Mask.causal(rows) & Mask.lengths(key=rows + 1), 8)},
    ),
    ModelCall(
        "Mistral 7B, window 4096", _arrays(8192, 32, 128, k=8) | {"mask": Mask.sliding_window(4096)}
    ),
    ModelCall(
        "Gemma 2 9B, width 256, soft cap", _arrays(8192, 16, 256, k=8) | _CAUSAL, {"soft_cap": 50.0}
    ),
    ModelCall(
        "gpt-oss 20B, float32 sinks, window 128",
        _arrays(8192, 64, 64, k=8)
        | {
            "mask": Mask.sliding_window(128),
            "sinks": ShapeDtypeStruct((64,), jnp.float32),
        },
        learned=("query", "key", "value", "sinks"),
    ),
    ModelCall(
        "T5 base encoder, learned bias",
        _arrays(512, 12, 64, b=8) | {"bias": _bfloat16(1, 12, 512, 512)},
        {"scale": 1.0},
        learned=("query", "key", "value", "bias"),
    ),
    ModelCall(
        "BLOOM 7B, ALiBi", _arrays(2048, 32, 128) | _CAUSAL | {"bias": _bfloat16(1, 32, 2048, 2048)}
    ),
    ModelCall(
        "BERT base, 512 tokens, padded",
        _arrays(512, 12, 64, b=32) | {"mask": _integers(lambda rows: Mask.lengths(key=rows), 32)},
    ),
    ModelCall("ViT-B/16, 197 patches", _arrays(197, 12, 64, b=64)),
    # Cross-attention: no mask, and as many keys as half a minute of sound has frames.
    ModelCall("Whisper large, cross-attention", _arrays(448, 20, 64, b=8, s=1500)),
    # Values are narrower than keys.
    ModelCall("DeepSeek-V2-Lite, widths 192 and 128", _arrays(4096, 16, 192, v=128) | _CAUSAL),
)


def table(platform: str) -> Table:
    """Return a table of the backend of each call on a platform, with its memory.

    It says why not a backend that `"auto"` prefers. The platform may be a chip, as in `explain`.
    """
    rows = Table(
        "call", "b t n h", "s k v", "backend", title=f"Attention of models on {platform.upper()}"
    )
    rows.add_column("memory", justify="right")
    rows.add_column("predicted", justify="right")
    rows.add_column("why not another", overflow="fold")
    for call in MODEL_CALLS:
        rows.add_row(call.name, *_cells(call, platform))
    return rows


def _cells(call: ModelCall, platform: str) -> tuple[str | Text, ...]:
    found = explain(**call.arguments, platform=platform)
    assert found.backend is not None, "auto always finds one"
    memory = f"{found.memory[found.backend] / 2**20:.1f} MiB"
    reasons = [found.refusals[name] or "" for name in found.passed_over]
    seconds = found.seconds.get(found.backend)
    time = "" if seconds is None else f"{1000 * seconds:.3g} ms"
    return *_sizes(call), found.backend, memory, time, Text("\n".join(reasons))


def _sizes(call: ModelCall) -> tuple[str, str]:
    query, keys = call.arrays["query"].shape, call.arrays["value"].shape[1:]
    return " ".join(map(str, query)), " ".join(map(str, keys))
