"""Attention layers."""

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import (
    DeepseekV3Config,
    DiffLlamaConfig,
    LlamaConfig,
    ModernBertConfig,
    WhisperConfig,
)
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Attention
from transformers.models.diffllama.modeling_diffllama import DiffLlamaAttention
from transformers.models.llama.modeling_llama import LlamaAttention
from transformers.models.modernbert.modeling_modernbert import ModernBertAttention
from transformers.models.whisper.modeling_whisper import WhisperAttention

import torch_ref
from cards.card import Card
from cards.twins import angles, causal, loaded, loaded_as, tensor
from flax_attn.convert.rules import Rule
from flax_attn.models.deepseekv3 import DeepseekV3
from flax_attn.models.diffllama import DiffLlama
from flax_attn.models.hugging_face.family import linears

# The second line is indented as the examples are.
CALL = """attended = layer.attend(x, return_weights=True)
        output, weights = attended.output, attended.weights"""
SDPA = "torch.nn.functional.scaled_dot_product_attention"
TOKENS = ("output token", "input token")


def plain(names):
    x = tensor(names["x"])[None]
    return scaled_dot_product_attention(x, x, x, scale=1.0)[0]


def one_head(is_causal):
    """Return a twin that projects by hand and calls PyTorch's attention."""

    def twin(names):
        layer, x = names["layer"], tensor(names["x"])[None]
        q, k, v = (
            x @ tensor(one.kernel[...]) for one in (layer.W_query, layer.W_key, layer.W_value)
        )
        return scaled_dot_product_attention(q, k, v, is_causal=is_causal)[0]

    return twin


def several(names):
    heads = loaded(
        torch_ref.MultiHeadAttentionWrapper(8, 4, None, 0.0, num_heads=2),
        names["layer"],
        "torch_ref",
    )
    return heads(tensor(names["x"]))


def multi_head(names):
    theirs, x = (
        loaded(torch.nn.MultiheadAttention(8, 2, batch_first=True), names["layer"], "torch_mha"),
        names["x"],
    )
    x = tensor(x)[None]
    return theirs(x, x, x, attn_mask=causal(10)[0, 0], need_weights=False)[0][0]


def llama(num_kv_heads):
    """Return a twin that is the attention of a Llama with so many heads of keys and values."""

    def twin(names):
        config = LlamaConfig(
            hidden_size=8,
            num_attention_heads=4,
            num_key_value_heads=num_kv_heads,
            attn_implementation="eager",
        )
        theirs = loaded(LlamaAttention(config, 0), names["layer"], "hf_llama")
        return theirs(tensor(names["x"])[None], angles(10, 2), causal(10))[0][0]

    return twin


def whisper(names):
    config = WhisperConfig(d_model=8, decoder_attention_heads=2, attn_implementation="eager")
    theirs = WhisperAttention(8, 2, is_decoder=True, config=config, layer_idx=0)
    layout = linears(
        {"W_query": "q_proj", "W_key": "k_proj", "W_value": "v_proj", "out_proj": "out_proj"}
    )
    theirs = loaded(theirs, names["layer"], layout)
    return theirs(tensor(names["x"])[None], key_value_states=tensor(names["encoded"])[None])[0][0]


def modern_bert(names):
    config = ModernBertConfig(
        hidden_size=8, num_attention_heads=2, num_hidden_layers=2, attn_implementation="eager"
    )
    inputs = tuple(f"{name}.kernel" for name in ("W_query", "W_key", "W_value"))
    layout = [
        Rule(inputs, "Wqkv.weight", "i o -> o i"),
        Rule(("out_proj.kernel",), "Wo.weight", "i o -> o i"),
    ]
    theirs = loaded(ModernBertAttention(config, 1), names["layer"], layout)
    distance = (torch.arange(10)[:, None] - torch.arange(10)).abs()
    hidden = torch.zeros(10, 10).masked_fill(distance > 2, -torch.inf)[None, None]
    return theirs(tensor(names["x"])[None], angles(10, 4), hidden)[0][0]


