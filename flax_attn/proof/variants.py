"""The one table of variants: each row is a module of both packages, by name, and how to call it.

The two packages mirror each other, so one row of names and numbers serves both. Sizes within a row are pairwise
different, so that no swapped axis goes unseen.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import numpy as np

from flax_attn.proof.build import build

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Variant:
    """One row: a variant with arguments, the shapes of its inputs, and the rest of the call.

    Args:
        name: of the row.
        module: name of the class or factory in both packages.
        arguments: of `build`; a function makes one from a package, as `call` does.
        inputs: shapes of the inputs, batched.
        call: makes the keyword arguments of the call from a package, `flax_attn` or `torch_ref`.
        vocab_size: of inputs that are integers below it; None is floats.
        chunks: how many tokens each call takes where the same is computed with a cache; empty where it has none.
        capacity: of the cache; None is all tokens.
    """

    name: str
    module: str
    arguments: Mapping[str, Any]
    inputs: tuple[Shape, ...]
    call: Callable[[ModuleType], Mapping[str, Any]] = field(default=lambda package: {})
    vocab_size: int | None = None
    chunks: tuple[int, ...] = ()
    capacity: int | None = None

    def draw(self, random: np.random.Generator) -> dict[str, np.ndarray]:
        """Return inputs drawn at random, by name."""
        return {f"input {i}": self._draw(random, shape) for i, shape in enumerate(self.inputs)}

    def _draw(self, random: np.random.Generator, shape: Shape) -> np.ndarray:
        return random.normal(size=shape) if self.vocab_size is None else random.integers(0, self.vocab_size, shape)

    def build(self, package: ModuleType, **numerics: Any):
        """Return the module of `package`."""
        arguments = {name: value(package) if callable(value) else value for name, value in self.arguments.items()}
        return build(package, self.module, numerics=numerics, **arguments)


_CHUNKS = (2, 1, 2)  # several tokens first, one, and several behind others
_OPEN = {"causal": False, "chunks": ()}  # a token sees what comes later, which no cache has yet


def _multi_head(
    name: str,
    *inputs: Shape,
    call=lambda package: {},
    chunks: tuple[int, ...] = _CHUNKS,
    capacity: int | None = None,
    **arguments: Any,
) -> Variant:
    arguments = {"d_in": 6, "d_out": 8, "context_length": 9, "dropout": 0.3, "num_heads": 4, **arguments}
    inputs, steps = inputs or ((3, 5, 6),), {"chunks": chunks, "capacity": capacity}
    return Variant(f"multi_head_{name}", "MultiHeadAttention", arguments, inputs, call, **steps)


def _block(name: str, *, chunks: tuple[int, ...] = _CHUNKS, capacity: int | None = None, **arguments: Any) -> Variant:
    arguments = {"d_model": 6, "context_length": 9, "dropout": 0.3, "num_heads": 2, **arguments}
    return Variant(f"block_{name}", "TransformerBlock", arguments, ((3, 5, 6),), chunks=chunks, capacity=capacity)


def _model(variant: str, config: Callable[[ModuleType], Any]) -> Variant:
    return Variant(variant.lower(), variant, {"config": config}, ((3, 5),), vocab_size=11, chunks=_CHUNKS)


_HEAD = {"d_in": 4, "d_out": 6, "context_length": 9, "dropout": 0.3}
_CROSS = {**_OPEN, "kdim": 5, "vdim": 3}
_EXACT = ("FeedForward", {"d_hidden": 10, "activation": "gelu_exact"})
_LLAMA = {
    **{"norm": "RMSNorm", "ff": ("GatedFeedForward", {"d_hidden": 10}), "out_bias": False, "num_kv_heads": 1},
    **{"head_dim": 4, "rope": lambda package: package.RoPE()},
}
_PACKED = np.array([[0, 1, 2, 0, 1], [0, 2, 3, 7, 9], [70, 73, 0, 1, 4]])  # with gaps: positions count, not places
_DOCUMENTS = np.array([[0, 0, 0, 1, 1], [0, 0, 0, 0, 0], [0, 0, 1, 1, 1]])
_DENSE = np.random.default_rng(0).random((4, 5, 5)) < 0.6

VARIANTS = (
    Variant("simplified", "SimplifiedSelfAttention", {}, ((3, 5, 4),)),
    Variant("self_attention", "SelfAttention", {"d_in": 4, "d_out": 6}, ((3, 5, 4),)),
    Variant(
        "self_attention_d_key", "SelfAttention", {"d_in": 4, "d_out": 6, "qkv_bias": True, "d_key": 2}, ((3, 5, 4),)
    ),
    Variant("causal", "CausalAttention", _HEAD, ((3, 5, 4),)),
    Variant("causal_d_key", "CausalAttention", {**_HEAD, "qkv_bias": True, "d_key": 2}, ((3, 5, 4),)),
    Variant(
        "multi_head_wrapper", "MultiHeadAttentionWrapper", {**_HEAD, "num_heads": 2, "qkv_bias": True}, ((3, 5, 4),)
    ),
    _multi_head("causal"),
    _multi_head("square", (3, 5, 8), d_in=8, qkv_bias=True),  # what torch's own layer and GPT-2's can hold
    _multi_head("gqa", num_kv_heads=2, qkv_bias=True),
    _multi_head("mqa", num_kv_heads=1, out_bias=False),
    _multi_head("bidirectional", **_OPEN),
    _multi_head("cross", (3, 5, 6), (3, 7, 5), (3, 7, 3), **_CROSS, qkv_bias=True),
    _multi_head(
        "cross_causal",
        *((3, 5, 6), (3, 7, 5), (3, 7, 3)),
        call=lambda package: {"mask": package.Mask.causal(offset=2)},
        **_CROSS,
    ),
    _multi_head(
        "padding",  # the first row of the batch may see nothing
        call=lambda package: {"mask": package.Mask.lengths(query=np.array([5, 3, 4]), key=np.array([0, 3, 5]))},
    ),
    _multi_head(
        "packed_window",
        call=lambda package: {
            "mask": package.Mask.segments(np.array([7, 7, 7, 0, 0])) & package.Mask.sliding_window(2)
        },
        causal=False,
    ),
    _multi_head(
        "prefix_dense",
        call=lambda package: {"mask": package.Mask.prefix(2) & package.Mask.dense(_DENSE)},
        causal=False,
    ),
    _multi_head("rope", num_heads=2, num_kv_heads=1, qkv_bias=True, rope=lambda package: package.RoPE()),
    _multi_head(
        "rope_yarn_packed",
        call=lambda package: {"positions": _PACKED, "mask": package.Mask.segments(_DOCUMENTS)},
        d_out=24,
        num_heads=2,
        rope=lambda package: package.RoPE(500.0, width=8, interleaved=True, scaling=package.YaRNScaling(4.0, 40)),
    ),
    _multi_head(
        "alibi",  # of 4 heads: slopes that no dtype rounds
        call=lambda package: {"bias": lambda query, key: package.alibi(4, query, key)},
        scores=lambda package: package.Scores(scale=0.8),
    ),
    _multi_head("qk_norm", num_kv_heads=2, head_dim=6, qk_norm=1e-3, rope=lambda package: package.RoPE()),
    _multi_head(
        "soft_cap_sinks",
        num_kv_heads=2,
        scores=lambda package: package.Scores(scale=0.7, soft_cap=1.5, sinks=True),
    ),
    _multi_head("window", num_kv_heads=2, window=2, capacity=2),
    _block("gpt2", qkv_bias=True),
    _block("llama_norms", norm="RMSNorm", num_kv_heads=1, ff=_EXACT),
    _block("bert", norm_first=False, ff=_EXACT, eps=1e-3, **_OPEN),
    _block("post_rms", norm_first=False, norm="RMSNorm"),
    _block("llama", **_LLAMA),
    _block("qwen2", **_LLAMA, qkv_bias=True),
    _block("qwen_window", **_LLAMA, qk_norm=1e-6, window=2, capacity=3),
    _block("gemma2", **_LLAMA, norms=("norm1", "norm2", "post_norm1", "post_norm2")),
    _block("olmo2", **_LLAMA, norms=("post_norm1", "post_norm2")),
    Variant("layer_norm", "LayerNorm", {"d_model": 4, "eps": 1e-3}, ((3, 5, 4),)),
    Variant("rms_norm", "RMSNorm", {"d_model": 4, "eps": 1e-3}, ((3, 5, 4),)),
    Variant("feed_forward_tanh", "FeedForward", {"d_model": 4, "d_hidden": 7}, ((3, 5, 4),)),
    Variant("feed_forward_exact", "FeedForward", {"d_model": 4, "activation": "gelu_exact"}, ((3, 5, 4),)),
    Variant("swiglu", "GatedFeedForward", {"d_model": 4, "d_hidden": 7}, ((3, 5, 4),)),
    Variant("geglu", "GatedFeedForward", {"d_model": 4, "activation": "gelu_tanh", "bias": True}, ((3, 5, 4),)),
    Variant("embedding", "Embedding", {"size": 7, "d_model": 4}, ((3, 5),), vocab_size=7),
    _model("GPT2", lambda package: package.GPT2Config(6, 3, 2, context_length=9, vocab_size=11, dropout=0.3)),
    _model("Llama", lambda package: package.LlamaConfig(8, 12, 4, 2, 2, context_length=9, vocab_size=11)),
)


def select(names: list[str] | None) -> list[Variant]:
    """Return the rows of these names, or of these classes; all rows for None.

    Raises:
        ValueError: for a name that is neither, with the list of those that are.

    Example:
        >>> [variant.name for variant in select(["CausalAttention"])]
        ['causal', 'causal_d_key']
    """
    if names is None:
        return list(VARIANTS)
    known = {name for variant in VARIANTS for name in (variant.name, variant.module)}
    unknown = [name for name in names if name not in known]
    if unknown:
        raise ValueError(f"no variant is called {', '.join(unknown)}. Known are: {', '.join(sorted(known))}")
    return [variant for variant in VARIANTS if variant.name in names or variant.module in names]
