"""Faults of what decoders add to Llama's parts.

Other norms, positions and windows by layer, caps and gates.
"""

from dataclasses import replace

import torch
from torch.nn import functional

from flax_attn.proof.faults.fault import (
    NO_HEAD_NORMS,
    Copy,
    Modify,
    Patch,
    Wrap,
    fault,
    patched,
    swapped,
    zeros,
)
from torch_ref import DifferentialAttention, MultiHeadAttention, RoPE
from torch_ref.models.gemma import Gemma
from torch_ref.models.gemma2 import Gemma2
from torch_ref.models.language_model import LanguageModel
from torch_ref.modules import differential, head_attention, multi_head
from torch_ref.modules.differential import differential_lambda
from torch_ref.modules.heads import norm_heads

# 4 query heads and 2 key/value heads of width 6.
OVER_HEADS = "multi_head_qk_norm_over_heads"
FIRST, SECOND = "trf_blocks.0", "trf_blocks.1"


def each_by_itself(norm_heads, norm, x):
    """Norm each head by itself, with its part of the scale."""
    return functional.rms_norm(x, x.shape[-1:], eps=norm.eps) * norm.scale.unflatten(
        0, x.shape[-2:]
    )


def after_rotation(project, module, *inputs):
    """Project and rotate without the norms, then norm all heads together."""
    with patched(module, NO_HEAD_NORMS):
        query, key, value = project(module, *inputs)
    return norm_heads(module.q_norm, query), norm_heads(module.k_norm, key), value


# Norms centred at zero, over all heads, and behind a layer.
NORMS = (
    fault("no_1_plus",
          "The factor of a zero-centred norm is scale, not 1 + scale.", "rms_norm_zero_centred",
          Patch("", "zero_centred", False)),
    fault("no_1_plus_in_heads",
          "The norm of queries is not zero-centred, as in Qwen3 and unlike Gemma 3.", "gemma3",
          Patch(f"{FIRST}.att.q_norm", "zero_centred", False)),
    fault("wide_norm_of_each_head", "The norm of all heads together is of each head.", OVER_HEADS,
          Wrap(multi_head, "norm_heads", each_by_itself)),
    fault("wide_norm_after_rope", "The norm of all heads together comes after RoPE.", OVER_HEADS,
          Wrap(MultiHeadAttention, "_project", after_rotation)),
    fault("norms_before_the_sublayer",
          "The norm is before the attention, as in Llama and unlike OLMo 2.", "olmo2",
          Copy(FIRST, "norm1", f"{FIRST}.post_norm1"), Patch(FIRST, "post_norm1", None)),
    fault("names_of_llama_for_gemma2",
          "The norm after the attention is taken for that before the feed-forward layer.", "gemma2",
          *swapped(f"{FIRST}.post_norm1", f"{FIRST}.norm2")),
    fault("no_post_norms", "The norms after the sublayers are missing.", "gemma2",
          Patch(FIRST, "post_norm1", None), Patch(FIRST, "post_norm2", None)),
)  # fmt: skip

# 4 of the 6 features.
PARTIAL = "multi_head_partial_rope"


