"""Causes where one side writes out what the other calls: heads, products, positions, pooling."""

import jax
import jax.numpy as jnp
import pytest
import torch
from flax import nnx

from flax_attn.parity import compare

D, HEADS, KV_HEADS = 12, 4, 2


class Theirs(torch.nn.Module):
    """Patches of an image as tokens, attention with two key/value heads, a norm before the mean."""

    def __init__(self):
        super().__init__()
        self.patches = torch.nn.Conv2d(2, D, 2, stride=2)
        self.positions = torch.nn.Embedding(6, D)
        self.query, self.out = torch.nn.Linear(D, D), torch.nn.Linear(D, D)
        self.key, self.value = torch.nn.Linear(D, D // 2), torch.nn.Linear(D, D // 2)
        self.norm, self.head = torch.nn.LayerNorm(D), torch.nn.Linear(D, 5)

    def forward(self, images):
        x = self.patches(images).flatten(2).transpose(1, 2)
        x = x + self.positions(torch.arange(6))
        q, k, v = (
            y.unflatten(-1, (-1, 3)).transpose(1, 2)
            for y in (self.query(x), self.key(x), self.value(x))
        )
        k, v = (y.repeat_interleave(HEADS // KV_HEADS, 1) for y in (k, v))
        weights = (q @ k.transpose(2, 3) / 3**0.5).softmax(-1)
        x = self.out((weights @ v).transpose(1, 2).flatten(2))
        return self.head(self.norm(x).mean(1))


class Ours(nnx.Module):
    """The same with a fault, or with none."""

    def __init__(self, fault=""):
        rngs = nnx.Rngs(0)
        self.patches = nnx.Conv(2, D, (2, 2), strides=2, rngs=rngs)
        self.positions = nnx.Embed(6, D, rngs=rngs)
        self.query, self.out = nnx.Linear(D, D, rngs=rngs), nnx.Linear(D, D, rngs=rngs)
        self.key, self.value = nnx.Linear(D, D // 2, rngs=rngs), nnx.Linear(D, D // 2, rngs=rngs)
        self.norm = nnx.LayerNorm(D, epsilon=1e-5, use_fast_variance=False, rngs=rngs)
        self.head, self.fault = nnx.Linear(D, 5, rngs=rngs), fault

    def __call__(self, images):
        x = self.patches(images.transpose(0, 2, 3, 1))
        x = (x.swapaxes(1, 2) if self.fault == "columns" else x).reshape(len(x), -1, D)
        positions = self.positions(jnp.arange(6))
        x = x + (jax.lax.stop_gradient(positions) if self.fault == "fixed" else positions)
        x = self.attention(x)
        x = x @ self.out.kernel.T + self.out.bias if self.fault == "product" else self.out(x)
        if self.fault == "first":
            return self.head(self.norm(x)[:, 0])
        return self.head(self.norm(x.mean(1)) if self.fault == "pooled" else self.norm(x).mean(1))

    def attention(self, x):
        q, k, v = (
            y.reshape(*x.shape[:2], -1, 3) for y in (self.query(x), self.key(x), self.value(x))
        )
        if self.fault == "interleaved":
            v = self.value(x).reshape(*x.shape[:2], 3, KV_HEADS).swapaxes(2, 3)
        k, v = (
            jnp.repeat(k, 2, axis=2),
            jnp.tile(v, (1, 1, 2, 1)) if self.fault == "tiled" else jnp.repeat(v, 2, axis=2),
        )
        weights = jax.nn.softmax(jnp.einsum("btnh,bsnh->bnts", q, k) / 3**0.5)
        axes = "bnth" if self.fault == "merged" else "btnh"
        return jnp.einsum(f"bnts,bsnh->{axes}", weights, v).reshape(x.shape)


WHOLE = "the whole module"
ATTENDED = (
    f"{WHOLE}, input of out: flax has weights . value{{}}, torch has weights . value, heads side by"
    " side"
)
POOLED = f"{WHOLE}, input of head: flax has {{}}, torch has the mean of norm over its tokens"
CAUSES = {
    "": [],
    "merged": [ATTENDED.format(", heads by reshape without a transpose")],
    "interleaved": [ATTENDED.format(" split as heads interleaved, heads side by side")],
    "tiled": [ATTENDED.format(" with its heads tiled, not repeated, heads side by side")],
    "product": [
        f"{WHOLE}, input of norm: flax has x @ weight + bias of out, torch has x @ weight.T + bias"
        " of out"
    ],
    "columns": [
        f"{WHOLE}, input of query: flax has patches column by column + positions, "
        "torch has patches row by row + positions"
    ],
    "pooled": [
        POOLED.format("layer norm with eps=1e-05 by norm, of the mean of out over its tokens")
    ],
    "first": [POOLED.format("the first token of norm")],
    "fixed": [
        "positions: flax has no gradient at its output, as of stop_gradient or detach, torch"
        " has one"
    ],
}


@pytest.mark.parametrize("fault", CAUSES)
def test_what_is_written_out_is_a_cause(fault):
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        report = compare(Ours(fault), Theirs(), [(3, 2, 4, 6)], checks=["forward", "gradients"])
    assert report.causes == CAUSES[fault]
    assert report.passed == (not fault)
