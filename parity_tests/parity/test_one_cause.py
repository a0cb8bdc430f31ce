"""One fault is one difference, wherever the two sides write it otherwise."""

import jax
import pytest
from torch.nn import functional as F

pytestmark = pytest.mark.usefixtures("as_a_user_has_jax")
X, D = (2, 6, 8), 8


def test_groups_of_another_size_are_one_difference(differ):
    def flax(x):
        groups = x.reshape(-1, 4, 2)  # planted
        mean = groups.mean(-1, keepdims=True)
        scale = jax.lax.rsqrt(groups.var(-1, keepdims=True) + 1e-3)
        return ((groups - mean) * scale).reshape(x.shape)

    def theirs(x):
        return F.group_norm(x.reshape(-1, D), 2, eps=1e-3).view(x.shape)

    found = differ(flax, theirs, X)
    assert found.repaired, str(found)
    (cause,) = found.causes
    assert "over 2, torch over 4" in cause
