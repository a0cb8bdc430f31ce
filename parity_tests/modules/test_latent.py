"""Latent attention: two forms of one function, and a cache of latents alone."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from flax_attn import Mask, MultiHeadLatentAttention, Scores, convert
from flax_attn.functional.absorption import Absorption
from flax_attn.parity import tolerance
from parity_tests.asserts import assert_near, assert_results_near

B, T, D = 2, 6, 7
X = np.random.default_rng(0).normal(size=(B, T, D))
WIDTHS = {"kv_lora_rank": 5, "qk_nope_head_dim": 3, "qk_rope_head_dim": 4, "v_head_dim": 2}


def latent(side, **options):
    """Return latent attention of a side."""
    parts = {"rope": side.RoPE(interleaved=True), "kv_norm": side.build("RMSNorm", 5)}
    sizes = (D, D, None, 0.0, 3)
    return side.build("MultiHeadLatentAttention", *sizes, **WIDTHS, **parts, **options)


@pytest.fixture
def flax(sides):
    """Return the side of Flax."""
    return sides[0]


# Of the output and of the weights.
COTANGENTS = [np.random.default_rng(1).normal(size=size) for size in ((B, T, D), (B, 3, T, T))]


def both(model, **options):
    """Return output and weights, and all gradients under random cotangents."""

    def weighed(model, x):
        attended = model.attend(x, return_weights=True, **options)
        outputs = {"output": attended.output, "weights": attended.weights}
        pairs = zip(outputs.values(), COTANGENTS, strict=True)
        return sum((y * cotangent).sum() for y, cotangent in pairs), outputs

    return named(*nnx.jit(nnx.grad(weighed, argnums=(0, 1), has_aux=True))(model, jnp.asarray(X)))


def named(gradients, outputs):
    """Return outputs and gradients as arrays of NumPy, by name."""
    leaves = jax.tree_util.tree_leaves_with_path(gradients)
    return jax.tree.map(np.asarray, outputs), {str(path): np.asarray(x) for path, x in leaves}


def falling(score, b, n, i, j):
    """A function of scores that differs between the heads."""
    return score - ((n + 1) * (i - j)).astype(score.dtype)


SCORES = Scores(function=falling)


def test_functions_of_scores_and_masks_mean_the_same_in_both_forms(flax):
    mask = Mask.where(lambda b, n, i, j: (i - j) < 3 + n)
    layers = [latent(flax, form=form, scores=SCORES) for form in ("absorbed", "plain")]
    (absorbed, _), (plain, _) = (both(layer, mask=mask) for layer in layers)
    assert_near(absorbed, plain)
    # The function is not left out in both.
    without, _ = both(latent(flax, form="plain"), mask=mask)
    assert min(tolerance.relative(without, plain).values()) > 1e-3


def test_the_absorbed_form_equals_the_plain_one(flax):
    options = {"lengths": jnp.array([T, 4]), "mask": Mask.segments(np.array([0, 0, 0, 1, 1, 1]))}
    layers = [latent(flax, form=form) for form in ("absorbed", "plain")]
    assert_results_near(*(both(layer, **options) for layer in layers))


@pytest.mark.parametrize(
    ("t", "capacity", "absorbed"), [(3, 4, True), (17, 18, True), (3, 3, False), (3, None, False)]
)
def test_queries_of_a_cache_are_absorbed(flax, t, capacity, absorbed, monkeypatch):
    calls, values = [], Absorption.values
    monkeypatch.setattr(Absorption, "values", lambda *given: calls.append(1) or values(*given))
    layer = latent(flax)
    cache = None if capacity is None else layer.init_cache(1, capacity)
    jax.eval_shape(lambda x: layer.attend(x, cache=cache), jnp.zeros((1, t, D)))
    assert bool(calls) is absorbed


@pytest.mark.parametrize("length", [0, 2, None], ids=["empty", "known", "traced"])
def test_a_chunk_takes_the_memory_of_the_tokens_there_not_of_those_that_fit(length):
    layer = MultiHeadLatentAttention(D, D, None, 0.0, 16, **WIDTHS, rngs=nnx.Rngs(0))
    few, _ = temporaries(layer, 64, length)
    many, held = temporaries(layer, 8192, length)
    # The keys and values of 16 heads are 16 times what is held.
    assert many - few < (4 * held if length is None else 0.1 * held)


def temporaries(layer, capacity, length):
    """Return the bytes of temporaries of a chunk, and those that the cache holds."""
    cache = layer.init_cache(1, capacity)
    cache = cache if length is None else cache.replace(length=length)
    call = jax.jit(lambda x, cache: layer.attend(x, cache=cache), donate_argnums=1)
    compiled = call.lower(jnp.zeros((1, 32, D), jnp.float32), cache).compile()
    return compiled.memory_analysis().temp_size_in_bytes, cache.key.nbytes


def test_a_cache_is_as_large_as_latents_and_rotated_parts(side):
    cache = latent(side).init_cache(B, 10)
    arrays = [side.numpy(array) for array in cache.arrays.values()]
    # In float64.
    assert sum(array.nbytes for array in arrays) == B * 10 * (5 + 4) * 8


def test_a_cache_holds_latents_and_rotated_parts(side):
    model = latent(side)
    cache = model.attend(side.array(X), cache=model.init_cache(B, 10)).cache
    stored = side.numpy(model._latents(side.array(X), side.array(np.arange(T))))
    assert_near({"cache": side.numpy(cache.key)[:, 0, :T]}, {"cache": stored[:, :, 0]})


def test_a_layout_with_keys_of_its_own_refuses_latents(flax):
    rule = r"keys and values are made of the input; got latents.*rank=5"
    with pytest.raises(convert.ConversionError, match=rule):
        convert.state_dict(latent(flax), "hf_llama")
