"""Right pairs are called equal, and what is wrong by one rounding is still called different."""

import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx

from flax_attn.parity import compare, tolerance
from flax_attn.parity.adapters import recording
from flax_attn.parity.adapters.rounded_sums import with_rounded_sums
from flax_attn.parity.compare import ParityError, assert_parity
from flax_attn.parity.cpu import on_cpu
from flax_attn.parity.lower_dtype import lower_dtype
from parity_tests.right_pairs import bench
from parity_tests.right_pairs.pairs import Sides

pytestmark = pytest.mark.usefixtures("usual_promotion")
# The whole bench takes too long for each run of the tests.
FAST = (
    *("linear", "two_outputs", "unused_parameters", "embedding", "one_hot", "parity_of_ids"),
    *("rms_norm", "average_pool_of_large_windows", "squeeze_excite", "rnn_cell", "log_softmax"),
)
LOWER = ["float32", "bfloat16", "float16"]


@pytest.mark.parametrize("name", FAST)
def test_a_right_pair_gives_no_alarm(name):
    assert not bench.alarm(name, "small", 0)


# Seeds of which the plain sum in bfloat16 misses the rule.
@pytest.mark.parametrize("seed", [2, 5, 9])
def test_the_bias_of_a_linear_layer_gives_no_alarm(seed):
    sides = nnx.Linear(8, 6, rngs=nnx.Rngs(0)), torch.nn.Linear(8, 6)
    report = compare(*sides, [(2, 32, 8)], seed=seed, checks=["bfloat16"])
    assert report.passed, report.explain()
    said = r"JAX adds up the gradient of a broadcast.* in bfloat16 .* 1\.\d+ of the rule at 'bias'"
    assert re.search(said, report.checks[0].note)


def test_a_norm_over_many_pixels_gives_no_alarm():
    """The plain sum of float32 loses more than that of PyTorch, forwards too."""
    sides = bench.PAIRS["group_norm"](bench.SIZES["large"])
    options = {**sides.options, "checks": ["float32"], "locate": False}
    assert_parity(sides.flax, sides.torch, sides.inputs, **options)


def test_the_bench_fails_where_a_pair_is_called_different(monkeypatch, capsys):
    def wrong(size):
        return Sides(jnp.sin, torch.cos, [size.sequence])

    def run(*arguments):
        monkeypatch.setattr("sys.argv", ["right_pairs", *arguments])
        return bench.main()

    monkeypatch.setitem(bench.PAIRS, "wrong", wrong)
    assert run("--only", "wrong", "one_hot", "--sizes", "small", "--seeds", "1") == 1
    printed = capsys.readouterr().out
    assert "wrong: 1 alarms in 1 runs" in printed
    assert "one_hot: 0 alarms in 1 runs" in printed
    assert "2 pairs, 2 runs, 1 alarms" in printed
    assert run("--only", "one_hot", "--seeds", "1") == 0


def shifted(bias, x):
    """Add a bias in a call, a scan, a branch, a loop and what is computed again."""
    x = jax.jit(lambda x: jnp.tanh(x + bias[None]))(x)
    x, _ = jax.lax.scan(lambda x, _: (x + bias[None], None), x, None, length=2)
    x = jax.lax.cond(x.sum() > 0, lambda x: x + bias[None], lambda x: x - bias[None], x)
    x = jax.lax.fori_loop(0, 2, lambda _, x: x + bias[None], x)
    return jax.checkpoint(lambda x: jnp.sin(x) + bias[None])(x)


def gradient(bias, x, cotangent):
    _, pull = jax.vjp(shifted, bias, x)
    return pull(cotangent)


def low_sums(function, *arrays):
    """Return the sums in bfloat16 in the program of a function."""
    program = jax.make_jaxpr(function)(*arrays)
    return re.findall(r":bf16\[[\d,]*\] = reduce_sum", str(program))


@pytest.fixture
def operands():
    """The bias, the input, and the cotangent of `gradient`."""
    random = np.random.default_rng(0)
    return [random.normal(size=shape) for shape in ((3,), (500, 3), (500, 3))]


def test_sums_of_a_backward_pass_are_rounded_once_wherever_they_are(operands):
    low = [jnp.asarray(array, jnp.bfloat16) for array in operands]
    # One for each place at which the bias is added.
    assert len(low_sums(gradient, *low)) >= 6
    assert not low_sums(with_rounded_sums(gradient), *low)


def test_sums_in_float64_are_as_they_were(operands):
    wide = [jnp.asarray(array, jnp.bfloat16).astype(jnp.float64) for array in operands]
    plain = gradient(*wide)
    rounded = with_rounded_sums(gradient)(*wide)
    for ours, reference in zip(plain, rounded, strict=True):
        np.testing.assert_array_equal(ours, reference)


