"""The rule of every bad call: both packages raise the same error in the same words."""

import re

import pytest


def message_of(side, act):
    with pytest.raises(ValueError, match=r"\S") as caught:
        act(side)
    return str(caught.value)


@pytest.fixture
def error_of():
    """Return the message of the error that an action raises on a side."""
    return message_of


@pytest.fixture
def assert_same_error(sides, no_shape_checks):
    """Assert that an action raises one message on both sides, and that it matches.

    A dictionary in place of the pattern names a size, with the value that is no positive integer.
    """

    def check(act, match):
        ours, theirs = (message_of(side, act) for side in sides)
        assert re.search(pattern_of(match), ours), ours
        assert ours == theirs

    return check


def pattern_of(match):
    if not isinstance(match, dict):
        return match
    ((name, value),) = match.items()
    return re.escape(f"{name} must be a positive integer; got {name}={value!r}") + "$"