def deepseek(names):
    config = DeepseekV3Config(
        hidden_size=8,
        num_attention_heads=2,
        num_key_value_heads=2,
        kv_lora_rank=6,
        q_lora_rank=None,
        qk_nope_head_dim=4,
        qk_rope_head_dim=2,
        v_head_dim=4,
        attn_implementation="eager",
    )
    theirs = loaded_as(
        DeepseekV3.family.layout,
        "att",
        "model.layers.0.self_attn",
        DeepseekV3Attention(config, 0),
        names["layer"],
    )
    return theirs(tensor(names["x"])[None], angles(10, 2), causal(10))[0][0]


def diff_llama(names):
    config = DiffLlamaConfig(
        hidden_size=8,
        num_attention_heads=4,
        num_key_value_heads=4,
        rms_norm_eps=1e-5,
        attn_implementation="eager",
    )
    theirs = loaded_as(
        DiffLlama.family.layout,
        "att",
        "model.layers.0.self_attn",
        DiffLlamaAttention(config, 0),
        names["layer"],
    )
    return theirs(tensor(names["x"])[None], angles(10, 2), causal(10))[0][0]


ATTENTION = (
    Card(
        "Simplified self-attention",
        ("SimplifiedSelfAttention", "single_head_attention"),
        "You learn what attention is: no parameters, no scaling.",
        f"""
        layer = SimplifiedSelfAttention()
        {CALL}
        """,
        "weights",
        "A square of weights, largest on the diagonal, as a token is most like itself.",
        f"{SDPA}(x, x, x, scale=1.0)",
        plain,
        ("simplified",),
        reference="Vaswani et al. 2017 (arXiv:1706.03762)",
    ),
    Card(
        "Self-attention",
        ("SelfAttention",),
        "One head, in both directions.",
        f"""
        layer = SelfAttention(8, 6, rngs=rngs)
        {CALL}
        """,
        "weights",
        "A square of weights: every token attends to every token.",
        f"{SDPA}(x W_query, x W_key, x W_value)",
        one_head(False),
        ("self_attention", "self_attention_d_key"),
    ),
    Card(
        "Causal attention",
        ("CausalAttention",),
        "One head that continues text.",
        f"""
        layer = CausalAttention(
            8, 6, context_length=16, dropout=0.0, rngs=rngs)
        {CALL}
        """,
        "weights",
        "A lower triangle of weights.",
        f"{SDPA}(x W_query, x W_key, x W_value, is_causal=True)",
        one_head(True),
        ("causal", "causal_d_key"),
        reference="Radford et al. 2018, GPT; Vaswani et al. 2017 (arXiv:1706.03762)",
    ),
    Card(
        "Heads side by side",
        ("MultiHeadAttentionWrapper",),
        "You want to read how several heads come about; `MultiHeadAttention` computes them at"
        " once.",
        """
        layer = MultiHeadAttentionWrapper(
            8, 4, 16, dropout=0.0, num_heads=2, rngs=rngs)
        output = layer(x)
        """,
        "influence(layer, x)",
        "A lower triangle: each token of the output depends on itself and on those before it.",
        "torch_ref.MultiHeadAttentionWrapper",
        several,
        ("multi_head_wrapper",),
        reference="Vaswani et al. 2017 (arXiv:1706.03762)",
        axes=TOKENS,
    ),
    Card(
        "Multi-head",
        ("MultiHeadAttention", "Attention", "HeadAttention"),
        "The default: GPT-2, BERT (`causal=False`), and whatever has no reason to be another.",
        f"""
        layer = MultiHeadAttention(
            8, 8, context_length=16, dropout=0.0,
            num_heads=2, qkv_bias=True, rngs=rngs)
        {CALL}
        """,
        "weights",
        "Two heads, each a lower triangle of weights of its own.",
        "torch.nn.MultiheadAttention(8, 2, batch_first=True)",
        multi_head,
        ("multi_head_causal", "multi_head_square", "multi_head_bidirectional"),
        reference="Vaswani",
    ),
    Card(
        "Grouped-query",
        ("MultiHeadAttention",),
        "Most new models: several query heads share a head of keys and values, and the cache is"
        " that much smaller.",
        f"""
        layer = MultiHeadAttention(
            8, 8, 16, 0.0, num_heads=4, num_kv_heads=2,
            out_bias=False, rope=RoPE(), rngs=rngs)
        {CALL}
        """,
        "weights",
        "Four heads, each a lower triangle; heads 0 and 1 share their keys, and so do heads 2"
        " and 3.",
        "transformers.models.llama.modeling_llama.LlamaAttention(num_key_value_heads=2)",
        llama(2),
        ("multi_head_gqa", "llama"),
        "softmax(mask(q_i k_j^T / sqrt(h))) v_j    with j = i // (num_heads / num_kv_heads)",
        "grouped-query",
    ),
    Card(
        "Multi-query",
        ("MultiHeadAttention",),
        "The cache must be as small as it gets: all heads share one head of keys and values.",
        f"""
        layer = MultiHeadAttention(
            8, 8, 16, 0.0, num_heads=4, num_kv_heads=1,
            out_bias=False, rope=RoPE(), rngs=rngs)
        {CALL}
        """,
        "weights",
        "Four heads, each a lower triangle; all share their keys.",
        "transformers.models.llama.modeling_llama.LlamaAttention(num_key_value_heads=1)",
        llama(1),
        ("multi_head_mqa",),
        "softmax(mask(q_i k^T / sqrt(h))) v",
        "multi-query",
    ),
    Card(
        "Cross-attention",
        ("CrossAttention",),
        "A decoder reads what an encoder returned; its keys and values are computed once and kept.",
        """
        layer = CrossAttention(8, 8, 0.0, num_heads=2,
            qkv_bias=True, out_bias=True, rngs=rngs)
        encoded = x[:6] + 1
        output = layer(x, layer.keep(encoded))
        """,
        "influence(lambda encoded: layer(x, layer.keep(encoded)), encoded)",
        "Ten rows, six columns: each token depends on all six tokens of the other sequence.",
        "transformers.models.whisper.modeling_whisper.WhisperAttention(is_decoder=True)",
        whisper,
        ("multi_head_cross", "t5", "whisper"),
        axes=("token", "token of the encoder"),
    ),
    Card(
        "Local",
        ("LocalAttention",),
        "Long text is encoded and most layers need neighbours only, as in ModernBERT.",
        f"""
        layer = LocalAttention(
            8, 8, 16, 0.0, num_heads=2, out_bias=False,
            reach=2, rope=RoPE(), rngs=rngs)
        {CALL}
        """,
        "weights",
        "Two heads, each a diagonal band of five keys.",
        "transformers.models.modernbert.modeling_modernbert.ModernBertAttention",
        modern_bert,
        ("modernbertmaskedlm",),
        "softmax(window(reach, reach)(q k^T / sqrt(h))) v",
    ),
    Card(
        "Latent (MLA)",
        ("MultiHeadLatentAttention",),
        "Weights of DeepSeek, or a cache that holds one small vector for each token instead of all"
        " heads.",
        f"""
        layer = MultiHeadLatentAttention(
            8, 8, 16, 0.0, num_heads=2, kv_lora_rank=6,
            qk_nope_head_dim=4, qk_rope_head_dim=2,
            v_head_dim=4, rope=RoPE(interleaved=True),
            kv_norm=RMSNorm(6, 1e-6), rngs=rngs)
        {CALL}
        """,
        "weights",
        "Two heads, each a lower triangle of weights.",
        "transformers.models.deepseek_v3.modeling_deepseek_v3.DeepseekV3Attention",
        deepseek,
        ("latent_deepseek", "latent_absorbed", "latent_plain", "deepseekv3"),
    ),
    Card(
        "Differential",
        ("DifferentialAttention",),
        "Weights of DiffLlama, or long texts of which little matters: one softmax is subtracted"
        " from another.",
        """
        layer = DifferentialAttention(
            8, 8, 16, 0.0, num_heads=4, out_bias=False,
            lambda_init=0.2, rope=RoPE(), rngs=rngs)
        output = layer(x)
        """,
        "influence(layer, x)",
        "A lower triangle: each token of the output depends on itself and on those before it.",
        "transformers.models.diffllama.modeling_diffllama.DiffLlamaAttention",
        diff_llama,
        ("multi_head_differential", "multi_head_differential_gqa", "diffllama"),
        axes=TOKENS,
    ),
)