@pytest.mark.parametrize("again", [lambda f: f, jax.checkpoint])
def test_sums_that_a_program_asks_for_are_left_as_they_are(again):
    @again
    def total(x):
        zero = np.zeros((), x.dtype)
        return jnp.sin(jax.lax.reduce(x, zero, jax.lax.add, (0,)))

    def backward(x):
        _, pull = jax.vjp(total, x)
        return pull(x[0])

    x = jnp.ones((500, 3), jnp.bfloat16)
    assert low_sums(with_rounded_sums(backward), x)


@pytest.mark.parametrize(("dtype", "computed"), [("float32", "f64"), ("bfloat16", "bf16")])
def test_a_function_that_xla_approximates_is_rounded_once_in_float32(dtype, computed):
    def half(x):
        return jnp.tanh(x) * 0.5

    x = jnp.linspace(-3, 3, 1000).astype(dtype)
    program = str(jax.make_jaxpr(with_rounded_sums(half))(x))
    assert re.findall(r":(\w+)\[1000\] = tanh", program) == [computed]
    assert with_rounded_sums(half)(x).dtype == dtype


def loss_of_softmax(softmax, x, weights):
    return jax.grad(lambda x: (softmax(x) * weights).sum())(x)


def written_out(x):
    shifted = jnp.exp(x - x.max(-1, keepdims=True))
    return shifted / shifted.sum(-1, keepdims=True)


def test_the_steps_of_a_function_of_jax_are_rounded_once_in_half_precision():
    random = np.random.default_rng(0)
    x, weights = (jnp.asarray(random.normal(size=(50, 9)), jnp.bfloat16) for _ in range(2))
    wide = x.astype(jnp.float32), weights.astype(jnp.float32)

    def error(softmax, change=lambda f: f):
        gradient = partial(loss_of_softmax, softmax)
        found = change(gradient)(x, weights)
        assert found.dtype == jnp.bfloat16
        return np.abs(found.astype(jnp.float32) - gradient(*wide)).max()

    own = error(jax.nn.softmax)
    rounded = error(jax.nn.softmax, with_rounded_sums)
    assert rounded < own / 2
    # What a port writes itself is as it is written.
    assert error(written_out, with_rounded_sums) > own / 2


def test_what_follows_a_function_of_jax_takes_its_rounded_result():
    def doubled(x):
        return jax.nn.softmax(x) * 2, jax.lax.scan(lambda c, row: (c + row, c), x[0], x)[0]

    x = jnp.linspace(-1, 1, 12).reshape(3, 4).astype(jnp.bfloat16)
    program = str(jax.make_jaxpr(with_rounded_sums(doubled))(x))
    assert re.search(r":bf16\[3,4\] = mul \w+ 2", program)
    assert re.search(r":f32\[3,4\] = exp ", program)


def test_a_gelu_whose_tanh_xla_approximates_gives_no_alarm():
    report = bench.judged("gelu_tanh", "medium", 332)
    assert report.check("float32").passed, report.explain()


def test_the_gradient_of_a_convolution_is_rounded_once_in_float32():
    def convolved(kernel, x):
        return jax.lax.conv(x, kernel, (1, 1), "VALID")

    def both(kernel, x, cotangent):
        output, pull = jax.vjp(convolved, kernel, x)
        return output, *pull(cotangent)

    kernel = jnp.ones((5, 2, 3, 3), jnp.float32)
    x = jnp.ones((4, 2, 9, 7), jnp.float32)
    cotangent = jnp.ones((4, 5, 7, 5), jnp.float32)
    program = jax.make_jaxpr(with_rounded_sums(both))(kernel, x, cotangent)
    dtypes = re.findall(r":(f\d\d)\[[\d,]*\] = conv_general_dilated", str(program))
    # The forward pass is as the port has it.
    assert dtypes == ["f32", "f64", "f64"]


def test_the_sum_of_the_gradient_of_a_lookup_is_rounded_once():
    random = np.random.default_rng(0)
    # Many of each of three rows: sums that lose most in bfloat16.
    ids = random.integers(0, 3, 2000)
    table = jnp.asarray(random.normal(size=(3, 4)), jnp.bfloat16)
    cotangent = jnp.asarray(random.normal(size=(2000, 4)), jnp.bfloat16)

    def looked_up(table, cotangent):
        _, pull = jax.vjp(lambda table: jnp.sin(table[ids]), table)
        (gradient,) = pull(cotangent)
        return gradient

    expected = looked_up(table.astype(jnp.float32), cotangent.astype(jnp.float32))

    def error(function):
        found = function(table, cotangent).astype(jnp.float32)
        return np.abs(found - expected).max()

    assert error(with_rounded_sums(looked_up)) < error(looked_up) / 4


def product(precision, dtype):
    x = jnp.ones((3, 5), dtype)
    function = with_rounded_sums(lambda x: jnp.matmul(x, x.T, precision=precision))
    return str(jax.make_jaxpr(function)(x))


