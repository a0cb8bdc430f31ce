"""Blocks of stacked parameters, run by one scan: the same as blocks one after another."""

import filecmp
from dataclasses import replace

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx

from flax_attn import GPT2, GPT2Config, Llama, LlamaConfig, convert, from_pretrained, generate
from flax_attn.models.loss import next_token_loss
from flax_attn.models.qwen2 import Qwen2, Qwen2Config
from flax_attn.training import Checkpoints, float32_state, train_step

TOKENS = jnp.array([[1, 2, 3, 4, 5, 6, 7], [9, 8, 0, 6, 5, 4, 3]])
LENGTHS = jnp.array([4, 7])
SIZES = {"context_length": 16, "vocab_size": 11, "dropout": 0.3}
LLAMA = {"d_model": 8, "d_hidden": 12, "num_heads": 4, "num_layers": 3, **SIZES}
MODELS = {
    "gpt2": (GPT2, GPT2Config(6, 2, 3, **SIZES)),
    "mistral": (Llama, LlamaConfig(**LLAMA, num_kv_heads=2, window=4)),
}
NAMES = pytest.mark.parametrize("name", MODELS)


def both(name, param_dtype=jnp.float64, **options):
    """Return the model of blocks one after another, and the stacked one; they start alike."""
    cls, config = MODELS[name]
    return [
        cls(config, scan_layers=scan, param_dtype=param_dtype, rngs=nnx.Rngs(3), **options)
        for scan in (False, True)
    ]


def gradients(model, **options):
    """Return the loss, and the gradients as a state dict has them."""
    loss, found = nnx.jit(
        nnx.value_and_grad(lambda model: next_token_loss(model, TOKENS, **options))
    )(model)
    nnx.update(model, found)
    return {"loss": loss, **convert.state_dict(model)}


@pytest.mark.parametrize("remat", [False, True])
@NAMES
def test_loss_and_gradients_are_the_same(name, remat, x64, close):
    plain, stacked = (gradients(m, dropout_key=jax.random.key(1)) for m in both(name, remat=remat))
    close(stacked, plain)
    assert len(plain) > 30


@pytest.mark.parametrize("remat", [False, True])
@NAMES
def test_streams_of_dropout_draw_the_same_call_by_call(name, remat, x64, close):
    plain, stacked = both(name, remat=remat)
    call = nnx.jit(lambda model: model(TOKENS))
    first = call(stacked)
    close(first, call(plain))
    second = call(stacked)
    close(second, call(plain))
    assert not jnp.allclose(first, second)


@NAMES
def test_a_model_that_is_closed_over_can_be_compiled(name, x64, close):
    plain, stacked = (
        jax.jit(lambda x, m=m: m(x, dropout_key=jax.random.key(1)))(TOKENS) for m in both(name)
    )
    close(stacked, plain)


def in_steps(model, tokens, capacity, **options):
    """Return the logits of prompts and steps, with the lengths of the cache after each."""
    b = len(tokens) if tokens.ndim == 2 else None
    cache, found = model.init_cache(b, capacity), []
    call = nnx.jit(lambda model, x, cache, options: model.attend(x, cache=cache, **options))
    for i, j in ((0, 4), (4, 5), (5, 7)):
        attended = call(model, tokens[..., i:j], cache, options)
        cache = attended.cache
        found.append((attended.output, cache[0].length.astype(float)))
    return found


@pytest.mark.parametrize("tokens", [TOKENS, TOKENS[0]], ids=["batch", "sequence"])
@NAMES
def test_cached_decoding_is_the_same(name, tokens, x64, close):
    plain, stacked = both(name)
    for model in (plain, stacked):
        model.eval()
    found = in_steps(stacked, tokens, 7)
    close(found, in_steps(plain, tokens, 7))
    close(jnp.concatenate([logits for logits, _ in found], axis=-2), plain(tokens))


def test_padding_and_static_lengths_of_a_cache_are_the_same(x64, close):
    found = []
    for model in both("gpt2"):
        model.eval()
        first = model.attend(TOKENS, lengths=LENGTHS, cache=model.init_cache(2, 9))
        then = model.attend(TOKENS[:, :2], lengths=2, cache=first.cache)
        found.append((first.output, first.cache[0].length.astype(float), then.output))
    close(*found[::-1])
    assert found[0][1].tolist() == [4, 7]


