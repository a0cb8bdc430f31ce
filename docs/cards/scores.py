"""Changes of the scores: what stands between the product of query and key and the weight."""

import warnings
from types import SimpleNamespace

import torch
from torch.nn.attention.flex_attention import flex_attention
from transformers import Qwen3Config, Qwen3NextConfig
from transformers.models.gemma2 import modeling_gemma2
from transformers.models.gpt_oss import modeling_gpt_oss
from transformers.models.qwen3.modeling_qwen3 import Qwen3Attention
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextAttention

import torch_ref
from cards.card import Card, code
from cards.twins import angles, causal, heads_first, loaded_as, tensor
from flax_attn.models.qwen3 import Qwen3
from flax_attn.models.qwen3next import Qwen3Next

WIDTH = 16


def grouped(names):
    """Return the eval-mode module that attention functions of transformers take."""
    sinks = tensor(names["sinks"]) if "sinks" in names else None
    return SimpleNamespace(num_key_value_groups=1, training=False, sinks=sinks)


def soft_capped(names):
    arrays = heads_first(names, "query", "key", "value")
    return modeling_gemma2.eager_attention_forward(
        grouped(names), *arrays, causal(10), scaling=WIDTH**-0.5, softcap=1.0
    )[0][0]


def with_sinks(names):
    arrays = heads_first(names, "query", "key", "value")
    return modeling_gpt_oss.eager_attention_forward(
        grouped(names), *arrays, causal(10), scaling=WIDTH**-0.5
    )[0][0]


def flexible(names):
    """FlexAttention, whose functions return the scores that are hidden as -inf."""

    def falling(score, b, n, i, j):
        return torch.where(j <= i, score - 0.3 * (i - j), -torch.inf)

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "flex_attention called without torch.compile")
        return flex_attention(*heads_first(names, "query", "key", "value"), score_mod=falling)[
            0
        ].transpose(0, 1)


def dropped(names):
    arrays = (tensor(names[name]) for name in ("query", "key", "value"))
    dropout = torch_ref.KeyedDropout(0.3, torch.tensor([0, 0]))
    return torch_ref.dot_product_attention(*arrays, mask=torch_ref.Mask.causal(), dropout=dropout)


def qwen(family, config, attention):
    """Return the attention of a family that norms its queries and keys."""

    def twin(names):
        sizes = {
            "hidden_size": 8,
            "num_attention_heads": 2,
            "num_key_value_heads": 2,
            "head_dim": 4,
        }
        theirs = attention(config(**sizes, rms_norm_eps=1e-6, attn_implementation="eager"), 0)
        theirs = loaded_as(family.layout, "att", "model.layers.0.self_attn", theirs, names["layer"])
        return theirs(tensor(names["x"])[None], angles(10, 4), causal(10))[0][0]

    return twin


def of_call(name, shows, argument, take, alt, equals, twin, proof, formula, reference, before=""):
    """Return the card of an argument of the call, whose picture is the weights of four heads."""
    call = f"""
    attended = attend(
        query, key, value, mask=Mask.causal(),
        {argument},
        return_weights=True)
    output, weights = attended.output, attended.weights
    """
    example = code(before, call)
    return Card(name, shows, take, example, "weights", alt, equals, twin, proof, formula, reference)


