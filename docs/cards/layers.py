"""What stands around attention in a block, and the block."""

import torch
from torch.nn.functional import silu
from transformers import (
    Dinov2Config,
    GPT2Config,
    GptOssConfig,
    LlamaConfig,
    MixtralConfig,
    ViTConfig,
)
from transformers.models.dinov2.modeling_dinov2 import Dinov2LayerScale
from transformers.models.gemma2.modeling_gemma2 import Gemma2RMSNorm
from transformers.models.gpt2.modeling_gpt2 import GPT2MLP, GPT2Block
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssMLP
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm
from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock
from transformers.models.vit.modeling_vit import ViTPatchEmbeddings

from cards.card import Card, code
from cards.twins import causal, loaded, loaded_as, tensor
from flax_attn import convert
from flax_attn.convert.rules import Rule
from flax_attn.models.gpt2 import GPT2
from flax_attn.models.gptoss import GptOss
from flax_attn.models.hugging_face.family import linears
from flax_attn.models.mixtral import Mixtral

CALL = "output = layer(x)"
ROUTING = """
routing = layer.router(x)  # experts, weights
output = layer(x)
"""
TOKENS, FEATURES, HIDDEN = (
    ("output token", "input token"),
    ("token", "feature"),
    ("token", "hidden feature"),
)
ROUTED = "(jax.nn.one_hot(routing.experts, 4) * routing.weights[..., None]).sum(1)"
LLAMA = {"W_gate": "gate_proj", "W_up": "up_proj", "W_down": "down_proj"}
NEEDS_SIZES = {"hidden_size": 8, "intermediate_size": 6}


def of_x(make, layout="torch", batched=False):
    """Return a twin that applies one module, with our weights, to the x of the example."""

    def twin(names):
        theirs, x = loaded(make(), names["layer"], layout), tensor(names["x"])
        return theirs(x[None])[0] if batched else theirs(x)

    return twin


def gpt2_block(names):
    config = GPT2Config(n_embd=8, n_head=2, n_inner=12, attn_implementation="eager")
    theirs = loaded_as(
        GPT2.family.layout, "", "transformer.h.0", GPT2Block(config, 0), names["layer"]
    )
    found = theirs(tensor(names["x"])[None], attention_mask=causal(10))
    return (found if isinstance(found, torch.Tensor) else found[0])[0]


def decoder_layer(names):
    layer = names["layer"]
    weights = {
        **convert.state_dict(layer.att, "torch_mha", prefix="self_attn."),
        **convert.state_dict(layer.cross, "torch_mha", prefix="multihead_attn."),
        **convert.state_dict(layer.ff, linears({"layers.0": "linear1", "layers.2": "linear2"})),
    }
    for i in (1, 2, 3):
        weights |= convert.state_dict(getattr(layer, f"norm{i}"), "torch", prefix=f"norm{i}.")
    theirs = torch.nn.TransformerDecoderLayer(
        8, 2, 12, 0.0, "gelu", batch_first=True, norm_first=True
    ).eval()
    theirs.load_state_dict({name: tensor(array) for name, array in weights.items()})
    x, encoded = (tensor(names[name])[None] for name in ("x", "encoded"))
    return theirs(x, encoded, tgt_mask=causal(10)[0, 0])[0]


def mixtral(names):
    config = MixtralConfig(**NEEDS_SIZES, num_local_experts=4, num_experts_per_tok=2)
    layout = Mixtral.family.others[0]
    theirs = loaded_as(
        layout, "ff", "model.layers.0.mlp", MixtralSparseMoeBlock(config), names["layer"]
    )
    return theirs(tensor(names["x"])[None])[0]


def gpt_oss(names):
    config = GptOssConfig(**NEEDS_SIZES, num_local_experts=4, num_experts_per_tok=2)
    theirs = loaded_as(
        GptOss.family.layout, "ff", "model.layers.0.mlp", GptOssMLP(config), names["layer"]
    )
    return theirs(tensor(names["x"])[None])[0].reshape(10, 8)


def patches(names):
    config = ViTConfig(image_size=(4, 6), patch_size=(2, 2), num_channels=1, hidden_size=8)
    layout = [
        Rule(("proj.kernel",), "projection.weight", "(c p q) d -> d c p q"),
        Rule(("proj.bias",), "projection.bias"),
    ]
    return loaded(ViTPatchEmbeddings(config), names["layer"], layout)(tensor(names["image"])[None])[
        0
    ]


def convolution(names):
    layout = [Rule(("proj.kernel",), "weight", "(c k) d -> d c k"), Rule(("proj.bias",), "bias")]
    theirs = loaded(torch.nn.Conv1d(8, 8, 3, stride=2, padding=1), names["layer"], layout)
    return theirs(tensor(names["x"]).T[None])[0].T


def short_convolution(names):
    theirs = torch.nn.Conv1d(8, 8, 3, padding=2, groups=8, bias=False)
    theirs = loaded(theirs, names["layer"], [Rule(("kernel",), "weight", "w d -> d 1 w")])
    return silu(theirs(tensor(names["x"]).T[None])[0, :, :10]).T


