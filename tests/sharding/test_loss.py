"""The loss on a mesh: each device has its tokens and its part of the vocabulary.

Sums over devices are taken once.
"""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from flax_attn import GPT2, GPT2Config
from flax_attn.models import cross_entropy
from flax_attn.models.loss import next_token_loss
from flax_attn.parity import tolerance
from flax_attn.sharding import rules
from flax_attn.sharding.parameters import shard

TOKENS = np.random.default_rng(0).integers(0, 12, (8, 16))
COLLECTIVE = r" (?:all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute)(?:-start)?\("


def build(tied=True):
    """Return a model without blocks: embeddings, a norm and the head."""
    config = GPT2Config(16, 2, 0, context_length=16, vocab_size=12, dropout=0.0, tied=tied)
    return GPT2(config, param_dtype=jnp.float64, rngs=nnx.Rngs(3))


def lesson(model, tokens=TOKENS):
    """Return the compiled program of the loss and its gradients, and what it returns."""
    graph, state = nnx.split(model)
    call = jax.value_and_grad(
        lambda state, tokens: next_token_loss(nnx.merge(graph, state), tokens)
    )
    compiled = jax.jit(call).lower(state, tokens).compile()
    value, gradients = compiled(state, tokens)
    named = {
        ".".join(map(str, path)): np.asarray(x[...]) for path, x in nnx.to_flat_state(gradients)
    }
    return compiled.as_text(), {"loss": np.asarray(value)}, named


def assert_same(found, truth):
    assert max(tolerance.relative(found[1], truth[1]).values()) <= tolerance.FORWARD
    assert max(tolerance.gradient_errors(found[2], truth[2]).values()) <= tolerance.GRADIENT


@pytest.mark.parametrize(
    ("table", "tied"),
    [
        ({}, True),
        ({}, False),
        ({"vocab": None}, True),  # the head is whole
        (
            {"tokens": ("context", "tensor")},
            True,
        ),  # an axis that tokens have, the vocabulary has not
        ({"vocab": ("tensor", "fsdp"), "batch": "data"}, False),  # two axes
        ({"embed": None, "batch": "fsdp"}, False),
    ],
    ids=str,
)
@pytest.mark.parametrize("kind", ["auto", "explicit"])
def test_loss_and_gradients_are_those_of_one_device(table, tied, kind, x64, mesh_like, monkeypatch):
    monkeypatch.setattr(cross_entropy, "_ROWS", 8)
    truth, mesh = lesson(build(tied)), mesh_like(kind, fsdp=2, tensor=2, context=2)
    with rules(**table), jax.set_mesh(mesh):
        assert_same(lesson(shard(build(tied), mesh)), truth)


def test_more_chunks_send_no_more_of_the_head(x64, mesh_like, monkeypatch):
    mesh, sent, count = mesh_like(fsdp=4), [], []
    for rows in (512, 4):
        monkeypatch.setattr(cross_entropy, "_ROWS", rows)
        with jax.set_mesh(mesh):
            text = lesson(shard(build(), mesh))[0]
        bodies = re.findall(r"body=%?([\w.\-]+)", text)
        loops = [text[text.index(f"%{name} (") :].split("\n}")[0] for name in bodies]
        sent.append(sum(len(re.findall(COLLECTIVE, loop)) for loop in loops))
        count.append(len(bodies))
        assert re.search(COLLECTIVE, text)
    assert sent == [0, 0]
    assert count[1] > count[0]  # the loop over chunks is among them


def test_a_target_outside_the_vocabulary_gives_nan(x64, mesh_like):
    tokens, mesh = np.array(TOKENS), mesh_like(tensor=2)
    tokens[2, -1] = 12  # only a target, and no input of one that counts
    model = build()
    assert np.isnan(lesson(model, tokens)[1]["loss"])
    with jax.set_mesh(mesh):
        assert np.isnan(lesson(shard(model, mesh), tokens)[1]["loss"])
