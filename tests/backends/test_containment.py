from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from flax_attn import Mask
from flax_attn.backends.call import Call, prepare
from flax_attn.backends.containment import memory, on_test
from flax_attn.backends.reference import BACKEND as REFERENCE

from .calls import draw

B, T, S, N, K, H, V = 2, 7, 9, 4, 2, 3, 5
LENGTHS = jnp.array([6, 3])
NAMES = ("query", "key", "value")


def arrays():
    return draw(B, T, N, H), draw(B, S, K, H, seed=1), draw(B, S, K, V, seed=2)


def leaky(call: Call):
    """A kernel that multiplies hidden values by zero, so it is correct for finite numbers only."""
    group = call.query.shape[2] // call.key.shape[2]
    key, value = (jnp.repeat(x, group, axis=2) for x in (call.key, call.value))
    scores = jnp.einsum("btnh,bsnh->bnts", call.query, key) * call.scale
    weights = jax.nn.softmax(
        jnp.where(call.mask.block(jnp.arange(T), jnp.arange(S)), scores, -1e30)
    )
    return jnp.einsum("bnts,bsnv->btnv", weights, value)


def contained(call: Call):
    return on_test(call, leaky)


def both(attend, inputs, lengths=LENGTHS):
    """Return output and gradients under a random cotangent.

    Lengths are traced, the causal mask is not.
    """

    @jax.jit
    def run(inputs, lengths):
        mask = Mask.causal(2) & Mask.lengths(key=lengths)
        output, pullback = jax.vjp(lambda *inputs: attend(prepare(*inputs, mask=mask)), *inputs)
        return dict(
            zip(("output", *NAMES), (output, *pullback(draw(*output.shape, seed=3))), strict=True)
        )

    return run(inputs, lengths)


def test_finite_numbers_give_what_the_kernel_gives():
    ours, theirs = both(contained, arrays()), both(leaky, arrays())
    for name, array in ours.items():
        np.testing.assert_array_equal(array, theirs[name], err_msg=name)


@pytest.mark.parametrize(
    ("name", "at", "bad"),
    [
        ("query", (0, 4, 1, 2), np.nan),
        ("key", (0, 4, 1, 2), np.inf),
        ("value", (0, 4, 1, 2), -np.inf),
        ("value", (1, 3, 0, 2), np.nan),
    ],
)
def test_what_is_not_finite_reaches_the_rows_that_see_it(close, devices, name, at, bad):
    inputs = [
        x.at[at].set(bad) if name == given else x for given, x in zip(NAMES, arrays(), strict=True)
    ]
    ours, theirs, plain = (both(attend, inputs) for attend in (contained, REFERENCE.attend, leaky))
    seen = at != (1, 3, 0, 2)  # beyond the keys of its row
    for result in ("output", "query") if seen else ("output", *NAMES):
        close(ours[result], theirs[result])
    assert np.isnan(ours["output"]).any() == seen
    leaked = [name for name in ours if (np.isnan(plain[name]) != np.isnan(ours[name])).any()]
    assert leaked  # the kernel alone does not keep the contract


@pytest.fixture(params=["one device", "many devices"])
def devices(request):
    with jax.sharding.use_abstract_mesh(
        jax.sharding.AbstractMesh((1 + 7 * request.param.startswith("many"),), ("x",))
    ):
        yield


def test_a_batch_made_by_vmap_takes_one_branch_and_equals_the_batch(close):
    query, key, value = arrays()
    value = value.at[0, 4, 1, 2].set(jnp.nan)

    def total(attend, lengths, *inputs):
        mask = Mask.causal(2) & Mask.lengths(key=lengths)
        return jnp.nansum(attend(prepare(*inputs, mask=mask)))

    def one(attend, length, *inputs):
        return total(attend, length[None], *(x[None] for x in inputs))

    rows = jax.vmap(jax.value_and_grad(partial(one, contained), argnums=1))
    truth = jax.value_and_grad(partial(total, REFERENCE.attend), argnums=1)(
        LENGTHS, query, key, value
    )
    values, gradients = jax.jit(rows)(LENGTHS, query, key, value)
    close((values.sum(), gradients), truth)
    branches = [
        eqn
        for eqn in jax.make_jaxpr(rows)(LENGTHS, query, key, value).eqns
        if eqn.primitive.name == "cond"
    ]
    assert [eqn.invars[0].aval.shape for eqn in branches] == [(), ()]  # one forward, one backward


def test_remat_changes_nothing(close):
    def again(call: Call):
        attend = jax.checkpoint(
            lambda *inputs: contained(replace(call, **dict(zip(NAMES, inputs, strict=True))))
        )
        return attend(call.query, call.key, call.value)

    close(both(again, arrays()), both(contained, arrays()))


def test_finite_numbers_take_the_memory_of_one_head():
    inputs = draw(2, 64, 8, 32), draw(2, 64, 4, 32), draw(2, 64, 4, 32)
    attend = jax.jit(lambda *inputs: on_test(prepare(*inputs), lambda call: jnp.sin(call.query)))
    found = attend.lower(*inputs).compile().memory_analysis()
    assert found is not None
    extra = (
        found.temp_size_in_bytes - inputs[0].nbytes
    )  # the output of the kernel, which XLA keeps apart on CPU
    assert extra < memory(prepare(*inputs)) < inputs[1].nbytes
