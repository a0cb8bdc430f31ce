"""What the tests of conversion share: random weights, both directions, and outputs side by side."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx

from flax_attn import convert
from parity_tests.asserts import assert_near


class Rig:
    """Fills two layers with one set of weights and compares them."""

    def __init__(self):
        self.random = np.random.default_rng(0)

    def normal(self, *shape):
        return self.random.normal(size=shape)

    def theirs(self, layer):
        """Return a PyTorch layer in float64, every parameter random, and every buffer too."""
        for parameter in layer.double().eval().parameters():
            parameter.data = torch.from_numpy(self.normal(*parameter.shape))
        for buffer in (buffer for buffer in layer.buffers() if buffer.is_floating_point()):
            buffer.copy_(torch.from_numpy(self.random.uniform(0.2, 1.0, tuple(buffer.shape))))
        return layer

    def ours(self, layer):
        """Return an NNX layer, every parameter random."""
        for param in convert.parameters(layer).values():
            param[...] = jnp.asarray(self.normal(*param.shape))
        layer.eval()
        return layer

    def load_both_ways(self, ours, theirs, layout):
        """Load their weights into ours, store them again, and load ours into theirs.

        What is stored is equal bit for bit; theirs loads strictly.
        """
        ours, published = self.ours(ours), theirs.state_dict()
        mine = convert.state_dict(ours, layout)
        assert all((array != published[name].numpy()).any() for name, array in mine.items())
        convert.load_state_dict(ours, published, layout)
        stored = convert.state_dict(ours, layout)
        assert all(
            array.tobytes() == published[name].numpy().tobytes() for name, array in stored.items()
        )
        other = {name: torch.from_numpy(array) for name, array in mine.items()}
        theirs.load_state_dict({**published, **other}, strict=True)
        convert.load_state_dict(ours, mine, layout)

    def run(self, layer, *arrays, **named):
        """Return the output of an NNX layer, compiled."""
        arrays, named = jax.tree.map(jnp.asarray, (arrays, named))
        return np.asarray(
            nnx.jit(lambda layer, arrays, named: layer(*arrays, **named))(layer, arrays, named)
        )

    def assert_equal(self, ours, theirs):
        assert_near({"output": ours}, {"output": theirs.detach().numpy()})


@pytest.fixture
def rig():
    return Rig()


@pytest.fixture(params=sorted(set(convert.LAYOUTS) - {"hf_t5", "nnx_mha", "equinox_mha"}))
def layout(request):
    """Each layout that holds our multi-head attention, square and with biases."""
    return request.param
