"""Latent attention: two forms of one function, and a cache of latents alone."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from flax_attn import Mask, MultiHeadLatentAttention, RMSNorm, RoPE, Scores, convert
from flax_attn.functional.absorption import Absorption
from flax_attn.parity import tolerance
from flax_attn.proof.build import drawn

B, T, D = 2, 6, 7
X = np.random.default_rng(0).normal(size=(B, T, D))
WIDTHS = {"kv_lora_rank": 5, "qk_nope_head_dim": 3, "qk_rope_head_dim": 4, "v_head_dim": 2}


def latent(side=None, **options):
    """Return latent attention of a side, of ours by default."""
    if side is not None:
        parts = {"rope": side.RoPE(interleaved=True), "kv_norm": side.build("RMSNorm", 5)}
        return side.build(
            "MultiHeadLatentAttention", D, D, None, 0.0, 3, **WIDTHS, **parts, **options
        )

    def make():
        numerics = {"param_dtype": jnp.float64, "rngs": nnx.Rngs(0)}
        parts = {"rope": RoPE(interleaved=True), "kv_norm": RMSNorm(5, param_dtype=jnp.float64)}
        return MultiHeadLatentAttention(
            D, D, None, 0.0, 3, **WIDTHS, **parts, **options, **numerics
        )

    return drawn(make)


def both(model, x, **options):
    """Return output and weights, and all gradients under random cotangents."""
    random = np.random.default_rng(1)
    cotangents = (
        jnp.asarray(random.normal(size=x.shape)),
        jnp.asarray(random.normal(size=(B, 3, x.shape[1], x.shape[1]))),
    )

    def weighed(model, x):
        attended = model.attend(x, return_weights=True, **options)
        outputs = attended.output, attended.weights
        return sum((y * c).sum() for y, c in zip(outputs, cotangents, strict=True)), outputs

    gradients, outputs = nnx.jit(nnx.grad(weighed, argnums=(0, 1), has_aux=True))(model, x)
    found = dict(zip(("output", "weights"), map(np.asarray, outputs), strict=True))
    leaves = jax.tree_util.tree_leaves_with_path(gradients)
    return found, {str(path): np.asarray(leaf) for path, leaf in leaves}


def test_functions_of_scores_and_masks_mean_the_same_in_both_forms():
    scores = Scores(
        function=lambda score, b, n, i, j: score - ((n + 1) * (i - j)).astype(score.dtype)
    )
    options = {"mask": Mask.where(lambda b, n, i, j: (i - j) < 3 + n)}
    (absorbed, _), (plain, _) = (
        both(latent(form=form, scores=scores), jnp.asarray(X), **options)
        for form in ("absorbed", "plain")
    )
    (alone, _) = both(latent(form="plain"), jnp.asarray(X), **options)
    errors = tolerance.relative(absorbed, plain)
    assert max(errors.values()) <= tolerance.FORWARD, errors
    assert min(tolerance.relative(alone, plain).values()) > 1e-3


def test_the_absorbed_form_equals_the_plain_one():
    options = {"lengths": jnp.array([T, 4]), "mask": Mask.segments(np.array([0, 0, 0, 1, 1, 1]))}
    (absorbed, of_absorbed), (plain, of_plain) = (
        both(latent(form=form), jnp.asarray(X), **options) for form in ("absorbed", "plain")
    )
    errors = tolerance.relative(absorbed, plain)
    assert max(errors.values()) <= tolerance.FORWARD, errors
    errors = tolerance.gradient_errors(of_absorbed, of_plain)
    assert max(errors.values()) <= tolerance.GRADIENT, errors


@pytest.mark.parametrize(
    ("t", "capacity", "absorbed"), [(3, 4, True), (17, 18, True), (3, 3, False), (3, None, False)]
)
def test_queries_of_a_cache_are_absorbed(t, capacity, absorbed, monkeypatch):
    calls, values = [], Absorption.values
    monkeypatch.setattr(Absorption, "values", lambda *given: calls.append(1) or values(*given))
    layer = latent()
    cache = None if capacity is None else layer.init_cache(1, capacity)
    jax.eval_shape(lambda x: layer.attend(x, cache=cache), jnp.zeros((1, t, D)))
    assert bool(calls) is absorbed


@pytest.mark.parametrize("length", [0, 2, None], ids=["empty", "known", "traced"])
def test_a_chunk_takes_the_memory_of_the_tokens_there_not_of_those_that_fit(length):
    layer = MultiHeadLatentAttention(D, D, None, 0.0, 16, **WIDTHS, rngs=nnx.Rngs(0))

    def temporaries(capacity):
        cache = layer.init_cache(1, capacity)
        cache = cache if length is None else cache.replace(length=length)
        call = jax.jit(lambda x, cache: layer.attend(x, cache=cache), donate_argnums=1)
        compiled = call.lower(jnp.zeros((1, 32, D), jnp.float32), cache).compile()
        return compiled.memory_analysis().temp_size_in_bytes, cache.key.nbytes

    (few, _), (many, held) = temporaries(64), temporaries(8192)
    # The keys and values of 16 heads are 16 times what is held.
    assert many - few < (4 * held if length is None else 0.1 * held)


def test_a_cache_holds_latents_and_rotated_parts_alone(side):
    cache = latent(side).init_cache(B, 10)
    arrays = [side.numpy(array) for array in cache.arrays.values()]
    assert sum(array.nbytes for array in arrays) == B * 10 * (5 + 4) * 8
    model = latent(side)
    cache = model.attend(side.array(X), cache=cache).cache
    stored = side.numpy(model._latents(side.array(X), side.array(np.arange(T))))
    found = {"cache": side.numpy(cache.key)[:, 0, :T]}
    assert max(tolerance.relative(found, {"cache": stored[:, :, 0]}).values()) <= tolerance.FORWARD


def test_a_layout_with_keys_of_its_own_refuses_latents():
    with pytest.raises(
        convert.ConversionError, match=r"keys and values are made of the input; got latents.*rank=5"
    ):
        convert.state_dict(latent(), "hf_llama")
