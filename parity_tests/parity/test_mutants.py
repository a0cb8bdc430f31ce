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


def summed(x):
    steps = jnp.arange(4, dtype=x.dtype)[None, None]
    inner = jnp.where(x > 0, jnp.sin(x) - steps, x * 1.5)
    return jnp.mean(inner[:, 1:, :], axis=1) + 1e-5


def split(x):
    heads = jnp.reshape(x, (5, 2, 2, 4))
    weights = jax.nn.softmax(heads)
    return jax.lax.cumsum(weights, axis=1), jnp.concatenate([x[:, :2], x[:, 2:]], axis=2)


def scanned(x):
    def step(carry, row):
        carry = jnp.tanh(carry + row)
        return carry, carry * 2.0

    last, rows = jax.lax.scan(step, x[0], x)
    return last, jax.lax.cond(x[0, 0, 0] > 100.0, jnp.sin, jnp.cos, rows)


def looped(x):
    return jax.lax.fori_loop(0, 3, lambda i, y: jnp.square(y) + x, x)


def convolved(x):
    kernel = jnp.arange(12.0, dtype=x.dtype).reshape(3, 4, 1)
    return jax.lax.conv_general_dilated(
        x, kernel, (1,), [(1, 1)], dimension_numbers=("NWC", "WIO", "NWC")
    )


def largest(x):
    return jnp.max(x, axis=2) + jnp.take(x[:, 0], jnp.array([0, 2, 1, 1]), axis=1) ** 3


def edits(paired, function):
    """Return a pair of a function with itself in JAX, its unedited side, and all its edits."""
    pair = paired(function, torch.sin, *X)
    right = EditedAdapter(JaxAdapter(function))
    trace = right.trace(pair.uncompiled)
    return pair, right, [edit for edit in trace.edits() if trace.fits(edit)]


FUNCTIONS = (summed, split, scanned, looped, convolved, largest)


@pytest.mark.parametrize("function", FUNCTIONS)
def test_each_edit_runs_in_its_line_and_keeps_shapes_and_dtypes(paired, function):
    with jax.enable_x64(True):
        pair, right, found = edits(paired, function)
        wanted = right.run(pair.uncompiled).outputs
        assert len(found) > 10
        for edit in found[:: len(found) // 8]:
            assert edit.key.place.file == __file__
            outputs = EditedAdapter(right, edit).run(pair.uncompiled).outputs
            shapes = {name: (output.shape, output.dtype) for name, output in outputs.items()}
            assert shapes == {name: (a.shape, a.dtype) for name, a in wanted.items()}


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
    assert set(LINES) == set(CATALOGUE)


@pytest.mark.parametrize("kind", LINES)
def test_an_edit_changes_the_run_at_its_line(paired, kind):
    function, source = LINES[kind]
    with jax.enable_x64(True):
        pair, right, found = edits(paired, function)
        here = [one for one in found if one.kind == kind and source in one.key.place.source]
        assert here
        plain = right.run(pair.uncompiled)
        cotangents = pair.cotangents_for(plain.outputs)
        # No gradient flows backwards through a loop of unknown length.
        gradients = None if function is looped and kind != "stop_gradient" else cotangents
        spec = pair.run_spec("edited", cotangents=gradients)
        wanted = right.run(spec).arrays
        changed = [_differs(EditedAdapter(right, one).run(spec).arrays, wanted) for one in here]
        assert any(changed)


def _differs(found, wanted):
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
    return compare(Layer(), torch_layer().eval(), [(3, 4)], checks=checks, mutants=count, **options)


def test_forward_and_gradients_detect_what_changes_anything():
    report = planted(["forward", "gradients"], 30)
    found = report.mutants
    assert report.passed
    assert len(found.mutants) == 30
    assert not found.undetected
    assert set(found.detected) == {"forward", "gradients"}
    stopped = [one for one in found.mutants if one.kind == "stop_gradient" and one.detected_by]
    assert {one.detected_by for one in stopped} == {"gradients"}
    effective = 30 - len(found.equivalent)
    assert f"{effective} of {effective} edits are detected (forward" in str(report)
    assert report.mutants.as_dict()["undetected"] == 0


def test_a_check_of_shapes_detects_nothing():
    report = planted(["shapes"], 6)
    found = report.mutants
    assert not found.detected
    assert len(found.undetected) + len(found.equivalent) == 6
    first, *lines = found.lines()
    assert first.startswith(f"0 of {len(found.undetected)} edits are detected")
    assert lines == [f"not detected: {one}" for one in found.undetected]
    assert all(line.split()[2].startswith("test_mutants.py:") for line in lines)
    record = json.loads(json.dumps(found.as_dict()))
    assert record["planted"] == 6
    assert record["mutants"][0]["file"] == __file__


def test_an_edit_without_effect_is_counted_apart(paired):
    def function(x):
        return jnp.square(-x)

    found = plant(paired(function, lambda x: x**2, (3, 4)), ["forward", "gradients"], 40)
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
    pair.flax = pair.torch
    with pytest.raises(ValueError, match="edits of a JAX module; got a TorchAdapter"):
        plant(pair, ["forward"], 5)


def test_training_runs_on_an_edited_side():
    found = planted(["training"], 3, seed=1).mutants
    assert set(found.detected) <= {"training"}
    assert found.detected


def test_a_mutant_names_its_line():
    mutants = planted(["shapes"], 3).mutants.mutants
    assert all(isinstance(one.place, Place) and one.place.source for one in mutants)
