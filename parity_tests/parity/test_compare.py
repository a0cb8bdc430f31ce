"""What `compare` and `assert_parity` promise, whatever is compared."""

import copy

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx

from flax_attn.parity import CHECKS, PairingError, ParityError, assert_parity, compare

X = [(4, 3)]


class Noisy(nnx.Module):
    """A layer with dropout and a count of its calls."""

    def __init__(self):
        self.linear = nnx.Linear(3, 2, rngs=nnx.Rngs(0))
        self.dropout = nnx.Dropout(0.5, rngs=nnx.Rngs(1))
        self.calls = nnx.BatchStat(jnp.zeros((), jnp.int32))

    def __call__(self, x):
        self.calls[...] += 1
        return self.dropout(self.linear(x))


class TorchNoisy(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.dropout = torch.nn.Linear(3, 2), torch.nn.Dropout(0.5)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int32))

    def forward(self, x):
        self.calls += 1
        return self.dropout(self.linear(x))


def taken_down(flax, theirs):
    """Return all that a comparison could change: parameters, state, modes, random streams."""
    state = {
        jax.tree_util.keystr(path): leaf
        for path, leaf in jax.tree_util.tree_leaves_with_path(nnx.state(flax))
    }
    # NumPy holds no keys, but the numbers behind them.
    for name, leaf in state.items():
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            state[name] = jax.random.key_data(leaf)
    arrays = state | theirs.state_dict()
    parameters = dict(theirs.named_parameters())
    return {
        "values": {name: np.asarray(x).tobytes() for name, x in arrays.items()},
        "dtypes": {name: x.dtype for name, x in state.items()},
        "dropout": flax.dropout.deterministic,
        "modes": [module.training for module in theirs.modules()],
        "parameters": {name: (x.dtype, x.requires_grad, x.grad) for name, x in parameters.items()},
        "stream": torch.get_rng_state().tolist(),
    }


@pytest.mark.parametrize(
    "names", [["forward", "float32", "dropout", "training"], ["padded rows"]], ids=["run", "fail"]
)
def test_modules_stay_as_they_are(names):
    flax, theirs = Noisy(), TorchNoisy()
    flax.eval()
    theirs.eval()
    # Gradients are taken of all weights, also of what the user froze.
    theirs.linear.weight.requires_grad_(False)
    before = copy.deepcopy(taken_down(flax, theirs))
    report = compare(flax, theirs, X, layout="torch", checks=names, locate=False)
    assert not report.passed
    assert taken_down(flax, theirs) == before
    # Nor where it ends with an error.
    with pytest.raises(PairingError, match="do not go through"):
        compare(flax, theirs, [(4, 5)], layout="torch")
    assert taken_down(flax, theirs) == before


def test_jax_is_left_as_it_was():
    with jax.enable_x64(False):
        assert_parity(jnp.sin, torch.sin, X, checks=["forward"])
        assert not jax.config.jax_enable_x64
        assert jnp.ones(2).dtype == jnp.float32


def linear():
    return nnx.Linear(3, 2, rngs=nnx.Rngs(0))


def test_every_check_appears_once_with_a_reason_where_it_did_not_run():
    report = compare(linear(), torch.nn.Linear(3, 2), [(4, 5, 3)])
    assert report.passed
    assert [check.name for check in report.checks] == list(CHECKS)
    reasons = {check.name: check.skipped for check in report.checks if not check.ran}
    without = {
        "precision",
        "dropout",
        "masks",
        "ids",
        "cache = full",
        "running statistics",
        "padded rows",
    }
    without.add("non-finite padding")
    assert reasons.keys() == without
    assert all(reasons.values())
    assert all(check.limit <= 1 and check.errors for check in report.checks if check.ran)


def test_without_a_layout_weights_stay_and_the_report_says_what_was_not_run():
    layer, theirs = linear(), torch.nn.Linear(3, 2)
    with torch.no_grad():
        theirs.weight.copy_(torch.tensor(np.array(layer.kernel[...]).T))
        theirs.bias.zero_()
    report = compare(layer, theirs, X, layout=None)
    assert report.passed
    assert {check.name for check in report.checks if not check.ran} >= {"weights", "training"}
    assert report.check("gradients").note == "parameters are not shared: inputs only"
    assert any("layout=None: both modules keep their weights" in note for note in report.notes)
    with torch.no_grad():
        theirs.bias[1] = 1e-9
    # Drawn anew on both sides, the weights would hide it.
    changed = compare(layer, theirs, X, layout=None, locate=False, checks=["forward"])
    assert [check.name for check in changed.failed] == ["forward"]


def test_weights_are_drawn_unless_they_are_to_be_kept():
    theirs = torch.nn.Linear(3, 2)
    options = {"layout": "torch", "checks": ["forward"]}
    kept = assert_parity(linear(), theirs, X, redraw=False, **options).pair.weights
    drawn = assert_parity(linear(), theirs, X, redraw=True, **options).pair.weights
    assert (kept["weight"] == theirs.weight.detach().numpy()).all()
    assert (drawn["weight"] != kept["weight"]).all()
    # A bias of zeros would be right wherever it is added.
    assert (drawn["bias"] != 0).all()


