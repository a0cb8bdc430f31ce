from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from attn_spec.sampling import Sampling
from flax_attn.models import GPT2, GPT2Config, Llama, LlamaConfig, generate
from flax_attn.models.pretrained import Pretrained
from flax_attn.models.sampling import keep_most_likely, sample

GPT = GPT2Config(8, 2, 2, context_length=24, vocab_size=31)
LLAMA = LlamaConfig(8, 12, 4, 1, num_kv_heads=2, context_length=200, vocab_size=31)
WINDOWED = LlamaConfig(8, 12, 4, 1, num_kv_heads=2, context_length=200, vocab_size=31, window=5)
PROMPTS = [[1, 2, 3, 4, 5, 6, 7], [30], [9, 9]]


def build(config):
    model = (GPT2 if isinstance(config, GPT2Config) else Llama)(config, rngs=nnx.Rngs(0))
    for param in jax.tree.leaves(
        nnx.state(model, nnx.Param), is_leaf=lambda x: isinstance(x, nnx.Variable)
    ):
        # Large, so that no tokens nearly tie and depend on the order of a sum.
        param[...] = 20 * param[...]
    return model


@pytest.fixture(scope="module", params=[GPT, LLAMA, WINDOWED], ids=["gpt2", "llama", "windowed"])
def model(request):
    return build(request.param)


@pytest.fixture(scope="module")
def llama():
    return build(LLAMA)


@pytest.fixture(scope="module")
def gpt2():
    return build(GPT)


def naive(model, prompt, new):
    """Return greedy tokens from one full forward pass per token; causality hides the rest."""
    model.eval()
    tokens, forward = np.zeros(24, int), nnx.jit(lambda model, tokens: model(tokens))
    tokens[: len(prompt)] = prompt
    for i in range(len(prompt), len(prompt) + new):
        tokens[i] = forward(model, tokens)[i - 1].argmax()
    return tokens[len(prompt) : len(prompt) + new].tolist()


def test_greedy_equals_the_full_forward_for_every_row_of_a_batch(model):
    assert generate(model, PROMPTS, 12) == [naive(model, prompt, 12) for prompt in PROMPTS]


def test_more_layers_than_run_together_equal_the_full_forward():
    # Six run as one program, and then the last two.
    model = build(replace(GPT, num_layers=8))
    assert generate(model, PROMPTS, 4) == [naive(model, prompt, 4) for prompt in PROMPTS]


def test_one_prompt_gives_one_list_and_arrays_do_as_well(llama):
    alone = generate(llama, PROMPTS[0], 5)
    assert (
        alone
        == generate(llama, np.array(PROMPTS[0]), 5)
        == generate(llama, jnp.array([PROMPTS[0]]), 5)[0]
    )
    assert all(type(token) is int for token in alone)


def test_a_row_ends_with_its_stop_token_and_the_others_go_on(llama):
    free = generate(llama, PROMPTS, 12)
    stop = free[0][3]
    cut = [row[: row.index(stop) + 1] if stop in row else row for row in free]
    assert generate(llama, PROMPTS, 12, stop_tokens=[stop]) == cut
    assert len(cut[0]) < 12


STOPS = (list, tuple, set, np.array, jnp.array, iter, lambda stops: np.array(stops, np.uint8))


@pytest.mark.parametrize("kind", STOPS)
@pytest.mark.usefixtures("no_shape_checks")
def test_stop_tokens_of_any_kind(kind, llama):
    stop = generate(llama, PROMPTS[2], 4)[1]
    expected = generate(llama, PROMPTS[2], 4, stop_tokens=[stop])
    assert generate(llama, PROMPTS[2], 4, stop_tokens=kind([stop, 30])) == expected
    assert generate(llama, PROMPTS[2], 4, stop_tokens=[np.int64(stop), jnp.int32(30)]) == expected


@pytest.mark.parametrize("temperature", [5e-324, 1e-40, np.float32(1e-40), 1e-38, 1.2e-38, 1e-30])
@pytest.mark.usefixtures("no_shape_checks")
def test_the_smallest_temperatures_are_greedy(temperature, llama):
    """Logits that are divided by them are infinite, several of them alike."""
    options = {"temperature": temperature, "key": jax.random.key(0)}
    assert generate(llama, PROMPTS, 8, **options) == generate(llama, PROMPTS, 8)


@pytest.mark.parametrize("top_p", [1e-45, 1e-40, 5e-324])
def test_the_smallest_shares_keep_the_most_likely(top_p, llama):
    options = {"temperature": 1.0, "top_p": top_p, "key": jax.random.key(0)}
    assert generate(llama, PROMPTS, 8, **options) == generate(llama, PROMPTS, 8)


