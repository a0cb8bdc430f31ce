"""Whole models: equal on both sides, in one call, in steps, in chunks, and document by document."""

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx

import torch_ref
from flax_attn import convert
from flax_attn.parity import tolerance
from flax_attn.proof.build import drawn
from parity_tests.asserts import assert_gradients_near

B, T, VOCAB = 3, 7, 11
TOTALS = np.array([7, 4, 6])
STEPS = (((4, 1, 3), 4), ((1, 1, 1), 1), ((1, 1, 1), 1), ((1, 1, 1), 1))
CHUNKS = (((3, 0, 2), 4), ((2, 2, 0), 4), ((2, 2, 4), 4))
TOKENS = np.random.default_rng(0).integers(0, VOCAB, (B, T))
SIZES = {"context_length": 7, "vocab_size": VOCAB}
LLAMA = {"d_model": 8, "d_hidden": 12, "num_heads": 4, **SIZES}


TURNS = {"num_layers": 2, "num_kv_heads": 2, "window": 3, "full_layers": (1,)}
DELTA = {"linear_heads": 4, "linear_key_heads": 2, "linear_head_dim": 3, "linear_value_dim": 5}
QWEN3_NEXT = {**DELTA, "num_experts": 4, "top_k": 2, "d_expert": 5, "d_shared": 9}


def gpt2(**options):
    return "GPT2", lambda side: side.GPT2Config(6, 3, **{"num_layers": 1, **SIZES, **options})


def llama(rope=lambda side: side.RoPE(), **options):
    return "Llama", lambda side: side.LlamaConfig(
        **{**LLAMA, "num_layers": 1, **options}, rope=rope(side)
    )


def decoder(name, **options):
    """Return the name of a family, and a function from a side to its config.

    Parts are functions from a side, too.
    """

    def config(side):
        made = {key: value(side) if callable(value) else value for key, value in options.items()}
        return getattr(side.file(f"models.{name.lower()}"), f"{name}Config")(
            **{**LLAMA, "num_layers": 1, **made}
        )

    return name, config


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
EVERY = pytest.mark.parametrize(
    ("name", "config", "scan_layers"),
    [*((*row, False) for row in MODELS.values()), *((*row, True) for row in STACKED.values())],
    ids=[*MODELS, *STACKED],
)


def build(side, name, config, scan_layers):
    """Return a model in float64, of a class that its family's file has."""
    cls = getattr(side.file(f"models.{name.lower()}"), name)
    if not side.is_flax:
        return cls(config).double()
    return drawn(
        lambda: cls(config, scan_layers=scan_layers, rngs=nnx.Rngs(0), param_dtype=jnp.float64)
    )


def both(sides, name, config, scan_layers=False):
    """Return each side with its model, the weights of both being the same."""
    ours, theirs = (build(side, name, config(side), scan_layers) for side in sides)
    random = np.random.default_rng(1)
    weights = {name: random.normal(0, 0.5, a.shape) for name, a in convert.state_dict(ours).items()}
    convert.load_state_dict(ours, weights)
    theirs.load_state_dict({name: sides[1].array(weight) for name, weight in weights.items()})
    for model in (ours, theirs):
        model.eval()
    return list(zip(sides, (ours, theirs), strict=True))


def calls(plan):
    """Yield how many tokens of each row are real in each call, and which they are."""
    cached = np.zeros(B, int)
    for counts, width in plan:
        yield np.array(counts), np.minimum(cached[:, None] + np.arange(width), T - 1)
        cached = cached + counts


def cached(model, tokens, cache, **options):
    """Return the logits and the new cache."""
    attended = model.attend(tokens, cache=cache, **options)
    return attended.output, attended.cache


def cached_call(side, model):
    return side.jit(lambda cache, tokens, lengths: cached(model, tokens, cache, lengths=lengths))


def in_calls(side, model, call, plan, capacity=T):
    cache, whole = model.init_cache(B, capacity), np.zeros((B, T, VOCAB))
    for counts, where in calls(plan):
        real = np.arange(where.shape[1]) < counts[:, None]
        tokens = np.where(real, TOKENS[np.arange(B)[:, None], where], VOCAB - 1)
        logits, cache = call(cache, side.array(tokens), side.array(counts))
        for row, count in enumerate(counts):
            whole[row, where[row, :count]] = side.numpy(logits)[row, :count]
    return whole


def real(logits):
    return np.where(np.arange(T)[:, None] < TOTALS[:, None, None], logits, 0.0)


def assert_equal(found, reference, rule=tolerance.FORWARD):
    errors = tolerance.relative(found, dict.fromkeys(found, reference))
    assert max(errors.values()) <= rule, errors


@EVERY
def test_steps_and_chunks_equal_the_full_forward(sides, name, config, scan_layers):
    found = {}
    for side, model in both(sides, name, config, scan_layers):
        full = side.jit(lambda tokens, lengths, model=model: model(tokens, lengths=lengths))
        found[f"{side.name}: full"] = real(side.numpy(full(side.array(TOKENS), side.array(TOTALS))))
        call = cached_call(side, model)
        found |= {
            f"{side.name}: {i}": in_calls(side, model, call, plan)
            for i, plan in enumerate((STEPS, CHUNKS))
        }
    assert_equal(found, found["torch_ref: full"])
    assert np.abs(found["torch_ref: full"]).max() > 0.1