def measured(seed, **options):
    report = assert_parity(
        linear(), torch.nn.Linear(3, 2), X, layout="torch", checks=["gradients"], seed=seed
    )
    return report.check("gradients").where, report.pair.reference


def test_a_seed_repeats_everything_and_another_draws_anew():
    (place, reference), (again, same), (_, other) = measured(0), measured(0), measured(1)
    assert place == again
    for name, gradient in reference.gradients.items():
        assert (gradient == same.gradients[name]).all()
        assert (gradient != other.gradients[name]).any()


def test_inputs_by_name_and_as_arrays():
    x, y = np.arange(6.0).reshape(2, 3), torch.arange(3, dtype=torch.bfloat16)[None]
    report = assert_parity(
        lambda *, y, x: x - 2 * y,
        lambda *, x, y: x - 2 * y,
        {"x": x, "y": y},
        checks=["shapes", "gradients"],
    )
    assert report.pair.inputs["y"].dtype == np.float64
    assert report.check("gradients").errors.keys() == {"x", "y"}
    # A shape that is not in a list is one input, and not two numbers.
    single = assert_parity(jnp.sin, torch.sin, (4, 3), checks=["forward"])
    assert single.pair.inputs["input 0"].shape == (4, 3)
    with pytest.raises(ParityError, match="worst element"):
        assert_parity(
            lambda x, y: x - y,
            lambda x, y: y - x,
            [(2, 3), (2, 3)],
            checks=["forward"],
            locate=False,
        )


def test_integers_stay_integers():
    tokens = np.array([[3, 1, 0], [2, 2, 1]], np.int32)
    report = assert_parity(
        nnx.Embed(4, 5, rngs=nnx.Rngs(0)),
        torch.nn.Embedding(4, 5),
        [tokens],
        layout="torch",
        checks=["gradients"],
    )
    assert report.check("gradients").errors.keys() == {"weight"}


def test_extras_reach_both_calls():
    def flax(x, lengths=None):
        if lengths is None:
            return x
        return x * lengths[:, None].astype(x.dtype)

    def theirs(x, lengths=None):
        if lengths is None:
            return x
        return x * lengths[:, None].to(x.dtype)

    lengths = np.array([0, 2, 3, 4])
    report = assert_parity(flax, theirs, X, checks=["forward"], extras={"lengths": lengths})
    # Without the lengths both sides would agree as well, in an output that is nowhere 0.
    output = report.pair.plain.outputs["output"]
    assert not output[0].any()
    assert output[1].all()


def test_a_failure_names_tensor_element_error_and_rule():
    def wrong(x):
        return {"good": x, "bad": x.at[2, 1].add(1e-6)}

    with pytest.raises(ParityError) as caught:
        assert_parity(
            wrong,
            lambda x: {"good": x, "bad": x},
            [np.ones((4, 3))],
            checks=["forward"],
            locate=False,
        )
    message = str(caught.value)
    assert "the two sides differ" in message
    assert "forward: error 1e-06 at 'bad', the rule is 1e-12" in message
    assert "worst element (2, 1): flax 1.000001, torch 1" in message
    assert isinstance(caught.value, AssertionError)
    assert not caught.value.report.passed


def test_a_module_that_draws_and_counts_inside_can_be_compared():
    report = assert_parity(
        Noisy(), TorchNoisy().eval(), X, layout="torch", checks=["forward", "gradients", "training"]
    )
    assert "calls" not in report.pair.weights


def test_unbatched_inputs_are_asked_of_sides_that_take_them():
    def batches_alone(x):
        if x.ndim != 2:
            raise ValueError("batches alone")
        return x

    # With PyTorch as well as with JAX as the side that refuses.
    for sides in ((batches_alone, lambda x: x), (lambda x: x, batches_alone)):
        check = compare(*sides, X, locate=False).check("unbatched")
        assert check.passed
        assert check.skipped.startswith("one of the calls takes batches only: ")
        asked = compare(*sides, X, checks=["unbatched"], locate=False)
        assert not asked.passed, "it was asked for by name"


def test_a_first_axis_that_is_always_a_batch_is_no_failure():
    report = compare(lambda x: x.mean(1), lambda x: x.mean(1), [(3, 5, 4)], locate=False)
    assert report.passed, report.explain()
    assert (
        report.check("unbatched").skipped == "PyTorch takes the first axis of any input as a batch"
    )


def test_features_are_not_taken_for_tokens():
    def broadcast(x):
        return x * np.arange(6.0)[None]  # one feature is let through as well

    report = compare(broadcast, torch.nn.LayerNorm(6), [(4, 6)], layout=None, locate=False)
    for name in ("single token", "long sequence", "duplicate tokens"):
        assert report.check(name).skipped.startswith(
            "tokens are the second axis of floats of rank 3"
        )


def test_what_the_pytorch_side_refuses_is_no_stress_input():
    def few(x):
        if x.shape[1] > 100:
            raise ValueError("too many tokens")
        return x

    report = compare(lambda x: x, few, [(3, 5, 4)], locate=False)
    assert report.passed, report.explain()
    assert "torch raised ValueError: too many tokens" in report.check("long sequence").skipped
