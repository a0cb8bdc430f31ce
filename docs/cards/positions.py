"""Positions: what tells one place in the text from another."""

import torch
from transformers import LlamaConfig, T5Config
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.bloom.modeling_bloom import build_alibi_tensor
from transformers.models.cohere.modeling_cohere import apply_rotary_pos_emb as apply_interleaved
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb
from transformers.models.t5.modeling_t5 import T5Attention
from transformers.models.xlm.modeling_xlm import create_sinusoidal_embeddings

from cards.card import Card
from cards.twins import angles, heads_first, loaded, tensor

HEADS, WIDTH, TRAINED = 4, 16, 40
FEATURES = ("feature, rotated", "feature")
SCALED = "scaling.frequencies(10000.0, 16)"
ROTATION = "rope(jnp.eye(16)[:, None], jnp.full(16, 3))[:, 0].T"


def halves(names):
    query = heads_first(names, "query")[0]
    return apply_rotary_pos_emb(query, query, *angles(10, WIDTH))[0][0].transpose(0, 1)


def interleaved(names):
    query = heads_first(names, "query")[0]
    cos, sin = (turned[..., : WIDTH // 2].repeat_interleave(2, -1) for turned in angles(10, WIDTH))
    return apply_interleaved(query, query, cos, sin)[0][0].transpose(0, 1)


def partial(names):
    query = heads_first(names, "query")[0]
    rotated = apply_rotary_pos_emb(query[..., :8], query[..., :8], *angles(10, 8))[0]
    return torch.cat([rotated, query[..., 8:]], -1)[0].transpose(0, 1)


def by_transformers(kind, length=None, longest=TRAINED, **fields):
    """Return a twin that rotates by the frequencies of a scaling of transformers."""

    def twin(names):
        config = LlamaConfig(
            hidden_size=HEADS * WIDTH,
            num_attention_heads=HEADS,
            max_position_embeddings=longest,
            rope_parameters={"rope_type": kind, "rope_theta": 10000.0, **fields},
        )
        frequencies, factor = ROPE_INIT_FUNCTIONS[kind](config, "cpu", length)
        turned = torch.outer(tensor(names["positions"]).double(), frequencies).repeat(1, 2)[None]
        query = heads_first(names, "query")[0]
        rotated = apply_rotary_pos_emb(query, query, turned.cos() * factor, turned.sin() * factor)[
            0
        ]
        return rotated[0].transpose(0, 1)

    return twin


def scaling(name, shows, arguments, take, alt, twin, kind, proof=(), scaled=SCALED, reference=""):
    """Return the card of a scaling; its picture shows how much each pair of features slows down."""
    example = f"""
    scaling = {shows}({arguments})
    rope = RoPE(scaling=scaling)
    positions = 10 * jnp.arange(10)
    output = rope(query, positions)
    """
    return Card(
        name,
        (shows, "RoPE"),
        take,
        example,
        f"10000.0 ** (-jnp.arange(0, 16, 2) / 16) / ({scaled})",
        alt,
        f"transformers.modeling_rope_utils.ROPE_INIT_FUNCTIONS('{kind}')",
        twin,
        proof,
        reference=reference,
        axes=("slowed by", "pair of features, from fast to slow"),
    )


def bloom(names):
    slopes = build_alibi_tensor(torch.ones(1, 10), HEADS, torch.float64)[None]
    q, k, v = heads_first(names, "query", "key", "value")
    hidden = torch.full((10, 10), -torch.inf).triu(1)
    output = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=slopes + hidden)
    return output[0].transpose(0, 1)


def t5(names):
    config = T5Config(
        d_model=8,
        d_kv=2,
        num_heads=HEADS,
        relative_attention_num_buckets=8,
        relative_attention_max_distance=8,
    )
    attention = T5Attention(config, has_relative_attention_bias=True)
    attention.relative_attention_bias.weight.data = tensor(names["table"])
    q, k, v = heads_first(names, "query", "key", "value")
    bias = attention.compute_bias(10, 10)
    output = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=bias, scale=1.0)
    return output[0].transpose(0, 1)


