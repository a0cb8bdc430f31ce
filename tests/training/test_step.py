"""One step: it is what its parts do, and it leaves nothing behind."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from flax_attn import GPT2, GPT2Config
from flax_attn.models.loss import next_token_loss
from flax_attn.training import train_step

TOKENS = np.arange(15).reshape(3, 5) % 11
OPTIONS = {"lengths": np.array([5, 3, 4]), "segments": np.array([0, 0, 1, 1, 1])}


def build(dropout=0.3, remat=False):
    config = GPT2Config(6, 2, 1, context_length=8, vocab_size=11, dropout=dropout)
    model = GPT2(config, remat=remat, rngs=nnx.Rngs(0))
    return model, nnx.Optimizer(model, optax.sgd(0.5, momentum=0.9), wrt=nnx.Param)


def leaves(node):
    return [
        x
        for x in jax.tree.leaves(nnx.as_pure(nnx.state(node)))
        if jnp.issubdtype(x.dtype, jnp.floating)
    ]


def test_it_is_the_loss_its_gradient_and_the_optimizer(close):
    model, optimizer = build()
    twin, other = build()
    loss = train_step(model, optimizer, TOKENS, dropout_key=jax.random.key(3), **OPTIONS)

    @nnx.jit
    def step(model, optimizer, tokens):
        def loss_of(model):
            return next_token_loss(model, tokens, dropout_key=jax.random.key(3), **OPTIONS)

        reference, gradients = nnx.value_and_grad(loss_of)(model)
        optimizer.update(model, gradients)
        return reference

    reference = step(twin, other, TOKENS)
    close([loss, *leaves(model), *leaves(optimizer)], [reference, *leaves(twin), *leaves(other)])


def test_lengths_that_are_wrong_leave_the_model_as_it_is():
    model, optimizer = build()
    with pytest.raises(ValueError, match=r"lengths counts the real tokens .* got lengths=6\. Use"):
        train_step(model, optimizer, TOKENS, lengths=np.array([5, 6, 1]))
    assert not model.tok_emb.embedding[...].is_deleted()


@pytest.mark.usefixtures("no_shape_checks")
def test_lengths_may_be_a_list_and_tokens_of_pytorch(close):
    torch = pytest.importorskip("torch")
    found = []
    for tokens, lengths in ((TOKENS, np.array([5, 3, 4])), (torch.tensor(TOKENS), [5, 3, 4])):
        model, optimizer = build(dropout=0.0)
        loss = train_step(model, optimizer, tokens, lengths=lengths)
        found.append([loss, *leaves(model)])
    close(*found)


@pytest.mark.parametrize(
    ("optimizer", "kind"),
    [
        (optax.adamw(1e-3), "GradientTransformationExtraArgs"),
        (nnx.Optimizer, "the class Optimizer, not an instance"),
    ],
)
@pytest.mark.usefixtures("no_shape_checks")
def test_an_optimizer_of_optax_goes_into_one_of_nnx(optimizer, kind):
    model, _ = build()
    rule = (
        rf"^optimizer must be Optimizer; got {kind}\. Pass optimizer=nnx\.Optimizer\(model,"
        r" optax\.adamw\(1e-3\), wrt=nnx\.Param\)$"
    )
    with pytest.raises(ValueError, match=rule):
        train_step(model, optimizer, TOKENS)


@pytest.mark.usefixtures("no_shape_checks")
def test_a_class_is_no_model():
    _, optimizer = build()
    rule = "take a LanguageModel; got the class GPT2, not an instance. Derive"
    with pytest.raises(ValueError, match=rule):
        train_step(GPT2, optimizer, TOKENS)


@pytest.mark.usefixtures("no_shape_checks")
def test_tokens_are_checked_before_the_step_is_compiled():
    rule = r"^tokens must be an array; got list\. Make it one before the call$"
    with pytest.raises(ValueError, match=rule):
        train_step(*build(), TOKENS.tolist())


@pytest.mark.parametrize("stranger", [-100, 11])
def test_ids_of_padding_do_not_reach_the_parameters(stranger):
    found = []
    for ids in (TOKENS, np.where(np.arange(5) < np.array([[5], [3], [0]]), TOKENS, stranger)):
        model, optimizer = build(dropout=0.0)
        loss = train_step(model, optimizer, ids, lengths=np.array([5, 3, 0]))
        found.append([loss, *leaves(model), *leaves(optimizer)])
    assert all(jnp.array_equal(*pair) for pair in zip(*found, strict=True))
    assert all(jnp.isfinite(x).all() for x in found[0])


def test_every_step_drops_something_else():
    model, optimizer = build(dropout=0.5, remat=True)
    optimizer = nnx.Optimizer(model, optax.sgd(0.0), wrt=nnx.Param)
    losses = [float(train_step(model, optimizer, TOKENS)) for _ in range(3)]
    assert len(set(losses)) == 3
    model.eval()
    losses = [float(train_step(model, optimizer, TOKENS)) for _ in range(2)]
    assert losses[0] == losses[1]


def test_the_old_parameters_make_room():
    model, optimizer = build()
    old = model.tok_emb.embedding[...]
    train_step(model, optimizer, TOKENS, dropout_key=jax.random.key(3), **OPTIONS)
    assert old.is_deleted()
    assert not model.tok_emb.embedding[...].is_deleted()


@pytest.mark.usefixtures("no_shape_checks")
def test_a_model_of_another_class_is_told_what_to_do():
    model = nnx.Linear(3, 4, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.sgd(0.5), wrt=nnx.Param)
    rule = (
        r"train_step take a LanguageModel; got Linear\. Derive your model from LanguageModel, or"
        " write its loss and step"
    )
    with pytest.raises(ValueError, match=rule):
        train_step(model, optimizer, TOKENS)