def of_the_whole_head(cos_sin, rope, width, positions, dtype):
    """The frequencies of a whole head, the slowest left out."""
    return [part[..., : width // 2] for part in cos_sin(rope, width + 2, positions, dtype)]


# Long from 5 tokens on.
LONGROPE = "multi_head_rope_longrope"


def rope_scaling_patch(change):
    """The rotation of PyTorch alone with changed fields of its scaling, which both sides share."""

    def cos_sin(original, rope, *others):
        scaling = replace(rope.scaling, **change(rope.scaling))
        return original(replace(rope, scaling=scaling), *others)

    return Wrap(RoPE, "_cos_sin", cos_sin)


SHORT_FACTORS = rope_scaling_patch(lambda scaling: {"long_factors": scaling.short_factors})
FIVE_LATER = rope_scaling_patch(
    lambda scaling: {"original_context_length": scaling.original_context_length + 5}
)
NO_TEMPERATURE = rope_scaling_patch(lambda scaling: {"attention_factor": 1.0})

# Windows and rotations by layer, and rotations of a part of a head.
LAYERS = (
    fault("windows_in_the_other_layers", "The windows are in the other layers.", "gemma2",
          *swapped(f"{FIRST}.att.window", f"{SECOND}.att.window")),
    fault("window_in_global_layers", "Every layer has the window.", "gemma2",
          Patch(f"{SECOND}.att", "window", 3)),
    fault("no_window_in_a_layer", "No layer has a window.", "smollm3",
          Patch(f"{FIRST}.att", "window", None)),
    fault("global_base_in_local_layers",
          "Layers with a window have the base of those without.", "gemma3",
          Copy(f"{FIRST}.att", "rope", f"{SECOND}.att.rope")),
    fault("local_base_in_global_layers",
          "Layers without a window have the base of those with one.", "gemma3",
          Copy(f"{SECOND}.att", "rope", f"{FIRST}.att.rope")),
    fault("rope_in_every_layer", "RoPE rotates in the layers without positions.", "smollm3",
          Copy(f"{FIRST}.att", "rope", f"{SECOND}.att.rope")),
    fault("no_rope_in_the_other_layers",
          "The layers without positions are the other ones.", "smollm3",
          *swapped(f"{FIRST}.att.rope", f"{SECOND}.att.rope")),
    fault("partial_rope_of_whole_heads", "RoPE rotates whole heads, not a part of each.", "phi3",
          Patch(f"{FIRST}.att", "rope", RoPE(50.0))),
    fault("partial_rope_of_the_last_features",
          "RoPE rotates the last features of each head, not the first.", PARTIAL,
          Wrap(RoPE, "__call__",
               lambda rotate, rope, x, where: rotate(rope, x.flip(-1), where).flip(-1))),
    fault("partial_rope_with_slow_frequencies",
          "The frequencies of partial RoPE are those of whole heads.", PARTIAL,
          Wrap(RoPE, "_cos_sin", of_the_whole_head)),
    fault("short_factors_of_long_inputs",
          "LongRoPE takes the short factors for long inputs, too.", LONGROPE,
          SHORT_FACTORS),
    fault("long_factors_too_late",
          "LongRoPE takes the long factors five tokens too late.", LONGROPE,
          FIVE_LATER),
    fault("no_longrope_temperature", "LongRoPE's factor on what is rotated is missing.", LONGROPE,
          NO_TEMPERATURE),
)  # fmt: skip

# Scales and caps of tokens, scores and logits.
SCALES = (
    fault("no_embedding_scale",
          "The tokens are not multiplied by the root of their width.", "gemma",
          Patch(Gemma, "embed", LanguageModel.embed)),
    fault("embedding_scale_in_the_head",
          "The tied head is multiplied by the root of the width as well.", "gemma",
          Wrap(Gemma, "logits",
               lambda logits, model, hidden: logits(model, model.config.d_model**0.5 * hidden))),
    fault("scores_by_the_head_width",
          "Scores are scaled by the width of a head, not query_pre_attn_scalar.", "gemma3",
          *(Modify(f"{layer}.att", "scores", lambda scores: replace(scores, scale=None))
            for layer in (FIRST, SECOND))),
    fault("no_score_cap_in_a_layer", "The scores of a layer are not capped.", "gemma2",
          Modify(f"{SECOND}.att", "scores", lambda scores: replace(scores, soft_cap=None))),
    fault("no_logit_cap", "The logits are not capped.", "gemma2",
          Patch(Gemma2, "logits", LanguageModel.logits)),
    fault("hidden_capped_for_logits",
          "The cap bounds the input of the head, not the logits.", "gemma2",
          Patch(Gemma2, "logits",
                lambda model, hidden: LanguageModel.logits(model, 3 * torch.tanh(hidden / 3)))),
)  # fmt: skip

# Of 4 heads.
FEATURES, HEADS = "multi_head_gated_features", "multi_head_gated_heads"


def gate_of_the_output():
    """Return the patches that multiply the output by the gate, and not the heads."""
    gates = []
    return (
        Wrap(head_attention, "gate_heads", lambda gated, gate, x: gates.append(gate) or x),
        Wrap(
            head_attention,
            "checkpoint_name",
            lambda named, x, name: named(torch.sigmoid(gates.pop()) * x, name),
        ),
    )


# Gates of what the heads return.
GATES = (
    fault("gate_after_the_output_projection",
          "The gate multiplies what the output projection returns.", FEATURES,
          *gate_of_the_output()),
    fault("no_gate", "The gate is missing.", FEATURES,
          Patch(head_attention, "gate_heads", lambda gate, x: x)),
    fault("silu_gate", "The gate is x * sigmoid(x), not sigmoid(x).", FEATURES,
          Wrap(head_attention, "gate_heads",
               lambda gated, gate, x: gated(gate, x) * gate.unflatten(-1, x.shape[-2:]))),
    fault("gate_features_first", "The gate is split into features, then heads.", FEATURES,
          Wrap(head_attention, "gate_heads", lambda gated, gate, x: gated(
              gate.unflatten(-1, (x.shape[-1], x.shape[-2])).transpose(-1, -2).flatten(-2), x))),
    fault("no_gate_bias", "The bias of the gate is missing.", FEATURES,
          Modify("W_gate", "bias", zeros)),
    fault("gates_of_other_heads", "The gates of the heads are in reverse order.", HEADS,
          Wrap(head_attention, "gate_heads", lambda gated, gate, x: gated(gate.flip(-1), x))),
)  # fmt: skip

# 4 query heads and 4 key/value heads; lambda starts near 0.4.
DIFFERENCE = "multi_head_differential"


def own_values(attend, module, query, key, value, *others, **options):
    """Attend to the values of the first of two paired heads twice."""
    return attend(module, query, key, value[..., : module.head_dim].tile(2), *others, **options)


# The difference of two softmaxes, and the norm behind it.
DIFFERENTIAL = (
    fault("no_lambda_init", "Lambda starts near 0, lambda_init is missing.", DIFFERENCE,
          Wrap(DifferentialAttention, "difference",
               lambda difference, module: difference(module) - 0.4)),
    fault("lambda_init_of_layers_from_1",
          "The layers are counted from 1 for lambda_init.", "diffllama",
          Patch(f"{FIRST}.att", "lambda_init", differential_lambda(1))),
    fault("lambda_without_exponents",
          "Lambda is made of the products, not of their exponentials.", DIFFERENCE,
          Patch(DifferentialAttention, "difference",
                lambda module: 0.4 + module.lambda_q1 @ module.lambda_k1
                - module.lambda_q2 @ module.lambda_k2)),
    fault("softmaxes_added", "The second softmax is added.", DIFFERENCE,
          Wrap(DifferentialAttention, "difference",
               lambda difference, module: -difference(module))),
    fault("neighbours_paired",
          "Neighbouring heads are paired, as in the code of the paper.", DIFFERENCE,
          Wrap(DifferentialAttention, "_project",
               lambda project, module, *inputs: tuple(
                   x[..., [0, 2, 1, 3], :] for x in project(module, *inputs)))),
    fault("values_of_one_head", "Two paired heads attend to the values of one of them.", DIFFERENCE,
          Wrap(MultiHeadAttention, "_attend", own_values)),
    fault("no_norm_of_pairs", "The norm of each pair of heads is missing.", DIFFERENCE,
          Patch(differential, "rms_normed", lambda x, eps: x)),
    fault("norm_of_all_pairs", "The norm is over all pairs of heads together.", DIFFERENCE,
          Wrap(differential, "rms_normed",
               lambda normed, x, eps: normed(x.flatten(-2), eps).view_as(x))),
    fault("no_1_minus_lambda_init",
          "The normed heads are not multiplied by 1 - lambda_init.", DIFFERENCE,
          Wrap(differential, "rms_normed", lambda normed, x, eps: normed(x, eps) / 0.6)),
)  # fmt: skip

FAULTS = (*NORMS, *LAYERS, *SCALES, *GATES, *DIFFERENTIAL)
