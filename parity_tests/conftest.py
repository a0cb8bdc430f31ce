"""What holds in every two-sided test: float64, one thread, and both packages behind one face."""

import importlib
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx

from flax_attn import convert
from flax_attn.proof.build import drawn
from flax_attn.proof.variant import Package

# Workers share the processors.
torch.set_num_threads(1)


class Float64Torch:
    """Stand in for torch in modules of transformers that name float32.

    They do so in rotary angles, RMS norms, softmax and states.
    """

    float = float32 = torch.float64

    def __getattr__(self, name):
        return getattr(torch, name)


@pytest.fixture
def float64_modules():
    """Return a context in which modules of transformers use float64 where they name float32."""

    @contextmanager
    def replaced(*modules):
        # The norms of Gemma, Mixtral's routers and Kimi's states name their casts.
        with ExitStack() as stack, mock.patch.object(torch.Tensor, "float", torch.Tensor.double):
            for module in modules:
                stack.enter_context(mock.patch.object(module, "torch", Float64Torch()))
            yield

    return replaced


@pytest.fixture(autouse=True)
def x64():
    with jax.enable_x64(True):
        yield


def block(
    parts,
    *,
    d_model,
    dropout,
    ff=("FeedForward", {"d_hidden": 10}),
    norm="LayerNorm",
    norms=("norm1", "norm2"),
    norm_first=True,
    **attention,
):
    """Return a block, made of the parts of a package."""
    own = {name: getattr(parts, norm)(d_model) for name in norms}
    kind, options = ff
    return parts.TransformerBlock(
        parts.MultiHeadAttention(d_in=d_model, d_out=d_model, dropout=dropout, **attention),
        getattr(parts, kind)(d_model, **options),
        **{"norm1": None, "norm2": None, **own},
        norm_first=norm_first,
        drop_shortcut=parts.Dropout(dropout),
    )


@dataclass(frozen=True)
class Side:
    """One package, so that a test can be written once for both."""

    name: str

    @property
    def is_flax(self):
        return self.name == "flax_attn"

    def __getattr__(self, name):
        return getattr(importlib.import_module(self.name), name)

    def file(self, dotted):
        return importlib.import_module(f"{self.name}.{dotted}")

    def array(self, values, dtype=None):
        """Return values as an array of this side; the dtype is that of the values unless said."""
        values = np.asarray(values)
        dtype = values.dtype.name if dtype is None else dtype
        if self.is_flax:
            return jax.device_put(values.astype(jnp.dtype(dtype)))
        return torch.tensor(values, dtype=getattr(torch, dtype))

    def key(self, first=3, second=14):
        return self.array(np.array([first, second], "uint32" if self.is_flax else "int64"))

    def build(self, module, *arguments, **options):
        """Return a module in float64; the options of a block are those of `block`."""
        package = importlib.import_module(self.name)

        def make(**numerics):
            parts = Package(package, **numerics)
            if module == "TransformerBlock":
                return block(parts, **options)
            return getattr(parts, module)(*arguments, **options)

        # The key is made where the module is.
        if self.is_flax:
            return drawn(lambda: make(param_dtype=jnp.float64, rngs=nnx.Rngs(0)))
        return make().double()

    def numpy(self, array):
        return convert.to_numpy(array)

    def jit(self, function):
        return jax.jit(function) if self.is_flax else function

    def gradients(self, function, *arrays):
        """Return the gradients of a scalar function, as numpy arrays."""
        if self.is_flax:
            # Operation by operation it would compile a program for each.
            differentiate = jax.jit(jax.grad(function, tuple(range(len(arrays)))))
            return [np.asarray(gradient) for gradient in differentiate(*arrays)]
        # Leaves of their own: what is given stays as it is.
        leaves = [array.detach().clone().requires_grad_() for array in arrays]
        return [gradient.numpy() for gradient in torch.autograd.grad(function(*leaves), leaves)]


BOTH = (Side("flax_attn"), Side("torch_ref"))


@pytest.fixture(params=BOTH, ids=lambda side: side.name)
def side(request):
    return request.param


@pytest.fixture(scope="session")
def sides():
    return BOTH
