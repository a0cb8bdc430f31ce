"""A hundred steps of AdamW: `train_step` and optax against torch.optim.

The PyTorch models are our twins and transformers' own.
"""

from importlib import import_module
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch
import transformers
from flax import nnx
from torch.nn import functional
from transformers.models.llama import modeling_llama

import flax_attn
import torch_ref
import torch_ref.models.loss
from flax_attn import convert
from flax_attn.models import from_pretrained
from flax_attn.parity import tolerance
from flax_attn.training import train_step

STEPS, VOCAB, CONTEXT = 100, 17, 10
RATE, BETAS, EPS, DECAY = 1e-2, (0.9, 0.95), 1e-8, 0.1
RANDOM = np.random.default_rng(0)
TOKENS = (RANDOM.integers(0, VOCAB, (STEPS, 4, 1)) + 3 * np.arange(9)) % VOCAB  # the next is 3 more
KEYS = RANDOM.integers(0, 2**32, (STEPS, 2))
SEGMENTS = np.array([[0] * 4 + [1] * 5, [3] * 9, [2] * 7 + [0] * 2, [1] * 2 + [5] * 7])


@pytest.fixture(autouse=True)
def promotion():
    with jax.numpy_dtype_promotion("standard"):  # optax raises a float to an integer count
        yield


def train_flax(model, batches):
    """Return the loss before every step; the model is changed."""
    tx = optax.adamw(RATE, *BETAS, EPS, weight_decay=DECAY)
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
    return np.array(
        [float(train_step(model, optimizer, tokens, **options)) for tokens, options in batches]
    )


def train_torch(model, losses):
    """Return the loss before every step, given what computes each; the model is changed."""
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=RATE, betas=BETAS, eps=EPS, weight_decay=DECAY
    )
    found = []
    for loss in losses:
        optimizer.zero_grad()
        value = loss(model)
        value.backward()
        optimizer.step()
        found.append(value.item())
    return np.array(found)


def nonzero_gradients(model, loss):
    """Return which elements of each parameter have a gradient beyond rounding."""
    names, parameters = zip(*model.named_parameters(), strict=True)
    gradients = torch.autograd.grad(loss(model), parameters)
    found = {name: gradient.numpy() for name, gradient in zip(names, gradients, strict=True)}
    return tolerance.nonzero_gradient(found, found)


def assert_same_run(losses, ours, theirs, nonzero, layout):
    """Compare the losses of all steps, and the final parameters that the function depends on.

    Softmax ignores a key bias: its gradient is rounding alone, of which AdamW makes a step as large
    as any other.
    """
    assert losses[0][-10:].mean() < 0.95 * losses[0][:10].mean()
    errors = tolerance.relative({"loss": losses[0]}, {"loss": losses[1]})
    reference = {
        name: value.detach().numpy()
        for name, value in theirs.state_dict().items()
        if name in nonzero
    }
    found = convert.state_dict(ours, layout)
    sides = (
        {name: np.where(nonzero[name], side[name], 0.0) for name in reference}
        for side in (found, reference)
    )
    errors |= tolerance.relative(*sides)
    assert max(errors.values()) <= tolerance.TRAINING, errors
    return errors


EXPERTS = {
    "Mixtral": {"num_kv_heads": 2, "num_experts": 5, "top_k": 2},
    "Qwen3Next": {
        "num_kv_heads": 2,
        "head_dim": 4,
        "full_layers": (1,),
        "num_experts": 5,
        "top_k": 2,
        "d_expert": 7,
        "d_shared": 9,
        "linear_heads": 4,
        "linear_key_heads": 2,
        "linear_head_dim": 3,
        "linear_value_dim": 5,
    },
    "DeepseekV3": {
        "kv_lora_rank": 5,
        "q_lora_rank": 7,
        "qk_nope_head_dim": 3,
        "qk_rope_head_dim": 4,
        "v_head_dim": 2,
        "num_experts": 8,
        "groups": 4,
        "top_groups": 2,
        "top_k": 3,
        "d_expert": 5,
        "num_dense_layers": 1,
    },
}


def twins(name):
    """Return our model and its twin, every parameter random, biases included."""
    sizes = {"context_length": CONTEXT, "vocab_size": VOCAB}
    classes = [getattr(p, name, None) for p in (flax_attn, torch_ref)]
    if name == "GPT2":
        configs = (p.GPT2Config(12, 3, 1, dropout=0.2, **sizes) for p in (flax_attn, torch_ref))
    elif name == "Llama":
        options = {"num_kv_heads": 2, "attention_bias": True, "dropout": 0.2, **sizes}
        configs = (p.LlamaConfig(12, 20, 6, 1, **options) for p in (flax_attn, torch_ref))
    else:
        files = [
            import_module(f"{p.__name__}.models.{name.lower()}") for p in (flax_attn, torch_ref)
        ]
        configs = (
            getattr(f, f"{name}Config")(12, 20, 6, 2, dropout=0.2, **EXPERTS[name], **sizes)
            for f in files
        )
        classes = [getattr(file, name) for file in files]
    ours, theirs = configs
    reference = randomised(classes[1](theirs).double())
    model = classes[0](ours, param_dtype=jnp.float64, rngs=nnx.Rngs(0))
    convert.load_state_dict(model, reference.state_dict())
    return model, reference


