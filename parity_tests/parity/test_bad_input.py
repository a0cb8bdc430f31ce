"""What cannot be compared says why, and what to pass instead."""

import operator
import os
import re
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import linen, nnx

from flax_attn.convert import Rule
from flax_attn.parity import PairingError, ParityError, assert_parity, compare
from flax_attn.parity.report.state import next_steps

X = [(4, 3)]


# Linear layers of both libraries: the tests spoil one thing each.


def linear(width=2, **options):
    return nnx.Linear(3, width, rngs=nnx.Rngs(0), **options)


def torch_linear(width=2, **options):
    return torch.nn.Linear(3, width, **options)


class NoCall(nnx.Module):
    def __init__(self):
        self.layer = linear()


class NoForward(torch.nn.Module):
    pass


def say(match):
    # A sentence for the user, and not the error of a library that was called too early.
    return pytest.raises(PairingError, match=match)


@pytest.mark.parametrize(
    ("flax", "torch_side", "match"),
    [
        (3, torch_linear(), r"the Flax module is an NNX module, .* got int"),
        (linear(), [1.0], r"the PyTorch module is an nn.Module or a function of tensors; got list"),
        (
            linen.Dense(2),
            torch_linear(),
            r"Dense is a Linen module without variables. Pass module.bind\(variables\)",
        ),
        (
            torch_linear(),
            linear(),
            r"the Flax module is .* got Linear, of PyTorch. The order is compare\(flax_module, t",
        ),
        (
            jnp.sin,
            linear(),
            r"the PyTorch module is .* got Linear, of Flax. The order is compare\(flax_module, t",
        ),
        (
            NoCall(),
            torch_linear(),
            r"got NoCall, which cannot be called. Define __call__ in its cl",
        ),
        (
            linear(),
            NoForward(),
            r"got NoForward, which has no forward. Define forward in its class",
        ),
        (nnx.Linear, torch_linear(), r"got the class Linear: pass a module of it"),
        (linear(), torch.nn.Linear, r"got the class Linear: pass a module of it"),
    ],
    ids=[
        "number",
        "list",
        "unbound",
        "swapped",
        "two of Flax",
        "no call",
        "no forward",
        "Flax class",
        "PyTorch class",
    ],
)
def test_sides_that_are_none(flax, torch_side, match):
    with say(match):
        compare(flax, torch_side, X, layout="torch")


@pytest.mark.parametrize(
    ("flax", "torch_side", "layout", "match"),
    [
        (linear(), torch_linear(bias=False), "torch", r"(?s)do not pair.*missing bias \(2,\)"),
        (
            linear(use_bias=False),
            torch_linear(),
            "torch",
            r"(?s)do not pair.*unexpected bias \(2,\)",
        ),
        (
            linear(),
            torch_linear(5),
            "torch",
            r"(?s)do not pair.*mis-shaped weight: expected \(2, 3\), got \(5, 3\)",
        ),
        (
            linear(),
            torch_linear(),
            [Rule(("kernel",), "weight", "i o -> o i")],
            r"do not pair.*no place for bias \(2,",
        ),
        (
            linear(),
            torch_linear(),
            [Rule(("{a}",), "my_{a}")],
            r"(?s)do not pair.*missing my_bias .*unexpected bias",
        ),
    ],
    ids=["missing", "unexpected", "mis-shaped", "no place", "renamed"],
)
def test_parameters_that_do_not_pair(flax, torch_side, layout, match):
    with say(match):
        compare(flax, torch_side, X, layout=layout)


def test_parameters_claimed_twice():
    class Two(nnx.Module):
        def __init__(self):
            self.scale = nnx.Param(jnp.ones(3))
            self.gain = nnx.Param(jnp.ones(3))

        def __call__(self, x):
            return x * self.scale * self.gain

    theirs = torch.nn.LayerNorm(3, bias=False)
    # Whichever of both came last would be compared, and the other never.
    rules = [Rule(("scale",), "weight"), Rule(("gain",), "weight")]
    with say(r"an entry is made once; this layout makes weight of scale, and of gain"):
        compare(Two(), theirs, X, layout=rules)


