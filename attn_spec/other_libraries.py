"""Arguments of other libraries: what to pass here instead, with the same messages in both packages.

The names are those of `jax.nn`, Flax, tokamax, PyTorch, FlexAttention, FlashAttention and
transformers.
"""

from collections.abc import Callable, Mapping
from functools import wraps
from inspect import signature
from types import MappingProxyType
from typing import Any, TypeVar, cast

F = TypeVar("F", bound=Callable)
Remedies = Mapping[str, str]

_DROPOUT = "dropout=KeyedDropout(rate, key)"
_IDS = "mask=Mask.segments(ids), with the id of its document for each token"
_NO_SUMS = "return_weights=True to attend for the weights; the log-sums are not returned"
_SEEN = "mask=, where True means attend; arrays are (b, t, n, h)"
_WEIGHTS = "return_weights=True to attend"
_WINDOW = "mask=Mask.window(left, right)"

OF_FUNCTIONS: Remedies = MappingProxyType(
    {
        "alibi_slopes": "bias=alibi(num_heads, query_positions, key_positions)",
        "attention_mask": _SEEN,
        "attn_bias": "bias=",
        "attn_mask": _SEEN,
        "block_mask": "mask=Mask.where(function)",
        "broadcast_dropout": f"{_DROPOUT}, which drops each weight by itself",
        "causal": "is_causal=True",
        "cu_seqlens_k": _IDS,
        "cu_seqlens_q": _IDS,
        "deterministic": f"nothing for no dropout, and {_DROPOUT} for dropout",
        "dropout_p": _DROPOUT,
        "dropout_rate": _DROPOUT,
        "dropout_rng": _DROPOUT,
        "dtype": "query, key and value in this dtype",
        "enable_gqa": "keys and values with fewer heads as they are",
        "implementation": 'backend="auto", or the name of a backend',
        "k": "key=",
        "kernel_options": 'backend="auto", or the name of a backend',
        "key_value_seq_lengths": "mask=Mask.lengths(key=lengths)",
        "local_window_size": _WINDOW,
        "logits_scale": "scale=",
        "logits_soft_cap": "soft_cap=",
        "need_weights": _WEIGHTS,
        "q": "query=",
        "query_seq_lengths": "mask=Mask.lengths(query=lengths)",
        "return_attn_probs": _WEIGHTS,
        "return_lse": _NO_SUMS,
        "return_residual": _NO_SUMS,
        "return_residuals": _NO_SUMS,
        "return_weights": _WEIGHTS,
        "s_aux": "sinks=",
        "score_mod": "score=",
        "segment_ids": _IDS,
        "sliding_window": "mask=Mask.sliding_window(width)",
        "sm_scale": "scale=",
        "softcap": "soft_cap=",
        "softmax_scale": "scale=",
        "v": "value=",
        "window": "mask=Mask.sliding_window(width)",
        "window_size": _WINDOW,
    }
)

# What `jax.nn.dot_product_attention` has beside our arguments, and where it asks for nothing. Only
# of this function: others that are called so have axes in another order.
ASKS_NOTHING: Mapping[str, Any] = MappingProxyType(
    {
        "implementation": None,
        "key_value_seq_lengths": None,
        "local_window_size": None,
        "query_seq_lengths": None,
        "return_residual": False,
    }
)

_CACHE = "cache=layer.init_cache(b, capacity) to attend"
_MODE = "nothing: layer.eval() switches dropout off, layer.train() on"
_OF_LAYER = "when you construct the layer"
_SCORES = f"scores=Scores(...) {_OF_LAYER}"