def randomised(model):
    random = np.random.default_rng(1)
    for parameter in model.parameters():
        parameter.data = torch.from_numpy(random.normal(0, 0.2, parameter.shape))
    return model


def twin_losses(**options):
    """Return what computes the loss of each batch in torch_ref."""
    options = {name: torch.from_numpy(value) for name, value in options.items()}

    def loss(tokens, key):
        return lambda model: torch_ref.models.loss.next_token_loss(
            model, tokens, dropout_key=key, **options
        )

    return [
        loss(torch.from_numpy(tokens), torch.from_numpy(key))
        for tokens, key in zip(TOKENS, KEYS, strict=True)
    ]


RUNS = [
    ("GPT2", {"segments": SEGMENTS}),
    ("Llama", {"lengths": np.array([9, 4, 1, 7])}),
    ("Mixtral", {"segments": SEGMENTS}),
    ("Qwen3Next", {"segments": SEGMENTS}),
    ("DeepseekV3", {"lengths": np.array([9, 4, 1, 7])}),
]


@pytest.mark.parametrize(
    ("name", "options"), RUNS, ids=lambda value: value if isinstance(value, str) else min(value)
)
def test_dropping_twins_learn_alike(name, options):
    ours, theirs = twins(name)
    references = twin_losses(**options)
    nonzero = nonzero_gradients(theirs, references[0])
    batches = [
        (tokens, {"dropout_key": key.astype(np.uint32), **options})
        for tokens, key in zip(TOKENS, KEYS, strict=True)
    ]
    assert_same_run(
        (train_flax(ours, batches), train_torch(theirs, references)),
        ours,
        theirs,
        nonzero,
        "torch_ref",
    )


class Float64Torch(SimpleNamespace):
    """Stands for torch in modules of transformers that name float32: in rotary angles and norms."""

    float = float32 = torch.float64

    def __getattr__(self, name):
        return getattr(torch, name)


HUGGING_FACE = {
    "GPT2": {
        "vocab_size": VOCAB,
        "n_positions": CONTEXT,
        "n_embd": 12,
        "n_head": 3,
        "n_layer": 1,
        "attn_pdrop": 0.0,
        "resid_pdrop": 0.0,
        "embd_pdrop": 0.0,
    },
    "Llama": {
        "vocab_size": VOCAB,
        "max_position_embeddings": CONTEXT,
        "hidden_size": 12,
        "intermediate_size": 20,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "num_hidden_layers": 1,
        "attention_bias": True,
    },
}


@pytest.mark.parametrize("name", HUGGING_FACE)
def test_a_model_of_transformers_learns_alike(name, tmp_path, monkeypatch):
    monkeypatch.setattr(modeling_llama, "torch", Float64Torch())
    config = getattr(transformers, f"{name}Config")(
        **HUGGING_FACE[name], bos_token_id=0, eos_token_id=1
    )
    build = transformers.AutoModelForCausalLM.from_config
    theirs = randomised(build(config, attn_implementation="sdpa").double())
    theirs.save_pretrained(tmp_path)
    ours = from_pretrained(tmp_path)
    layout = ours.family.layout

    def loss(tokens):
        tokens = torch.from_numpy(tokens)
        targets = tokens[:, 1:].flatten()
        return lambda model: functional.cross_entropy(
            model(tokens).logits[:, :-1].flatten(0, 1), targets
        )

    nonzero = nonzero_gradients(theirs, loss(TOKENS[0]))
    losses = (
        train_flax(ours, [(tokens, {}) for tokens in TOKENS]),
        train_torch(theirs, map(loss, TOKENS)),
    )
    assert_same_run(losses, ours, theirs, nonzero, layout)


def test_another_weight_decay_is_detected(monkeypatch):
    ours, theirs = twins("Llama")
    references = twin_losses()
    nonzero, adamw = nonzero_gradients(theirs, references[0]), optax.adamw
    monkeypatch.setattr(
        optax,
        "adamw",
        lambda *given, weight_decay: adamw(*given, weight_decay=1.001 * weight_decay),
    )
    batches = [
        (tokens, {"dropout_key": key.astype(np.uint32)})
        for tokens, key in zip(TOKENS, KEYS, strict=True)
    ]
    losses = train_flax(ours, batches), train_torch(theirs, references)
    with pytest.raises(AssertionError, match="loss"):
        assert_same_run(losses, ours, theirs, nonzero, "torch_ref")