@pytest.mark.parametrize("dtype", [np.uint8, np.int8, np.uint64])
@pytest.mark.usefixtures("no_shape_checks")
def test_prompts_of_any_integer_dtype(dtype, llama):
    prompts = [np.array(prompt, dtype) for prompt in PROMPTS]
    assert generate(llama, prompts, 5) == generate(llama, PROMPTS, 5)


def test_the_callback_gets_every_token_in_order(llama):
    received = [[] for _ in PROMPTS]
    rows = generate(llama, PROMPTS, 6, callback=lambda row, token: received[row].append(token))
    assert received == rows == generate(llama, PROMPTS, 6)


def test_the_same_key_draws_the_same_tokens_and_another_key_others(llama):
    options = {"temperature": 1.5, "top_k": 20, "top_p": 0.95}
    one, again, other = (
        generate(llama, PROMPTS, 12, key=jax.random.key(k), **options) for k in (0, 0, 1)
    )
    assert one == again != other
    assert generate(
        llama, PROMPTS, 12, temperature=0.5, top_k=1, key=jax.random.key(0)
    ) == generate(llama, PROMPTS, 12)


def test_the_model_runs_in_eval_mode_and_stays_in_its_own():
    model = build(GPT2Config(8, 2, 1, context_length=24, vocab_size=31, dropout=0.9))
    model.train()
    assert generate(model, PROMPTS, 5) == generate(model, PROMPTS, 5)
    assert not model.drop_emb.deterministic


@pytest.fixture
def compiled():
    """The number of programs compiled so far in a list of one."""
    programs = [0]

    def add(event, seconds, **_):
        programs[0] += event == "/jax/core/compile/backend_compile_duration"

    jax.monitoring.register_event_duration_secs_listener(add)
    yield programs
    jax.monitoring.unregister_event_duration_listener(add)


def test_layers_and_lengths_within_a_bucket_share_programs(compiled):
    config = LlamaConfig(8, 12, 4, 5, num_kv_heads=2, context_length=200, vocab_size=37)
    llama, stacked = (Llama(config, scan_layers=scan, rngs=nnx.Rngs(0)) for scan in (False, True))
    before = compiled[0]
    generate(llama, [[1, 2, 3], [4]], 7)
    assert compiled[0] - before == 5  # embed, prefill, last, choose, step
    before = compiled[0]
    generate(stacked, [[1, 2, 3], [4]], 7)
    assert compiled[0] - before == 1  # takes a layer
    before = compiled[0]
    generate(llama, [[1] * 60, [4] * 9], 2)
    generate(llama, [[7], [4] * 31], 9)
    assert compiled[0] == before
    generate(llama, [[1] * 70, [4]], 3)
    assert compiled[0] - before == 4  # all but choose


def test_it_compiles_by_itself(gpt2):
    rule = r"^generate reads its prompts, .*; got tokens that are traced\. Call it outside of jax"
    with pytest.raises(ValueError, match=rule):
        jax.jit(lambda tokens: generate(gpt2, tokens, max_new_tokens=2))(jnp.array([1, 2]))


