"""`hidden_activation` of Gemma, which Flax reads and PyTorch does not."""

import jax.numpy as jnp
import numpy as np
import torch
import transformers
from transformers.models.gemma.modeling_flax_gemma import FlaxGemmaMLP

SIZES = {
    "vocab_size": 37,
    "hidden_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "head_dim": 12,
}
SIZES |= {"intermediate_size": 40, "num_key_value_heads": 2}
x = np.linspace(-3, 3, 7, dtype=np.float32)
for name in ("gelu_pytorch_tanh", "gelu"):
    config = transformers.GemmaConfig(**SIZES, hidden_activation=name)
    theirs = transformers.GemmaModel(config).layers[0].mlp.act_fn
    ours = FlaxGemmaMLP(config).bind({}).act
    tanh = torch.nn.functional.gelu(torch.tensor(x), approximate="tanh").numpy()
    exact = torch.nn.functional.gelu(torch.tensor(x)).numpy()
    for side, got in (
        ("Flax", np.asarray(ours(jnp.asarray(x)))),
        ("PyTorch", theirs(torch.tensor(x)).numpy()),
    ):
        far = {"tanh": abs(got - tanh).max(), "exact": abs(got - exact).max()}
        print(
            f"hidden_activation={name!r}, {side}: {min(far, key=far.get)} GELU,"
            f" {min(far.values()):.0e} off"
        )
