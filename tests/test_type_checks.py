"""Types and shapes are checked in tests, whichever of the two ways a function is checked in."""

from collections.abc import Callable

import beartype
import jaxtyping
import numpy as np
import pytest
from jaxtyping import Float

from attn_spec.checks import check_positive
from flax_attn.functional.relative import t5_bias
from tests.type_checks import has_shapes, jaxtyped

typed = jaxtyped(typechecker=beartype.beartype)
Rows = Float[np.ndarray, "b d"]


@typed
def plain(count: int, names: "list[str]") -> str:
    return names[0] if count else count  # pyright: ignore[reportReturnType]


@typed
def shaped(x: Rows, y: Float[np.ndarray, "b d"]) -> Float[np.ndarray, " b"]:
    return x.sum(axis=0 if x is y else 1)


def test_wrong_arguments_and_results_raise():
    assert plain(1, ["a"]) == "a"
    with pytest.raises(beartype.roar.BeartypeCallHintParamViolation, match="count"):
        plain("1", ["a"])
    with pytest.raises(beartype.roar.BeartypeCallHintParamViolation, match="names"):
        plain(1, names=[2])
    with pytest.raises(beartype.roar.BeartypeCallHintReturnViolation, match="0"):
        plain(0, ["a"])


def test_shapes_are_compared_with_each_other():
    x = np.ones((2, 3))
    assert shaped(x, x.copy()).shape == (2,)
    with pytest.raises(jaxtyping.TypeCheckError, match="y"):
        shaped(x, np.ones((2, 4)))
    with pytest.raises(jaxtyping.TypeCheckError, match="return"):
        shaped(x, x)


def test_what_has_shapes_is_left_to_jaxtyping():
    assert has_shapes(Callable[[int, Rows | None], str])
    assert has_shapes(dict[str, tuple[Rows, ...]])
    assert not has_shapes(dict[str, Callable[[np.ndarray], list[int]]])


def test_the_library_is_checked_in_both_ways():
    with pytest.raises(beartype.roar.BeartypeCallHintParamViolation):
        check_positive(width="3")
    with pytest.raises(jaxtyping.TypeCheckError):
        t5_bias(np.ones((4, 2)), np.ones(3), np.ones(3))


def test_both_are_switched_off(no_shape_checks):
    assert plain(1, (2,)) == 2
    assert shaped(np.ones((2, 3)), None).shape == (2,)
