"""A hundred steps of AdamW: `train_step` and optax against torch.optim.

The PyTorch models are our twins and transformers' own.
"""

from functools import partial
from importlib import import_module

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

pytestmark = pytest.mark.usefixtures("dtype_promotion")
STEPS, VOCAB, CONTEXT = 100, 17, 10
RATE, BETAS, EPS, DECAY = 1e-2, (0.9, 0.95), 1e-8, 0.1
RANDOM = np.random.default_rng(0)
# The next token is 3 more, which a model can learn.
TOKENS = (RANDOM.integers(0, VOCAB, (STEPS, 4, 1)) + 3 * np.arange(9)) % VOCAB
KEYS = RANDOM.integers(0, 2**32, (STEPS, 2))
# Two documents in most rows; ids need not count up.
SEGMENTS = np.array([[0] * 4 + [1] * 5, [3] * 9, [2] * 7 + [0] * 2, [1] * 2 + [5] * 7])


def train_flax(model, batches):
    """Return the loss before every step; the model is changed."""
    tx = optax.adamw(RATE, *BETAS, EPS, weight_decay=DECAY)
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
    steps = (train_step(model, optimizer, tokens, **options) for tokens, options in batches)
    return np.array([float(loss) for loss in steps])


def step_torch(model, optimizer, loss):
    # Otherwise PyTorch adds the gradients of all steps.
    optimizer.zero_grad()
    value = loss(model)
    value.backward()
    optimizer.step()
    return value.item()


def train_torch(model, losses):
    """Return the loss before every step, given what computes each; the model is changed."""
    options = {"lr": RATE, "betas": BETAS, "eps": EPS, "weight_decay": DECAY}
    optimizer = torch.optim.AdamW(model.parameters(), **options)
    return np.array([step_torch(model, optimizer, loss) for loss in losses])


def nonzero_gradients(model, loss):
    """Return which elements of each parameter have a gradient beyond rounding."""
    parameters = dict(model.named_parameters())
    gradients = torch.autograd.grad(loss(model), parameters.values())
    arrays = [gradient.numpy() for gradient in gradients]
    found = dict(zip(parameters, arrays, strict=True))
    return tolerance.nonzero_gradient(found, found)


def learnt(state, nonzero):
    """Return parameters with 0 where the function does not depend on them.

    Softmax ignores a key bias: its gradient is nothing but rounding, of which AdamW makes a step as
    large as any other.
    """
    return {name: np.where(mask, np.asarray(state[name]), 0.0) for name, mask in nonzero.items()}


def assert_same_run(losses, ours, theirs, nonzero, layout):
    """Compare the losses of all steps, and the final parameters that the function depends on."""
    found, expected = losses
    # The models learn: else both could stay where they are.
    assert found[-10:].mean() < 0.95 * found[:10].mean()
    errors = tolerance.relative({"loss": found}, {"loss": expected})
    parameters = learnt(convert.state_dict(ours, layout), nonzero)
    errors |= tolerance.relative(parameters, learnt(theirs.state_dict(), nonzero))
    assert max(errors.values()) <= tolerance.TRAINING, errors


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


SHARED = {"dropout": 0.2, "context_length": CONTEXT, "vocab_size": VOCAB}


def gpt2(package):
    return package.GPT2, package.GPT2Config(12, 3, 1, **SHARED)


def llama(package):
    options = {"num_kv_heads": 2, "attention_bias": True, **SHARED}
    return package.Llama, package.LlamaConfig(12, 20, 6, 1, **options)


def mixture(name, package):
    file = import_module(f"{package.__name__}.models.{name.lower()}")
    config = getattr(file, f"{name}Config")
    return getattr(file, name), config(12, 20, 6, 2, **EXPERTS[name], **SHARED)


# From a package to the class of a model and its config.
TWINS = {"GPT2": gpt2, "Llama": llama, **{name: partial(mixture, name) for name in EXPERTS}}


def twins(name):
    """Return our model and its twin, every parameter random, biases included."""
    cls, config = TWINS[name](torch_ref)
    theirs = randomised(cls(config).double())
    cls, config = TWINS[name](flax_attn)
    ours = cls(config, param_dtype=jnp.float64, rngs=nnx.Rngs(0))
    convert.load_state_dict(ours, theirs.state_dict())
    return ours, theirs


def randomised(model):
    random = np.random.default_rng(1)
    for parameter in model.parameters():
        parameter.data = torch.from_numpy(random.normal(0, 0.2, parameter.shape))
    return model


def twin_losses(**options):
    """Return what computes the loss of each batch in torch_ref."""
    given = {name: torch.from_numpy(value) for name, value in options.items()}
    batches = zip(torch.from_numpy(TOKENS), torch.from_numpy(KEYS), strict=True)
    loss = partial(torch_ref.models.loss.next_token_loss, **given)
    return [partial(loss, tokens=tokens, dropout_key=key) for tokens, key in batches]


def our_batches(**options):
    """Return the tokens of each step, and what else `train_step` takes."""
    steps = zip(TOKENS, KEYS.astype(np.uint32), strict=True)
    return [(tokens, {"dropout_key": key, **options}) for tokens, key in steps]


def run_twins(name, **options):
    """Train both, and return all that `assert_same_run` compares."""
    ours, theirs = twins(name)
    references = twin_losses(**options)
    nonzero = nonzero_gradients(theirs, references[0])
    losses = train_flax(ours, our_batches(**options)), train_torch(theirs, references)
    return losses, ours, theirs, nonzero, "torch_ref"


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
    assert_same_run(*run_twins(name, **options))


# Without dropout, which transformers draws from another source.
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


def new(name):
    """Return a model of transformers, every parameter random."""
    config = getattr(transformers, f"{name}Config")
    own = config(**HUGGING_FACE[name], bos_token_id=0, eos_token_id=1)
    model = transformers.AutoModelForCausalLM.from_config(own, attn_implementation="sdpa")
    return randomised(model.double())


def cross_entropy(model, tokens):
    # No token follows the last one.
    logits = model(tokens).logits[:, :-1]
    return functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


@pytest.fixture
def in_float64(float64_modules):
    """Let the rotary angles and norms of transformers be in float64."""
    with float64_modules(modeling_llama):
        yield


def run_model(theirs, folder):
    """Train a model of transformers and ours, and return what `assert_same_run` compares."""
    theirs.save_pretrained(folder)
    ours = from_pretrained(folder)
    references = [partial(cross_entropy, tokens=tokens) for tokens in torch.from_numpy(TOKENS)]
    nonzero = nonzero_gradients(theirs, references[0])
    losses = train_flax(ours, [(tokens, {}) for tokens in TOKENS]), train_torch(theirs, references)
    return losses, ours, theirs, nonzero, ours.family.layout


@pytest.mark.parametrize("name", HUGGING_FACE)
def test_a_model_of_transformers_learns_alike(name, tmp_path, in_float64):
    assert_same_run(*run_model(new(name), tmp_path))


ADAMW = optax.adamw


def decays_too_much(*given, weight_decay):
    return ADAMW(*given, weight_decay=1.001 * weight_decay)


def test_another_weight_decay_is_detected(monkeypatch):
    # A thousandth: the comparison is as fine as that.
    monkeypatch.setattr(optax, "adamw", decays_too_much)
    run = run_twins("Llama")
    with pytest.raises(AssertionError, match="loss"):
        assert_same_run(*run)
