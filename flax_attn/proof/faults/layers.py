"""Faults of norms, feed-forward layers, blocks and models."""

import torch
from torch import nn

from flax_attn.proof.faults.fault import Modify, Patch, Wrap, fault, swapped, zeros
from torch_ref import Embedding, GatedFeedForward, LayerNorm, RMSNorm, TransformerBlock
from torch_ref.modules import block

# The rows that are patched.
GPT2 = "block_gpt2"
GEMMA = "block_gemma2"


def layer_norm_patch(deviation):
    """Return the patch of a layer norm whose standard deviation is `deviation(x - mean, eps)`."""

    def forward(norm, x):
        x = x - x.mean(dim=-1, keepdim=True)
        return x / deviation(x, norm.eps) * norm.scale + norm.shift

    return Patch(LayerNorm, "forward", forward)


# The epsilon, the variance, the factor and the shift.
NORMS = (
    fault("another_epsilon", "The epsilon of a norm is 1e-6, not 1e-5.", GPT2,
          Patch("norm1", "eps", 1e-6)),
    fault("epsilon_outside_the_root", "The epsilon is added outside the root.", "layer_norm",
          layer_norm_patch(lambda x, eps: x.square().mean(dim=-1, keepdim=True).sqrt() + eps)),
    fault("unbiased_variance", "The variance is divided by d - 1, not by d.", "layer_norm",
          layer_norm_patch(lambda x, eps: (x.var(dim=-1, keepdim=True) + eps).sqrt())),
    fault("swapped_scale_and_shift", "The scale and the shift of a norm are swapped.", "layer_norm",
          *swapped("scale", "shift")),
    fault("no_shift", "The shift of a norm is missing.", "layer_norm", Modify("", "shift", zeros)),
    fault("centred_rms_norm", "RMSNorm subtracts the mean.", "rms_norm",
          Wrap(RMSNorm, "forward",
               lambda forward, norm, x: forward(norm, x - x.mean(dim=-1, keepdim=True)))),
    fault("scale_plus_one", "RMSNorm multiplies by 1 + scale, as in Gemma.", "rms_norm",
          Modify("", "scale", lambda scale: nn.Parameter(1 + scale.data))),
    fault("no_epsilon", "The epsilon of a norm is missing.", "rms_norm", Patch("", "eps", 0.0)),
)  # fmt: skip


def gated_patch(hidden):
    """Return the patch of a gated feed-forward layer with hidden features `hidden(layer, x)`."""
    return Patch(GatedFeedForward, "forward", lambda layer, x: layer.W_down(hidden(layer, x)))


# Activations, and what they are applied to.
FEED_FORWARD = (
    fault("exact_gelu_for_tanh", "GELU is exact, not the tanh form.", "feed_forward_tanh",
          Patch("layers", "1", nn.GELU())),
    fault("tanh_gelu_for_exact", "GELU has the tanh form, not the exact one.", "feed_forward_exact",
          Patch("layers", "1", nn.GELU(approximate="tanh"))),
    fault("quick_gelu", "GELU is x * sigmoid(1.702 x).", "feed_forward_exact",
          Patch(nn.GELU, "forward", lambda gelu, x: x * torch.sigmoid(1.702 * x))),
    fault("no_hidden_bias", "The bias of the hidden layer is missing.", "feed_forward_tanh",
          Modify("layers.0", "bias", zeros)),
    fault("gate_and_up_swapped", "The gate and what it multiplies are swapped.", "swiglu",
          *swapped("W_gate", "W_up")),
    fault("gelu_for_silu", "The activation of SwiGLU is GELU, not SiLU.", "swiglu",
          Patch("", "activation", nn.GELU())),
    fault("activation_of_both", "The activation is on both branches.", "swiglu",
          gated_patch(lambda layer, x: layer.activation(layer.W_gate(x))
                      * layer.activation(layer.W_up(x)))),
    fault("activation_of_the_product", "The activation comes after the product.", "swiglu",
          gated_patch(lambda layer, x: layer.activation(layer.W_gate(x) * layer.W_up(x)))),
    fault("sigmoid_for_silu", "The gate is a sigmoid, as in the first GLU.", "swiglu",
          Patch("", "activation", nn.Sigmoid())),
    fault("exact_gelu_in_the_gate", "The gate's GELU is exact, not the tanh form.", "geglu",
          Patch("", "activation", nn.GELU())),
)  # fmt: skip


def without_shortcut(add, layer, x, *others):
    """Return what is added to the residual, alone."""
    return add(layer, torch.zeros_like(x), *others)


def normed_shortcut(add, layer, x, y, norm, *others):
    """Add to the input after its norm."""
    return add(layer, norm(x), y, norm, *others)


def dropped_sum(layer, x, y, norm, post_norm, key):
    """Drop elements of the sum."""
    return layer.drop_shortcut(x + y, dropout_key=key)


def post_norm_of_the_sum(layer, x, y, norm, post_norm, key):
    """Normalise the sum."""
    return post_norm(x + layer.drop_shortcut(y, dropout_key=key))


# The order of norms, sums and dropout.
BLOCKS = (
    fault("swapped_norms", "The two norms are swapped.", GPT2, *swapped("norm1", "norm2")),
    fault("norm_after_for_norm_before", "The norm comes after the sum, not before the layer.", GPT2,
          Patch("", "norm_first", False)),
    fault("no_residual", "The residual connections are missing.", GPT2,
          Wrap(TransformerBlock, "_add", without_shortcut)),
    fault("residual_of_the_normed", "The residual is added to the input after its norm.", GPT2,
          Wrap(TransformerBlock, "_add", normed_shortcut)),
    fault("dropout_of_the_sum", "Dropout comes after the sum.", GPT2,
          Patch(TransformerBlock, "_add", dropped_sum), check="dropout"),
    fault("no_dropout_of_sublayers",
          "The output of attention and feed-forward is not dropped.", GPT2,
          Patch("", "drop_shortcut", None), check="dropout"),
    fault("one_key_for_all_dropout", "One dropout key is used everywhere.", GPT2,
          Patch(block, "fold_in", lambda key, index: key), check="dropout"),
    fault("post_norm_of_the_sum", "The post norm comes after the sum, not before it.", GEMMA,
          Patch(TransformerBlock, "_add", post_norm_of_the_sum)),
    fault("no_post_norm", "The post norm of the attention is missing.", GEMMA,
          Patch("", "post_norm1", None)),
    fault("swapped_post_norms", "The norms before and after the attention are swapped.", GEMMA,
          *swapped("norm1", "post_norm1")),
)  # fmt: skip

# Ids outside the table, and windows by layer.
MODELS = (
    fault("clamped_ids",
          "Token ids outside the table are clamped, and do not give NaN.", "embedding_outside",
          Patch(Embedding, "forward",
                lambda table, ids: table.weight[ids.clamp(0, table.num_embeddings - 1)])),
    fault("wrapped_ids",
          "Token ids outside the table wrap around, and do not give NaN.", "embedding_outside",
          Patch(Embedding, "forward", lambda table, ids: table.weight[ids % table.num_embeddings])),
    fault("window_in_every_layer",
          "Every layer has the window: max_window_layers is ignored.", "qwen2",
          Patch("trf_blocks.0.att", "window", 3)),
    fault("window_in_no_layer", "No layer has the window: use_sliding_window is ignored.", "qwen2",
          Patch("trf_blocks.1.att", "window", None)),
)  # fmt: skip

FAULTS = (*NORMS, *FEED_FORWARD, *BLOCKS, *MODELS)
