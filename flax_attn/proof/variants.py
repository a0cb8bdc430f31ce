"""The one table of variants: how each is built from the parts of either package, and how it is called.

The two packages mirror each other, so one row serves both. Sizes within a row are pairwise different, so that a swapped
axis shows.
"""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from types import ModuleType
from typing import Any

import numpy as np

Shape = tuple[int, ...]


class Package:
    """A package whose classes are given numerics where they take them, so that a row composes parts of either.

    Args:
        module: `flax_attn` or `torch_ref`.
        numerics: keyword arguments, such as `rngs` and `param_dtype`.

    Example:
        >>> import jax.numpy as jnp
        >>> from flax import nnx
        >>> import flax_attn
        >>> package = Package(flax_attn, param_dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
        >>> package.LayerNorm(4).scale.dtype, package.RoPE(500.0).base
        (dtype(bfloat16), 500.0)
    """

    def __init__(self, module: ModuleType, **numerics: Any):
        self.module, self.numerics = module, numerics

    def __getattr__(self, name: str) -> Callable:
        made = getattr(self.module, name, None) or getattr(_family(self.module, name), name)
        accepted = inspect.signature(made.__init__ if isinstance(made, type) else made).parameters
        return partial(made, **{name: value for name, value in self.numerics.items() if name in accepted})


def _family(package: ModuleType, name: str) -> ModuleType:
    """Return the file of a family of models, for `Qwen2` and `Qwen2Config`, which a package does not export."""
    return import_module(f"{package.__name__}.models.{name.removesuffix('Config').lower()}")


@dataclass(frozen=True)
class Variant:
    """One row: how a module is built, the shapes of its inputs, and the rest of the call.

    Args:
        name: of the row.
        module: name of the class in both packages.
        make: builds the module from the parts of a `Package`.
        inputs: shapes of the inputs, batched.
        call: returns the keyword arguments of the call, from a package.
        vocab_size: of inputs that are integers below it; None is floats.
        chunks: how many tokens each step takes where the same is computed with a cache, of all rows of the batch or of
            each; empty where there is none.
        capacity: of the cache; None is all tokens.
        dropout: whether it has dropout.
    """

    name: str
    module: str
    make: Callable[[Any], Any]
    inputs: tuple[Shape, ...]
    call: Callable[[Any], Mapping[str, Any]] = field(default=lambda package: {})
    vocab_size: int | None = None
    chunks: tuple[int | tuple[int, ...], ...] = ()
    capacity: int | None = None
    dropout: bool = False

    def draw(self, random: np.random.Generator) -> dict[str, np.ndarray]:
        """Return inputs drawn at random, by name."""
        return {f"input {i}": self._draw(random, shape) for i, shape in enumerate(self.inputs)}

    def _draw(self, random: np.random.Generator, shape: Shape) -> np.ndarray:
        return random.normal(size=shape) if self.vocab_size is None else random.integers(0, self.vocab_size, shape)

    def build(self, package: ModuleType, **numerics: Any) -> Any:
        """Return the module of `package`; every part is given the numerics that it takes."""
        return self.make(Package(package, **numerics))


@dataclass(frozen=True)
class Sizes:
    """The sizes of a table: rows of the batch, tokens, tokens of the other sequence, and heads of its GPT-2."""

    b: int = 3
    t: int = 5
    s: int = 7
    heads: int = 3

    @property
    def chunks(self) -> tuple[int, ...]:
        """Several tokens with an empty cache, one, and several after others."""
        return 2, 1, self.t - 3


_OPEN: dict[str, Any] = {"causal": False}  # tokens attend to later ones, so there is no cache


def _layer(sizes: Sizes, name: str, module: str, **arguments: Any) -> Variant:
    inputs, drops = ((sizes.b, sizes.t, 4),), bool(arguments.get("dropout"))
    return Variant(name, module, lambda p: getattr(p, module)(**arguments), inputs, dropout=drops)


