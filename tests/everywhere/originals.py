"""A function of another library, computed by it and by this one."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from flax_attn import everywhere
from flax_attn.parity import tolerance
from tests.everywhere.conftest import assert_equal, with_gradients

T, S, WIDTHS = 7, 9, (10, 11, 13)


def inputs(*leading: int, dtype: Any = jnp.float64) -> list[jax.Array]:
    """Return query, key and value of a layer."""
    draw = np.random.default_rng(1).normal
    shapes = zip((T, S, S), WIDTHS, strict=True)
    return [jnp.asarray(draw(size=(*leading, *shape)), dtype) for shape in shapes]


def some_mask(*leading: int) -> jax.Array:
    """Return a mask under which one row sees no key."""
    mask = np.random.default_rng(2).random((*leading, T, S)) < 0.6
    mask[..., 2, :] = False
    return jnp.asarray(mask)


def taken(run: Callable, arguments: Any, target: str, calls: int = 1) -> tuple[dict, dict]:
    """Return `with_gradients` with all calls computed here, of which there are so many."""
    with everywhere(targets=[target], strict=True) as report:
        found = with_gradients(run, *arguments)
    assert not report.left_alone, report
    assert sum(report.taken.values()) == calls, report
    return found


def check_same(run: Callable, arguments: Any, target: str, calls: int = 1) -> None:
    """Compare a function that is clean in float64 with itself, computed here."""
    expected = with_gradients(run, *arguments)
    assert_equal(taken(run, arguments, target, calls), expected)


def check_low(run: Callable, exact: Callable, arguments: Any, target: str) -> None:
    """Compare the errors of a function in a lower dtype, against `exact` of the same numbers.

    Args:
        run: function as its library computes it.
        exact: the same function in float64.
        arguments: arguments in the lower dtype.
        target: name of the target.
    """
    wide = jax.tree.map(lambda x: x.astype(jnp.float64), arguments)
    references = with_gradients(exact, *wide)
    plain = with_gradients(run, *arguments)
    ours = taken(run, arguments, target)
    dtype = jax.tree.leaves(arguments)[0].dtype
    eps = float(jnp.finfo(dtype).eps)
    factors = tolerance.LOW_FORWARD, tolerance.LOW_GRADIENT
    for found, original, reference, factor in zip(ours, plain, references, factors, strict=True):
        found, original = _in_float64(found), _in_float64(original)
        errors = tolerance.lower_dtype(found, [original], reference, factor, eps)
        nothing = _only_rounding(reference)
        assert max(error for name, error in errors.items() if name not in nothing) <= 1, errors


def _only_rounding(gradients: dict[str, np.ndarray]) -> set[str]:
    # The bias of the keys moves all scores of a row alike: its gradient is 0 but for rounding, in
    # float64 as well, and has no digit to compare.
    sizes = {name: float(np.abs(array).max()) for name, array in gradients.items()}
    largest = max(sizes.values())
    return {name for name, size in sizes.items() if size < 1e-12 * largest}


def _in_float64(arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    return {name: array.astype(np.float64) for name, array in arrays.items()}


def left_alone(run: Callable, target: str) -> list[str]:
    """Return the reasons why calls of a function were left alone; they run as before."""
    expected = run()
    with everywhere(targets=[target]) as report:
        found = run()
    assert not report.taken, report
    same = jax.tree.map(lambda a, b: bool((a == b).all()), found, expected)
    assert all(jax.tree.leaves(same))
    return [entry.reason for entry in report.left_alone]
