"""The operations that are read off a traced program."""

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from jax import lax

from flax_attn import Mask, dot_product_attention
from flax_attn.modules.work import Work, work
from flax_attn.plan.models import OwnModel
from flax_attn.plan.phases import Phase
from flax_attn.plan.plan import plan
from flax_attn.plan.traced_work import traced_work

pytestmark = pytest.mark.usefixtures("dtype_promotion")

B, T, N, H = 2, 6, 3, 4
# Of each row of queries: causal, then a window of 2.
CAUSAL = 2 * B * N * (T * (T + 1) // 2) * 2 * H
WINDOW = 2 * B * N * (2 * T - 1) * 2 * H


def tokens(shape=(B, T, N, H)):
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def causal(x):
    return dot_product_attention(x, x, x, mask=Mask.causal())


def over_examples(x):
    return jax.vmap(causal)(x)


def in_turns(x):
    return lax.scan(lambda x, _: (causal(x), None), x, None, length=5)[0]


def again(x):
    return jax.checkpoint(jax.jit(causal))(x)


def either(x):
    return lax.cond(x.sum() > 0, lambda x: x, causal, x)


def windowed(x):
    return dot_product_attention(x, x, x, mask=Mask.sliding_window(2))


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (causal, CAUSAL),
        (over_examples, CAUSAL),
        (in_turns, 5 * CAUSAL),
        (again, CAUSAL),
        (either, 0),
        (windowed, WINDOW),
    ],
)
def test_attention_is_what_its_mask_lets_through(function, expected):
    found = traced_work(function, tokens())
    assert found == Work(attention=expected)


def test_products_and_convolutions():
    def layer(x, matrix, kernel):
        x = lax.conv_general_dilated(x, kernel, (1,), "SAME", feature_group_count=2)
        return jnp.einsum("bct,cd->btd", x, matrix)

    found = traced_work(layer, tokens((B, 8, T)), tokens((8, 5)), tokens((8, 4, 3)))
    assert found == Work(2 * B * 8 * T * 4 * 3 + 2 * B * T * 8 * 5)


class Layer(nnx.Module):
    """A layer of your own that calls attention as a function."""

    def __init__(self):
        rngs = nnx.Rngs(0)
        self.embed = nnx.Embed(40, N * H, rngs=rngs)
        self.inner = nnx.Linear(N * H, 3 * N * H, rngs=rngs)
        self.head = nnx.Linear(N * H, 40, rngs=rngs)

    def __call__(self, ids):
        x = self.inner(self.embed(ids))
        query, key, value = jnp.split(x.reshape(*ids.shape, 3 * N, H), 3, axis=2)
        mixed = dot_product_attention(query, key, value, mask=Mask.causal())
        return self.head(mixed.reshape(*ids.shape, N * H))


def test_a_module_of_your_own_is_planned_with_its_attention(job):
    one = job({"data": 2, "fsdp": 4}, model=OwnModel(Layer))
    (phase,) = plan(one).phases
    products = 2 * one.batch * one.tokens * (N * H * 3 * N * H + N * H * 40)
    pairs = one.tokens * (one.tokens + 1) // 2
    attention = 2 * one.batch * N * pairs * 2 * H
    assert isinstance(phase, Phase)
    assert phase.work == 3 * (products + attention) // 8


def test_a_model_of_this_library_says_the_same_of_itself():
    from flax_attn.models import Llama, LlamaConfig

    config = LlamaConfig(
        d_model=8, num_heads=2, num_kv_heads=1, num_layers=2, d_hidden=12, vocab_size=11
    )
    model = Llama(config, rngs=nnx.Rngs(0))
    graph, state = nnx.split(model)
    ids = jax.ShapeDtypeStruct((1, T), jnp.int32)
    found = traced_work(lambda state, ids: nnx.merge(graph, state)(ids), state, ids)
    assert found == work(model, T, T)
