"""Checkpoints: a run that is killed, also in the middle of a save, goes on to the same bits."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax import nnx

from flax_attn import GPT2, GPT2Config
from flax_attn.training import Checkpoints, float32_state, train_step

STEPS = 11
TOKENS = np.random.default_rng(0).integers(0, 11, (STEPS + 1, 3, 7)).astype(np.int32)


def build(seed=0, d_model=8, optimizer=None, **options):
    config = GPT2Config(d_model, 2, 0, context_length=8, vocab_size=11, dropout=0.3)
    model = GPT2(config, rngs=nnx.Rngs(seed), **options)
    return model, nnx.Optimizer(model, optimizer or optax.adamw(0.01), wrt=nnx.Param)


def take_step(model, optimizer, tokens):
    with jax.numpy_dtype_promotion("standard"):  # optax raises a float to an integer count
        return float(train_step(model, optimizer, tokens))


def run(folder, seed=0):
    """Train from the last checkpoint and save every other step; return losses and final state."""
    model, optimizer = build(seed)
    losses, done = {}, 0
    with Checkpoints(folder) as checkpoints:
        if checkpoints.latest is not None:
            done, extra = checkpoints.restore(model, optimizer)
            assert extra == {"read": [done]}
        for step in range(done + 1, STEPS + 1):
            losses[step] = take_step(model, optimizer, TOKENS[step])
            tell(f"{step} {losses[step].hex()}")
            if step % 2 == 0:
                checkpoints.save(step, model, optimizer, read=[step])
    return losses, arrays(model, optimizer)


def arrays(model, optimizer):
    state = nnx.state((model, optimizer))
    keys = jax.tree.map(
        lambda x: jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x,
        state,
    )
    return {
        jax.tree_util.keystr(path): np.array(x)
        for path, x in jax.tree_util.tree_leaves_with_path(keys)
    }


def tell(line):
    """Print in one piece: saves are written, and tell of it, beside the run."""
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def hang_in_the_third_save():
    finalize, calls = ocp.PyTreeCheckpointHandler.finalize, []

    def slow(self, directory):
        calls.append(directory)
        if len(calls) == 3:
            tell("in the middle of a save")
            time.sleep(600)
        finalize(self, directory)

    ocp.PyTreeCheckpointHandler.finalize = slow


def killed(folder, at):
    """Run in another process, kill it when it prints `at`, and return the losses it printed."""
    command = [sys.executable, __file__, str(folder), *(["hang"] if at.startswith("in") else [])]
    # The same options as here.
    options = {
        "cwd": Path(__file__).parents[2],
        "env": os.environ | {"JAX_DISABLE_MOST_OPTIMIZATIONS": "1"},
    }
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, **options) as process:
        lines = []
        for line in process.stdout:
            lines.append(line.split())
            if line.startswith(at):
                process.kill()
        assert process.wait() == -signal.SIGKILL
    return {int(step): float.fromhex(loss) for step, loss, *_ in lines if step.isdigit()}


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory):
    return run(tmp_path_factory.mktemp("unbroken"))


@pytest.mark.parametrize(("at", "latest"), [("7 ", (4, 6)), ("in the middle of a save", (4,))])
def test_a_killed_run_goes_on_to_the_same_bits(at, latest, unbroken, tmp_path):
    before = killed(tmp_path, at)
    assert max(before) >= 6
    with Checkpoints(tmp_path) as checkpoints:
        assert checkpoints.latest in latest
        first = checkpoints.latest + 1
    losses, left = run(tmp_path, seed=5)  # what it starts from is overwritten
    assert min(losses) == first
    assert before.items() <= unbroken[0].items()
    assert before | losses == unbroken[0]
    assert left.keys() == unbroken[1].keys()
    for name, array in left.items():
        np.testing.assert_array_equal(array, unbroken[1][name], err_msg=name)


def test_what_is_saved_is_the_moment_of_the_call(tmp_path):
    """Files are written while the run goes on, and each step reuses the memory of the last one."""
    model, optimizer = build()
    take_step(model, optimizer, TOKENS[0])
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, model, optimizer)
        saved = arrays(model, optimizer)
        for _ in range(3):
            take_step(model, optimizer, TOKENS[0])
        other = build(3)
        assert checkpoints.restore(*other) == (1, {})
    for name, array in arrays(*other).items():
        np.testing.assert_array_equal(array, saved[name], err_msg=name)


def test_parameters_of_low_precision_come_back_with_their_copies(tmp_path):
    options = {"optimizer": float32_state(optax.adam(0.1)), "param_dtype": jnp.bfloat16}
    with Checkpoints(tmp_path) as checkpoints:
        model, optimizer = build(**options)
        take_step(model, optimizer, TOKENS[0])
        checkpoints.save(1, model, optimizer)
        other = build(3, **options)
        checkpoints.restore(*other)
    saved = arrays(model, optimizer)
    assert any("master" in name for name in saved)
    for name, array in arrays(*other).items():
        np.testing.assert_array_equal(array, saved[name], err_msg=name)


def test_the_last_ones_are_kept(tmp_path):
    model, optimizer = build()
    with Checkpoints(tmp_path, keep=2) as checkpoints:
        assert checkpoints.latest is None
        for step in (3, 4, 9, 10):
            checkpoints.save(step, model, optimizer)
        assert checkpoints.latest == 10
    assert sorted(int(path.name) for path in tmp_path.iterdir()) == [9, 10]


def test_a_save_that_failed_is_heard_of(tmp_path, monkeypatch):
    model, optimizer = build()

    def fail(self, directory):
        raise OSError("no space left")

    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(1, model, optimizer)
    checkpoints.wait()
    monkeypatch.setattr(ocp.PyTreeCheckpointHandler, "finalize", fail)
    checkpoints.save(2, model, optimizer)
    with pytest.raises(OSError, match="no space left"):
        checkpoints.save(3, model, optimizer)
    with Checkpoints(tmp_path) as checkpoints:
        assert checkpoints.latest == 1


@pytest.mark.parametrize("step", [3, 4])
def test_steps_grow(step, tmp_path):
    model, optimizer = build()
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(4, model, optimizer)
        with pytest.raises(
            ValueError,
            match=rf"got step={step}, and {re.escape(str(tmp_path))} has one of step 4\.",
        ):
            checkpoints.save(step, model, optimizer)


@pytest.mark.parametrize("value", [(1, 2), np.float32(1), {1: 2}, float("nan")], ids=str)
def test_what_is_not_json_is_refused(value, tmp_path):
    model, optimizer = build()
    with Checkpoints(tmp_path) as checkpoints:
        with pytest.raises(ValueError, match=r"must be as JSON has them: .*; got \{'value': "):
            checkpoints.save(4, model, optimizer, value=value)
        assert checkpoints.latest is None


def test_a_folder_without_checkpoint(tmp_path):
    with (
        Checkpoints(tmp_path / "new") as checkpoints,
        pytest.raises(ValueError, match=r"new has no complete checkpoint"),
    ):
        checkpoints.restore(*build())


def test_a_checkpoint_of_another_run(tmp_path):
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(4, *build())
        for other in (
            build(1, d_model=6),
            build(1, param_dtype=jnp.bfloat16),
            build(1, optimizer=optax.sgd(0.1)),
        ):
            before = arrays(*other)
            with pytest.raises(ValueError, match="is of another model or optimizer") as error:
                checkpoints.restore(*other)
            for name, array in arrays(*other).items():
                np.testing.assert_array_equal(array, before[name])
    lines = str(error.value).splitlines()[1:]
    assert (
        "  optimizer.opt_state.0.nu.tok_emb.embedding: float32[11, 8] is saved, nothing is wanted"
        in lines
    )


def test_a_model_is_restored_without_the_optimizer(tmp_path, monkeypatch):
    with Checkpoints(tmp_path) as checkpoints:
        model, optimizer = build(seed=3)
        take_step(model, optimizer, TOKENS[0])
        checkpoints.save(4, model, optimizer, read=[1])
        evaluated, untouched = build(seed=5)
        before = arrays((), untouched)
        read = []
        restore = checkpoints._manager.restore

        def note(step, args):
            found = restore(step, args=args)
            read.extend(found.arrays)
            return found

        monkeypatch.setattr(checkpoints._manager, "restore", note)
        assert checkpoints.restore(evaluated) == (4, {"read": [1]})
        with pytest.raises(ValueError, match=r"another model or optimizer.*\n  model\."):
            checkpoints.restore(build(d_model=6)[0])
    assert read
    assert all(name.startswith("model.") for name in read)
    expected = arrays(model, ())
    for name, array in arrays(evaluated, ()).items():
        np.testing.assert_array_equal(array, expected[name], err_msg=name)
    for name, array in arrays((), untouched).items():
        np.testing.assert_array_equal(array, before[name], err_msg=name)


def test_the_lines_name_both_shapes_and_dtypes(tmp_path):
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(4, *build(optimizer=optax.sgd(0.1)))
        wide = r"model.final_norm.scale: float32\[8\] is saved, float32\[6\] is wanted"
        with pytest.raises(ValueError, match=wide):
            checkpoints.restore(*build(d_model=6, optimizer=optax.sgd(0.1)))
        low = r"model.final_norm.scale: float32\[8\] is saved, bfloat16\[8\] is wanted"
        with pytest.raises(ValueError, match=low):
            checkpoints.restore(*build(param_dtype=jnp.bfloat16, optimizer=optax.sgd(0.1)))
        with pytest.raises(ValueError, match=r"momentum|trace\..*: nothing is saved, float32"):
            checkpoints.restore(*build(optimizer=optax.sgd(0.1, momentum=0.9)))


@pytest.mark.usefixtures("no_shape_checks")
def test_a_run_is_a_model_and_an_optimizer(tmp_path):
    model, optimizer = build()
    no_optimizer = r"^optimizer must be Optimizer; got {}\. Pass optimizer=nnx\.Optimizer\(model, "
    with Checkpoints(tmp_path) as checkpoints:
        with pytest.raises(ValueError, match=no_optimizer.format("NoneType")):
            checkpoints.save(1, model, None)
        with pytest.raises(ValueError, match=r"^model must be Module; got State\. Pass the model"):
            checkpoints.save(1, nnx.state(model), optimizer)
        with pytest.raises(ValueError, match=r"^model must be Module; got the class GPT2"):
            checkpoints.restore(type(model))
        with pytest.raises(ValueError, match=r"^optimizer must be Optimizer or None; got G"):
            checkpoints.restore(model, optax.adam(0.1))
        assert checkpoints.latest is None


@pytest.mark.parametrize("keep", [0, 1.5])
def test_how_many_are_kept_is_a_number(keep, tmp_path, no_shape_checks):
    with pytest.raises(ValueError, match=rf"keep must be a positive integer; got keep={keep}"):
        Checkpoints(tmp_path, keep)


if __name__ == "__main__":
    if "hang" in sys.argv:
        hang_in_the_third_save()
    run(sys.argv[1])
