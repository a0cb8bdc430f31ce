"""Whole models: equal on both sides, in one call, in steps, in chunks, and document by document."""

from functools import partial

import jax.numpy as jnp
import numpy as np
import pytest
import torch

import torch_ref
from flax_attn import convert
from flax_attn.parity import tolerance
from parity_tests.asserts import assert_gradients_near
from parity_tests.models.build import in_float64
from parity_tests.models.plans import CHUNKS, STEPS, TOTALS, in_calls, real

B, T, VOCAB = 3, 7, 11
# A prompt of four tokens, and then one a call.
SLICES = (slice(0, 4), slice(4, 5), slice(5, 6), slice(6, 7))
TOKENS = np.random.default_rng(0).integers(0, VOCAB, (B, T))
SIZES = {"context_length": 7, "vocab_size": VOCAB}
LLAMA = {"d_model": 8, "d_hidden": 12, "num_heads": 4, **SIZES}

# Layers with a window and without one take turns, so a cache has both kinds.
TURNS = {"num_layers": 2, "num_kv_heads": 2, "window": 3, "full_layers": (1,)}
DELTA = {"linear_heads": 4, "linear_key_heads": 2, "linear_head_dim": 3, "linear_value_dim": 5}
QWEN3_NEXT = {**DELTA, "num_experts": 4, "top_k": 2, "d_expert": 5, "d_shared": 9}


def gpt2(**options):
    return "GPT2", lambda side: side.GPT2Config(6, 3, **{"num_layers": 1, **SIZES, **options})


def llama(rope=lambda side: side.RoPE(), **options):
    sizes = {**LLAMA, "num_layers": 1, **options}
    return "Llama", lambda side: side.LlamaConfig(**sizes, rope=rope(side))


def decoder(name, **options):
    """Return the name of a family, and a function from a side to its config.

    Parts are functions from a side, too.
    """
    sizes = {**LLAMA, "num_layers": 1, **options}

    def config(side):
        made = {key: value(side) if callable(value) else value for key, value in sizes.items()}
        file = side.file(f"models.{name.lower()}")
        return getattr(file, f"{name}Config")(**made)

    return name, config


def longrope(side):
    # Beyond four tokens keys turn by the factors 0.3 in place of 1.
    return side.RoPE(scaling=side.LongRoPEScaling(4.0, 4, (1.0,) * 2, (0.3,) * 2))


LATENT = {"kv_lora_rank": 5, "qk_nope_head_dim": 3, "qk_rope_head_dim": 4, "v_head_dim": 2}
LATENT |= {"num_experts": 8, "groups": 4, "top_groups": 2, "top_k": 3, "d_expert": 5}

MODELS = {
    "gpt2": gpt2(num_layers=2),
    "gpt2 untied": gpt2(tied=False, qkv_bias=False, d_hidden=10, activation="gelu_exact"),
    "llama": llama(num_kv_heads=2, attention_bias=True, ff_bias=True),
    "llama 3": llama(
        lambda side: side.RoPE(500.0, scaling=side.Llama3Scaling(8.0, 20)), num_kv_heads=2
    ),
    "mistral": llama(num_kv_heads=2, window=3),
    "full and windowed layers": llama(
        num_layers=2, num_kv_heads=1, head_dim=6, window=3, full_layers=(0,), tied=True
    ),
    "qwen2": decoder("Qwen2", num_layers=2, num_kv_heads=2, window=3, full_layers=(0,)),
    "qwen3": decoder("Qwen3", num_kv_heads=1, head_dim=6, attention_bias=True, tied=True),
    "phi3": decoder("Phi3", rope=lambda side: side.RoPE(50.0, width=4), num_kv_heads=2, head_dim=6),
    "gemma": decoder("Gemma", num_kv_heads=1, head_dim=6, attention_bias=True),
    "gemma2": decoder("Gemma2", **TURNS, query_pre_attn_scalar=5, score_cap=2.0, logit_cap=3.0),
    "gemma3": decoder(
        "Gemma3", **TURNS, query_pre_attn_scalar=5, local_rope=lambda side: side.RoPE(30.0)
    ),
    "olmo2": decoder("Olmo2", num_kv_heads=2, head_dim=6, attention_bias=True),
    "diffllama": decoder("DiffLlama", num_kv_heads=2, head_dim=6, attention_bias=True),
    "smollm3": decoder("SmolLM3", **TURNS, unrotated_layers=(0,), ff_bias=True),
    "mixtral": decoder("Mixtral", num_kv_heads=2, window=3, num_experts=4),
    "qwen3 moe": decoder(
        "Qwen3Moe", num_layers=2, dense_layers=(0,), num_experts=4, top_k=2, d_expert=5
    ),
    "qwen3-next": decoder(
        "Qwen3Next", num_layers=2, num_kv_heads=1, head_dim=6, full_layers=(1,), **QWEN3_NEXT
    ),
    "deepseek v3": decoder("DeepseekV3", num_layers=2, **LATENT, q_lora_rank=7, num_dense_layers=1),
    "gpt-oss": decoder("GptOss", num_layers=2, num_experts=4, top_k=2, window=3, full_layers=(1,)),
}
# Here JAX scans over layers of one kind; PyTorch has a list of them.
STACKED = {
    "gpt2, stacked": MODELS["gpt2"],
    "gemma, stacked": decoder("Gemma", num_layers=2, num_kv_heads=1, head_dim=6),
    "mistral, stacked": llama(num_layers=2, num_kv_heads=2, window=3),
    "deepseek v3, stacked": decoder(
        "DeepseekV3", num_layers=2, **LATENT, q_lora_rank=None, num_dense_layers=0
    ),
    "mixtral, stacked": decoder("Mixtral", num_layers=2, num_experts=4),
    "qwen3-next, stacked": decoder(
        "Qwen3Next", num_layers=2, num_kv_heads=1, head_dim=6, **QWEN3_NEXT
    ),
    "qwen3, stacked": decoder("Qwen3", num_layers=2, num_kv_heads=1, head_dim=6, tied=True),
}
ROWS = [(*row, False) for row in MODELS.values()]
ROWS += [(*row, True) for row in STACKED.values()]
EVERY = pytest.mark.parametrize(("name", "config", "scan_layers"), ROWS, ids=[*MODELS, *STACKED])


