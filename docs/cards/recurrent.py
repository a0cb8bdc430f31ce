"""Linear attention: a state of fixed size instead of keys and values."""

from transformers import KimiLinearConfig, Qwen3NextConfig
from transformers.models.kimi_linear.modeling_kimi_linear import KimiLinearDeltaAttention
from transformers.models.qwen3_next.modeling_qwen3_next import (
    Qwen3NextGatedDeltaNet,
    torch_recurrent_gated_delta_rule,
)

from cards.card import Card
from cards.twins import loaded, loaded_as, tensor
from flax_attn.convert.rules import Rule
from flax_attn.models.hugging_face.family import linears
from flax_attn.models.qwen3next import Qwen3Next

KIMI = (
    *linears(
        {
            **{
                "W_query": "q_proj",
                "W_key": "k_proj",
                "W_value": "v_proj",
                "W_beta": "b_proj",
                "out_proj": "o_proj",
            },
            **{"W_decay_down": "forget_gate.f_a_proj", "W_decay_up": "forget_gate.f_b_proj"},
            **{"W_gate_down": "g_a_proj", "W_gate_up": "g_b_proj"},
        }
    ),
    Rule(
        tuple(f"conv_{name}.kernel" for name in ("query", "key", "value")),
        "conv1d.weight",
        "w d -> d 1 w",
    ),
    Rule(("rate.A_log",), "forget_gate.A_log", "n -> 1 1 n 1"),
    Rule(("rate.dt_bias",), "forget_gate.dt_bias"),
    Rule(("norm.scale",), "o_norm.weight"),
)


def rule(names):
    q, k, v = (tensor(names[name])[None] for name in ("q", "k", "v"))
    decay, beta = (tensor(names[name])[None] for name in ("decay", "beta"))
    return torch_recurrent_gated_delta_rule(q, k, v, decay, beta)[0][0]


def qwen3_next(names):
    config = Qwen3NextConfig(
        hidden_size=8,
        rms_norm_eps=1e-6,
        linear_num_value_heads=2,
        linear_num_key_heads=1,
        linear_key_head_dim=4,
        linear_value_head_dim=4,
    )
    name = "model.layers.0.linear_attn"
    theirs = loaded_as(
        Qwen3Next.family.layout, "att", name, Qwen3NextGatedDeltaNet(config, 0), names["layer"]
    )
    return theirs(tensor(names["x"])[None])[0]


def kimi(names):
    kinds = ["linear_attention", "full_attention"]
    config = KimiLinearConfig(
        hidden_size=8, num_hidden_layers=2, layer_types=kinds, rms_norm_eps=1e-6
    )
    config.linear_num_heads, config.linear_head_dim, config.linear_conv_kernel_dim = 2, 4, 4
    return loaded(KimiLinearDeltaAttention(config, 0), names["layer"], KIMI)(
        tensor(names["x"])[None]
    )[0]


RECURRENT = (
    Card(
        "Gated delta rule",
        ("gated_delta_rule",),
        "A linear attention of your own: what the state holds under a key is replaced, and all of"
        " it decays.",
        """
        k = k / jnp.linalg.norm(k, axis=-1, keepdims=True)
        decay = jnp.full((10, 1), -0.2)  # logarithms
        beta = jnp.full((10, 1), 0.7)
        output, state = gated_delta_rule(
            q, k, v, decay, beta)
        """,
        "influence(lambda v: gated_delta_rule(q, k, v, decay, beta)[0], v)",
        "A lower triangle that fades away from the diagonal: what was stored decays and is"
        " replaced.",
        "transformers.models.qwen3_next.modeling_qwen3_next.torch_recurrent_gated_delta_rule(q, k,"
        " v, decay, beta)",
        rule,
        ("gated_delta_net", "kimi_delta_attention"),
        axes=("output token", "token of the value"),
    ),
    Card(
        "Gated DeltaNet",
        ("GatedDeltaNet", "DeltaAttention", "DecayRate"),
        "Weights of Qwen3-Next, or text so long that a growing cache is too much: one decay a"
        " head.",
        """
        layer = GatedDeltaNet(8, 8, num_heads=2, head_dim=4,
            num_key_heads=1, rngs=rngs)
        output = layer(x)
        """,
        "jnp.exp(layer.decay(x))",
        "Ten tokens and two heads: one number a head says how much of its state remains.",
        "transformers.models.qwen3_next.modeling_qwen3_next.Qwen3NextGatedDeltaNet",
        qwen3_next,
        ("gated_delta_net", "gated_delta_net_packed", "gated_delta_net_ragged", "qwen3next"),
        axes=("token", "head"),
    ),
    Card(
        "Kimi Delta Attention",
        ("KimiDeltaAttention",),
        "Weights of Kimi Linear, or a state that forgets each feature at its own rate.",
        """
        layer = KimiDeltaAttention(
            8, 8, num_heads=2, head_dim=4, rngs=rngs)
        output = layer(x)
        """,
        "jnp.exp(layer.decay(x)).reshape(10, 8)",
        "Ten tokens and eight features, four of each head: each feature of the state remains by its"
        " own part.",
        "transformers.models.kimi_linear.modeling_kimi_linear.KimiLinearDeltaAttention",
        kimi,
        ("kimi_delta_attention", "kimi_delta_attention_packed"),
        axes=("token", "feature of the key"),
    ),
)