def test_an_unknown_layout_and_an_unknown_check():
    layouts = r"layout must be one of 'auto', 'torch_ref', .* got 'pytorch'"
    with pytest.raises(ValueError, match=layouts):
        compare(linear(), torch_linear(), X, layout="pytorch")
    checks = r"check must be one of .*'forward'.*; got 'foward' \(nearest: forward\)"
    with pytest.raises(ValueError, match=checks):
        compare(linear(), torch_linear(), X, layout="torch", checks=["foward"])
    text = r"checks are names in a list or tuple; got 'forward': pass \['forward'\]"
    with pytest.raises(ValueError, match=text):
        compare(linear(), torch_linear(), X, layout="torch", checks="forward")


@pytest.mark.parametrize(
    ("inputs", "match"),
    [
        ("x", r"inputs are a list of arrays or of shapes, .* got str. Pass \[x\]"),
        (3, r"inputs are a list of arrays or of shapes, .* got int"),
        ([], r"inputs are a list of arrays or of shapes, .* got an empty \[\]"),
        (
            ["text"],
            (
                r"input 0 is no array of real numbers: its dtype is <U4. Pass an array, or a shape"
                r" as a tuple"
            ),
        ),
        ([None], r"input 0 is no array of real numbers: its dtype is object"),
        ([[[1.0], [1.0, 2.0]]], r"input 0 is no array of numbers: setting an array element"),
        ([(4, -3)], r"input 0: a tuple is a shape, of sizes from 0; got \(4, -3\)"),
        ([(4, 0.5)], r"input 0: a tuple is a shape, of sizes from 0; got \(4, 0.5\)"),
    ],
    ids=["text", "number", "nothing", "strings", "None", "ragged", "negative", "fraction"],
)
def test_inputs_of_a_wrong_kind(inputs, match, no_shape_checks):
    with say(match):
        compare(linear(), torch_linear(), inputs, layout="torch")


@pytest.mark.parametrize(
    ("inputs", "match"),
    [
        ([(4, 5)], r"do not go through the torch module: torch raised RuntimeError: mat1 and mat2"),
        (
            {"x": np.ones((4, 3))},
            r"do not go through the torch module: torch raised TypeError: .* keyword argument 'x'",
        ),
    ],
    ids=["width", "name"],
)
def test_inputs_that_a_side_does_not_take(inputs, match):
    with say(match):
        compare(linear(), torch_linear(), inputs, layout="torch")


def test_extras_that_a_call_does_not_take():
    def call(module, x, lengths=None):
        return module(x)

    lengths = {"lengths": np.array([1, 2, 3, 4])}
    one_side = (
        r"extras are lengths and dropout_key, .* got 'lengths', flax takes \['lengths'\], torch"
        r" takes \[\]"
    )
    with say(one_side):
        compare(linear(), torch_linear(), X, layout="torch", flax_call=call, extras=lengths)
    # Misspelt, it would be passed to neither side.
    with say(r"extras are lengths and dropout_key, .* got 'length'"):
        compare(linear(), torch_linear(), X, layout="torch", extras={"length": 3})


def test_one_side_that_raises():
    def refuses(module, x):
        raise RuntimeError("not today")

    for side in ("flax", "torch"):
        call = {f"{side}_call": refuses}
        raised = f"{side} raised RuntimeError: not today"
        with say(f"the inputs do not go through the {side} module: {raised}"):
            compare(linear(), torch_linear(), X, layout="torch", **call)


def test_one_side_that_ends_the_process():
    def exits(module, x):
        sys.exit(0)

    for side in ("flax_call", "torch_call"):
        with say(r"^test_bad_input.py:\d+ ended the process \(SystemExit 0\)"):
            compare(linear(), torch_linear(), X, layout="torch", **{side: exits})


def test_one_side_that_ends_the_process_at_once(monkeypatch):
    monkeypatch.setattr(os, "_exit", lambda status: pytest.fail(f"os._exit({status})"))

    def exits(module, x):
        os._exit(0)

    for side in ("flax_call", "torch_call"):
        with say(r"^test_bad_input.py:\d+ ended the process \(os\._exit\(0\)\).* remove os\._exit"):
            compare(linear(), torch_linear(), X, layout="torch", **{side: exits})