def build(side, name, config, scan_layers):
    """Return a model in float64, of a class that its family's file has."""
    cls = getattr(side.file(f"models.{name.lower()}"), name)
    options = {"scan_layers": scan_layers} if side.is_flax else {}
    return in_float64(side, cls, config, **options)


def both(sides, name, config, scan_layers=False):
    """Return each side with its model, the weights of both being the same."""
    ours, theirs = (build(side, name, config(side), scan_layers) for side in sides)
    weights = random_weights(convert.state_dict(ours))
    convert.load_state_dict(ours, weights)
    theirs.load_state_dict({name: torch.from_numpy(array) for name, array in weights.items()})
    return list(zip(sides, (ours, theirs), strict=True))


def random_weights(state):
    random = np.random.default_rng(1)
    return {name: random.normal(0, 0.5, array.shape) for name, array in state.items()}


def whole_call(side, model, **options):
    """Return a compiled call of the model on all tokens."""
    return side.jit(lambda tokens, **arrays: model(tokens, **options, **arrays))


def cached_call(side, model, **options):
    """Return a compiled call that takes a cache, and returns the logits and the new cache."""

    def call(cache, tokens, **arrays):
        attended = model.attend(tokens, cache=cache, **options, **arrays)
        return attended.output, attended.cache

    return side.jit(call)


def in_slices(side, call, cache, tokens, **arrays):
    """Return the logits of tokens that come in several calls, with an array for each token."""
    logits = []
    for places in SLICES:
        own = {name: side.array(array[places]) for name, array in arrays.items()}
        output, cache = call(cache, side.array(tokens[..., places]), **own)
        logits.append(side.numpy(output))
    return np.concatenate(logits, axis=-2)


def assert_equal(found, reference, rule=tolerance.FORWARD):
    errors = tolerance.relative(found, dict.fromkeys(found, reference))
    assert max(errors.values()) <= rule, errors


def in_plan(side, model, call, plan, capacity=T):
    """Return the logits that the calls of a plan have, with a cache for some tokens."""
    cache = model.init_cache(B, capacity)
    return in_calls(side, call, cache, TOKENS, plan, VOCAB)


def in_every_way(side, model):
    """Return the logits of the real tokens in one call, in steps and in chunks."""
    full = whole_call(side, model)(side.array(TOKENS), lengths=side.array(TOTALS))
    call = cached_call(side, model)
    steps, chunks = (in_plan(side, model, call, plan) for plan in (STEPS, CHUNKS))
    found = {"full": real(side.numpy(full)), "steps": steps, "chunks": chunks}
    return {f"{side.name}: {name}": logits for name, logits in found.items()}


@EVERY
def test_steps_and_chunks_equal_the_full_forward(sides, name, config, scan_layers):
    found = {}
    for side, model in both(sides, name, config, scan_layers):
        found |= in_every_way(side, model)
    reference = found["torch_ref: full"]
    assert_equal(found, reference)
    # Logits of 0 would be equal as well.
    assert np.abs(reference).max() > 0.1


# Two documents in each row, and the places of their tokens.
DOCUMENTS = np.array([0, 0, 0, 1, 1, 1, 1])
POSITIONS = np.array([0, 1, 2, 0, 1, 2, 3])


