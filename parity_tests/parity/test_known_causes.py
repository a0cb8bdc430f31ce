"""Causes in layers of Flax, JAX and transformers: precision, one-pass variance, windows."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers
from flax import nnx

import flax_attn
from flax_attn.convert import LAYOUTS, Rule
from flax_attn.convert.rules import Layout
from flax_attn.models import from_pretrained
from flax_attn.parity.adapters.jax_adapter import JaxAdapter
from flax_attn.parity.adapters.torch_adapter import TorchAdapter
from flax_attn.parity.pair import Pair, weight_map
from flax_attn.parity.trace.localise import localise


class FlaxPreNorm(nnx.Module):
    def __init__(self, **norm):
        self.norm = nnx.LayerNorm(
            8, epsilon=1e-5, param_dtype=jnp.float64, rngs=nnx.Rngs(0), **norm
        )
        self.att = nnx.MultiHeadAttention(
            2, 8, decode=False, param_dtype=jnp.float64, rngs=nnx.Rngs(0)
        )

    def __call__(self, x):
        return self.att(self.norm(x))


class TorchPreNorm(torch.nn.Module):
    def __init__(self, attend=torch.nn.functional.scaled_dot_product_attention):
        super().__init__()
        self.norm, self.attend = torch.nn.LayerNorm(8), attend
        self.att = torch.nn.ModuleDict(
            {name: torch.nn.Linear(8, 8) for name in ("query", "key", "value", "out")}
        )

    def forward(self, x):
        x = self.norm(x)
        q, k, v = (
            self.att[name](x).unflatten(-1, (2, 4)).transpose(1, 2)
            for name in ("query", "key", "value")
        )
        return self.att["out"](self.attend(q, k, v).transpose(1, 2).flatten(2))


PRE_NORM = Layout(
    (
        Rule(("norm.scale",), "norm.weight"),
        Rule(("norm.bias",), "norm.bias"),
        Rule(("att.out.kernel",), "att.out.weight", "n d o -> o (n d)"),
        Rule(("att.out.bias",), "att.out.bias"),
        *(
            Rule((f"att.{name}.kernel",), f"att.{name}.weight", "i n d -> (n d) i")
            for name in ("query", "key", "value")
        ),
        *(
            Rule((f"att.{name}.bias",), f"att.{name}.bias", "n d -> (n d)")
            for name in ("query", "key", "value")
        ),
    )
)


def located(pair):
    with jax.numpy_dtype_promotion("standard"):  # which the layers of Flax need
        return localise(pair)


def test_the_float32_softmax_of_flax_is_a_cause(paired):
    divergence = located(paired(FlaxPreNorm(), TorchPreNorm(), (3, 5, 8), layout=PRE_NORM))
    assert 1e-9 < divergence.nodes[-1].error < 1e-6
    assert divergence.causes == (
        "the whole module: flax has the softmax in float32, torch in float64",
    )
    assert str(divergence).startswith(divergence.causes[0])


def float32_softmax(q, k, v):
    scores = q @ k.transpose(2, 3) / 2
    return scores.softmax(-1, dtype=torch.float32).to(q.dtype) @ v


def test_the_float32_softmax_of_both_is_a_cause(paired):
    divergence = located(
        paired(FlaxPreNorm(), TorchPreNorm(float32_softmax), (3, 5, 8), layout=PRE_NORM)
    )
    assert divergence.causes == (
        "the whole module: both have the softmax in float32, where their roundings differ",
    )


def test_float32_rotary_angles_are_a_cause(paired):
    angles = np.outer(np.arange(5), 10000.0 ** (-np.arange(4) / 4))[None]

    def rotated(x, cos, sin):
        return x * cos + x[..., ::-1] * sin

    def ours(x):
        return rotated(x, jnp.cos(jnp.asarray(angles)), jnp.sin(jnp.asarray(angles)))

    def theirs(x):
        low = torch.from_numpy(angles).float()
        return x * low.cos().double() + x.flip(-1) * low.sin().double()

    divergence = localise(paired(ours, theirs, (3, 5, 4)))
    assert divergence.causes == (
        "the whole module: flax has cos and sin (rotary angles) in float64, torch in float32",
    )


@pytest.mark.parametrize("fast", [True, False])
def test_the_variance_of_flax_in_one_pass_is_a_cause(fast):
    x = 1e3 + np.random.default_rng(0).normal(size=(3, 5, 8))
    flax = nnx.LayerNorm(
        8, epsilon=1e-5, param_dtype=jnp.float64, use_fast_variance=fast, rngs=nnx.Rngs(0)
    )
    ours, theirs = JaxAdapter(flax), TorchAdapter(torch.nn.LayerNorm(8))
    ours.entries = weight_map(flax, ours.shapes, theirs.shapes, LAYOUTS["torch"])
    divergence = located(Pair(ours, theirs, {"input 0": x}, ours.entries))
    cause = (
        "the whole module: flax has the variance in one pass, mean(x^2) - mean(x)^2, torch in two"
    )
    assert divergence.causes == ((cause,) if fast else ())


def test_a_sliding_window_that_one_side_lacks_is_a_cause(paired):
    def ours(q, k, v):
        return flax_attn.dot_product_attention(q, k, v, mask=flax_attn.Mask.causal())

    def theirs(q, k, v):
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        window = torch.ones(5, 5, dtype=bool).tril().triu(-2)
        return torch.nn.functional.scaled_dot_product_attention(
            q, k, v, attn_mask=window
        ).transpose(1, 2)

    divergence = localise(paired(ours, theirs, *[(2, 5, 3, 4)] * 3))
    assert divergence.causes == (
        (
            "./masked: flax has a causal mask, query i sees keys up to i, "
            "torch has a sliding window, query i sees keys i - 2 to i"
        ),
    )


LLAMA = {
    "vocab_size": 13,
    "hidden_size": 12,
    "intermediate_size": 10,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "num_hidden_layers": 1,
    "max_position_embeddings": 16,
}
ROOT = "flax has the root in a norm in float64, torch in float32"


@pytest.mark.parametrize(
    ("attention", "cause"),
    [
        ("eager", "model.layers.0.self_attn: flax has the softmax in float64, torch in float32"),
        (
            "sdpa",
            "the whole module: flax has cos and sin (rotary angles) in float64, torch in float32",
        ),
    ],
)
def test_what_transformers_computes_in_float32_is_a_cause(attention, cause, tmp_path):
    config = transformers.LlamaConfig(**LLAMA, bos_token_id=None, eos_token_id=None)
    model = (
        transformers.AutoModelForCausalLM.from_config(config, attn_implementation=attention)
        .double()
        .eval()
    )
    model.save_pretrained(tmp_path)
    loaded = from_pretrained(tmp_path)
    ours = JaxAdapter(loaded)
    theirs = TorchAdapter(model, lambda model, x: model(x).logits)
    ours.entries = weight_map(loaded, ours.shapes, theirs.shapes, loaded.family.layout)
    tokens = np.random.default_rng(0).integers(0, 13, (3, 7))
    divergence = localise(Pair(ours, theirs, {"input 0": tokens}, ours.entries))
    norms = [f"model.layers.0.{name}_layernorm: {ROOT}" for name in ("input", "post_attention")]
    assert divergence.causes == (norms[0], cause, norms[1], f"model.norm: {ROOT}")
