"""The known layouts, as tables.

A row reads: our parameters, their entry, how one becomes the other.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace

from flax_attn.convert.refusals import (
    biases_alike,
    biases_all,
    biases_none,
    features_alike,
    has_output,
    heads_alike,
    heads_share_width,
    inputs_alike,
    nnx_unless,
    no_gate,
    no_lambda,
    no_qk_norm,
    no_rope,
    other_kernels,
    ours_unless,
    scores_plain,
    scores_unscaled,
    self_attention,
    width_kept,
)
from flax_attn.convert.rules import ConversionError, Layout, Rule

#: What is taken for a layout: a name in `LAYOUTS`, a `Layout`, or rules alone.
LayoutLike = str | Layout | Sequence[Rule]

_PROJECTIONS = ("W_query", "W_key", "W_value", "out_proj")
_INPUTS = _PROJECTIONS[:3]
_KERNELS = tuple(f"{name}.kernel" for name in _INPUTS)
_BIASES = tuple(f"{name}.bias" for name in _INPUTS)
_LINEAR = Rule(("kernel",), "weight", "i o -> o i")
_EXPERTS = tuple(
    Rule((f"experts.{name}.kernel",), f"experts.{name}.weight", "e i o -> e o i")
    for name in ("W_gate", "W_up", "W_down")
)
_SAME = Rule(("{name}",), "{name}")
# Those of BatchNorm.
_STATISTICS = (Rule(("mean",), "running_mean"), Rule(("var",), "running_var"))
_PLAIN_HEADS = (no_qk_norm, no_gate, no_lambda)
_SQUARE = (
    has_output,
    *_PLAIN_HEADS,
    no_rope,
    scores_plain,
    biases_alike,
    heads_alike,
    width_kept,
    heads_share_width,
)


def _linears(*theirs: str) -> tuple[Rule, ...]:
    """Return the rules of the four projections, each a PyTorch Linear of another name."""
    rules = []
    for ours, name in zip(_PROJECTIONS, theirs, strict=True):
        rules += _layer(ours, name, "i o -> o i")
    return tuple(rules)


def _layer(ours: str, theirs: str, pattern: str = "") -> tuple[Rule, Rule]:
    """Return the rules of one linear layer."""
    kernel = Rule((f"{ours}.kernel",), f"{theirs}.weight", pattern)
    return kernel, Rule((f"{ours}.bias",), f"{theirs}.bias")


def _split_heads(ours: str, theirs: str) -> tuple[Rule, Rule]:
    return (
        Rule((f"{ours}.kernel",), f"{theirs}.kernel", "i (n h) -> i n h"),
        Rule((f"{ours}.bias",), f"{theirs}.bias", "(n h) -> n h"),
    )


def _packed(
    names: tuple[str, str, str], part: str, weight: str = "", bias: str = ""
) -> tuple[Rule, ...]:
    """Return the rules of query, key and value for `torch.nn.MultiheadAttention`.

    It packs them into one tensor, unless their widths differ.
    """
    kernels = tuple(f"{name}.{part}" for name in names)
    biases = tuple(f"{name}.bias" for name in names)
    apart = [
        Rule((kernel,), f"{letter}_proj_weight", weight)
        for letter, kernel in zip("qkv", kernels, strict=True)
    ]
    packed = Rule(kernels, "in_proj_weight", weight)
    return packed, *apart, Rule(biases, "in_proj_bias", bias)


def _within(ours: str, theirs: str, rules: Iterable[Rule]) -> tuple[Rule, ...]:
    """Return the rules of a module for its parent, which names it `ours` and `theirs`."""
    found = []
    for rule in rules:
        names = tuple(f"{ours}.{name}" for name in rule.ours)
        found.append(replace(rule, ours=names, theirs=f"{theirs}.{rule.theirs}"))
    return tuple(found)


# Flax layers and the torch.nn layers of the same names: each framework's own name and axes for the
# same weight.
_TORCH = (
    Rule(("kernel",), "weight", "... i o -> o i ..."),
    Rule(("embedding",), "weight"),
    Rule(("scale",), "weight"),
    Rule(("shift",), "bias"),
    *_STATISTICS,
    _SAME,
)
_TORCH_MHA = (
    *_packed(_INPUTS, "kernel", "i o -> o i"),
    *_layer("out_proj", "out_proj", "i o -> o i"),
)
_GPT2_ATTENTION = (
    # Conv1D has its weight as (in, out), with columns [query, key, value].
    Rule(_KERNELS, "c_attn.weight", axis=1),
    Rule(_BIASES, "c_attn.bias"),
    *_layer("out_proj", "c_proj"),
)
#: The layouts that have a name.
LAYOUTS = {
    # torch_ref, and any PyTorch module with our names: Linear weights are (out, in).
    "torch_ref": Layout(
        (*_EXPERTS, _LINEAR, Rule(("embedding",), "weight"), *_STATISTICS, _SAME),
        ignored=r"(.*\.)?(mask|num_batches_tracked)",
    ),
    "torch": Layout(_TORCH, ignored=r"(.*\.)?num_batches_tracked", refuse=other_kernels),
    # One fused projection, `qkv_proj` (out, in) with rows [query; key; value], and `out_proj`.
    "fused_qkv": Layout(
        (
            Rule(_KERNELS, "qkv_proj.weight", "i o -> o i"),
            Rule(_BIASES, "qkv_proj.bias"),
            _LINEAR,
            _SAME,
        ),
        ignored=r"(.*\.)?mask",
        refuse=ours_unless(inputs_alike),
    ),
    # torch.nn.MultiheadAttention: packed where the three inputs are equally wide, else one weight
    # each.
    "torch_mha": Layout(
        (*_packed(_INPUTS, "kernel", "i o -> o i"), _LINEAR, _SAME),
        refuse=ours_unless(*_SQUARE),
    ),
    # torch.nn.TransformerEncoderLayer from a TransformerBlock, and TransformerDecoderLayer from a
    # CrossBlock.
    "torch_transformer": Layout(
        (
            *_within("att", "self_attn", _TORCH_MHA),
            *_within("cross", "multihead_attn", _TORCH_MHA),
            *_layer("ff.layers.0", "linear1", "i o -> o i"),
            *_layer("ff.layers.2", "linear2", "i o -> o i"),
            *_TORCH,
        ),
        refuse=ours_unless(*_SQUARE),
    ),
    # torch.nn.MultiheadAttention from flax.nnx.MultiHeadAttention.
    "nnx_mha": Layout(
        (
            *_packed(("query", "key", "value"), "kernel", "i n h -> (n h) i", "n h -> (n h)"),
            Rule(("out.kernel",), "out_proj.weight", "n h o -> o (n h)"),
            Rule(("out.bias",), "out_proj.bias"),
        ),
        refuse=nnx_unless(heads_alike, features_alike),
    ),
    # The same, from equinox.nn.MultiheadAttention, whose weights are (out, in) too.
    "equinox_mha": Layout(
        (
            *_packed(("query_proj", "key_proj", "value_proj"), "weight"),
            Rule(("output_proj.weight",), "out_proj.weight"),
            Rule(("output_proj.bias",), "out_proj.bias"),
        ),
    ),
    # The attention of Hugging Face's GPT-2, which was stored with its mask once.
    "hf_gpt2": Layout(
        _GPT2_ATTENTION,
        ignored=r"(.*\.)?(attn\.)?masked_bias|(.*\.)?attn\.bias|bias",
        refuse=ours_unless(*_SQUARE, biases_all, self_attention),
    ),
    # The attention of Hugging Face's Llama, and of the models that follow it.
    "hf_llama": Layout(
        _linears("q_proj", "k_proj", "v_proj", "o_proj"),
        ignored=r"(.*\.)?rotary_emb\.inv_freq",
        refuse=ours_unless(
            has_output, *_PLAIN_HEADS, scores_plain, biases_alike, width_kept, self_attention
        ),
    ),
    # The attention of Hugging Face's BERT; the norm after its output is not part of ours.
    "hf_bert": Layout(
        _linears("self.query", "self.key", "self.value", "output.dense"),
        ignored=r"(.*\.)?output\.LayerNorm\.(weight|bias)",
        refuse=ours_unless(*_SQUARE, biases_all, self_attention),
    ),
    # The attention of Hugging Face's T5; the table of its bias by distance, in the first layer, is
    # not part of ours.
    "hf_t5": Layout(
        _linears("q", "k", "v", "o"),
        ignored=r"(.*\.)?relative_attention_bias\.weight",
        refuse=ours_unless(
            has_output,
            *_PLAIN_HEADS,
            no_rope,
            scores_unscaled,
            biases_none,
            heads_alike,
            width_kept,
            self_attention,
        ),
    ),
    # flax.linen.MultiHeadDotProductAttention and flax.nnx.MultiHeadAttention: the head axis is
    # separate.
    "flax": Layout(
        (
            *_split_heads("W_query", "query"),
            *_split_heads("W_key", "key"),
            *_split_heads("W_value", "value"),
            Rule(("out_proj.kernel",), "out.kernel", "(n h) o -> n h o"),
            Rule(("out_proj.bias",), "out.bias"),
        ),
        refuse=ours_unless(has_output, *_PLAIN_HEADS, no_rope, scores_plain, biases_alike),
    ),
}


def as_layout(layout: LayoutLike) -> Layout:
    """Return a layout given by its name, as a `Layout` or by its rules alone.

    Raises:
        ConversionError: if there is no layout of that name, or it is none of these.

    Example:
        >>> as_layout([Rule(("{name}",), "{name}")]).rules[0].ours
        ('{name}',)
    """
    if isinstance(layout, Layout):
        return layout
    if isinstance(layout, str):
        if layout in LAYOUTS:
            return LAYOUTS[layout]
    elif isinstance(layout, Sequence) and all(isinstance(rule, Rule) for rule in layout):
        return Layout(tuple(layout))
    known = ", ".join(map(repr, LAYOUTS))
    raise ConversionError(
        f"layout must be one of {known}, a Layout or a sequence of Rules; got {layout!r}"
    )