SCORES = (
    of_call(
        "Soft cap",
        ("Scores", "dot_product_attention"),
        "soft_cap=1.0",
        "Weights of Gemma 2, or scores that must not grow: they are bounded smoothly.",
        "Four heads, each a lower triangle of weights that differ little, as no score exceeds 1.",
        "transformers.models.gemma2.modeling_gemma2.eager_attention_forward(softcap=1.0)",
        soft_capped,
        ("multi_head_soft_cap_sinks", "gemma2"),
        "softmax(soft_cap * tanh(scale * q k^T / soft_cap))",
        "soft-capped",
    ),
    of_call(
        "Attention sinks",
        ("Scores",),
        "sinks=sinks",
        "Weights of gpt-oss, or heads that may attend to nothing: each has a logit that takes part"
        " in its softmax.",
        "Four heads, each a lower triangle; their rows add up to less the larger the sink of the"
        " head.",
        "transformers.models.gpt_oss.modeling_gpt_oss.eager_attention_forward(module, query, key,"
        " value)",
        with_sinks,
        ("multi_head_soft_cap_sinks", "gptoss"),
        "exp(score_j) / (exp(sink) + sum_j exp(score_j))",
        "sinks",
        before="""
        # a parameter; in layers Scores(sinks=True)
        sinks = jnp.array([-2.0, 0.0, 1.0, 2.0])
        """,
    ),
    of_call(
        "Function of scores",
        ("ScoreFunction",),
        "score=falling",
        "A change that has no name yet, as in FlexAttention. Arrays that the function captures have"
        " gradients.",
        "Four heads, each a lower triangle whose weights fall with the distance from the diagonal.",
        "torch.nn.attention.flex_attention.flex_attention(query, key, value, score_mod=falling)",
        flexible,
        ("multi_head_function_score",),
        before="""
        def falling(score, b, n, i, j):
            return score - 0.3 * (i - j)
        """,
        formula="",
        reference="",
    ),
    of_call(
        "Dropout",
        ("KeyedDropout", "Dropout"),
        "dropout=KeyedDropout(0.3, jax.random.key(0))",
        "Training. The same key drops the same weights in every backend, and in PyTorch.",
        "Four heads, each a lower triangle in which about three in ten weights are missing.",
        "torch_ref.dot_product_attention(dropout=KeyedDropout(0.3, key))",
        dropped,
        ("multi_head_causal", "multi_head_gqa"),
        "weight * kept(key, b, n, t, s) / (1 - rate)",
        "Hinton et al. 2012 (arXiv:1207.0580)",
    ),
    Card(
        "Norms of queries and keys",
        ("MultiHeadAttention", "RMSNorm"),
        "Weights of Qwen3, Gemma 3 or OLMo 2, or training at a high learning rate: scores stay"
        " bounded.",
        """
        layer = MultiHeadAttention(
            8, 8, None, 0.0, num_heads=2, out_bias=False,
            rope=RoPE(), q_norm=RMSNorm(4, 1e-6),
            k_norm=RMSNorm(4, 1e-6), rngs=rngs)
        attended = layer.attend(x, return_weights=True)
        output, weights = attended.output, attended.weights
        """,
        "weights",
        "Two heads, each a lower triangle of weights.",
        "transformers.models.qwen3.modeling_qwen3.Qwen3Attention",
        qwen(Qwen3.family, Qwen3Config, Qwen3Attention),
        ("multi_head_qk_norm", "multi_head_qk_norm_over_heads", "qwen3"),
        "softmax(mask(q_norm(q_i) k_norm(k_j)^T / sqrt(h)))",
        "norms of queries",
    ),
    Card(
        "Gated output",
        ("MultiHeadAttention",),
        "Weights of Qwen3-Next: what each head returns is multiplied by a sigmoid of the query's"
        " token.",
        """
        layer = MultiHeadAttention(
            8, 8, None, 0.0, num_heads=2, out_bias=False,
            rope=RoPE(), output_gate="features",
            q_norm=RMSNorm(4, 1e-6, zero_centred=True),
            k_norm=RMSNorm(4, 1e-6, zero_centred=True),
            rngs=rngs)
        output = layer(x)
        """,
        "influence(layer, x)",
        "A lower triangle with a strong diagonal: the gate adds the token's own influence to that"
        " of the keys.",
        "transformers.models.qwen3_next.modeling_qwen3_next.Qwen3NextAttention",
        qwen(Qwen3Next.family, Qwen3NextConfig, Qwen3NextAttention),
        ("multi_head_gated_features", "multi_head_gated_heads", "qwen3next"),
        "out_proj(concat_i(sigmoid(x W_gate)_i * head_i))",
        "gated outputs",
        ("output token", "input token"),
    ),
)