def _multi_head(
    sizes: Sizes,
    name: str,
    *widths: int,
    call: Callable[[Any], Mapping[str, Any]] = lambda p: {},
    parts: Callable[[Any], Mapping[str, Any]] = lambda p: {},
    capacity: int | None = None,
    chunks: tuple[int | tuple[int, ...], ...] | None = None,
    **arguments: Any,
) -> Variant:
    """Return a row; `widths` are those of query, key and value, `parts` are arguments built from the package."""
    arguments = {"d_in": 6, "d_out": 8, "context_length": 9, "dropout": 0.3, "num_heads": 4, **arguments}
    if chunks is None:
        chunks = sizes.chunks if arguments.get("causal", True) else ()
    tokens = (sizes.t, sizes.s, sizes.s)
    return Variant(
        f"multi_head_{name}",
        "MultiHeadAttention",
        lambda p: p.MultiHeadAttention(**arguments, **parts(p)),
        tuple((sizes.b, *shape) for shape in zip(tokens, widths or (6,), strict=False)),
        call,
        chunks=chunks,
        capacity=capacity,
        dropout=True,
    )


def _block(
    sizes: Sizes,
    name: str,
    ff: Callable[[Any], Any],
    norm: Callable[[Any], Any] | None,
    *,
    post_norm: Callable[[Any], Any] | None = None,
    norm_first: bool = True,
    capacity: int | None = None,
    rope: bool = False,
    **attention: Any,
) -> Variant:
    arguments = {"d_in": 6, "d_out": 6, "context_length": 9, "dropout": 0.3, "num_heads": 2, **attention}

    def make(p: Any) -> Any:
        att = p.MultiHeadAttention(**arguments, rope=p.RoPE() if rope else None)
        norms = [None if norm is None else norm(p) for _ in range(2)]
        after = {f"post_norm{i}": post_norm(p) for i in (1, 2)} if post_norm else {}
        return p.TransformerBlock(att, ff(p), *norms, norm_first=norm_first, drop_shortcut=p.Dropout(0.3), **after)

    chunks = sizes.chunks if arguments.get("causal", True) else ()
    inputs = ((sizes.b, sizes.t, 6),)
    return Variant(f"block_{name}", "TransformerBlock", make, inputs, chunks=chunks, capacity=capacity, dropout=True)


def _model(sizes: Sizes, module: str, config: Callable[[Any], Any], dropout: bool = False) -> Variant:
    def make(p: Any) -> Any:
        return getattr(p, module)(config(p))

    return Variant(
        module.lower(), module, make, ((sizes.b, sizes.t),), vocab_size=11, chunks=sizes.chunks, dropout=dropout
    )


_HEAD = {"d_in": 4, "d_out": 6, "context_length": 9, "dropout": 0.3}
_CROSS: dict[str, Any] = {**_OPEN, "kdim": 5, "vdim": 3}
_LLAMA: dict[str, Any] = {"out_bias": False, "num_kv_heads": 1, "head_dim": 4, "rope": True}
_PACKED = np.array([[0, 1, 2, 0, 1], [0, 2, 3, 7, 9], [70, 73, 0, 1, 4]])  # with gaps: these are positions, not indices
_DOCUMENTS = np.array([[0, 0, 0, 1, 1], [0, 0, 0, 0, 0], [0, 0, 1, 1, 1]])


def _layer_norm(p: Any) -> Any:
    return p.LayerNorm(6)


def _rms_norm(p: Any) -> Any:
    return p.RMSNorm(6)


def _swiglu(p: Any) -> Any:
    return p.GatedFeedForward(6, 10)


def _feed_forward(activation: str) -> Callable[[Any], Any]:
    return lambda p: p.FeedForward(6, 10, activation)