def test_products_in_float32_alone_are_rounded_once_and_none_of_a_chosen_algorithm():
    assert "preferred_element_type=float64" in product("highest", jnp.float32)
    chosen = jax.lax.DotAlgorithmPreset.BF16_BF16_F32
    assert "float64" not in product(chosen, jnp.float32)
    assert "float64" not in product(None, jnp.bfloat16)


POSITIVE = np.abs(np.random.default_rng(0).normal(size=(4, 512)))
TOKENS = (2, 9, 7)


def low_sum(x):
    start = jnp.zeros_like(x[:, 0])
    return jax.lax.scan(lambda total, row: (total + row, None), start, x.T)[0]


def low_positions(x):
    # Beyond 256 the next integer is no number of bfloat16.
    places = jnp.cumsum(jnp.ones((x.shape[1],), x.dtype)) / 8
    return x * jnp.sin(places)[:, None]


def torch_positions(x):
    places = torch.arange(1, x.shape[1] + 1, dtype=torch.float64) / 8
    return x * places.sin().to(x.dtype)[:, None]


def cast(x):
    return jnp.tanh(x).astype(jnp.bfloat16).astype(x.dtype)


WRONG = {
    "a sum in half precision": (low_sum, lambda x: x.sum(1), POSITIVE, "bfloat16"),
    "positions in half precision": (low_positions, torch_positions, (2, 400, 7), "bfloat16"),
    "a cast": (cast, torch.tanh, TOKENS, "float16"),
    # Off by some roundings of float16.
    "another function": (lambda x: x * (1 + 2**-7), lambda x: x, TOKENS, "float16"),
}


@pytest.mark.parametrize("fault", WRONG)
def test_what_loses_more_than_it_must_is_different(fault):
    ours, theirs, inputs, dtype = WRONG[fault]
    with pytest.raises(ParityError, match=f"{dtype}: error"):
        assert_parity(lambda x: ours(x), theirs, [inputs], checks=[dtype], locate=False)


def test_a_rounded_bias_is_different_for_all_that_jax_loses_in_its_gradient():
    # With 3 bits of its mantissa, where bfloat16 has 7.
    class Port(nnx.Module):
        def __init__(self):
            self.bias = nnx.Param(jnp.zeros((6,)))

        def __call__(self, x):
            bias = jax.lax.reduce_precision(self.bias[...], 8, 3)
            return x + jnp.broadcast_to(bias, x.shape)

    class Plain(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.bias = torch.nn.Parameter(torch.zeros(6))

        def forward(self, x):
            return x + self.bias

    report = compare(Port(), Plain(), [(2, 32, 6)], checks=LOWER, locate=False)
    assert [check.name for check in report.failed] == LOWER


def test_what_happens_in_few_draws_is_no_difference(monkeypatch):
    """Half of the first four draws are off, and less than half of all."""
    x = np.random.default_rng(0).normal(size=(3, 5))
    # Nearly in the middle of two numbers of float16: a draw rounds it to either at random.
    x[2, 3] = 1 + 2**-11 * 0.75

    def jump(x):
        rounded_down = (x.dtype == jnp.float16) & (x[2, 3] == 1.0)
        return jnp.where(rounded_down, 3 * x, 2 * x)

    def judged():
        return compare(jump, lambda x: 2 * x, [x], checks=["float16"], locate=False)

    assert judged().passed
    monkeypatch.setattr(tolerance, "MORE_DRAWS", tolerance.DRAWS)
    assert not judged().passed


def test_an_export_is_judged_by_the_draws_that_it_holds(tmp_path):
    checks = ["float16"]
    report = compare(jnp.tanh, torch.tanh, [TOKENS], checks=checks, record=True, name="tanh")
    theirs = recording.Recording(recording.save(report, tmp_path))
    assert compare(jnp.tanh, theirs, theirs.inputs, checks=checks).passed
    found = compare(lambda x: cast(x), theirs, theirs.inputs, checks=checks)
    assert found.differs


def test_a_difference_that_float64_shows_takes_no_more_draws(paired):
    pair = paired(jnp.sin, torch.cos, (4, 3))
    with on_cpu():
        check = lower_dtype("float16", pair)
    assert check.failed
    assert not any("rounded once" in name for _, name in pair._results)


def test_a_difference_below_the_rounding_of_a_dtype_is_judged_again(paired):
    # More than float32 rounds, and no more than a table in float32 may be off.
    pair = paired(lambda x: jnp.sin(x) * (1 + 1e-5), torch.sin, (4, 3))
    with on_cpu():
        check = lower_dtype("float32", pair)
    assert check.failed
    assert any("rounded once" in name for _, name in pair._results)


def test_a_dtype_that_holds_asks_for_nothing_in_float64(paired):
    pair = paired(jnp.sin, torch.sin, (4, 3))
    with on_cpu():
        assert lower_dtype("bfloat16", pair).passed
    assert "flax64" not in vars(pair)