def card(
    name,
    shows,
    layer,
    take,
    alt,
    equals,
    twin,
    proof,
    picture="output",
    axes=FEATURES,
    call=CALL,
    **more,
):
    """Return the card of a layer."""
    example = code(f"layer = {code(layer)}", call)
    return Card(name, shows, take, example, picture, alt, equals, twin, proof, axes=axes, **more)


LAYERS = (
    card(
        "Linear",
        ("Linear", "QuantizedLinear"),
        "Linear(8, 6, rngs=rngs)",
        "A projection that starts as `torch.nn.Linear` does; `nnx.Linear` starts differently."
        " `QuantizedLinear` holds its matrix in 8 or 4 bits, for generating.",
        "Ten tokens with six features each.",
        "torch.nn.Linear(8, 6)",
        of_x(lambda: torch.nn.Linear(8, 6)),
        ("multi_head_causal",),
        reference="He et al. 2015, the distribution (arXiv:1502.01852)",
    ),
    card(
        "Layer norm",
        ("LayerNorm",),
        "LayerNorm(8)",
        "GPT-2, BERT, ViT and Whisper. Its epsilon is PyTorch's 1e-5, and its variance takes two"
        " passes.",
        "Ten tokens with eight features each: columns differ by their scales and shifts.",
        "torch.nn.LayerNorm(8)",
        of_x(lambda: torch.nn.LayerNorm(8)),
        ("layer_norm",),
    ),
    card(
        "RMS norm",
        ("RMSNorm",),
        "RMSNorm(8, 1e-6)",
        "Llama and most models after it: no mean is subtracted.",
        "Ten tokens with eight features each: columns differ by their scales.",
        "transformers.models.llama.modeling_llama.LlamaRMSNorm",
        of_x(lambda: LlamaRMSNorm(8, 1e-6)),
        ("rms_norm",),
        reference="Zhang",
    ),
    card(
        "RMS norm, zero-centred",
        ("RMSNorm",),
        "RMSNorm(8, 1e-6, zero_centred=True)",
        "Gemma and Qwen3-Next: the weight is the difference from 1.",
        "Ten tokens with eight features each: columns differ by one plus their scales.",
        "transformers.models.gemma2.modeling_gemma2.Gemma2RMSNorm",
        of_x(lambda: Gemma2RMSNorm(8, 1e-6)),
        ("rms_norm_zero_centred",),
        formula="x / sqrt(mean(x^2) + eps) * (1 + scale)",
        reference="zero-centred",
    ),
    card(
        "Feed-forward",
        ("FeedForward",),
        "FeedForward(8, 12, rngs=rngs)",
        "GPT-2, BERT and ViT. GPT-2 has GELU's tanh form, BERT and ViT the exact one:"
        " `activation='gelu_exact'`.",
        "Ten tokens with twelve hidden features each, of which GELU sets about half close to zero.",
        "transformers.models.gpt2.modeling_gpt2.GPT2MLP",
        of_x(
            lambda: GPT2MLP(12, GPT2Config(n_embd=8)),
            linears({"layers.0": "c_fc", "layers.2": "c_proj"}, pattern=""),
        ),
        ("feed_forward_tanh", "feed_forward_exact"),
        picture="jax.nn.gelu(layer.layers[0](x))",
        axes=HIDDEN,
    ),
    card(
        "Gated feed-forward",
        ("GatedFeedForward",),
        "GatedFeedForward(8, 12, rngs=rngs)",
        "Llama (SwiGLU, the default) and Gemma (GeGLU, `activation='gelu_tanh'`).",
        "Ten tokens with twelve gates each, of which SiLU sets about half close to zero.",
        "transformers.models.llama.modeling_llama.LlamaMLP",
        of_x(
            lambda: LlamaMLP(
                LlamaConfig(hidden_size=8, intermediate_size=12, num_attention_heads=2)
            ),
            linears(LLAMA),
        ),
        ("swiglu", "geglu"),
        picture="jax.nn.silu(layer.W_gate(x))",
        axes=HIDDEN,
    ),
    card(
        "Mixture of experts",
        ("MixtureOfExperts", "Router", "Routing", "Experts", "load_balancing_loss"),
        """
        MixtureOfExperts(
            Router(8, 4, 2, rngs=rngs),
            Experts(4, 8, 6, "silu", rngs=rngs))
        """,
        "More parameters at the cost of fewer: Mixtral, Qwen3-MoE, DeepSeek-V3. No token is"
        " dropped.",
        "Ten tokens and four experts: each token gives its weight to two of them.",
        "transformers.models.mixtral.modeling_mixtral.MixtralSparseMoeBlock",
        mixtral,
        ("moe_mixtral", "moe_dense", "moe_qwen2", "moe_deepseek_v3", "mixtral"),
        picture=ROUTED,
        axes=("token", "expert"),
        call=ROUTING,
    ),
    card(
        "Clamped SwiGLU experts",
        ("ClampedSwiGLU",),
        """
        MixtureOfExperts(
            Router(8, 4, 2, bias=True, rngs=rngs),
            Experts(4, 8, 6, ClampedSwiGLU(), bias=True,
                rngs=rngs))
        """,
        "Weights of gpt-oss.",
        "Ten tokens and four experts: each token gives its weight to two of them.",
        "transformers.models.gpt_oss.modeling_gpt_oss.GptOssMLP",
        gpt_oss,
        ("moe_gpt_oss", "gptoss"),
        picture=ROUTED,
        axes=("token", "expert"),
        call=ROUTING,
    ),
    card(
        "Transformer block",
        ("TransformerBlock",),
        """
        TransformerBlock(
            MultiHeadAttention(8, 8, 16, 0.0, num_heads=2,
                qkv_bias=True, rngs=rngs),
            FeedForward(8, 12, rngs=rngs),
            LayerNorm(8), LayerNorm(8))
        """,
        "Attention and a feed-forward layer with norms and residual connections, built from parts"
        " of your choice.",
        "A lower triangle with a strong diagonal, as the residual connections carry each token on.",
        "transformers.models.gpt2.modeling_gpt2.GPT2Block",
        gpt2_block,
        ("block_gpt2", "block_llama", "block_bert", "block_gemma2", "block_olmo2", "block_mixtral"),
        picture="influence(layer, x)",
        axes=TOKENS,
    ),
    card(
        "Block with cross-attention",
        ("CrossBlock",),
        """
        CrossBlock(
            MultiHeadAttention(8, 8, 16, 0.0, num_heads=2,
                qkv_bias=True, rngs=rngs),
            CrossAttention(8, 8, 0.0, num_heads=2,
                qkv_bias=True, key_bias=True, rngs=rngs),
            FeedForward(8, 12, "gelu_exact", rngs=rngs),
            LayerNorm(8), LayerNorm(8), LayerNorm(8))
        """,
        "The decoder of an encoder-decoder: T5, Whisper, translation.",
        "Ten rows, six columns: each token depends on all six tokens of the encoder.",
        "torch.nn.TransformerDecoderLayer(norm_first=True)",
        decoder_layer,
        ("t5", "whisper"),
        picture="influence(lambda encoded: layer(x, layer.cross.keep(encoded)), encoded)",
        axes=("token", "token of the encoder"),
        call="""
        encoded = x[:6] + 1
        output = layer(x, layer.cross.keep(encoded))
        """,
    ),
    card(
        "Layer scale",
        ("LayerScale",),
        "LayerScale(8)",
        "DINOv2: what a layer adds is scaled by a vector that starts small.",
        "Ten tokens with eight features each; a column is faint where its scale is small.",
        "transformers.models.dinov2.modeling_dinov2.Dinov2LayerScale",
        of_x(lambda: Dinov2LayerScale(Dinov2Config(hidden_size=8)), [Rule(("scale",), "lambda1")]),
        ("dinov2",),
    ),
    card(
        "Patches",
        ("Patches",),
        "Patches(8, 1, 2, 2, rngs=rngs)",
        "Images become tokens: ViT and DINOv2.",
        "Six patches by 24 pixels, in rows of six: each token depends on the four pixels of its"
        " patch.",
        "transformers.models.vit.modeling_vit.ViTPatchEmbeddings",
        patches,
        ("vit", "dinov2"),
        picture="influence(lambda pixels: layer(pixels.reshape(1, 4, 6)), image.reshape(24, 1))",
        axes=("token", "pixel"),
        call="""
        image = x[:3].reshape(1, 4, 6)  # c, rows, columns
        output = layer(image)
        """,
    ),
    card(
        "Convolution over tokens",
        ("Convolution",),
        """
        Convolution(8, 8, width=3, stride=2,
            rngs=rngs)
        """,
        "Sound becomes tokens: the two layers before Whisper's encoder.",
        "Five output tokens, each depending on three input tokens; the windows move by two.",
        "torch.nn.Conv1d(8, 8, 3, stride=2, padding=1)",
        convolution,
        ("whisper",),
        picture="influence(layer, x)",
        axes=TOKENS,
        formula=(
            "proj(x_(stride i - r), ..., x_(stride i + r))    with r = width // 2, and 0 outside"
        ),
    ),
    card(
        "Short causal convolution",
        ("ShortConvolution",),
        "ShortConvolution(8, 3, rngs=rngs)",
        "Queries, keys and values of linear attention see the few tokens before them.",
        "A diagonal band: each token depends on itself and on the two before it.",
        "torch.nn.Conv1d(8, 8, 3, padding=2, groups=8)",
        short_convolution,
        ("gated_delta_net",),
        picture="influence(lambda x: layer(x).output, x)",
        call="output = layer(x).output",
        axes=TOKENS,
        reference="Yang et al. 2024, Gated DeltaNet (arXiv:2412.06464)",
    ),
)
