"""What a pass is worth: mutants of the JAX side, and which checks detect them."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx

from flax_attn.parity import compare
from flax_attn.parity.adapters.jax_adapter import JaxAdapter
from flax_attn.parity.mutants import EditedAdapter, plant
from flax_attn.parity.trace.edits import CATALOGUE
from flax_attn.parity.trace.program import Place

X = [(5, 4, 4)]

# Between them these functions have an operation for each kind of edit, see LINES.


def summed(x):
    steps = jnp.arange(4, dtype=x.dtype)[None, None]
    inner = jnp.where(x > 0, jnp.sin(x) - steps, x * 1.5)
    return jnp.mean(inner[:, 1:, :], axis=1) + 1e-5


def split(x):
    heads = jnp.reshape(x, (5, 2, 2, 4))
    weights = jax.nn.softmax(heads)
    joined = jnp.concatenate([x[:, :2], x[:, 2:]], axis=2)
    return jax.lax.cumsum(weights, axis=1), joined


def scanned(x):
    def step(carry, row):
        carry = jnp.tanh(carry + row)
        return carry, carry * 2.0

    last, rows = jax.lax.scan(step, x[0], x)
    # Inputs are normal numbers, so that only the second branch runs.
    large = x[0, 0, 0] > 100.0
    return last, jax.lax.cond(large, jnp.sin, jnp.cos, rows)


def looped(x):
    return jax.lax.fori_loop(0, 3, lambda i, y: jnp.square(y) + x, x)


def convolved(x):
    kernel = jnp.arange(12.0, dtype=x.dtype).reshape(3, 4, 1)
    return jax.lax.conv_general_dilated(
        x, kernel, (1,), [(1, 1)], dimension_numbers=("NWC", "WIO", "NWC")
    )


def largest(x):
    columns = jnp.array([0, 2, 1, 1])
    taken = jnp.take(x[:, 0], columns, axis=1)
    return jnp.max(x, axis=2) + taken**3


def edits(paired, function):
    """Return a pair of a function with itself in JAX, its unedited side, and all its edits."""
    pair = paired(function, torch.sin, *X)
    right = EditedAdapter(JaxAdapter(function))
    trace = right.trace(pair.uncompiled)
    fitting = [edit for edit in trace.edits() if trace.fits(edit)]
    return pair, right, fitting


def shapes_and_dtypes(outputs):
    return {name: (output.shape, output.dtype) for name, output in outputs.items()}


FUNCTIONS = (summed, split, scanned, looped, convolved, largest)


@pytest.mark.parametrize("function", FUNCTIONS)
def test_each_edit_runs_in_its_line_and_keeps_shapes_and_dtypes(paired, function):
    with jax.enable_x64(True):
        pair, right, found = edits(paired, function)
        wanted = shapes_and_dtypes(right.run(pair.uncompiled).outputs)
        assert len(found) > 10
        # A run of each edit would take minutes.
        apart = len(found) // 8
        for edit in found[::apart]:
            assert edit.key.place.file == __file__
            edited = EditedAdapter(right, edit)
            outputs = edited.run(pair.uncompiled).outputs
            assert shapes_and_dtypes(outputs) == wanted


#: For each kind a function and the text of the line at which an edit of the kind changes it.
LINES = {
    "drop": (summed, "jnp.sin(x)"),
    "missing": (summed, "+ 1e-5"),
    "swap": (summed, "jnp.where"),
    "transpose": (split, "jax.nn.softmax"),
    "permute": (split, "jnp.reshape"),
    "scale": (looped, "jnp.square"),
    "constant": (summed, "+ 1e-5"),
    "cast": (convolved, "conv_general_dilated"),
    "shift": (scanned, "jnp.tanh"),
    "reverse": (scanned, "jnp.tanh"),
    "axis": (split, "jax.nn.softmax"),
    "off by one": (summed, "inner[:, 1:, :]"),
    "other": (largest, "jnp.max"),
    "sign": (scanned, "jnp.tanh"),
    "stop_gradient": (looped, "jnp.square"),
}


def test_there_is_a_line_for_each_kind():
    # Else a kind that is added would not be tried.
    assert set(LINES) == set(CATALOGUE)


@pytest.mark.parametrize("kind", LINES)
def test_an_edit_changes_the_run_at_its_line(paired, kind):
    function, source = LINES[kind]
    with jax.enable_x64(True):
        pair, right, found = edits(paired, function)
        of_kind = [one for one in found if one.kind == kind]
        here = [one for one in of_kind if source in one.key.place.source]
        assert here
        # No gradient flows backwards through a loop of unknown length.
        backwards = function is not looped or kind == "stop_gradient"
        assert changed(pair, right, here, backwards)


def changed(pair, right, edits, backwards):
    """Whether one of some edits changes the outputs or, backwards, the gradients."""
    cotangents = pair.cotangents_for(right.run(pair.uncompiled).outputs)
    spec = pair.run_spec("edited", cotangents=cotangents if backwards else None)
    wanted = right.run(spec).arrays
    edited = [EditedAdapter(right, edit).run(spec).arrays for edit in edits]
    # One is enough: a kind has several edits at a line, and not each is felt.
    return any(differs(arrays, wanted) for arrays in edited)


def differs(found, wanted):
    return any(not np.array_equal(found[name], array) for name, array in wanted.items())


class Layer(nnx.Module):
    """Two layers."""

    def __init__(self):
        self.up = nnx.Linear(4, 6, rngs=nnx.Rngs(0))
        self.down = nnx.Linear(6, 3, rngs=nnx.Rngs(0))

    def __call__(self, x):
        return self.down(jnp.tanh(self.up(x)))


def torch_layer():
    return torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.Tanh(), torch.nn.Linear(6, 3))


def planted(checks, count, **options):
    sides = Layer(), torch_layer().eval()
    return compare(*sides, [(3, 4)], checks=checks, mutants=count, **options)


def test_forward_and_gradients_detect_what_changes_anything():
    report = planted(["forward", "gradients"], 30)
    found = report.mutants
    assert report.passed
    assert len(found.mutants) == 30
    assert not found.undetected
    assert set(found.detected) == {"forward", "gradients"}
    # A stopped gradient leaves all outputs as they are.
    stopped = [one for one in found.mutants if one.kind == "stop_gradient"]
    by = {one.detected_by for one in stopped if one.detected_by}
    assert by == {"gradients"}
    effective = 30 - len(found.equivalent)
    assert f"{effective} of {effective} edits are detected (forward" in str(report)
    assert report.mutants.as_dict()["undetected"] == 0


@pytest.fixture(scope="module")
def unseen():
    # An edit keeps all shapes.
    return planted(["shapes"], 6).mutants


def test_a_check_of_shapes_detects_nothing(unseen):
    undetected = unseen.undetected
    assert not unseen.detected
    assert len(undetected) + len(unseen.equivalent) == 6
    first, *lines = unseen.lines()
    assert first.startswith(f"0 of {len(undetected)} edits are detected")
    assert lines == [f"not detected: {one}" for one in undetected]
    assert all(line.startswith("not detected: test_mutants.py:") for line in lines)


def test_a_record_of_mutants_can_be_written(unseen):
    written = json.dumps(unseen.as_dict())
    record = json.loads(written)
    assert record["planted"] == 6
    assert record["mutants"][0]["file"] == __file__


def test_an_edit_without_effect_is_counted_apart(paired):
    def function(x):
        # Without the sign it is the same function.
        return jnp.square(-x)

    pair = paired(function, lambda x: x**2, (3, 4))
    found = plant(pair, ["forward", "gradients"], 40)
    assert any("neg" in one.sentence for one in found.equivalent)
    assert not any(one.detected_by for one in found.equivalent)
    assert not found.undetected


def test_nothing_is_planted_where_a_check_fails():
    report = compare(jnp.sin, torch.cos, [(3, 4)], checks=["forward"], locate=False, mutants=5)
    assert report.mutants is None
    assert "no mutants were planted: a check fails on the modules as they are" in report.notes


def test_a_program_without_operations_has_no_mutants(paired):
    found = plant(paired(lambda x: x, lambda x: x, (3, 4)), ["forward"], 5)
    assert list(found.lines()) == ["no operation of the JAX side can be edited"]


def test_the_number_of_mutants_is_not_negative():
    with pytest.raises(ValueError, match=r"mutants must be 0 or more; got -1\. Pass mutants=50"):
        planted(["forward"], -1)


def test_the_edited_side_is_a_jax_module(paired):
    pair = paired(jnp.sin, torch.sin, (3, 4))
    # PyTorch in both places, where there is no jaxpr to edit.
    pair.flax = pair.torch
    with pytest.raises(ValueError, match="edits of a JAX module; got a TorchAdapter"):
        plant(pair, ["forward"], 5)


def test_training_runs_on_an_edited_side():
    # Of these three edits at least one changes what is trained.
    found = planted(["training"], 3, seed=1).mutants
    assert set(found.detected) <= {"training"}
    assert found.detected


def test_a_mutant_names_its_line():
    mutants = planted(["shapes"], 3).mutants.mutants
    assert all(isinstance(one.place, Place) and one.place.source for one in mutants)
