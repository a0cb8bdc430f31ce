"""States of models of Flax as arrays by name."""

import numpy as np
from flax import nnx


def by_path(state):
    """Return the arrays of a state by their paths, joined by dots, as `convert` names them."""
    leaves = nnx.to_flat_state(state)
    return {".".join(map(str, path)): np.asarray(leaf[...]) for path, leaf in leaves}