class Captured(nnx.Module):
    def __init__(self, train):
        self.layer = linear()
        self.norm = nnx.BatchNorm(2, epsilon=1e-5, rngs=nnx.Rngs(0))
        self.train_always = train

    def __call__(self, x):
        average = False if self.train_always else None
        return jax.jit(lambda x: self.norm(self.layer(x), use_running_average=average))(x)


def normed():
    return torch.nn.Sequential(torch_linear(), torch.nn.BatchNorm1d(2)).eval()


CAPTURED = (
    r"`return jax\.jit\(.*` at test_bad_input\.py:\d+ changes a variable of a module that a"
    r" transform of JAX has captured.* \(TraceContextError\)\. Pass the module .*: nnx\.jit"
)


def test_a_module_that_a_transform_has_captured():
    with say(f"^{CAPTURED}"):
        compare(Captured(True), normed(), X)


def test_a_module_that_a_transform_has_captured_in_training_alone():
    report = compare(Captured(False), normed(), X, checks=["running statistics"])
    assert report.state == "not compared"
    assert re.search(CAPTURED, report.check("running statistics").nothing)


# Warned of by JAX, and by Python from 3.12 on.
@pytest.mark.filterwarnings("ignore:.*fork")
def test_a_side_that_forks_ends_its_children():
    def forks(module, x):
        child = os.fork()
        if not child:
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        return module(x)

    sides = linear(), torch_linear(), X
    assert compare(*sides, layout="torch", torch_call=forks, checks=["forward"]).passed


def branches(x):
    return jnp.sin(x) if x.sum() > 0 else jnp.sin(1 * x)


@pytest.mark.parametrize(
    ("flax", "match"),
    [
        (
            branches,
            (
                r"JAX cannot compile `return jnp.sin\(x\) if x.sum\(\) > 0 else .*` at"
                r" test_bad_input.py:\d+ \(TracerBoolConversionError\). Use jnp.where or jax.lax.co"
            ),
        ),
        (
            lambda x: x[x > -100],
            r"test_bad_input.py:\d+ \(NonConcreteBooleanIndexError\). Use jnp.where in place",
        ),
        (lambda x: jnp.asarray(np.sin(x)), r"\(TracerArrayConversionError\). Use jnp in place of"),
        (lambda x: x * float(x.sum()), r"\(ConcretizationTypeError\). Take sizes from shapes, an"),
        (
            lambda x: jnp.sin(x)[: operator.index(x.argmax() + 9)],
            r"\(TracerIntegerConversionError\). Take sizes from shapes",
        ),
    ],
    ids=["if", "index by a mask", "NumPy", "number", "size"],
)
def test_code_that_jax_cannot_compile_is_no_difference(flax, match):
    with say(match):
        compare(flax, torch.sin, X)


def test_an_array_that_is_kept_of_another_call():
    kept = []

    def keeps(x):
        kept.append(jnp.sin(x))
        return 1 * kept[-2] if len(kept) > 2 else kept[-1]

    report = compare(keeps, torch.sin, X, checks=["forward", "second"], locate=False)
    assert not report.differs
    assert "the check raised UnexpectedTracerError: " in report.check("second").nothing


def test_an_output_that_is_no_array():
    def with_a_note(module, x):
        return module(x), "note"

    def uncalled(module, x):
        return type(module).__call__

    def nothing(module, x):
        return None

    remedy = (
        r"an output is an array, or a tuple, mapping or dataclass of arrays; 1 is a str. Pass a"
        r" call that returns arrays"
    )
    with say(remedy):
        compare(linear(), torch_linear(), X, layout="torch", torch_call=with_a_note)
    with say(r"the output is a function"):
        compare(linear(), torch_linear(), X, layout="torch", flax_call=uncalled)
    with say(r"the torch module returns nothing"):
        compare(linear(), torch_linear(), X, layout="torch", torch_call=nothing)


