"""A function that JAX takes in bfloat16 where PyTorch widens for it is seen in the two programs."""

import jax
import jax.numpy as jnp
import pytest
import torch
from flax import nnx

from flax_attn.parity import compare
from flax_attn.parity.check import Check

SHAPE = (3, 5, 8)


# Functions are called in float64 as well, which none may narrow.


def softmax_in_torch(x):
    widened = torch.promote_types(x.dtype, torch.float32)
    return torch.softmax(x, dim=-1, dtype=widened).to(x.dtype)


def wide(x):
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))


def wide_softmax(x):
    return jax.nn.softmax(wide(x)).astype(x.dtype)


def norm_in_torch(x):
    own = x.to(torch.promote_types(x.dtype, torch.float32))
    inverse = torch.rsqrt(own.square().mean(-1, keepdim=True) + 1e-6)
    return (own * inverse).to(x.dtype)


def norm(x, widened):
    own = wide(x) if widened else x
    inverse = jax.lax.rsqrt(jnp.square(own).mean(-1, keepdims=True) + 1e-6)
    return (own * inverse).astype(x.dtype)


FAULTS = {
    "exp": (softmax_in_torch, wide_softmax, jax.nn.softmax),
    "sqrt": (norm_in_torch, lambda x: norm(x, True), lambda x: norm(x, False)),
}


def judged(ours, theirs) -> Check:
    with jax.numpy_dtype_promotion("standard"):
        report = compare(ours, theirs, [SHAPE], checks=["precision"], locate=False)
    return report.check("precision")


@pytest.mark.parametrize("function", FAULTS)
def test_a_function_in_bfloat16_that_torch_takes_in_float32(function):
    theirs, sound, faulty = FAULTS[function]
    assert judged(sound, theirs).passed
    # In a call of one's own: the place is a line of the user.
    found = judged(lambda x: faulty(x), theirs)
    assert not found.passed
    assert found.worst.startswith(f"{function}: flax bfloat16 at test_precision.py:")
    assert "torch float32 at test_precision.py:" in found.worst


def three_in_torch(x):
    for _ in range(3):
        x = softmax_in_torch(x)
    return x


class Layers(nnx.Module):
    """Three layers, of which the last is given."""

    def __init__(self, last):
        self.last = last

    def __call__(self, x):
        return self.last(wide_softmax(wide_softmax(x)))


def test_one_layer_of_several():
    assert judged(Layers(wide_softmax), three_in_torch).passed
    assert not judged(Layers(jax.nn.softmax), three_in_torch).passed


def test_a_scan_takes_as_often_as_its_length():
    def ours(x):
        scanned, _ = jax.lax.scan(lambda x, _: (wide_softmax(x), None), x, length=3)
        return scanned + jnp.exp(scanned)

    def theirs(x):
        x = three_in_torch(x)
        return x + x.expm1() + 1

    assert judged(ours, theirs).passed


def attend(x):
    heads = x[:, None]
    return torch.nn.functional.scaled_dot_product_attention(heads, heads, heads)[:, 0]


def loop(x):
    return jax.lax.while_loop(lambda x: x.sum() > 1e9, jnp.exp, x)


@pytest.mark.parametrize(
    ("ours", "theirs", "reason"),
    [
        # What PyTorch computes inside of one operation is its own.
        (jax.nn.softmax, lambda x: x.softmax(-1), "PyTorch widens bfloat16 for no function"),
        (lambda x: x, attend, "PyTorch widens bfloat16 for no function"),
        # How often it runs is known only when it runs.
        (loop, softmax_in_torch, "what while takes in JAX is not seen"),
    ],
)
def test_programs_that_do_not_say(ours, theirs, reason):
    assert judged(lambda x: ours(x), theirs).skipped == reason
