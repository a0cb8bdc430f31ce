"""Training on a mesh: microbatches, and checkpoints that are resumed on another mesh."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from flax_attn import GPT2, GPT2Config, convert
from flax_attn.parity import tolerance
from flax_attn.sharding.parameters import create, shard
from flax_attn.training import Checkpoints, float32_state, train_step

ROWS = np.random.default_rng(0).integers(0, 12, (48, 8))  # 6 batches of 8


def build(mesh=None, optimizer=None, d_model=16, dropout=0.0, **options):
    """Return a model and its optimizer, on a mesh or on one device."""
    config = GPT2Config(
        d_model, 4, 1, context_length=8, vocab_size=12, dropout=dropout, qkv_bias=False
    )
    options = {"param_dtype": jnp.float64, "backend": "reference", **options}
    model = GPT2(config, rngs=nnx.Rngs(3), **options)
    optimizer = optimizer or optax.adamw(0.01)

    def optimize(model):
        return nnx.Optimizer(model, optimizer, wrt=nnx.Param)

    return (
        (model, optimize(model))
        if mesh is None
        else (shard(model, mesh), create(optimize, mesh, model))
    )


def run(model, optimizer, batches, mesh=None):
    """Train, and return the losses."""
    with (
        jax.numpy_dtype_promotion("standard"),
        jax.set_mesh(mesh) if mesh else jax.numpy_rank_promotion("raise"),
    ):
        return np.array([train_step(model, optimizer, jnp.asarray(batch)) for batch in batches])


def largest_error(actual, expected):
    return max(tolerance.relative(actual, expected).values())


@pytest.mark.parametrize("kind", ["auto", "explicit"])
def test_microbatches_take_the_step_of_the_whole_batch(kind, x64, mesh_like):
    mesh, batch = mesh_like(kind, data=2, fsdp=2, tensor=2), ROWS[:16]
    optimizer = optax.sgd(0.1, momentum=0.9)
    whole = build(optimizer=optimizer)
    losses = run(*whole, [batch])
    # Its sums are in float32 by default.
    accumulating = optax.MultiSteps(optimizer, every_k_schedule=4, accumulator_dtype=jnp.float64)
    parts = build(mesh, accumulating.gradient_transformation())
    sums = parts[1].opt_state.acc_grads
    assert jax.tree.leaves(jax.tree.map(lambda x: x.sharding, sums)) == jax.tree.leaves(
        jax.tree.map(lambda x: x.sharding, nnx.state(parts[0], nnx.Param))
    )
    before = convert.state_dict(parts[0])
    first = run(*parts, np.split(batch, 4)[:3], mesh)
    assert largest_error(convert.state_dict(parts[0]), before) == 0
    last = run(*parts, np.split(batch, 4)[3:], mesh)
    assert abs(np.mean([*first, *last]) - losses[0]) <= 1e-12 * losses[0]
    assert largest_error(convert.state_dict(parts[0]), convert.state_dict(whole[0])) <= 1e-12


def test_parameters_of_low_precision_train_beside_their_copies(mesh_like):
    optimizer = float32_state(optax.sgd(2.0**-10))
    losses = []
    for mesh in (None, mesh_like(fsdp=2, tensor=2)):
        model, state = build(mesh, optimizer, param_dtype=jnp.bfloat16)
        losses.append(run(model, state, [ROWS[:8]] * 3, mesh))
    assert abs(losses[0] - losses[1]).max() < 2**-8 * losses[0].max()
    assert losses[1][2] < losses[1][0]


def test_a_run_is_resumed_on_another_mesh(x64, mesh_like, tmp_path):
    batches = np.split(ROWS, 6)
    expected = run(*build(dropout=0.2), batches)
    meshes = [mesh_like(data=2, fsdp=2, tensor=2), mesh_like(fsdp=2, tensor=2), None]
    losses, read = [], 0
    for i, mesh in enumerate(meshes):
        model, optimizer = build(mesh, dropout=0.2)
        with Checkpoints(tmp_path) as checkpoints:
            if i > 0:
                step, extra = checkpoints.restore(model, optimizer)
                assert (step, extra) == (i, {"read": 2 * i})
                read = extra["read"]
            losses.extend(run(model, optimizer, batches[read : read + 2], mesh))
            checkpoints.save(i + 1, model, optimizer, read=read + 2)
        kernel = model.trf_blocks[0].ff.layers[0].kernel
        assert kernel.sharding.shard_shape((16, 64)) == ((16, 64) if mesh is None else (8, 32))
        assert {
            len(x.sharding.device_set) for x in jax.tree.leaves(nnx.state((model, optimizer)))
        } == {(8, 4, 1)[i]}
    assert np.abs(np.array(losses) - expected).max() <= 1e-12 * expected.max()


def test_a_checkpoint_of_another_model_is_refused_on_a_mesh(mesh_like, tmp_path):
    mesh = mesh_like(fsdp=2, tensor=2)
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, *build(mesh, param_dtype=jnp.float32))
        line = r"model\.final_norm\.scale: float32\[16\] is saved, float32\[8\] is wanted"
        with pytest.raises(
            ValueError, match=rf"is of another model or optimizer\. Build both[\s\S]*{line}"
        ):
            checkpoints.restore(*build(mesh, d_model=8, param_dtype=jnp.float32))
