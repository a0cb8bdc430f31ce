"""The lines that define the constants of a line are read from the source."""

import pytest

from flax_attn.parity.trace.definitions import definitions
from flax_attn.parity.trace.program import Place

SOURCE = '''
import numpy as np
from torch import nn

BASE = 1e4
SHIFT = 2


class Config:
    scale: float = 0.5


def table(width, length):
    """A helper, whose text is no line of its own."""
    rates = BASE ** -np.arange(width)
    return np.outer(np.arange(length), rates)


def rotate(x, angles):
    return x * angles  # in a helper


class Base(nn.Module):
    def __init__(self):
        super().__init__()
        self.offset = 3.0


class Layer(Base):
    def __init__(self, width, heads, config):
        super().__init__()
        self.scale = (width // heads) ** -0.5
        self.cfg_scale = config.scale
        self.norm = nn.LayerNorm(width, eps=1e-3)
        self.proj = nn.Linear(width, width)
        self.register_buffer("angles", table(width, 9))
        mask = np.tril(np.ones((9, 9)))
        mask[0] = 1
        self.mask = mask > 0

    def forward(self, x):
        b, t, d = x.shape
        y = self.proj(x) * self.scale  # scaled
        y = rotate(y, self.angles[:t])
        z = np.where(self.mask[:t, :t], y, -1e9)  # masked
        local = np.arange(t) + SHIFT
        z = z + local  # shifted
        z = z * self.cfg_scale + self.offset  # configured
        return self.norm(z)  # normed


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = Layer(32, 4, Config())


TIMES = (0.0, 0.5, 1.0)
DILATIONS = (1, 2, 4)


def features(length):
    return np.cos(np.arange(length) / 7)


def solve(y, times):
    def step(y, at):
        start, size = at
        return y + size * start, y  # in a step

    at = np.asarray(times), np.diff(times)
    return jax.lax.scan(step, y, at)


class Wave(nn.Module):
    def __init__(self):
        norm = lambda: nn.LayerNorm(8, eps=1e-4)
        self.first, self.last = norm(), norm()
        self.length = 9
        self.convs = [nn.Conv1d(8, 8, 2, dilation=d) for d in DILATIONS]

    def __call__(self, count):
        z = features(self.length)[:count]
        return self.last(z)  # made by a helper

    def solved(self, x, count):
        y = solve(self.first(x), TIMES)
        y = rotate(y, self(min(x.shape[1], count)))
        return self.convs[0](y)  # a convolution
'''
LINES = SOURCE.splitlines()


def line(text):
    """Return the number of the one line that contains a text."""
    (found,) = [i for i, own in enumerate(LINES, 1) if text in own]
    return found


@pytest.fixture
def defined(tmp_path):
    """A function that returns the lines that define what a line reads."""
    file = tmp_path / "layer.py"
    file.write_text(SOURCE)

    def find(text, module="", called_in=None):
        around = [called_in] if isinstance(called_in, str) else called_in or ()
        callers = tuple((str(file), line(one)) for one in around)
        place = Place(str(file), line(text), module, callers)
        return [LINES[found.line - 1].strip() for found in definitions(place)]

    return find


def test_a_number_of_the_constructor(defined):
    found = defined("# scaled")
    assert found[0] == "self.scale = (width // heads) ** -0.5"
    # The sizes that it is made with come from the call.
    assert "self.layer = Layer(32, 4, Config())" in found
    # The parameters of a layer are none.
    assert not any("Linear" in one for one in found)


def test_a_mask_that_is_changed_after_it_is_made(defined):
    assert defined("# masked") == [
        "self.mask = mask > 0",
        "mask = np.tril(np.ones((9, 9)))",
        "mask[0] = 1",
    ]


def test_a_table_that_a_helper_makes_and_another_one_is_given(defined):
    found = defined("# in a helper", called_in="y = rotate(y, self.angles[:t])")
    assert found[0] == 'self.register_buffer("angles", table(width, 9))'
    rates = "rates = BASE ** -np.arange(width)"
    assert {rates, "return np.outer(np.arange(length), rates)", "BASE = 1e4"} <= set(found)
    # What the helper is given beside it depends on the inputs.
    assert not any("proj" in one for one in found)


def test_a_constant_of_the_same_function(defined):
    assert defined("# shifted") == ["local = np.arange(t) + SHIFT", "SHIFT = 2"]


def test_a_field_of_a_configuration_and_an_attribute_of_a_base(defined):
    found = defined("# configured")
    wanted = {"self.cfg_scale = config.scale", "scale: float = 0.5", "self.offset = 3.0"}
    assert wanted <= set(found)


def test_the_settings_of_a_layer_are_those_of_an_operation_inside_it(defined):
    assert defined("# normed", module="model.norm")[0].startswith("self.norm = nn.LayerNorm")
    assert defined("# normed", module="model") == []


def test_what_a_scan_runs_over(defined):
    around = ["return jax.lax.scan(step, y, at)", "y = solve(self.first(x), TIMES)"]
    found = defined("# in a step", called_in=around)
    assert found == [
        "start, size = at",
        "at = np.asarray(times), np.diff(times)",
        "TIMES = (0.0, 0.5, 1.0)",
    ]


def test_a_module_is_given_what_its_own_call_is_given(defined):
    found = defined("# made by a helper", called_in="y = rotate(y, self(min(x.shape[1], count)))")
    wanted = {
        "z = features(self.length)[:count]",
        "return np.cos(np.arange(length) / 7)",
        "self.length = 9",
    }
    assert wanted <= set(found)


def test_a_layer_that_a_function_of_the_constructor_makes(defined):
    found = defined("# made by a helper", module="wave.last")
    assert "norm = lambda: nn.LayerNorm(8, eps=1e-4)" in found


def test_what_a_comprehension_goes_through(defined):
    found = defined("# a convolution", module="wave.convs.0")
    assert found[0].startswith("self.convs = ")
    assert "DILATIONS = (1, 2, 4)" in found


def test_a_line_that_cannot_be_read_has_none(tmp_path):
    assert definitions(Place(str(tmp_path / "missing.py"), 3)) == ()
    broken = tmp_path / "broken.py"
    broken.write_text("def f(:\n")
    assert definitions(Place(str(broken), 1)) == ()