def sizes_for(mesh: Mapping[str, int]) -> Sizes:
    """Return sizes that the axes of a mesh divide.

    Raises:
        ValueError: if they cannot be divided so often.

    Example:
        >>> sizes_for({"data": 2, "context": 2})
        Sizes(b=4, t=6, s=8, heads=2)
    """
    rows, heads, tokens = (mesh.get(name, 1) for name in ("data", "tensor", "context"))
    rows *= mesh.get("fsdp", 1)
    unknown = mesh.keys() - {"data", "fsdp", "tensor", "context"}
    if unknown or heads > 2 or tokens not in (1, 2, 4, 8):
        raise ValueError(
            "the table of variants can be divided over data and fsdp, over tensor=2, and over context=2, 4 or 8, as "
            f"its modules have 2 heads at least and 8 tokens at most; got {dict(mesh)}. Use fewer devices"
        )
    return Sizes(-(-4 // rows) * rows, {1: 5, 2: 6, 4: 4, 8: 8}[tokens], 8, 2)


def _fitted(sizes: Sizes, ids: np.ndarray) -> np.ndarray:
    """Return ids of 3 rows and 5 tokens for other sizes: rows begin again, and the last token is repeated."""
    rows, tokens = np.arange(sizes.b) % len(ids), np.minimum(np.arange(sizes.t), ids.shape[1] - 1)
    return ids[rows][:, tokens]


def _of_rows(sizes: Sizes, *counts: int) -> tuple[int, ...]:
    return tuple(np.resize(counts, sizes.b).tolist())


def table(sizes: Sizes = Sizes()) -> tuple[Variant, ...]:
    """Return all rows."""
    t, dense = sizes.t, np.random.default_rng(0).random((4, sizes.t, sizes.t)) < 0.6
    return (
        _layer(sizes, "simplified", "SimplifiedSelfAttention"),
        _layer(sizes, "self_attention", "SelfAttention", d_in=4, d_out=6),
        _layer(sizes, "self_attention_d_key", "SelfAttention", d_in=4, d_out=6, qkv_bias=True, d_key=2),
        _layer(sizes, "causal", "CausalAttention", **_HEAD),
        _layer(sizes, "causal_d_key", "CausalAttention", **_HEAD, qkv_bias=True, d_key=2),
        _layer(sizes, "multi_head_wrapper", "MultiHeadAttentionWrapper", **_HEAD, num_heads=2, qkv_bias=True),
        _multi_head(sizes, "causal"),
        _multi_head(sizes, "square", 8, d_in=8, qkv_bias=True),  # what torch's own layer and GPT-2's can represent
        _multi_head(sizes, "gqa", num_kv_heads=2, qkv_bias=True),
        _multi_head(sizes, "mqa", num_kv_heads=1, out_bias=False),
        _multi_head(sizes, "bidirectional", **_OPEN),
        _multi_head(sizes, "cross", 6, 5, 3, **_CROSS, qkv_bias=True),
        _multi_head(
            sizes,
            "cross_causal",
            *(6, 5, 3),
            call=lambda p: {"mask": p.Mask.causal(offset=2)},
            **_CROSS,
        ),
        _multi_head(
            sizes,
            "padding",  # the first row of the batch attends to nothing
            call=lambda p: {
                "mask": p.Mask.lengths(query=np.array(_of_rows(sizes, t, 3, 4)), key=np.array(_of_rows(sizes, 0, 3, t)))
            },
        ),
        _multi_head(
            sizes,
            "packed_window",
            call=lambda p: {"mask": p.Mask.segments(np.where(np.arange(t) < 3, 7, 0)) & p.Mask.sliding_window(2)},
            causal=False,
            chunks=sizes.chunks,
        ),
        _multi_head(
            sizes,
            "prefix_dense",
            call=lambda p: {"mask": p.Mask.prefix(2) & p.Mask.dense(dense)},
            causal=False,
            chunks=sizes.chunks,
        ),
        _multi_head(sizes, "rope", parts=lambda p: {"rope": p.RoPE()}, num_heads=2, num_kv_heads=1, qkv_bias=True),
        _multi_head(
            sizes,
            "rope_yarn_packed",
            call=lambda p: {"positions": _fitted(sizes, _PACKED), "mask": p.Mask.segments(_fitted(sizes, _DOCUMENTS))},
            parts=lambda p: {"rope": p.RoPE(500.0, width=8, interleaved=True, scaling=p.YaRNScaling(4.0, 40))},
            d_out=24,
            num_heads=2,
        ),
        _multi_head(
            sizes,
            "alibi",  # of 4 heads: slopes that are exact in every dtype
            call=lambda p: {"bias": lambda query, key: p.alibi(4, query, key)},
            parts=lambda p: {"scores": p.Scores(scale=0.8)},
        ),
        _multi_head(
            sizes,
            "t5",  # with a table that is exact in every dtype
            call=lambda p: {
                "bias": lambda query, key: p.t5_bias(p.alibi(4, [0], np.arange(8))[:, 0].T, query, key, max_distance=8)
            },
            parts=lambda p: {"scores": p.Scores(scale=1.0)},
            **_OPEN,
        ),
        _multi_head(
            sizes,
            "soft_cap_sinks",
            call=lambda p: {"bias": lambda query, key: p.alibi(4, query, key)},
            parts=lambda p: {"scores": p.Scores(soft_cap=1.5, sinks=True)},
            num_kv_heads=2,
        ),
        _multi_head(sizes, "qk_norm", parts=lambda p: {"rope": p.RoPE()}, num_kv_heads=2, head_dim=6, qk_norm=1e-3),
        _multi_head(sizes, "window", num_kv_heads=2, window=2, capacity=2),
        _multi_head(
            sizes,
            "ragged",
            num_kv_heads=2,
            chunks=(_of_rows(sizes, 3, 1, 2), _of_rows(sizes, t - 3, t - 1, t - 2)),
            capacity=8,
        ),
        _block(sizes, "gpt2", _feed_forward("gelu_tanh"), _layer_norm, qkv_bias=True),
        _block(sizes, "llama_norms", _feed_forward("gelu_exact"), _rms_norm, num_kv_heads=1),
        _block(sizes, "bert", _feed_forward("gelu_exact"), lambda p: p.LayerNorm(6, 1e-3), norm_first=False, **_OPEN),
        _block(sizes, "post_rms", _feed_forward("gelu_tanh"), _rms_norm, norm_first=False),
        _block(sizes, "gemma2", _feed_forward("gelu_tanh"), _rms_norm, post_norm=_rms_norm),
        _block(sizes, "olmo2", _swiglu, None, post_norm=_rms_norm, out_bias=False),
        _block(sizes, "llama", _swiglu, _rms_norm, **_LLAMA),
        _block(sizes, "qwen2", _swiglu, _rms_norm, **_LLAMA, qkv_bias=True),
        _block(sizes, "qwen_window", _swiglu, _rms_norm, **_LLAMA, qk_norm=1e-6, window=2, capacity=3),
        _layer(sizes, "layer_norm", "LayerNorm", d_model=4, eps=1e-3),
        _layer(sizes, "rms_norm", "RMSNorm", d_model=4, eps=1e-3),
        _layer(sizes, "feed_forward_tanh", "FeedForward", d_model=4, d_hidden=7),
        _layer(sizes, "feed_forward_exact", "FeedForward", d_model=4, activation="gelu_exact"),
        _layer(sizes, "swiglu", "GatedFeedForward", d_model=4, d_hidden=7),
        _layer(sizes, "geglu", "GatedFeedForward", d_model=4, activation="gelu_tanh", bias=True),
        Variant("embedding", "Embedding", lambda p: p.Embedding(7, 4), ((sizes.b, t),), vocab_size=7),
        Variant(
            "embedding_outside", "Embedding", lambda p: p.Embedding(7, 4), ((sizes.b, t),), vocab_size=9
        ),  # ids 7, 8: NaN
        _model(
            sizes,
            "GPT2",
            lambda p: p.GPT2Config(6, sizes.heads, 2, context_length=9, vocab_size=11, dropout=0.3),
            dropout=True,
        ),
        _model(sizes, "Llama", lambda p: p.LlamaConfig(8, 12, 4, 2, 2, context_length=9, vocab_size=11)),
        _model(
            sizes,
            "Qwen2",
            lambda p: p.Qwen2Config(8, 12, 4, 2, 2, context_length=9, vocab_size=11, window=3, full_layers=(0,)),
        ),
        _model(sizes, "Qwen3", lambda p: p.Qwen3Config(8, 12, 4, 2, 2, head_dim=6, context_length=9, vocab_size=11)),
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
        raise ValueError(f"no variant is called {', '.join(unknown)}. Known are: {', '.join(sorted(known))}")
    return [variant for variant in variants if variant.name in names or variant.module in names]