def xlm(names):
    return create_sinusoidal_embeddings(10, 8, torch.empty(10, 8)) + tensor(names["x"])


def learned(names):
    table = loaded(torch.nn.Embedding(10, 8), names["layer"], "torch")
    return tensor(names["x"]) + table(torch.arange(10))


POSITIONS = (
    Card(
        "Sinusoids",
        ("sinusoidal",),
        "Positions are added to the embeddings, and nothing about them is learned.",
        "output = x + sinusoidal(jnp.arange(10), width=8)",
        "sinusoidal(jnp.arange(24), 16)",
        "Waves down the positions: fast in the first features, slow in the last ones.",
        "transformers.models.xlm.modeling_xlm.create_sinusoidal_embeddings(n_pos, dim, out)",
        xlm,
        (),
        axes=("position", "feature"),
    ),
    Card(
        "Learned positions",
        ("Embedding",),
        "The longest input is known and short, as in GPT-2 and BERT: a vector for each position.",
        """
        layer = Embedding(10, 8, rngs=rngs)
        output = x + layer(jnp.arange(10))
        """,
        "layer.embedding[...]",
        "A table of numbers without a pattern: a row for each position.",
        "torch.nn.Embedding(10, 8)",
        learned,
        ("embedding", "gpt2"),
        "embedding[position]",
        "Gehring et al. 2017 (arXiv:1705.03122)",
        ("position", "feature"),
    ),
    Card(
        "Rotary, halves",
        ("RoPE",),
        "The default of new models: scores depend on distances alone. Weights of Llama, GPT-NeoX"
        " and most others.",
        """
        rope = RoPE()  # an argument of layers
        output = rope(query)
        """,
        ROTATION,
        "The rotation at position 3: feature i turns with feature i + 8, so that two diagonals"
        " flank the main one.",
        "transformers.models.llama.modeling_llama.apply_rotary_pos_emb(q, k, cos, sin)",
        halves,
        ("multi_head_rope", "llama"),
        "(x_a, x_b) -> (x_a cos - x_b sin, x_b cos + x_a sin)    angle: position * base ** (-2i /"
        " width)    pairs: (x_i, x_(i + width/2))",
        axes=FEATURES,
    ),
    Card(
        "Rotary, interleaved",
        ("RoPE",),
        "Weights come from GPT-J, Cohere, DeepSeek or the original Llama files, which pair"
        " neighbouring features.",
        """
        rope = RoPE(interleaved=True)
        output = rope(query)
        """,
        ROTATION,
        "The rotation at position 3: each feature turns with its neighbour, in two-by-two blocks on"
        " the diagonal.",
        "transformers.models.cohere.modeling_cohere.apply_rotary_pos_emb(q, k, cos, sin)",
        interleaved,
        ("multi_head_rope_yarn_packed", "latent_deepseek"),
        "as rotary halves, but pairs: (x_2i, x_(2i+1))",
        axes=FEATURES,
    ),
    Card(
        "Rotary, partial",
        ("RoPE",),
        "Only the first `width` features of a head carry the position, as in GPT-NeoX, Phi and"
        " Qwen3-Next.",
        """
        rope = RoPE(width=8)
        output = rope(query)
        """,
        ROTATION,
        "The rotation at position 3: the first eight features turn, the last eight stay as they"
        " are.",
        "transformers.models.llama.modeling_llama.apply_rotary_pos_emb(q[..., :8], k[..., :8], cos,"
        " sin)",
        partial,
        ("multi_head_partial_rope", "phi3"),
        formula="as rotary halves, of x_0 to x_(width-1) alone",
        reference="Black et al. 2022, GPT-NeoX (arXiv:2204.06745)",
        axes=FEATURES,
    ),
    scaling(
        "Linear scaling",
        "LinearScaling",
        "4.0",
        "The model was tuned with positions divided by a factor (position interpolation).",
        "Eight bars of the same height, 4: all pairs are slowed alike.",
        by_transformers("linear", factor=4.0),
        "linear",
    ),
    scaling(
        "Dynamic NTK scaling",
        "DynamicNTKScaling",
        "4.0, 40",
        "A model without further training is run on longer inputs than it was trained on.",
        "Bars that rise from 1 at the fastest pair to 6.1 at the slowest one, for an input of 91"
        " tokens.",
        by_transformers("dynamic", 91, factor=4.0),
        "dynamic",
        scaled=f"{SCALED} * scaling.stretch(jnp.array(91.0)) ** scaling.exponents(16)",
    ),
    scaling(
        "YaRN",
        "YaRNScaling",
        "4.0, 40",
        "The context was extended with YaRN, as in DeepSeek-V3, gpt-oss and many Qwen models.",
        "Bars at 1 for the fast pairs, then a ramp to 4 for the slow ones.",
        by_transformers("yarn", factor=4.0, original_max_position_embeddings=TRAINED),
        "yarn",
        ("multi_head_rope_yarn_packed", "deepseekv3"),
    ),
    scaling(
        "Llama 3 scaling",
        "Llama3Scaling",
        "8.0, 160",
        "Weights come from Llama 3.1 or later.",
        "Bars at 1 for the fast pairs, then a ramp to 8 for the slow ones.",
        by_transformers(
            "llama3",
            longest=1280,
            factor=8.0,
            low_freq_factor=1.0,
            high_freq_factor=4.0,
            original_max_position_embeddings=160,
        ),
        "llama3",
        reference="Llama Team",
    ),
    scaling(
        "LongRoPE",
        "LongRoPEScaling",
        "4.0, 40, (1.0,) * 8, tuple(range(1, 9))",
        "Every frequency has a factor of its own, as in Phi-3 and Phi-4 with long contexts.",
        "Bars with the factors for long inputs, from 1 to 8.",
        by_transformers(
            "longrope",
            91,
            factor=4.0,
            original_max_position_embeddings=TRAINED,
            short_factor=[1.0] * 8,
            long_factor=[float(i) for i in range(1, 9)],
        ),
        "longrope",
        ("multi_head_rope_longrope",),
        scaled="scaling.long_frequencies(10000.0, 16)",
    ),
    Card(
        "ALiBi",
        ("alibi", "alibi_slopes"),
        "Weights of BLOOM or MPT, or a model that is to run on longer inputs than those it was"
        " trained on.",
        """
        positions = jnp.arange(10)  # of queries, of keys
        bias = alibi(4, positions, positions)
        output = dot_product_attention(
            query, key, value, bias=bias,
            mask=Mask.causal())
        """,
        "jnp.exp(bias) * Mask.causal().materialise(1, 4, 10, 10)[0]",
        "Four heads: the factor on each weight falls with the distance, fast in the first head and"
        " slowly in the last.",
        "transformers.models.bloom.modeling_bloom.build_alibi_tensor(mask, heads, dtype)",
        bloom,
        ("multi_head_alibi",),
    ),
    Card(
        "T5 bias",
        ("t5_bias", "t5_buckets"),
        "Weights of T5: a learned number for each head and range of distances.",
        """
        # a parameter: buckets, heads
        table = jax.random.normal(jax.random.key(0), (8, 4))
        positions = jnp.arange(10)
        bias = t5_bias(
            table, positions, positions, max_distance=8)
        output = dot_product_attention(
            query, key, value, bias=bias, scale=1.0)
        """,
        "bias",
        "Four heads: every diagonal has one value, and far diagonals share theirs.",
        "transformers.models.t5.modeling_t5.T5Attention.compute_bias(10, 10)",
        t5,
        ("multi_head_t5", "t5"),
    ),
)
