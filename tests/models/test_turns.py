"""Stacked layers that differ: alternating, numbered, or attending to an encoded sequence."""

import filecmp

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from flax_attn import convert, from_pretrained, generate
from flax_attn.models.diffllama import DiffLlama, DiffLlamaConfig
from flax_attn.models.gemma2 import Gemma2, Gemma2Config
from flax_attn.models.layer_pattern import group_by_pattern
from flax_attn.models.modernbert import ModernBert, ModernBertConfig
from flax_attn.models.t5 import T5, T5Config
from flax_attn.models.whisper import Whisper, WhisperConfig

DECODER = {
    "d_model": 8,
    "d_hidden": 12,
    "num_heads": 4,
    "num_kv_heads": 2,
    "context_length": 16,
    "vocab_size": 11,
}
TURNS = {
    "num_layers": 5,
    "window": 3,
    "full_layers": (0, 2, 4),
    "query_pre_attn_scalar": 2,
    "head_dim": 2,
    "dropout": 0.3,
}
WHISPER = WhisperConfig(
    6, 2, 2, 3, 3, 8, 10, num_mel=5, num_positions=7, context_length=9, vocab_size=11, dropout=0.3
)
TOKENS = np.random.default_rng(0).integers(0, 11, (2, 7))
SOUND = np.random.default_rng(1).normal(size=(2, 5, 14))
MODELS = {
    "a number each": (DiffLlama, DiffLlamaConfig(**DECODER, num_layers=3), [TOKENS]),
    "turns behind a layer": (Gemma2, Gemma2Config(**DECODER, **TURNS), [TOKENS]),
    "an encoder": (
        ModernBert,
        ModernBertConfig(6, 8, 3, 7, vocab_size=11, window=4, dropout=0.3),
        [TOKENS],
    ),
    "t5": (T5, T5Config(6, 8, 2, 4, 2, 3, vocab_size=11, dropout=0.3), [TOKENS, TOKENS[:, :5]]),
    "whisper": (Whisper, WHISPER, [SOUND, TOKENS[:, :5]]),
}


def both(name, param_dtype=jnp.float64, **options):
    """Return the model of layers one after another, and the stacked one; they start alike."""
    cls, config, _ = MODELS[name]
    made = [
        cls(config, scan_layers=scan, param_dtype=param_dtype, rngs=nnx.Rngs(3), **options)
        for scan in (False, True)
    ]
    random = np.random.default_rng(4)
    weights = {
        key: random.normal(0, 0.4, x.shape).astype(x.dtype)
        for key, x in convert.state_dict(made[0]).items()
    }
    for model in made:
        convert.load_state_dict(model, weights)
    return made


def gradients(model, inputs):
    """Return the output, and the gradients as a state dict has them, under a random cotangent."""

    def weighed(model):
        y = model(*map(jnp.asarray, inputs), dropout_key=jax.random.key(1))
        return (y * jnp.asarray(np.random.default_rng(2).normal(size=y.shape))).sum(), y

    found, y = nnx.jit(nnx.grad(weighed, has_aux=True))(model)
    nnx.update(model, found)
    return {"output": y, **convert.state_dict(model)}


@pytest.mark.parametrize(
    ("name", "remat"), [*((name, False) for name in MODELS), ("turns behind a layer", True)]
)
def test_outputs_and_gradients_are_those_of_layers_one_by_one(name, remat, x64, close):
    plain, stacked = (gradients(model, MODELS[name][2]) for model in both(name, remat=remat))
    assert np.mean([abs(x).max() > 1e-9 for x in plain.values()]) > 0.8
    close(stacked, plain)


def test_a_stack_of_turns_has_a_block_for_each_of_a_turn():
    blocks = both("an encoder", jnp.float32)[1].trf_blocks
    assert blocks.stacked_layers == ((0,), (1, 4), (2, 5), (3, 6))
    assert [block.norm1 is None for block in blocks.blocks] == [True, False, False, False]
    assert blocks.blocks[1].norm2.scale.shape == (2, 6)


@pytest.mark.parametrize("name", ["a number each", "turns behind a layer", "t5"])
def test_generated_tokens_are_the_same(name):
    plain, stacked = both(name, jnp.float32)
    prompts = [[1, 2, 3, 4, 5, 6], [7]]
    found = generate(stacked, prompts, 8)
    assert found == generate(plain, prompts, 8)
    assert len(set(found[0])) > 1


@pytest.mark.parametrize("name", ["a number each", "turns behind a layer"])
def test_cached_decoding_is_the_same(name, x64, close):
    plain, stacked = both(name)
    for model in (plain, stacked):
        model.eval()
    cache, tokens, found = stacked.init_cache(2, 7), jnp.asarray(TOKENS), []
    call = nnx.jit(lambda model, x, cache: model.attend(x, cache=cache))
    for i, j in ((0, 4), (4, 7)):
        attended = call(stacked, tokens[:, i:j], cache)
        cache = attended.cache
        found.append(attended.output)
    close(jnp.concatenate(found, axis=1), nnx.jit(lambda model: model(tokens))(plain))


@pytest.mark.parametrize("name", ["a number each", "turns behind a layer", "t5"])
def test_folders_are_the_same(name, tmp_path, close):
    inputs = [jnp.asarray(x) for x in MODELS[name][2]]
    plain, stacked = both(name, jnp.float32)
    for model, folder in ((plain, "plain"), (stacked, "stacked")):
        model.save_pretrained(tmp_path / folder)
    names = sorted(file.name for file in (tmp_path / "plain").iterdir())
    assert (
        filecmp.cmpfiles(tmp_path / "plain", tmp_path / "stacked", names, shallow=False)[0] == names
    )
    loaded = [from_pretrained(tmp_path / "plain", scan_layers=scan) for scan in (False, True)]
    for model in loaded:
        model.train()
    # Streams of dropout draw the same.
    close(*[nnx.jit(lambda model: model(*inputs))(model) for model in loaded])


def test_layers_without_turns_are_refused():
    assert group_by_pattern([1, 2, 1, 2]) == ((0, 2), (1, 3))
    with pytest.raises(
        ValueError,
        match=r"layer 1 differs from layer 0, .* and no turn is repeated to the last layer",
    ):
        group_by_pattern([1, 2, 1, 3])