def failing(*sides, **options):
    with pytest.raises(ParityError) as caught:
        assert_parity(*sides, X, locate=False, **options)
    return caught.value


OUTPUTS = {
    "structure": (lambda x: (x, x[0]), lambda x: {"0": x}, "1: flax float64[3], torch nothing"),
    "shape": (lambda x: x[:2], lambda x: x, "output: flax float64[2, 3], torch float64[4, 3]"),
    "dtype": (
        lambda x: x > 0,
        lambda x: (x > 0).long(),
        "output: flax bool[4, 3], torch int64[4, 3]",
    ),
}


def test_outputs_of_another_structure_or_dtype():
    for flax, theirs, worst in OUTPUTS.values():
        error = failing(flax, theirs, checks=["shapes"])
        assert f"at '{worst}'" in str(error)

    # Cut to the rows that both have, the numbers agree.
    flax, theirs, _ = OUTPUTS["shape"]
    shorter = failing(flax, theirs, checks=["shapes", "forward"])
    assert "at 'output: flax float64[2, 3], torch float64[4, 3]'" in str(shorter)
    assert np.isinf(shorter.report.check("forward").error)
    assert "outputs must have the same shapes; output is (2, 3) here, (4, 3) in Py" in str(shorter)
    told = "mend this first, and compare again: output has the shape (2, 3) in JAX, (4, 3) in PyT"
    first, second, *_ = next_steps(shorter.report)
    assert first.startswith(told)
    assert second == "pass inputs or options that test what is listed as not tested"
    lower = failing(flax, theirs, checks=["float32"])
    # The check that fails says it: which dtypes JAX computes in is not asked.
    assert lower.report.check("float32").raised
    assert not any("which dtypes" in one for one in lower.report.coverage.untested)


@pytest.mark.parametrize("side", ["flax", "torch"])
def test_nan_on_one_side_alone(side):
    sides = {"flax": lambda x: x, "torch": lambda x: x}
    sides[side] = lambda x: x / 0.0 * 0.0
    error = failing(*sides.values(), checks=["forward"])
    assert f"not finite in {side} alone" in str(error)
    assert re.search(rf"{side} nan", str(error))


def test_a_torch_module_left_in_train_mode():
    dropping = torch.nn.Dropout(0.5)
    torch_side = torch.nn.Sequential(torch_linear(), dropping).train()
    rules = [Rule(("kernel",), "0.weight", "i o -> o i"), Rule(("bias",), "0.bias")]
    remedy = r"left in train mode, where output differs .* relative [\d.]+: call .eval\(\) on it"
    with say(remedy):
        compare(linear(), torch_side, X, layout=rules)
    # Refusing it must not switch it.
    assert torch_side.training

    assert_parity(linear(), torch_side.eval(), X, layout=rules, checks=["forward"])
    # Both modes of a linear layer compute the same.
    plain = torch_linear().train()
    assert_parity(linear(), plain, X, layout="torch", checks=["forward"])


def test_a_module_that_computes_in_float32():
    ours = linear(dtype=jnp.float32)
    error = failing(ours, torch_linear(), layout="torch", checks=["shapes", "forward"])
    assert "flax float32[4, 2], torch float64[4, 2]" in str(error)
    remedy = (
        "output is float32 for inputs and parameters in float64: construct the Flax module without"
        " dtype=, or, if its dtype is fixed at construction, run `flax-attn compare"
        " FILE.py:FLAX FILE.py:TORCH`"
    )
    assert remedy in str(error)


def test_a_check_that_is_asked_for_and_cannot_run():
    checks = ["forward", "dropout", "padded rows"]
    error = failing(linear(), torch_linear(), layout="torch", checks=checks)
    assert "dropout: not run: the calls take no dropout_key" in str(error)
    assert "padded rows: not run: the calls take no lengths" in str(error)
    assert "forward" not in str(error)
    # Two functions have no weights.
    unmeasured = compare(jnp.sin, torch.sin, X, checks=["weights"])
    assert not unmeasured.passed, "nothing was measured"