@pytest.mark.parametrize("kind", ["gpt2", "mistral"])
def test_packed_documents_equal_each_by_itself(sides, kind):
    ids, places, ends = (
        np.array([0, 0, 0, 1, 1, 1, 1]),
        np.array([0, 1, 2, 0, 1, 2, 3]),
        ((0, 3), (3, 7)),
    )
    for side, model in both(sides, *MODELS[kind]):
        packed = side.jit(
            lambda x, p, model=model, side=side: model(x, positions=p, mask=side.Mask.segments(ids))
        )
        alone = side.jit(lambda x, model=model: model(x))
        reference = np.concatenate(
            [side.numpy(alone(side.array(TOKENS[:, i:j]))) for i, j in ends], axis=1
        )
        found = {"packed": side.numpy(packed(side.array(TOKENS), side.array(places)))}

        def step(cache, x, p, model=model, side=side):
            return cached(model, x, cache, positions=p, mask=side.Mask.segments(ids))

        step, cache, logits = side.jit(step), model.init_cache(B, T), []
        for i, j in ((0, 4), (4, 5), (5, 6), (6, 7)):
            output, cache = step(cache, side.array(TOKENS[:, i:j]), side.array(places[i:j]))
            logits.append(side.numpy(output))
        assert_equal({**found, "cached": np.concatenate(logits, axis=1)}, reference)


def test_a_window_is_the_same_in_a_cache_of_any_size(sides):
    for side, model in both(sides, *MODELS["mistral"]):
        call = cached_call(side, model)
        found = {
            f"{side.name}: {capacity}": in_calls(side, model, call, STEPS, capacity)
            for capacity in (3, 4)
        }
        assert_equal(found, in_calls(side, model, call, CHUNKS))


def test_one_sequence_without_a_batch_axis(sides):
    for side, model in both(sides, *MODELS["llama 3"]):
        step = side.jit(lambda cache, x, model=model: cached(model, x, cache))
        cache, found = model.init_cache(None, T), []
        for i, j in ((0, 4), (4, 5), (5, 6), (6, 7)):
            logits, cache = step(cache, side.array(TOKENS[0, i:j]))
            found.append(side.numpy(logits))
        reference = side.numpy(side.jit(lambda x, model=model: model(x))(side.array(TOKENS[:1])))[0]
        assert_equal({side.name: np.concatenate(found)}, reference)


def test_longrope_reads_all_tokens_again_where_its_keys_change(sides):
    rope = {
        "rope": lambda side: side.RoPE(scaling=side.LongRoPEScaling(4.0, 4, (1.0,) * 2, (0.3,) * 2))
    }
    config = decoder("Phi3", **rope, head_dim=4, context_length=20)
    (ours, model), (theirs, reference) = both(sides, *config)
    prompts, generate = (
        [[1, 2], [3]],
        [side.file("models.generate").generate for side in (ours, theirs)],
    )
    greedy = generate[1](
        reference, prompts, 16
    )  # both rows become long, the first one token before the second
    for prompt, tokens in zip(prompts, greedy, strict=True):
        for i, token in enumerate(tokens):
            logits = reference(torch.tensor([prompt + tokens[:i]]))
            assert token == logits[0, -1].argmax()
    assert generate[0](model, prompts, 16) == greedy
    drawn = [
        {"temperature": 1.5, "key": key} for key in (jnp.uint32([7, 42]), torch.tensor([7, 42]))
    ]
    assert generate[0](model, prompts, 16, **drawn[0]) == generate[1](
        reference, prompts, 16, **drawn[1]
    )


def test_hidden_and_head_are_the_two_halves_of_a_call(sides):
    for side, model in both(sides, *MODELS["gpt2"]):
        halves = side.jit(lambda x, model=model: model.logits(model.hidden(x)))(side.array(TOKENS))
        whole = side.jit(lambda x, model=model: model(x))(side.array(TOKENS))
        assert_equal({side.name: side.numpy(halves)}, side.numpy(whole))


def test_recomputed_blocks_have_the_same_gradients():
    """In torch_ref; `tests/training/test_remat.py` does the same for flax_attn."""
    found = [
        gradients(torch_ref.GPT2(MODELS["gpt2"][1](torch_ref), remat=remat).double())
        for remat in (False, True)
    ]
    assert_gradients_near(*found)


def gradients(model):
    """Return the gradients of the parameters, which start alike, by name."""
    model.eval()
    for i, parameter in enumerate(model.parameters()):
        parameter.data = torch.from_numpy(
            np.random.default_rng(i).normal(0, 0.3, tuple(parameter.shape))
        )
    (model(torch.from_numpy(TOKENS)) ** 2).sum().backward()
    return {name: parameter.grad.numpy() for name, parameter in model.named_parameters()}
