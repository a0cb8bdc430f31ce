"""Plans of models with experts, latent or recurrent attention: memory and operations."""

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from flax_attn import (
    DifferentialAttention,
    GatedDeltaNet,
    Linear,
    Mask,
    MultiHeadAttention,
    MultiHeadLatentAttention,
)
from flax_attn.models.deepseekv3 import DeepseekV3, DeepseekV3Config
from flax_attn.models.llama import Llama, LlamaConfig
from flax_attn.models.qwen3next import Qwen3Next, Qwen3NextConfig
from flax_attn.modules.calls import Attention
from flax_attn.modules.work import Work, count_pairs, products
from flax_attn.plan import cost, work
from flax_attn.plan.hlo import read
from flax_attn.plan.models import LibraryModel
from flax_attn.plan.placement import held_bytes, model_on
from flax_attn.plan.plan import plan

SIZES = {"num_heads": 4, "num_layers": 2, "context_length": 64, "vocab_size": 40}
EXPERTS = {"num_experts": 8, "top_k": 2, "d_expert": 20}
DEEPSEEK = LibraryModel(DeepseekV3, DeepseekV3Config(
    32, 48, **SIZES, **EXPERTS, kv_lora_rank=16, q_lora_rank=24, qk_nope_head_dim=6,
    qk_rope_head_dim=4, v_head_dim=5, groups=4, top_groups=2, num_dense_layers=1,
))  # fmt: skip
NEXT = LibraryModel(Qwen3Next, Qwen3NextConfig(
    32, 48, **SIZES, **EXPERTS, num_kv_heads=2, head_dim=8, full_layers=(1,), linear_heads=4,
    linear_key_heads=2, linear_head_dim=6, linear_value_dim=10, d_shared=14,
))  # fmt: skip
SMALL = LlamaConfig(
    32, 48, num_heads=4, num_layers=3, num_kv_heads=2, context_length=64, vocab_size=56
)
MESH = {"data": 2, "expert": 2, "tensor": 2}

pytestmark = pytest.mark.usefixtures("dtype_promotion")


def test_experts_are_divided_and_a_token_is_counted_in_those_it_is_given_to(job):
    found = plan(job(MESH, model=DEEPSEEK, dtype="float32"))
    experts = 8 * 3 * 32 * 20
    assert found.held.experts == 4 * experts // 4  # expert * tensor
    attention = 32 * 24 + 24 * 4 * 10 + 32 * 20 + 16 * 4 * 11 + 4 * 5 * 32
    used = 2 * attention + 3 * 32 * 48 + (32 * 8 + 2 * 3 * 32 * 20 + 3 * 32 * 20) + 32 * 40
    seen = 2 * 2 * 4 * (10 + 5) * 16 * 17 // 2
    (phase,) = found.phases
    assert phase.work == 3 * 8 * (2 * used * 16 + seen) // 8
    assert phase.flops > 0.9 * phase.work
    sent = {row.kind for row in phase.collectives if row.axes == ("expert",)}
    assert sent == {"all-gather", "reduce-scatter"}  # of tokens