OF_LAYERS: Remedies = MappingProxyType(
    {
        "attention_bias": "bias=",
        "attention_mask": "mask=, where True means attend",
        "attn_mask": "mask=, where True means attend",
        "cache": _CACHE,
        "causal": f"causal= {_OF_LAYER}",
        "decode": _CACHE,
        "deterministic": _MODE,
        "dropout_rng": "dropout_key=",
        "inputs_k": "key=",
        "inputs_kv": "key=, which is the value, too",
        "inputs_q": "query=",
        "inputs_v": "value=",
        "is_causal": f"causal= {_OF_LAYER}",
        "key_padding_mask": "lengths=, or mask=~key_padding_mask[:, None, None, :]",
        "key_value_seq_lengths": "lengths=",
        "need_weights": _WEIGHTS,
        "output_attentions": _WEIGHTS,
        "past_key_value": _CACHE,
        "past_key_values": _CACHE,
        "position_ids": "positions=",
        "return_weights": _WEIGHTS,
        "rngs": "dropout_key=",
        "scale": _SCORES,
        "score_mod": _SCORES,
        "segment_ids": _IDS,
        "sinks": _SCORES,
        "soft_cap": _SCORES,
        "sow_weights": _WEIGHTS,
        "train": _MODE,
        "training": _MODE,
        "use_cache": _CACHE,
        "window": f"window= {_OF_LAYER}",
    }
)

_DIAGONAL = "d_in= and d_out="
_KV_HEADS = "num_kv_heads="
_HEADS = "num_heads="
_LENGTH = "context_length="

OF_CONSTRUCTORS: Remedies = MappingProxyType(
    {
        "attention_dropout": "dropout=",
        "batch_first": "nothing: inputs are always (b, t, d_in)",
        "bias": "qkv_bias= for the input projections, out_bias= for the output projection",
        "block_size": _LENGTH,
        "d_model": _DIAGONAL,
        "decode": f"nothing, and {_CACHE}",
        "deterministic": _MODE,
        "dropout_p": "dropout=",
        "dropout_rate": "dropout=",
        "embed_dim": _DIAGONAL,
        "features": _DIAGONAL,
        "hidden_size": _DIAGONAL,
        "in_features": "d_in=",
        "is_causal": "causal=",
        "kv_heads": _KV_HEADS,
        "max_position_embeddings": _LENGTH,
        "max_seq_len": _LENGTH,
        "n_heads": _HEADS,
        "normalize_qk": "q_norm= and k_norm=, each RMSNorm(head_dim) or LayerNorm(head_dim)",
        "num_attention_heads": _HEADS,
        "num_key_value_heads": _KV_HEADS,
        "num_query_heads": _HEADS,
        "out_features": "d_out=",
        "qkv_features": "head_dim=, which is qkv_features / num_heads",
        "scale": "scores=Scores(scale=...)",
        "sinks": "scores=Scores(sinks=True)",
        "sliding_window": "window=",
        "soft_cap": "scores=Scores(soft_cap=...)",
        "use_bias": "qkv_bias= for the input projections, out_bias= for the output projection",
    }
)


def names_remedies(
    remedies: Remedies, asks_nothing: Mapping[str, Any] = MappingProxyType({})
) -> Callable[[F], F]:
    """Return a decorator: the function says what to pass for the argument of another library.

    The error is a `TypeError`, as Python's own for an argument that there is not. An argument with
    the value that it has in `asks_nothing` is left out.

    Example:
        >>> attend = names_remedies(OF_FUNCTIONS, ASKS_NOTHING)(lambda query, mask=None: query)
        >>> attend(1, implementation=None)
        1
        >>> try:
        ...     attend(1, local_window_size=(2, 0))
        ... except TypeError as error:
        ...     print(str(error)[-36:])
        : pass mask=Mask.window(left, right)
    """

    def decorate(function: F) -> F:
        known = tuple(name for name in signature(function).parameters if name != "self")
        # A layer is named by its class, whichever of its methods the framework calls.
        called = function.__qualname__
        for method in (".__init__", ".__call__", ".forward"):
            called = called.removesuffix(method)

        @wraps(function)
        def call(*args: Any, **options: Any) -> Any:
            unknown = [name for name in options if name not in known]
            for name in unknown:
                value = options.pop(name)
                if name in asks_nothing and value is asks_nothing[name]:
                    continue
                told = remedies.get(name)
                remedy = f"pass {told}" if told else f"the arguments are {', '.join(known)}"
                raise TypeError(f"{called} has no argument {name!r}: {remedy}")
            return function(*args, **options)

        return cast(F, call)

    return decorate