def test_a_cache_that_is_known_to_be_empty_keeps_a_static_length():
    model = both("gpt2", jnp.float32)[1]
    cache = tuple(replace(one, length=0) for one in model.init_cache(2, 9))
    assert model.attend(TOKENS, cache=cache).cache[0].length == 7


def test_generated_tokens_are_the_same():
    plain, stacked = both("mistral", jnp.float32)
    prompts = [[1, 2, 3, 4, 5, 6], [7]]
    assert generate(stacked, prompts, 8) == generate(plain, prompts, 8)


def test_layers_that_differ_are_refused():
    config = Qwen2Config(**LLAMA, window=4, full_layers=(0, 1))
    with pytest.raises(
        ValueError,
        match=r"stacks layers of equal .* layer 2 differs from layer 0.* scan_layers=False",
    ):
        Qwen2(config, scan_layers=True, rngs=nnx.Rngs(0))


def test_no_layers_are_refused():
    with pytest.raises(
        ValueError, match=r"stacks one layer at least; got num_layers=0. Pass scan_layers=False"
    ):
        GPT2(GPT2Config(6, 2, 0, **SIZES), scan_layers=True, rngs=nnx.Rngs(0))


@NAMES
def test_files_are_the_same(name, tmp_path, close):
    plain, stacked = both(name, jnp.float32)
    for model, folder in ((plain, "plain"), (stacked, "stacked")):
        model.save_pretrained(tmp_path / folder, max_shard_size=2000)
    names = sorted(file.name for file in (tmp_path / "plain").iterdir())
    assert len(names) > 4
    assert (
        filecmp.cmpfiles(tmp_path / "plain", tmp_path / "stacked", names, shallow=False)[0] == names
    )
    loaded = [from_pretrained(tmp_path / "stacked", scan_layers=scan) for scan in (False, True)]
    close(loaded[1](TOKENS), loaded[0](TOKENS))
    for model in loaded:
        model.train()
    close(loaded[1](TOKENS), loaded[0](TOKENS))  # their streams of dropout draw the same


def test_state_dicts_are_the_same():
    plain, stacked = both("gpt2", jnp.float32)
    weights = convert.state_dict(plain)
    assert jax.tree.all(
        jax.tree.map(lambda x, y: (x == y).all(), weights, convert.state_dict(stacked))
    )
    other = GPT2(MODELS["gpt2"][1], scan_layers=True, rngs=nnx.Rngs(4))
    convert.load_state_dict(other, weights)
    assert jax.tree.all(
        jax.tree.map(lambda x, y: (x == y).all(), weights, convert.state_dict(other))
    )
    del weights["trf_blocks.1.norm1.shift"]
    with pytest.raises(
        convert.ConversionError, match=r"missing trf_blocks\.1\.norm1\.shift \(6,\)"
    ):
        convert.load_state_dict(other, weights)


def steps(model, count, folder=None):
    """Return the losses of training with a float32 state, interrupted halfway if given a folder."""
    optimizer, losses = nnx.Optimizer(model, float32_state(optax.adamw(0.01)), wrt=nnx.Param), []
    with jax.numpy_dtype_promotion("standard"):  # optax raises a float to an integer count
        for step in range(count):
            losses.append(float(train_step(model, optimizer, TOKENS)))
            if folder is not None and step == count // 2:
                with Checkpoints(folder) as checkpoints:
                    checkpoints.save(step, model, optimizer)
                    train_step(model, optimizer, TOKENS)
                    checkpoints.restore(model, optimizer)
    return losses


def test_training_in_bfloat16_goes_on_from_a_checkpoint_to_the_same_bits(tmp_path):
    first, again = (both("gpt2", jnp.bfloat16)[1] for _ in range(2))
    assert steps(first, 5) == steps(again, 5, tmp_path)


def test_training_is_the_same(x64, close):
    plain, stacked = (steps(model, 3) for model in both("gpt2"))
    close(jnp.array(stacked), jnp.array(plain))


def test_a_checkpoint_of_the_other_form_is_refused(tmp_path):
    (plain, stacked), empty = both("gpt2", jnp.float32), optax.identity()
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, plain, nnx.Optimizer(plain, empty, wrt=nnx.Param))
        with pytest.raises(ValueError, match=r"trf_blocks\.block\.att.* nothing is saved"):
            checkpoints.restore(stacked, nnx.Optimizer(stacked, empty, wrt=nnx.Param))
