"""A function of another library, computed by it and by this one."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from flax_attn import everywhere
from flax_attn.parity import tolerance


def numbers(run: Callable, arguments: Any) -> tuple[dict, dict]:
    """Return outputs by name, and gradients under a random cotangent by that of their argument."""
    outputs, pullback = jax.vjp(run, *arguments)
    rng = np.random.default_rng(5)
    cotangent = jax.tree.map(lambda x: jnp.asarray(rng.normal(size=x.shape), x.dtype), outputs)
    return _by_name(outputs), _by_name(pullback(cotangent))


def _by_name(tree: Any) -> dict[str, np.ndarray]:
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(path): np.asarray(leaf, np.float64) for path, leaf in leaves}


def taken(run: Callable, arguments: Any, target: str, calls: int = 1) -> tuple[dict, dict]:
    """Return `numbers` with all calls computed here, of which there are so many."""
    with everywhere(targets=[target], strict=True) as report:
        found = numbers(run, arguments)
    assert not report.left_alone, report
    assert sum(report.taken.values()) == calls, report
    return found


def check_same(run: Callable, arguments: Any, target: str, calls: int = 1) -> None:
    """Compare a function that is clean in float64 with itself, computed here."""
    outputs, gradients = numbers(run, arguments)
    found = taken(run, arguments, target, calls)
    errors = tolerance.relative(found[0], outputs)
    assert max(errors.values()) <= tolerance.FORWARD, errors
    largest = max(np.abs(gradient).max() for gradient in gradients.values())
    errors = tolerance.relative(found[1], gradients, tolerance.NULL * largest / tolerance.GRADIENT)
    assert max(errors.values()) <= tolerance.GRADIENT, errors


def check_low(run: Callable, exact: Callable, arguments: Any, target: str) -> None:
    """Compare the errors of a function in a lower dtype, against `exact` of the same numbers.

    Args:
        run: function as its library computes it.
        exact: the same function in float64.
        arguments: arguments in the lower dtype.
        target: name of the target.
    """
    wide = jax.tree.map(lambda x: x.astype(jnp.float64), arguments)
    references = numbers(exact, wide)
    plain = numbers(run, arguments)
    ours = taken(run, arguments, target)
    dtype = jax.tree.leaves(arguments)[0].dtype
    eps = float(jnp.finfo(dtype).eps)
    factors = tolerance.LOW_FORWARD, tolerance.LOW_GRADIENT
    for found, original, reference, factor in zip(ours, plain, references, factors, strict=True):
        errors = tolerance.lower_dtype(found, [original], reference, factor, eps)
        assert max(errors.values()) <= 1, errors


def left_alone(run: Callable, target: str) -> list[str]:
    """Return the reasons why calls of a function were left alone; they run as before."""
    expected = run()
    with everywhere(targets=[target]) as report:
        found = run()
    assert not report.taken, report
    same = jax.tree.map(lambda a, b: bool((a == b).all()), found, expected)
    assert all(jax.tree.leaves(same))
    return [entry.reason for entry in report.left_alone]