def one_by_one(side, model):
    """Return the logits of each document in a call of its own."""
    call = whole_call(side, model)
    documents = np.split(TOKENS, [3], axis=1)
    logits = [side.numpy(call(side.array(document))) for document in documents]
    return np.concatenate(logits, axis=1)


def packed(side, model):
    """Return the logits of both documents in one call, and in steps with a cache."""
    mask = side.Mask.segments(DOCUMENTS)
    call = whole_call(side, model, mask=mask)
    whole = call(side.array(TOKENS), positions=side.array(POSITIONS))
    step, cache = cached_call(side, model, mask=mask), model.init_cache(B, T)
    cached = in_slices(side, step, cache, TOKENS, positions=POSITIONS)
    return {"packed": side.numpy(whole), "cached": cached}


@pytest.mark.parametrize("kind", ["gpt2", "mistral"])
def test_packed_documents_equal_each_by_itself(sides, kind):
    for side, model in both(sides, *MODELS[kind]):
        assert_equal(packed(side, model), one_by_one(side, model))


def test_a_window_is_the_same_in_a_cache_of_any_size(sides):
    for side, model in both(sides, *MODELS["mistral"]):
        call = cached_call(side, model)
        # The window has three tokens: in so small a cache each token takes the place of one that
        # no later token sees.
        small = in_plan(side, model, call, STEPS, capacity=3)
        larger = in_plan(side, model, call, STEPS, capacity=4)
        found = {f"{side.name}: 3": small, f"{side.name}: 4": larger}
        assert_equal(found, in_plan(side, model, call, CHUNKS))


def test_one_sequence_without_a_batch_axis(sides):
    for side, model in both(sides, *MODELS["llama 3"]):
        cache = model.init_cache(None, T)
        found = in_slices(side, cached_call(side, model), cache, TOKENS[0])
        batch = whole_call(side, model)(side.array(TOKENS[:1]))
        assert_equal({side.name: found}, side.numpy(batch)[0])


def assert_greedy(model, found):
    """Assert that each token has the largest logit after those before it, read without a cache."""
    for prompt, tokens in zip(PROMPTS, found, strict=True):
        for i, token in enumerate(tokens):
            logits = model(torch.tensor([prompt + tokens[:i]]))
            assert token == logits[0, -1].argmax()


def generates(side):
    return side.file("models.generate").generate


@pytest.fixture
def longropes(sides):
    """Return what generates on each side with its model, and the model of PyTorch."""
    config = decoder("Phi3", rope=longrope, head_dim=4, context_length=20)
    (ours, model), (theirs, reference) = both(sides, *config)
    return partial(generates(ours), model), partial(generates(theirs), reference), reference


PROMPTS = [[1, 2], [3]]


def test_longrope_reads_all_tokens_again_where_its_keys_change(longropes):
    generate, generate_torch, reference = longropes
    # Both rows become long, the first one token before the second.
    greedy = generate_torch(PROMPTS, 16)
    assert_greedy(reference, greedy)
    assert generate(PROMPTS, 16) == greedy
    sampled = generate(PROMPTS, 16, temperature=1.5, key=jnp.uint32([7, 42]))
    key = torch.tensor([7, 42])
    assert sampled == generate_torch(PROMPTS, 16, temperature=1.5, key=key)


def test_hidden_and_head_are_the_two_halves_of_a_call(sides):
    for side, model in both(sides, *MODELS["gpt2"]):
        halves = side.jit(lambda x, model=model: model.logits(model.hidden(x)))
        tokens = side.array(TOKENS)
        whole = whole_call(side, model)(tokens)
        assert_equal({side.name: side.numpy(halves(tokens))}, side.numpy(whole))


def test_recomputed_blocks_have_the_same_gradients():
    """In torch_ref; `tests/training/test_remat.py` does the same for flax_attn."""
    _, config = MODELS["gpt2"]
    kept, recomputed = (
        torch_ref.GPT2(config(torch_ref), remat=remat).double() for remat in (False, True)
    )
    assert_gradients_near(gradients(kept), gradients(recomputed))


def redraw(model):
    for i, parameter in enumerate(model.parameters()):
        # A seed each: what a parameter gets does not depend on those before it.
        random = np.random.default_rng(i)
        parameter.data = torch.from_numpy(random.normal(0, 0.3, tuple(parameter.shape)))


def gradients(model):
    """Return the gradients of the parameters, which start alike, by name."""
    model.eval()
    redraw(model)
    logits = model(torch.from_numpy(TOKENS))
    (logits**2).sum().backward()
    return {name: parameter.grad.numpy() for name, parameter in model.named_parameters()}