@pytest.mark.parametrize(
    ("tokens", "options", "message"),
    [
        ([], {}, r"^a prompt holds at least one token; prompt 0 is empty"),
        ([[1], []], {}, r"^a prompt holds at least one token; prompt 1 is empty"),
        ([1, 31], {}, r"^token ids lie in the vocabulary, 0 to 30; got 31 in prompt 0"),
        ([[1], [-2]], {}, r"^token ids lie in the vocabulary, 0 to 30; got -2 in prompt 1"),
        ([1.5], {}, r"^prompts are integers .* got one of shape \(1,\), dtype float64"),
        ([[[1]]], {}, r"^prompts are integers .* got one of shape \(1, 1\)"),
        ([1] * 25, {}, r"^a prompt is at most context_length=24 tokens; prompt 0 has 25"),
        (
            [1] * 20,
            {},
            (
                r"together are at most context_length=24; prompt 0 has 20 tokens and"
                r" max_new_tokens=5\. Pass"
            ),
        ),
        (
            [1] * 6,
            {"capacity": 10},
            r"together are at most capacity=10; prompt 0 has 6 tokens .* max_new_tokens=4",
        ),
        (
            [1],
            {"max_new_tokens": 0},
            r"^max_new_tokens must be a positive integer; got max_new_tokens=0",
        ),
        (
            [1],
            {"temperature": 0.5},
            r"^temperature=0.5 draws tokens, which needs a key\. Pass key=jax",
        ),
        (
            [1],
            {"top_k": 3},
            r"^temperature=0 takes the most likely token.* got top_k=3, top_p=None",
        ),
        ([1], {"temperature": -1.0}, r"^temperature must be at least 0, and finite; got -1"),
        ([1], {"temperature": 1.0, "top_k": 0}, r"^top_k must be a positive integer; got top_k=0"),
        (
            [1],
            {"temperature": float("nan")},
            r"^temperature must be at least 0, and finite; got nan",
        ),
        (
            [1],
            {"temperature": "1"},
            r"^temperature must be one real number; got temperature='1'\. Pass a float",
        ),
        ([1], {"temperature": 1j}, r"^temperature must be one real number; got temperature=1j"),
        ([1], {"temperature": 1.0, "top_p": "a"}, r"^top_p must be one real number; got top_p='a'"),
        (
            [1],
            {"temperature": 1.0, "top_p": float("nan")},
            r"^top_p is a probability in \(0, 1\]; got top_p=nan",
        ),
        ([1], {"capacity": 0}, r"^capacity must be a positive integer; got capacity=0"),
        (5, {}, r"^prompts are integers .* got one of shape \(\), dtype int64"),
        (None, {}, r"^prompts are integers .* got one of shape \(\), dtype object"),
        (
            [1],
            {"stop_tokens": 3},
            (
                r"^stop_tokens are integers in a list, a set or an array \(n,\); got 3\. Pass"
                r" \[token\]"
            ),
        ),
        ([1], {"stop_tokens": None}, r"^stop_tokens are integers .* got None"),
        ([1], {"stop_tokens": [1.5]}, r"^stop_tokens are integers .* got \[1\.5\]"),
        (
            [1],
            {"stop_tokens": np.ones((1, 1), int)},
            r"^stop_tokens are integers .* got array\(\[\[1\]\]\)",
        ),
        (
            [1],
            {"temperature": 1.0, "top_p": 0.0},
            r"^top_p is a probability in \(0, 1\]; got top_p=0",
        ),
    ],
)
@pytest.mark.usefixtures("no_shape_checks")
def test_bad_calls(tokens, options, message, gpt2):
    with pytest.raises(ValueError, match=message):
        generate(gpt2, tokens, **{"max_new_tokens": 5, **options})


def test_top_k_and_top_p_keep_the_most_likely():
    logits = jnp.log(jnp.array([[0.1, 0.4, 0.3, 0.2], [0.97, 0.01, 0.01, 0.01]]))

    def kept(**options):
        return np.isfinite(keep_most_likely(logits, Sampling(1.0, **options))).tolist()

    assert (
        kept(top_k=2) == [[False, True, True, False], [True, False, False, False]]
        or kept(top_k=2)[1] == [True] * 4
    )
    assert kept(top_p=0.69) == [[False, True, True, False], [True, False, False, False]]
    assert kept(top_p=0.71) == [[False, True, True, True], [True, False, False, False]]
    assert kept(top_k=3, top_p=0.5) == [[False, True, True, False], [True, False, False, False]]
    assert kept(top_k=9) == [[True] * 4] * 2


def test_draws_follow_the_distribution():
    logits = jnp.log(jnp.tile(jnp.array([[0.1, 0.6, 0.3]]), (4000, 1)))
    drawn = np.asarray(sample(logits, Sampling(1.0), jnp.array([3, 4], jnp.uint32), 7))
    shares = np.bincount(drawn, minlength=3) / len(drawn)
    np.testing.assert_allclose(shares, [0.1, 0.6, 0.3], atol=5 * (0.25 / len(drawn)) ** 0.5)


def test_only_a_model_of_text_makes_text():
    with pytest.raises(
        ValueError,
        match=r"text is made by a LanguageModel or an EncoderDecoder; got Pretrained\. Load a model"
        r" of text, or derive your own from flax_attn\.models\.LanguageModel",
    ):
        generate(Pretrained(), [1], 1)


@pytest.mark.parametrize(
    ("logits", "token"),
    [
        ([1.0, 3.0, 3.0, 2.0], 1),
        ([0.0, jnp.nan, 9.0, jnp.nan], 1),
        ([-jnp.inf, -jnp.inf, -jnp.inf, -jnp.inf], 0),
        ([0.0, -jnp.inf, jnp.inf, jnp.inf], 2),
    ],
)
def test_the_first_of_the_largest_logits_is_taken(logits, token):
    logits = jnp.array([logits, [0.0, 0.0, 0.0, 1.0]])
    found = sample(logits, Sampling(), jnp.zeros(2, jnp.uint32), 0)
    assert found.tolist() == logits.argmax(axis=-1).tolist() == [token, 3]
