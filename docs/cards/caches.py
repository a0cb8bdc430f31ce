"""Caches: what a layer keeps of the tokens so far."""

import torch
from transformers import DynamicCache, LlamaConfig
from transformers.models.llama.modeling_llama import LlamaAttention

from cards.card import Card, code
from cards.recurrent import qwen3_next
from cards.twins import angles, loaded, tensor

STEPS = """
cache, steps = layer.init_cache(None, {capacity}), []
for tokens in (x[:6], x[6:]):  # a prompt, more
    step = layer.attend(tokens, cache=cache)
    cache = step.cache
    steps.append(step.output)
output = jnp.concatenate(steps)
"""
HELD = "held(KVCache.zeros(None, {capacity}, 1, 1, window={window}))"
AXES = ("tokens so far", "slot")


def llama(window=None):
    """Return a twin that is the attention of a Llama, with a cache and in the same steps."""

    def twin(names):
        config = LlamaConfig(hidden_size=8, num_attention_heads=2, attn_implementation="eager")
        theirs, cache = (
            loaded(LlamaAttention(config, 0), names["layer"], "hf_llama"),
            DynamicCache(),
        )
        x, (cos, sin), found = tensor(names["x"])[None], angles(10, 4), []
        for start, stop in ((0, 6), (6, 10)):
            i, j = torch.arange(start, stop)[:, None], torch.arange(stop)[None]
            seen = (j <= i) & (j > i - (window or 10))
            hidden = torch.zeros(seen.shape).masked_fill(~seen, -torch.inf)[None, None]
            turned = cos[:, start:stop], sin[:, start:stop]
            found.append(theirs(x[:, start:stop], turned, hidden, past_key_values=cache)[0][0])
        return torch.cat(found)

    return twin


def attention(more=""):
    """Return the code of a layer as a Llama has it."""
    return f"""
    layer = MultiHeadAttention(
        8, 8, 16, 0.0, num_heads=2, out_bias=False,
        rope=RoPE(){more}, rngs=rngs)
    """


CACHES = (
    Card(
        "Keys and values",
        ("KVCache", "Cache"),
        "Text is made token by token; rows may differ in length, and the same program serves every"
        " step.",
        code(attention(), STEPS.format(capacity=10)),
        HELD.format(capacity=10, window=None),
        "Ten steps: after each one more slot is taken. The stronger the colour, the later the"
        " position.",
        "transformers.cache_utils.DynamicCache",
        llama(),
        ("multi_head_causal", "multi_head_ragged", "gpt2"),
        reference="Shazeer 2019 (arXiv:1911.02150)",
        axes=AXES,
    ),
    Card(
        "Ring buffer",
        ("KVCache",),
        "The layer has a window: the cache stays as small as the window, and the text has no end.",
        code(attention(", window=4"), STEPS.format(capacity=6)),
        HELD.format(capacity=6, window=4),
        "Ten steps over six slots: new positions overwrite the oldest. The stronger the colour, the"
        " later.",
        "transformers.cache_utils.DynamicCache",
        llama(4),
        ("multi_head_window", "latent_window"),
        formula="slot(position) = position mod capacity",
        reference="Jiang et al. 2023, Mistral (arXiv:2310.06825)",
        axes=AXES,
    ),
    Card(
        "State of linear attention",
        ("DeltaCache",),
        "The layer is a Gated DeltaNet or Kimi Delta Attention: the size does not depend on the"
        " number of tokens.",
        """
        layer = GatedDeltaNet(8, 8, num_heads=2, head_dim=4,
            num_key_heads=1, rngs=rngs)
        empty = layer.init_cache(None, 10)
        attended = layer.attend(x, cache=empty)
        output, cache = attended.output, attended.cache
        """,
        "cache.state",
        "Two heads: a square of four by four numbers each, whatever the number of tokens.",
        "transformers.models.qwen3_next.modeling_qwen3_next.Qwen3NextGatedDeltaNet",
        qwen3_next,
        ("gated_delta_net", "gated_delta_net_ragged", "kimi_delta_attention"),
        formula="S_t = decay_t S_(t-1) (I - beta_t k_t k_t^T) + beta_t v_t k_t^T",
        reference="Yang et al. 2024 (arXiv:2412.06464)",
        axes=("feature of the value", "feature of the key"),
    ),
)