def test_a_state_is_divided_by_rows_and_heads_and_does_not_grow(job):
    caches = [
        held_bytes(job(MESH, model=NEXT, train=False, tokens=tokens)).cache for tokens in (16, 32)
    ]
    # Rows of a device, and numbers per token of the one layer with keys.
    rows, keys = 8 // 4, 2 * 2 * 8 // 2
    # The state in float32, and inputs in bfloat16.
    state = rows * (4 * 4 * 10 * 6 // 2 + 2 * 3 * (2 * 2 * 6 + 4 * 10) // 2)
    lengths = 2 * 4 * 8
    assert caches == [state + 2 * rows * keys * tokens + lengths for tokens in (16, 32)]


def test_a_step_behind_a_state_is_the_same_work_however_long_it_is(job):
    mesh = jax.sharding.AbstractMesh((1,), ("data",))
    jobs = [job({"data": 1}, name="cpu:1", model=NEXT, tokens=tokens) for tokens in (16, 32)]
    works = [work.decoding(one, model_on(one, mesh)).attention for one in jobs]
    assert works[0] == 8 * (4 * 4 * 8 * 16 + 6 * 4 * 6 * 10)
    assert works[1] - works[0] == 8 * 4 * 4 * 8 * 16  # of the layer with keys


@pytest.mark.parametrize(
    ("make", "pair", "step"),
    [
        (
            lambda **o: MultiHeadAttention(
                16, 16, 64, 0.0, 4, num_kv_heads=2, backend="reference", **o,
            ),
            64,
            64,
        ),
        (lambda **o: DifferentialAttention(16, 16, 64, 0.0, 4, backend="reference", **o), 96, 96),
        (
            lambda **o: MultiHeadLatentAttention(
                16, 16, 64, 0.0, 4, kv_lora_rank=7, qk_nope_head_dim=5, qk_rope_head_dim=2,
                v_head_dim=3, backend="reference", **o,
            ),
            80,
            128,
        ),
    ],
    ids=["heads", "differential", "latent"],
)  # fmt: skip
def test_operations_of_a_pair_are_those_of_the_formula_that_runs(make, pair, step):
    att = make(rngs=nnx.Rngs(0))
    asked = att.work(32, 32)
    assert asked.attention == pair * 32 * 33 // 2
    assert att.work(1, 32).attention == 32 * step

    def products(t):  # the reference computes all pairs
        program = jax.jit(lambda x: att(x)).lower(jnp.ones((1, t, 16))).compile()
        return cost.flops(read(program.as_text()))

    assert products(32) == asked.parameters + 32**2 * pair


def test_all_pairs_count_where_every_token_sees_every_other():
    att = MultiHeadAttention(16, 16, 64, 0.0, 4, causal=False, rngs=nnx.Rngs(0))
    assert att.work(5, 7).attention == 5 * 7 * 64


@pytest.mark.parametrize(
    ("form", "pair", "again"), [("auto", 128, 0), ("absorbed", 128, 0), ("plain", 80, 1)]
)
def test_the_form_of_latent_attention_is_counted(form, pair, again):
    att = MultiHeadLatentAttention(
        16, 16, 64, 0.0, 4, kv_lora_rank=7, qk_nope_head_dim=5, qk_rope_head_dim=2, v_head_dim=3,
        form=form, rngs=nnx.Rngs(0),
    )  # fmt: skip
    step = att.work(1, 9)
    assert step.attention == 9 * pair
    # The plain form computes the keys and values of the 8 tokens before once more.
    expanded = again * 8 * 2 * att.W_key_value.kernel.size
    assert step.parameters == att.work(1, 1).parameters + expanded


@pytest.mark.parametrize(("t", "s", "window"), [(1, 9, None), (9, 9, 4), (3, 9, 8), (9, 9, 20)])
def test_pairs_are_those_that_a_mask_shows(t, s, window):
    mask = Mask.causal(s - t) if window is None else Mask.sliding_window(window, s - t)
    seen = jnp.sum(mask.block(jnp.arange(t), jnp.arange(s)))
    assert count_pairs(t, s, window) == seen


def test_the_work_of_a_state_is_that_of_its_tokens():
    att = GatedDeltaNet(6, 6, 4, 3, value_dim=5, rngs=nnx.Rngs(0))
    assert att.work(7, 50).attention == 7 * 6 * 4 * 3 * 5


class TokenMean(Attention):
    """A variant that the library does not know: a token gets the mean of those before it."""

    def __init__(self, width, rngs):
        self.d_in = self.d_out = width
        self.W_value = Linear(width, width, rngs=rngs)

    def __call__(self, query, *, cache=None, **options):
        seen = jnp.arange(1, query.shape[-2] + 1, dtype=query.dtype)
        return jnp.cumsum(self.W_value(query), axis=-2) / seen[None, :, None]


class CountedTokenMean(TokenMean):
    """The same, which says what it computes."""

    def work(self, t, s):
        return products(self, t) + Work(attention=2 * t * self.d_out)


def model_of(attention):
    class Model(Llama):
        def attention(self, layer, backend, *, rngs, **numerics):
            return attention(self.config.d_model, rngs)

    return LibraryModel(Model, SMALL)


def test_the_work_of_a_variant_of_your_own_is_counted(job):
    (phase,) = plan(job(model=model_of(CountedTokenMean), dtype="float32")).phases
    kernels = 3 * (32 * 32 + 3 * 32 * 48) + 32 * 56
    assert phase.work == 3 * 8 * (2 * 16 * kernels + 3 * 2 * 16 * 32) // 8
    assert phase.flops > 0


def test_attention_of_unknown_work_is_refused(job):
    with pytest.raises(ValueError, match=r"TokenMean does not say them\. Define work\(t, s\)"):
        plan(job(model=model_of(TokenMean), dtype="float32"))
