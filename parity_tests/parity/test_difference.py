"""Faults planted in ports of a few lines: each is named, with its line on both sides, and proven.

A row is a class with the port, `flax`, and what it ports, `torch`. The lines that differ end in the
word `planted`; a headline is given as a pattern.
"""

# The functions of a row are no methods.
# ruff: noqa: N805

import inspect
import json
import re
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx
from torch.nn import functional as F

from flax_attn.parity import compare

pytestmark = pytest.mark.usefixtures("as_a_user_has_jax")
X, SQUARE = (3, 5, 8), (8, 8)


@dataclass
class Row:
    """A port with a fault.

    Args:
        pair: class that holds `flax` and `torch`.
        said: pattern of the headline of each hypothesis.
        shapes: shapes of the inputs.
    """

    pair: type
    said: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]


ROWS = []


def planted(*said, shapes=(X,)):
    """Return a decorator that adds a row."""

    def add(pair):
        ROWS.append(Row(pair, said, shapes))
        return pair

    return add


@planted(r"flax has decay.*, torch has -decay", shapes=(X, (8,)))
class SignOfADecay:
    # The exponential hides the sign: no factor of an output makes both agree.
    def flax(x, log):
        decay = jnp.exp(log)  # planted
        return jnp.exp(x * decay)

    def torch(x, log):
        decay = -torch.exp(log)  # planted
        return torch.exp(x * decay)


@planted(r"multiplies by 1, torch by 0.25", shapes=(X, (5, 8)))
class NoScaleBeforeAMask:
    # The two sides hide in other operations, so that the scores are no operand of a pair.
    def flax(q, k):
        scores = q @ k.T  # planted
        return jax.nn.softmax(jnp.where(jnp.arange(5) > 2, -jnp.inf, scores))

    def torch(q, k):
        scores = q @ k.T * 0.25  # planted
        mask = torch.arange(5) > 2
        hidden = torch.zeros(5, dtype=q.dtype).masked_fill_(mask, -torch.inf)
        return (scores + hidden).softmax(-1)


@planted(r"torch multiplies by 1 / sum\(weights, over 8\), flax does not", shapes=(X, X))
class WeightsThatAreNotNormalised:
    # PyTorch adds up term by term what JAX contracts at once.
    def flax(x, y):
        weights = jax.nn.sigmoid(x)  # planted
        return jnp.einsum("btd,btd->bt", weights, y)

    def torch(x, y):
        weights = x.sigmoid()
        weights = weights / weights.sum(-1, keepdim=True)  # planted
        return sum(w * one for w, one in zip(weights.unbind(-1), y.unbind(-1), strict=True))


@planted(r"flax multiplies by 1, torch by 0.25", shapes=(X, (5, 8), (3, 5)))
class NoScaleBesideAMaskInABias:
    # PyTorch hides in the bias that it adds, JAX in its softmax: what is hidden is the same.
    def flax(q, k, bias):
        scores = q @ k.T + bias[:, None]  # planted
        return jax.nn.softmax(scores, where=jnp.arange(5) < 3)

    def torch(q, k, bias):
        hidden = torch.arange(5) >= 3
        masked = bias[:, None].masked_fill(hidden, torch.finfo(bias.dtype).min)
        return (q @ k.T * 0.25 + masked).softmax(-1)  # planted


@planted(r"flax multiplies by 0.25, torch by 1", shapes=((5, 8), (5, 5, 2)))
class ScaleBesideAMaskInABiasOfTwoLayers:
    # Both layers take one bias, so that what differs is the scores and not their product.
    def flax(x, bias):
        shared = jnp.moveaxis(bias, -1, 0)[0]
        visible = jnp.arange(5) < 3

        def attend(x):
            scores = x @ x.T * 0.25 + shared  # planted
            return jax.nn.softmax(scores, where=visible) @ x

        return attend(attend(x))

    def torch(x, bias):
        shared = bias.permute(2, 0, 1)[0]
        hidden = torch.arange(5) >= 3
        masked = shared.masked_fill(hidden, torch.finfo(bias.dtype).min)

        def attend(x):
            scores = x @ x.T + masked  # planted
            return scores.softmax(-1) @ x

        return attend(attend(x))


@planted(
    r"flax has 0.25, torch 0.5",
    r"flax has exp\(.*cumsum.*, torch has cumprod",
    shapes=((14,), (3, 14)),
)
class LastStepBeforeAnotherFormula:
    # PyTorch computes with the negative steps: few values agree after the first is mended, and the
    # second makes all agree.
    def flax(x, density):
        steps = jnp.append(jnp.diff(x), 0.25)  # planted
        optical = jnp.abs(density) * steps
        before = jnp.cumsum(optical, axis=-1) - optical
        return -jnp.expm1(-optical) * jnp.exp(-before)  # planted

    def torch(x, density):
        steps = torch.cat([x[1:] - x[:-1], x.new_tensor([0.5])])  # planted
        alphas = 1 - torch.exp(-steps * density.abs())
        shifted = torch.cat([torch.ones_like(alphas[:, :1]), 1 - alphas + 1e-3], -1)
        return alphas * shifted.cumprod(-1)[:, :-1]  # planted


@planted(r"flax has sigmoid.*, torch has \(erf", shapes=((6, 2, 3), (3, 3)))
class FormulaOfALoopThatRunsTwice:
    # A step of PyTorch multiplies several times on the line, and JAX scans once.
    def flax(x, w):
        def step(h, now):
            h = jnp.tanh(now + jax.nn.silu(h @ w))  # planted
            return h, h

        _, outputs = jax.lax.scan(step, jnp.zeros((2, 3)), x)
        return jnp.concatenate([outputs, 2 * outputs])

    def torch(x, w):
        def run():
            h, outputs = x.new_zeros(2, 3), []
            for now in x:
                h = torch.tanh(now + F.gelu(h @ w))  # planted
                outputs.append(h)
            return torch.stack(outputs)

        return torch.cat([run(), 2 * run()])


@planted(
    r"flax runs the steps of the scan from the first to the last, torch from the last to the first",
    shapes=((6, 2, 3), (3, 3)),
)
class OtherDirectionOfAScan:
    # The second scan, over the same array, runs as its loop does.
    def flax(x, w):
        def step(h, x):
            h = jnp.tanh(x + h @ w)
            return h, 2 * h

        _, there = jax.lax.scan(step, jnp.zeros((2, 3)), x)  # planted
        _, back = jax.lax.scan(step, jnp.zeros((2, 3)), x)
        return jnp.concatenate([there, back])

    def torch(x, w):
        def run(steps):
            h, outputs = x.new_zeros(2, 3), [None] * len(x)
            for t in steps:
                h = torch.tanh(x[t] + h @ w)  # planted
                outputs[t] = 2 * h
            return outputs

        steps = range(len(x))
        return torch.stack([*run(steps[::-1]), *run(steps)])


@planted(r"flax has 0, torch has", shapes=((6, 2, 3), (3, 3)))
class StateBeforeItsUpdate:
    # The first step of JAX is zeros, which are not those of the gate times the first state.
    def flax(x, w):
        def step(states, x):
            h, c = states
            gates = x + h @ w
            updated = jax.nn.sigmoid(gates) * c + jnp.tanh(gates)
            h = jax.nn.sigmoid(2 * gates) * jnp.tanh(c)  # planted
            return (h, updated), h

        zeros = jnp.zeros((2, 3))
        _, outputs = jax.lax.scan(step, (zeros, zeros), x)
        return outputs

    def torch(x, w):
        h, c = x.new_zeros(2, 3), x.new_zeros(2, 3)
        outputs = []
        for one in x:
            gates = one + h @ w
            c = gates.sigmoid() * c + gates.tanh()
            h = (2 * gates).sigmoid() * c.tanh()  # planted
            outputs.append(h)
        return torch.stack(outputs)


@planted(r"flax has iota.* < 3, torch has not\(3 < iota", shapes=(X, (5, 8)))
class OneMoreKeyHiddenByAnotherNumber:
    # Which large number hides a score is no difference beside the mask.
    def flax(q, k):
        visible = jnp.arange(5) < 3  # planted
        return jax.nn.softmax(jnp.where(visible, q @ k.T, -1e30))

    def torch(q, k):
        hidden = torch.arange(5) > 3  # planted
        return (q @ k.T).masked_fill(hidden, torch.finfo(q.dtype).min).softmax(-1)


@planted(r"flax adds 1e-05, torch 1e-12", shapes=(X, SQUARE))
class EpsilonNextToNothing:
    # With 1e-12 added a variance is the same number, and no value of its own.
    def flax(x, w):
        mean, variance = x.mean(-1, keepdims=True), x.var(-1, keepdims=True)
        normed = (x - mean) / jnp.sqrt(variance + 1e-5)  # planted
        return normed @ w

    def torch(x, w):
        return F.layer_norm(x, (8,), eps=1e-12) @ w  # planted


@planted(r"flax has \w+ < 0, torch has 0 < \w+", shapes=((8, 3), (5, 5, 3)))
class HalfOfTheBuckets:
    # One side chooses an index by a condition, the other multiplies the condition.
    def flax(table, x):
        places = jnp.arange(5) - jnp.arange(5)[:, None]
        first = jnp.where(places < 0, 4, 0)  # planted
        return jnp.tanh(table[first + abs(places) % 4] + x)

    def torch(table, x):
        places = torch.arange(5) - torch.arange(5)[:, None]
        first = (places > 0) * 4  # planted
        return torch.tanh(table[first + abs(places) % 4] + x)


@planted(r"flax adds input 0, torch does not", shapes=(X, SQUARE))
class ResidualBeforeANorm:
    # A norm hides that a mean is taken off before it, which is no better than what both have.
    def flax(x, w):
        x = x + jnp.sin(x) @ w  # planted
        x = x - x.mean(-1, keepdims=True)
        return x / jnp.sqrt((x**2).mean(-1, keepdims=True) + 1e-5)

    def torch(x, w):
        x = F.linear(torch.sin(x), w.T)  # planted
        return F.layer_norm(x, (8,))


@planted(r"flax has tanh\(.*, torch has erf\(", shapes=(X, SQUARE))
class OneFunctionOnTwoLines:
    # The same difference, on whatever line: the second one is added to the first.
    def flax(x, w):
        x = jax.nn.gelu(x) @ w  # planted
        return jnp.sin(jax.nn.gelu(x))

    def torch(x, w):
        x = F.gelu(x) @ w  # planted
        return torch.sin(F.gelu(x))


@planted(r"multiplies by 1, torch by 0.25", shapes=((2, 5, 12), (2, 5, 6), (5, 5)))
class NoScaleOfGroupedHeads:
    # Two groups of two heads: both orders of the heads fit, and one of them is right.
    def flax(q, k, bias):
        q = q.reshape(2, 5, 2, 2, 3)
        scores = jnp.einsum("btkgh,bskh->bkgts", q, k.reshape(2, 5, 2, 3))  # planted
        shown = jax.nn.softmax(jnp.tanh(scores) + bias)
        return jnp.einsum("bkgts,bskh->btkgh", shown, k.reshape(2, 5, 2, 3)).reshape(2, 5, 12)

    def torch(q, k, bias):
        q = q.reshape(2, 5, 4, 3).transpose(1, 2)
        k = k.reshape(2, 5, 2, 3).transpose(1, 2).repeat_interleave(2, 1)
        scores = q @ k.mT * 0.25  # planted
        shown = (torch.tanh(scores) + bias).softmax(-1)
        return (shown @ k).transpose(1, 2).reshape(2, 5, 12)


@planted(r"flax has sum\(.*, torch has mean\(", shapes=(X, X))
class SumForMean:
    def flax(x, y):
        first = jnp.sum((jax.lax.stop_gradient(x) - y) ** 2)  # planted
        return first + 0.25 * jnp.mean((x - jax.lax.stop_gradient(y)) ** 2)

    def torch(x, y):
        first = F.mse_loss(x.detach(), y)  # planted
        return first + 0.25 * F.mse_loss(x, y.detach())


@planted(r"multiplies by 1, torch by 0.25", shapes=(X, X))
class WeightOfALossOfEqualValue:
    # Both losses have one value, and only their gradients tell them apart.
    def flax(x, y):
        first = jnp.mean((jax.lax.stop_gradient(x) - y) ** 2)
        return first + jnp.mean((x - jax.lax.stop_gradient(y)) ** 2)  # planted

    def torch(x, y):
        first = F.mse_loss(x.detach(), y)
        return first + 0.25 * F.mse_loss(x, y.detach())  # planted


@planted(
    r"in the backward pass flax adds .*tanh.*, torch does not",
    r"in the backward pass torch adds tanh.*, flax does not",
    shapes=(X, SQUARE, SQUARE),
)
class NoStraightThrough:
    # The outputs agree; the fault is in the gradient of the codes.
    def flax(x, codes, w):
        code = jnp.sin(x @ codes)
        return jnp.tanh(code + 0 * x) @ w + code.sum() * x.sum()  # planted

    def torch(x, codes, w):
        code = torch.sin(x @ codes)
        through = x + (code - x).detach()
        return torch.tanh(through) @ w + code.sum() * x.sum()  # planted


@planted(r"axis 0 is rolled by 1", shapes=(X, (8,)))
class RolledParameter:
    def flax(x, table):
        return jnp.sin(x + jnp.roll(table, 1))  # planted

    def torch(x, table):
        return torch.sin(x + table)  # planted


@planted(
    r"flax has stack.*, torch has concat",
    r"laid out differently",
    shapes=((2, 7, 4),),
)
class TwoOrdersOfARotation:
    # With one of them right, nothing agrees yet: the angles hold the same numbers on both sides.
    def flax(x):
        turned = jnp.stack([-x[..., 1::2], x[..., 0::2]], -1).reshape(x.shape)  # planted
        angles = jnp.repeat(jnp.arange(7.0)[:, None] * jnp.array([0.25, 0.75]), 2, -1)  # planted
        return jnp.tanh(x * jnp.cos(angles) + turned * jnp.sin(angles))

    def torch(x):
        turned = torch.cat([-x[..., 2:], x[..., :2]], -1)  # planted
        angles = torch.arange(7.0, dtype=x.dtype)[:, None] * torch.tensor([0.25, 0.75]).to(x)
        angles = torch.cat([angles, angles], -1)  # planted
        return torch.tanh(x * angles.cos() + turned * angles.sin())


@planted(r"flax multiplies by -4, torch by -8", shapes=((3, 5, 8), (8,)))
class HalfOfADecay:
    # Twice that of JAX is by chance that of PyTorch.
    def flax(x, rate):
        log = -4 * jnp.abs(rate) * jnp.tanh(x)  # planted
        return jnp.exp(log) * x + jnp.sqrt(1 + jnp.exp(2 * log))

    def torch(x, rate):
        log = -8 * rate.abs() * torch.tanh(x)  # planted
        return torch.exp(log) * x + torch.sqrt(1 + torch.exp(2 * log))


@planted(r"adds 1e-05, torch 1e-06")
class Epsilon:
    def flax(x):
        variance = x.var(-1, keepdims=True)
        return (x - x.mean(-1, keepdims=True)) / jnp.sqrt(variance + 1e-5)  # planted

    def torch(x):
        variance = x.var(-1, keepdim=True, correction=0)
        return (x - x.mean(-1, keepdim=True)) / torch.sqrt(variance + 1e-6)  # planted


@planted(r"adds 1e-05, torch 1e-06", shapes=(X, (8,), (8,)))
class EpsilonOfALayerNorm:
    # PyTorch has one operation for what JAX has in four lines.
    def flax(x, scale, shift):
        variance = x.var(-1, keepdims=True)
        inverse = jax.lax.rsqrt(variance + 1e-5)  # planted
        return (x - x.mean(-1, keepdims=True)) * inverse * scale + shift

    def torch(x, scale, shift):
        return F.layer_norm(x, (8,), scale, shift, 1e-6)  # planted


@planted(r"multiplies by 0.5, torch by 0.25", shapes=((3, 5, 8), (3, 7, 8)))
class Scale:
    def flax(q, k):
        scores = jnp.einsum("btd,bsd->bts", q, k) * 0.5  # planted
        return jax.nn.softmax(scores)

    def torch(q, k):
        scores = q @ k.transpose(1, 2) * 0.25  # planted
        return scores.softmax(-1)


@planted(r"torch adds (x|input 0), flax does not", shapes=(X, SQUARE))
class MissingTerm:
    def flax(x, w):
        return jnp.sin(x @ w)  # planted

    def torch(x, w):
        return x + torch.sin(x @ w)  # planted


@planted(r"flax adds .*cos.*, torch does not", shapes=(X, SQUARE))
class ExtraTerm:
    def flax(x, w):
        return x @ w + jnp.cos(x)  # planted

    def torch(x, w):
        return x @ w  # planted


@planted(r"over 5, torch (over )?8", shapes=(X, X))
class AxisOfSoftmax:
    def flax(x, y):
        weights = jax.nn.softmax(x * y, 1)  # planted
        return weights * y

    def torch(x, y):
        weights = (x * y).softmax(-1)  # planted
        return weights * y


@planted(r"axis 1 of .*, torch over axis 2", shapes=((3, 5, 5), (3, 5, 5)))
class AxisOfASquareSoftmax:
    # Both axes have the same size, so that no shape tells which one is meant.
    def flax(x, y):
        weights = jax.nn.softmax(x * y, 1)  # planted
        return weights @ y

    def torch(x, y):
        weights = (x * y).softmax(-1)  # planted
        return weights @ y


@planted(r"-|sign", shapes=(X, X))
class SwappedOperands:
    def flax(x, y):
        return jnp.exp(x - y)  # planted

    def torch(x, y):
        return torch.exp(y - x)  # planted


@planted(r"concat\(|rolled by -8", shapes=(X, X, (16, 4)))
class ConcatOrder:
    def flax(x, y, w):
        both = jnp.concatenate([x, y], -1)  # planted
        return both @ w

    def torch(x, y, w):
        both = torch.cat([y, x], -1)  # planted
        return both @ w


@planted(r"0:4 of 8.*4:8 of 8", shapes=(X, X))
class Slices:
    def flax(x, y):
        return jnp.tanh(x[..., :4]) * y[..., :4]  # planted

    def torch(x, y):
        return torch.tanh(x[..., 4:]) * y[..., :4]  # planted


@planted(r"split as \(4, 2\), in torch as \(2, 4\)|laid out differently", shapes=(X, SQUARE))
class HeadsSplit:
    def flax(x, w):
        heads = (x @ w).reshape(3, 5, 2, 4)
        return jnp.tanh(heads).sum(-1) / heads.var(-1)

    def torch(x, w):
        heads = (x @ w).reshape(3, 5, 4, 2).transpose(2, 3)  # planted
        return torch.tanh(heads).sum(-1) / heads.var(-1, correction=0)


@planted(r"laid out differently|transpose", shapes=(X, SQUARE))
class TransposedSquareWeight:
    # No shape tells that a square weight is transposed.
    def flax(x, w):
        return x @ w  # planted

    def torch(x, w):
        return F.linear(x, w)  # planted


@planted(r"iota.*torch has tril", shapes=((2, 5, 4), (2, 5, 4)))
class MaskOffByOne:
    def flax(q, k):
        scores = q @ k.transpose(0, 2, 1)
        visible = jnp.tril(jnp.ones((5, 5), bool), 1)  # planted
        return jax.nn.softmax(jnp.where(visible, scores, -jnp.inf))

    def torch(q, k):
        scores = q @ k.transpose(1, 2)
        visible = torch.ones(5, 5, dtype=torch.bool).tril()  # planted
        return torch.where(visible, scores, -torch.inf).softmax(-1)


@planted(r"flax has visible, torch has not\(visible\)", shapes=((2, 5, 4), (2, 5, 4)))
class MaskPolarity:
    def flax(q, k):
        scores = q @ k.transpose(0, 2, 1)
        visible = jnp.tril(jnp.ones((5, 5), bool))
        return jax.nn.softmax(jnp.where(visible, -1e9, scores))  # planted

    def torch(q, k):
        scores = q @ k.transpose(1, 2)
        visible = torch.ones(5, 5, dtype=torch.bool).tril()
        return torch.where(visible, scores, -1e9).softmax(-1)  # planted


@planted(r"flax has tanh\(.*0\.044715.*torch has erf\(", shapes=(X, SQUARE))
class TanhGELU:
    def flax(x, w):
        return jax.nn.gelu(x) @ w  # planted

    def torch(x, w):
        return F.gelu(x) @ w  # planted


@planted(r"flax has relu\(.*torch has .*sigmoid\(", shapes=(X, SQUARE))
class ReLUForSiLU:
    def flax(x, w):
        return jax.nn.relu(x) @ w  # planted

    def torch(x, w):
        return F.silu(x) @ w  # planted


@planted(
    r"multiplies by 1\.702, torch (by 1|does not)|flax multiplies by 1\.702", shapes=(X, SQUARE)
)
class QuickGELU:
    def flax(x, w):
        return x * jax.nn.sigmoid(1.702 * x) @ w  # planted

    def torch(x, w):
        return F.silu(x) @ w  # planted


IMAGE, KERNEL = (2, 4, 8, 8), (6, 4, 3, 3)


@planted(r"padding \(\(0, 1\), \(0, 1\)\), torch \(\(1, 1\), \(1, 1\)\)", shapes=(IMAGE, KERNEL))
class Padding:
    def flax(x, w):
        return jax.lax.conv_general_dilated(x, w, (2, 2), "SAME")  # planted

    def torch(x, w):
        return F.conv2d(x, w, stride=2, padding=1)  # planted


@planted(r"padding .*\(0, 2\).*1", shapes=(IMAGE, KERNEL))
class PaddingOnOneSide:
    def flax(x, w):
        return jax.lax.conv_general_dilated(x, w, (1, 1), ((0, 2), (0, 2)))  # planted

    def torch(x, w):
        return F.conv2d(x, w, padding=1)  # planted


@planted(r"dilation \(?2.*, torch \(?1", shapes=((2, 4, 6, 6), (6, 4, 2, 2)))
class Dilation:
    def flax(x, w):
        strides, pads = (3, 3), ((0, 0), (0, 0))
        return jax.lax.conv_general_dilated(x, w, strides, pads, rhs_dilation=(2, 2))  # planted

    def torch(x, w):
        return F.conv2d(x, w, stride=3)  # planted


@planted(r"tile\(|laid out differently", shapes=((2, 5, 4, 3), (2, 6, 2, 3)))
class TiledKeyHeads:
    def flax(q, k):
        every = jnp.tile(k, (1, 1, 2, 1))  # planted
        return jax.nn.softmax(jnp.einsum("btnh,bsnh->bnts", q, every))

    def torch(q, k):
        every = k.repeat_interleave(2, 2)  # planted
        return torch.einsum("btnh,bsnh->bnts", q, every).softmax(-1)


def angles(base, offset=0):
    frequencies = base ** (-np.arange(2) / 2)
    return (np.arange(6)[:, None] + offset) * frequencies


@planted(r"0:4:2 of 4.*0:2 of 4", r"laid out differently", shapes=((2, 6, 4),))
class RotaryPairs:
    def flax(x):
        angle = angles(100.0)
        cos, sin = jnp.cos(angle), jnp.sin(angle)
        first, second = x[..., 0::2], x[..., 1::2]  # planted
        halves = [first * cos - second * sin, first * sin + second * cos]
        return jnp.stack(halves, -1).reshape(x.shape)  # planted

    def torch(x):
        cos, sin = (torch.tensor(f(angles(100.0))) for f in (np.cos, np.sin))
        first, second = x.chunk(2, -1)  # planted
        halves = [first * cos - second * sin, first * sin + second * cos]
        return torch.cat(halves, -1)  # planted


@planted(r"changes the sign|adds.*sin|multiplies by -1", shapes=((2, 6, 4),))
class RotarySign:
    def flax(x):
        angle = angles(100.0)
        cos, sin = jnp.cos(angle), jnp.sin(angle)
        first, second = jnp.split(x, 2, -1)
        halves = [first * cos + second * sin, second * cos - first * sin]  # planted
        return jnp.concatenate(halves, -1)

    def torch(x):
        cos, sin = (torch.tensor(f(angles(100.0))) for f in (np.cos, np.sin))
        first, second = x.chunk(2, -1)
        halves = [first * cos - second * sin, second * cos + first * sin]  # planted
        return torch.cat(halves, -1)


@planted(r"100.*10000|array", shapes=((2, 6, 4),))
class RotaryBase:
    def flax(x):
        frequencies = 100.0 ** (-jnp.arange(2.0) / 2)  # planted
        angle = jnp.arange(6.0)[:, None] * frequencies
        first, second = jnp.split(x, 2, -1)
        return first * jnp.cos(angle) - second * jnp.sin(angle)

    def torch(x):
        frequencies = 10000.0 ** (-torch.arange(2.0, dtype=torch.float64) / 2)  # planted
        angle = torch.arange(6.0, dtype=torch.float64)[:, None] * frequencies
        first, second = x.chunk(2, -1)
        return first * torch.cos(angle) - second * torch.sin(angle)


@planted(r"(flax )?adds 1", shapes=((2, 6, 4),))
class RotaryOffset:
    def flax(x):
        frequencies = 100.0 ** (-jnp.arange(2.0) / 2)
        angle = (jnp.arange(6.0) + 1)[:, None] * frequencies  # planted
        first, second = jnp.split(x, 2, -1)
        return first * jnp.cos(angle) - second * jnp.sin(angle)

    def torch(x):
        frequencies = 100.0 ** (-torch.arange(2.0, dtype=torch.float64) / 2)
        angle = torch.arange(6.0, dtype=torch.float64)[:, None] * frequencies  # planted
        first, second = x.chunk(2, -1)
        return first * torch.cos(angle) - second * torch.sin(angle)


@planted(r"4:8 of 12.*torch.*0:4 of 12", shapes=((2, 4), (2, 4), (4, 12), (4, 12)))
class GatesOfAGRU:
    def flax(x, h, w, u):
        r, z, n = jnp.split(x @ w, 3, -1)
        hr, hz, hn = jnp.split(h @ u, 3, -1)
        reset, update = jax.nn.sigmoid(z + hz), jax.nn.sigmoid(r + hr)  # planted
        new = jnp.tanh(n + reset * hn)
        return (1 - update) * new + update * h

    def torch(x, h, w, u):
        r, z, n = (x @ w).chunk(3, -1)
        hr, hz, hn = (h @ u).chunk(3, -1)
        reset, update = torch.sigmoid(r + hr), torch.sigmoid(z + hz)  # planted
        new = torch.tanh(n + reset * hn)
        return (1 - update) * new + update * h


@planted(r"flax has float32\(", shapes=(X, SQUARE))
class Cast:
    def flax(x, w):
        scores = (x @ w).astype(jnp.float32)  # planted
        return jax.nn.softmax(scores)

    def torch(x, w):
        scores = x @ w  # planted
        return scores.softmax(-1)


@planted(r"stop_gradient", shapes=(X, SQUARE))
class StopGradient:
    def flax(x, w):
        gate = jax.lax.stop_gradient(jax.nn.sigmoid(x @ w))  # planted
        return gate * x

    def torch(x, w):
        gate = torch.sigmoid(x @ w)
        return gate * x


@planted(r"0.5, torch by 0.25", r"adds 1e-05, torch 1e-06", shapes=(X, SQUARE))
class TwoFaults:
    def flax(x, w):
        hidden = jnp.tanh(x @ w * 0.5)  # planted
        square = jnp.square(hidden).mean(-1, keepdims=True)
        return hidden * jax.lax.rsqrt(square + 1e-5)  # planted

    def torch(x, w):
        hidden = torch.tanh(x @ w * 0.25)  # planted
        square = hidden.square().mean(-1, keepdim=True)
        return hidden * torch.rsqrt(square + 1e-6)  # planted


@planted(r"laid out differently", shapes=((4, 3, 4), (4, 4)))
class LayoutOfAnOutput:
    # The shape is the same either way.
    def flax(x, w):
        return jnp.tanh(x @ w).transpose(2, 1, 0)  # planted

    def torch(x, w):
        return torch.tanh(x @ w)  # planted


@planted(
    r"padding \(\(4, 0\),\), torch \(\(2, 2\),\)|padding \(4, 0\), torch \(2, 2\)",
    shapes=((2, 9, 4), (5, 4, 4)),
)
class CausalPadding:
    def flax(x, w):
        padded = jnp.pad(x, ((0, 0), (4, 0), (0, 0)))
        options = {"dimension_numbers": ("NWC", "WIO", "NWC")}
        return jax.lax.conv_general_dilated(padded, w, (1,), "VALID", **options)  # planted

    def torch(x, w):
        found = F.conv1d(x.transpose(1, 2), w.permute(2, 1, 0), padding=2)  # planted
        return found.transpose(1, 2)


@planted(
    r"concat\(input 0\[4:5 of 5\], input 0\[0:4 of 5\].*torch has pad\(", shapes=(X, (8,), (8,))
)
class RolledForShifted:
    # All rows agree except the first.
    def flax(x, a, b):
        before = jnp.roll(x, 1, 1)  # planted
        return jnp.sin(x * a + before * (1 - a)) + jnp.cos(x * b + before * (1 - b))

    def torch(x, a, b):
        before = F.pad(x, (0, 0, 1, -1))  # planted
        return torch.sin(x * a + before * (1 - a)) + torch.cos(x * b + before * (1 - b))


@planted(
    r"over axis 2 of \(2, 3, 6, 6\), torch over axis 3 of .*, which is axis 2 in PyTorch",
    shapes=((2, 6, 3, 4), (2, 6, 3, 4)),
)
class SoftmaxOverQueries:
    # The heads stand at other axes on both sides, and are named for each.
    def flax(q, k):
        scores = jnp.einsum("btnh,bsnh->bnts", q, k)
        weights = jax.nn.softmax(scores, 2)  # planted
        return jnp.einsum("bnts,bsnh->btnh", weights, k)

    def torch(q, k):
        q, k = (x.transpose(1, 2).reshape(6, 6, 4) for x in (q, k))
        weights = (q @ k.mT).softmax(-1)  # planted
        return (weights @ k).reshape(2, 3, 6, 4).transpose(1, 2)


@planted(
    r"over axis 1 of \(8, 8\), torch over axis 0 of .*, which is axis 1 in PyTorch",
    shapes=(X, SQUARE),
)
class AxisOfANorm:
    def flax(x, w):
        norm = jnp.linalg.norm(jnp.sin(w), axis=1)  # planted
        return x / norm

    def torch(x, w):
        norm = torch.linalg.norm(torch.sin(w.T), dim=1)  # planted
        return x / norm


@planted(r"flax has .*var\(hidden.*, torch has hidden", shapes=(X, SQUARE, SQUARE))
class NormTooMuch:
    def flax(x, w, u):
        hidden = jnp.tanh(x @ w)
        centred = hidden - hidden.mean(-1, keepdims=True)
        hidden = centred / jnp.sqrt(hidden.var(-1, keepdims=True) + 1e-5)  # planted
        total = x + hidden
        centred = total - total.mean(-1, keepdims=True)
        return centred / jnp.sqrt(total.var(-1, keepdims=True) + 1e-5) @ u

    def torch(x, w, u):
        total = x + torch.tanh(x @ w)  # planted
        return F.layer_norm(total, (8,)) @ u


@planted(r"of flax and .* of torch agree to \d\.\de-0[78] alone.* float32", shapes=((2, 50, 8),))
class TableInFloat32:
    # Both tables round in float32, each in another way: a warning and no fault.
    def flax(x):
        rates = jnp.exp(jnp.arange(8, dtype=jnp.float32) * -1.15)
        table = jnp.sin(jnp.arange(50, dtype=jnp.float32)[:, None] * rates)  # planted
        return x * 2 + table

    def torch(x):
        rates = torch.exp(torch.arange(8, dtype=torch.float64) * -1.15)
        places = torch.arange(50, dtype=torch.float64)[:, None]
        table = torch.sin(places * rates).float()  # planted
        return x * 2 + table


@planted(r"torch adds 1, flax does not", shapes=((2, 5, 4), (2, 5, 4)))
class FeatureOfAScan:
    # JAX sums in a loop what PyTorch sums at once: no state agrees before the end.
    def flax(q, k):
        features = jax.nn.elu(k)  # planted

        def step(state, now):
            state = state + now
            return state, state

        tokens = jnp.swapaxes(features, 0, 1)
        start = jnp.zeros_like(k[:, 0])
        _, sums = jax.lax.scan(step, start, tokens)
        return jnp.tanh(q * jnp.swapaxes(sums, 0, 1))

    def torch(q, k):
        features = F.elu(k) + 1  # planted
        return torch.tanh(q * features.cumsum(1))


@planted(r"flax has amax\(.*, torch has logsumexp\(", shapes=(X, SQUARE))
class MaximumForLogsumexp:
    def flax(x, w):
        def step(carried, now):
            scores = carried[:, :, None] + now[:, None] + w
            return jnp.max(scores, axis=1), None  # planted

        return jax.lax.scan(step, x[:, 0], jnp.swapaxes(x, 0, 1))[0]

    def torch(x, w):
        carried = x[:, 0]
        for i in range(x.shape[1]):
            carried = torch.logsumexp(carried[:, :, None] + x[:, i, None] + w, 1)  # planted
        return carried


@planted(r"flax has the sum over axis 2 of .*, torch over axis 1", shapes=(X, SQUARE))
class AxisOfALogsumexp:
    def flax(x, w):
        scores = jnp.tanh(x[:, 0])[:, :, None] + w
        return jnp.sin(jax.nn.logsumexp(scores, axis=2))  # planted

    def torch(x, w):
        scores = torch.tanh(x[:, 0])[:, :, None] + w
        return torch.sin(torch.logsumexp(scores, dim=1))  # planted


@planted(r"flax has sin\(angle\), torch has -sin\(angle\)", shapes=((3, 9, 4), (3, 6)))
class SignOfASymmetricSine:
    # The sine and its negative hold the same numbers over a whole turn.
    def flax(x, w):
        angle = 2 * jnp.pi * jnp.linspace(0, 1, 9)[:, None]
        waves = jnp.concatenate([angle, jnp.cos(angle), jnp.sin(angle)], -1)  # planted
        return x + (waves @ w)[:, :4]

    def torch(x, w):
        angle = 2 * torch.pi * torch.linspace(0, 1, 9, dtype=x.dtype)[:, None]
        waves = torch.cat([angle, torch.cos(angle), -torch.sin(angle)], -1)  # planted
        return x + (waves @ w)[:, :4]


@planted(r"torch adds 1, flax does not")
class StartOfARange:
    def flax(x):
        rates = jnp.arange(0, 8, dtype=x.dtype)  # planted
        return x * jnp.cos(rates * 0.3)

    def torch(x):
        rates = torch.arange(1, 9, dtype=x.dtype)  # planted
        return x * torch.cos(rates * 0.3)


@planted(r"flax has conj\((\w+)\), torch has \1", shapes=((3, 8), (8,)))
class ConjugateOfATransform:
    def flax(x, w):
        kernel = jnp.fft.rfft(w, n=16)
        product = jnp.fft.rfft(x, n=16) * jnp.conj(kernel)  # planted
        return jnp.fft.irfft(product, n=16)[:, :8]

    def torch(x, w):
        kernel = torch.fft.rfft(w, n=16)
        product = torch.fft.rfft(x, n=16) * kernel  # planted
        return torch.fft.irfft(product, n=16)[:, :8]


@planted(r"flax has pos \* abs\(.*\), torch has -pos \* abs\(", shapes=(X, (8,)))
class SignOfAValueThatIsRightElsewhere:
    # The cosine of a negative position is that of the position: only the decay is wrong.
    def flax(x, w):
        pos = jnp.linspace(0, 1, 5)[:, None]
        waves = jnp.cos(3 * pos)
        return x * waves * jnp.exp(pos * jnp.abs(w))  # planted

    def torch(x, w):
        pos = torch.linspace(0, 1, 5, dtype=x.dtype)[:, None]
        waves = torch.cos(3 * pos)
        return x * waves * torch.exp(-pos * w.abs())  # planted


@planted(r"\[12:16 of 16\], torch has .*\[8:12 of 16\]")
class GatesOfAScan:
    def flax(x):
        def step(h, now):
            given = jnp.concatenate([now, 0.3 * now], -1)
            gates = given + jnp.tile(h, 4)
            i, f, o, g = jnp.split(gates, 4, axis=-1)  # planted
            h = jax.nn.sigmoid(f) * h + jax.nn.sigmoid(i) * jnp.tanh(g)  # planted
            h = jax.nn.sigmoid(o) * jnp.tanh(h)  # planted
            return h, h

        start = jnp.zeros((3, 4))
        _, states = jax.lax.scan(step, start, jnp.swapaxes(x, 0, 1))
        return states

    def torch(x):
        h = x.new_zeros(3, 4)
        states = []
        for now in x.unbind(1):
            given = torch.cat([now, 0.3 * now], -1)
            gates = given + h.tile(4)
            i, f, g, o = gates.chunk(4, -1)  # planted
            h = torch.sigmoid(f) * h + torch.sigmoid(i) * torch.tanh(g)  # planted
            h = torch.sigmoid(o) * torch.tanh(h)  # planted
            states.append(h)
        return torch.stack(states)


@planted(r"laid out differently", shapes=((2, 12, 4, 5),))
class OrderOfAPixelShuffle:
    def flax(x):
        x = jnp.moveaxis(jnp.tanh(x), 1, -1)
        split = x.reshape(2, 4, 5, 2, 2, 3)  # planted
        return jnp.sin(split.transpose(0, 5, 1, 3, 2, 4).reshape(2, 3, 8, 10))  # planted

    def torch(x):
        return torch.sin(F.pixel_shuffle(torch.tanh(x), 2))  # planted


@planted(r"flax multiplies by 1, torch by 0.25", shapes=((2, 6, 2), (2, 6, 2)))
class OffsetFarFromWhatAgrees:
    # JAX has both coordinates in one array, PyTorch each in its own: none agrees before the end.
    def flax(x, offset):
        places = x + offset  # planted
        for _ in range(20):
            places = jnp.sin(places) * 1.5
        return places[..., 0] * places[..., 1]

    def torch(x, offset):
        places = x + offset * 0.25  # planted
        first, second = places.unbind(-1)
        for _ in range(20):
            first, second = torch.sin(first) * 1.5, torch.sin(second) * 1.5
        return first * second


def within(place, function):
    lines, first = inspect.getsourcelines(function)
    return place.file == __file__ and first <= place.line < first + len(lines)


def points_at(side, function):
    """Return whether the places that a report writes are in a function, one where it is planted."""
    # A side without the word is right as it is, as what lacks a line is.
    if "# planted" not in inspect.getsource(function):
        return True
    shown = side.places[:3]
    inside = all(within(place, function) for place in shown)
    return inside and any(place.source.endswith("# planted") for place in shown)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.pair.__name__)
def test_a_planted_fault_is_named_with_its_lines(row, differ):
    flax, theirs = row.pair.flax, row.pair.torch
    found = differ(flax, theirs, *row.shapes)
    said = str(found)
    assert found.repaired, said
    # Each fault is named, and nothing else.
    assert len(found.hypotheses) == len(row.said), said
    for headline, pattern in zip(found.causes, row.said, strict=True):
        assert re.search(pattern, headline), said
    for one in found.hypotheses:
        assert points_at(one.flax, flax), said
        assert points_at(one.torch, theirs), said


def transposed_image(x, w):
    image = x.transpose(0, 1, 3, 2)
    return jax.nn.relu(jax.lax.conv_general_dilated(image, w, (1, 1), "SAME"))


def padded_image(x, w):
    return F.conv2d(x, w, padding=1).relu()


def test_what_explains_a_part_alone_is_said_with_a_doubt(differ):
    found = differ(transposed_image, padded_image, (2, 4, 9, 8), (5, 4, 3, 3))
    assert not found.repaired
    assert all("perhaps the same numbers" in cause for cause in found.causes), str(found)


def test_pixels_in_another_order_throughout_are_said_with_a_doubt(differ):
    def flax(x):
        image = jnp.transpose(x, (0, 3, 2, 1))
        return jnp.transpose(jnp.tanh(image), (0, 3, 1, 2))

    found = differ(flax, torch.tanh, (2, 4, 9, 8))
    # Read in this order the outputs agree, but so they would if the port meant to transpose.
    (one,) = found.hypotheses
    assert found.unproven
    assert one.doubtful
    assert one.flax.value == "transpose (0, 3, 2, 1), then transpose (0, 3, 1, 2)"
    assert "no proof" in str(found)


def test_many_places_are_said_with_a_doubt(differ):
    # Nine functions, none of which is another up to a factor: no two share a cause.
    names = ["sin", "tanh", "arctan", "cos", "exp2", "square", "log1p", "arcsinh", "cosh"]
    functions = [getattr(jnp, name) for name in names]

    def flax(*inputs):
        pairs = zip(functions, inputs, strict=True)
        return [function(jnp.abs(x)) for function, x in pairs]

    def theirs(*inputs):
        return [torch.sigmoid(x.abs() * 0.3 + 1) for x in inputs]

    shapes = [(3, 4)] * len(names)
    found = differ(flax, theirs, *shapes)
    assert len(found.hypotheses) == len(names)
    assert found.unnamed
    assert all(one.doubtful for one in found.hypotheses)
    assert "no single cause is known" in str(found)


def ids_in_a_row(x, table):
    ids = jnp.argmin(jnp.abs(x), -1)
    return jnp.take(table, ids, 0) * 0.5


def ids_flat(x, table):
    ids = x.reshape(-1, 8).abs().argmin(1)
    return table[ids].view(3, 5, 8) * 0.25


def test_whole_numbers_of_another_shape_are_the_same_quantity(differ):
    found = differ(ids_in_a_row, ids_flat, X, SQUARE)
    assert found.causes == ["the whole module: flax multiplies by 0.5, torch by 0.25"]


RIGHT = {
    "norm": (
        lambda x, w: (x - x.mean(-1, keepdims=True)) / jnp.sqrt(x.var(-1, keepdims=True) + 1e-5),
        lambda x, w: F.layer_norm(x, (8,)),
    ),
    "softmax": (
        lambda x, w: jax.nn.softmax(jnp.einsum("btd,bsd->bts", x, x)) @ x,
        lambda x, w: F.scaled_dot_product_attention(x, x, x, scale=1.0),
    ),
    "layout": (
        lambda x, w: (w.T @ x.transpose(0, 2, 1)).transpose(0, 2, 1),
        lambda x, w: F.linear(x.reshape(15, 8), w.T).view(3, 5, 8),
    ),
    "loop": (
        lambda x, w: jax.lax.scan(lambda h, now: (h + now @ w, None), x[0], x)[0],
        lambda x, w: x[0] + sum(row @ w for row in x),
    ),
}


@pytest.mark.parametrize("name", RIGHT)
def test_right_pairs_have_no_hypothesis(name, differ):
    found = differ(*RIGHT[name], X, SQUARE)
    assert found.hypotheses == found.remaining == (), str(found)
    assert not found.repaired
    assert found.first is None


class Norm(nnx.Module):
    def __init__(self, epsilon):
        self.weight = nnx.Param(jnp.ones(8))
        self.epsilon = epsilon

    def __call__(self, x):
        square = jnp.square(x).mean(-1, keepdims=True)
        return x / jnp.sqrt(square + self.epsilon) * self.weight


class TorchNorm(torch.nn.RMSNorm):
    def forward(self, x):
        square = x.square().mean(-1, keepdim=True)
        return x / torch.sqrt(square + self.eps) * self.weight


class Layers(nnx.Module):
    def __init__(self, epsilons):
        self.layers = nnx.List([Norm(epsilon) for epsilon in epsilons])

    def __call__(self, x):
        for layer in self.layers:
            x = x + jnp.sin(layer(x))
        return x


class TorchLayers(torch.nn.Module):
    def __init__(self, epsilons):
        super().__init__()
        self.layers = torch.nn.ModuleList([TorchNorm(8, eps=eps) for eps in epsilons])

    def forward(self, x):
        for layer in self.layers:
            x = x + torch.sin(layer(x))
        return x


@pytest.mark.parametrize(
    ("epsilons", "named"),
    [
        ((1e-5, 1e-5, 1e-5), ["layers.0 (also layers.1, layers.2): flax adds 1e-05, torch 0.001"]),
        ((1e-3, 1e-5, 1e-3), ["layers.1: flax adds 1e-05, torch 0.001"]),
        (
            (1e-5, 1e-3, 1e-4),
            [
                "layers.0: flax adds 1e-05, torch 0.001",
                "layers.2: flax adds 0.0001, torch 0.001",
            ],
        ),
    ],
)
def test_repeated_layers_with_one_fault_share_a_hypothesis(epsilons, named, differ):
    found = differ(Layers(epsilons), TorchLayers((1e-3,) * 3), X)
    assert found.repaired
    assert found.causes == named
    layer, _, _ = found.first.name.partition("/")
    assert named[0].startswith(layer)


def test_a_setting_that_differs_in_another_way_in_each_layer_is_no_doubt(differ):
    found = differ(Layers((1e-2, 3e-3, 1e-4, 1e-6, 3e-2)), TorchLayers((1e-3,) * 5), X)
    assert found.repaired
    assert len(found.causes) == 5
    assert not any("perhaps" in cause for cause in found.causes)


def test_as_many_places_as_a_deep_model_has_are_found(differ):
    count = 16
    found = differ(Layers((1e-5,) * count), TorchLayers((1e-3,) * count), X)
    assert found.repaired
    assert found.causes == [
        "layers.0 (also layers.1, layers.2, layers.3 and 12 more): flax adds 1e-05, torch 0.001"
    ]


def backwards(x, start):
    def step(h, now):
        h = jnp.tanh(0.5 * h + now)
        return h, h

    return jax.lax.scan(step, start, x, reverse=True)[1]


def forwards(x, start):
    found = []
    for now in x:
        start = torch.tanh(0.5 * start + now)
        found.append(start)
    return torch.stack(found)


def test_a_scan_in_the_other_direction_is_one_difference(differ):
    found = differ(backwards, forwards, (5, 3), (3,))
    assert found.repaired
    (only,) = found.hypotheses
    assert only.flax.value == "from the last to the first"
    assert only.torch.value == "from the first to the last"
    assert "reverse=True" in only.flax.places[0].source
    assert only.torch.places[0].source == "for now in x:"
    _, proof = str(found).rsplit("\n", 1)
    assert proof == "proof: with the steps in the order of torch all outputs are equal"
    (document,) = found.documents()
    assert document["edit"].endswith(": run the steps from the first to the last")


def test_a_difference_is_data_for_json(differ):
    found = differ(TwoFaults.flax, TwoFaults.torch, X, SQUARE)
    # What JSON cannot hold, as an array or a place, raises here.
    data = json.loads(json.dumps(found.as_dict()))
    assert data["repaired"]
    assert data["remaining"] == []
    assert {step["differs"] for step in data["steps"]} == {False, True}

    scale, epsilon = found.documents()
    assert scale["operation"] == "product"
    assert scale["parameter"] == "factor"
    assert epsilon["flax"]["value"] == "1e-05"
    assert epsilon["torch"]["value"] == "1e-06"
    place = scale["torch"]["places"][0]
    assert place["file"] == __file__
    assert place["source"] == "hidden = torch.tanh(x @ w * 0.25)  # planted"


def test_each_side_is_written_over_the_variables_of_its_own_source(differ):
    def flax(x, y):
        ours = jnp.sin(x)
        also = jnp.cos(y)
        return jnp.tanh(ours * also**2)

    def theirs(x, y):
        first = torch.sin(x)
        second = torch.cos(y)
        return torch.tanh(first * second**3)

    # `first` has the values of `ours`, and must not be written for it.
    (one,) = differ(flax, theirs, X, X).hypotheses
    assert one.flax.expression == "also**2"
    assert one.torch.expression == "second**3"


def test_a_long_expression_is_written_over_variables_that_one_side_alone_has(differ):
    def flax(x, y):
        wave = x
        for step in range(9):
            wave = jnp.sin(wave * (step + 2) + jnp.cos(wave) / (step + 3) - y * step)
        return jnp.tanh(wave)

    def theirs(x, y):
        return torch.erf(x + y)

    (one,) = differ(flax, theirs, X, X).hypotheses
    # Over the inputs it would fill many lines.
    assert one.flax.value == "tanh(wave)"


# By a name of the user's, which no search for `stop_gradient` finds.
stop = jax.lax.stop_gradient


def test_a_stop_is_found_among_others_whatever_it_is_called(differ):
    def flax(x, y):
        code, kept = jnp.sin(x), jnp.cos(y)
        first = jnp.sum((stop(code) - kept) ** 2)
        return first + 0.25 * jnp.sum((code - kept) ** 2)

    def theirs(x, y):
        code, kept = torch.sin(x), torch.cos(y)
        first = (code.detach() - kept).pow(2).sum()
        return first + 0.25 * (code - kept.detach()).pow(2).sum()

    found = differ(flax, theirs, X, X)
    assert found.causes == [
        "the whole module: torch stops the gradient here by detach, flax does not"
    ]
    assert "0.25" in found.hypotheses[0].flax.places[0].source


def test_a_line_that_stops_another_operand_is_found(differ):
    def flax(x, y):
        code, near = jnp.sin(x), jnp.cos(y)
        loss = jnp.sum((stop(code) - near) ** 2)
        straight = stop(code) + (near - stop(code))
        return jnp.tanh(straight), loss

    def theirs(x, y):
        code, near = torch.sin(x), torch.cos(y)
        loss = (code.detach() - near).pow(2).sum()
        straight = code + (near - code).detach()
        return straight.tanh(), loss

    found = differ(flax, theirs, X, X)
    assert found.repaired
    # Both sides stop as often, each at an operand where the other does not.
    stopped, detached = found.hypotheses
    assert stopped.operation == "stop_gradient"
    assert stopped.flax.places[0].source == "straight = stop(code) + (near - stop(code))"
    assert detached.operation == "detach"
    assert detached.torch.places[0].source == "straight = code + (near - code).detach()"


def test_a_value_that_is_another_times_a_number_says_by_which(differ):
    def flax(x, y):
        code, kept = jnp.sin(x), jnp.cos(y)
        # Both means in one line, so that the swapped weights are two differences and not one.
        first, second = jnp.mean((stop(code) - kept) ** 2), jnp.mean((code - stop(kept)) ** 2)
        return 0.25 * first + second

    def theirs(x, y):
        code, kept = torch.sin(x), torch.cos(y)
        first, second = (code.detach() - kept).pow(2).mean(), (code - kept.detach()).pow(2).mean()
        return first + 0.25 * second

    found = differ(flax, theirs, X, X)
    assert found.repaired
    assert {one.note for one in found.hypotheses} == {
        "what torch has is 0.25 times what flax has",
        "what torch has is 4 times what flax has",
    }


def test_what_is_gathered_at_other_places_is_another_value(as_a_user_has_jax):
    # Every row is taken twice on both sides, so that both hold the same numbers.
    source = np.array([1, 2, 3, 4, 0, 0, 1, 2, 3, 4])
    target = np.array([0, 1, 2, 3, 4, 2, 3, 4, 0, 1])

    def flax(nodes, edges, source, target):
        return jnp.tanh(nodes[target] * edges)

    def theirs(nodes, edges, source, target):
        return torch.tanh(nodes[source] * edges)

    inputs = [(5, 4), (10, 4), source, target]
    report = compare(flax, theirs, inputs, checks=["forward"])
    assert report.causes == ["the whole module: flax has input 3, torch has input 2"]


def test_a_search_that_takes_long_ends_and_says_so(monkeypatch):
    def flax(x):
        for scale in (0.5, 0.25):
            x = jnp.tanh(jnp.cumsum(x * scale, -1)) + jnp.sin(x)
        return x

    def theirs(x):
        for scale in (0.4, 0.2):
            x = torch.tanh(torch.cumsum(x * scale, -1)) + torch.sin(x)
        return x

    found = compare(flax, theirs, [X], checks=["forward"]).difference
    assert found.repaired
    assert not found.ended
    # Too few to find both.
    monkeypatch.setattr("flax_attn.parity.trace.align.VALUES", 4)
    found = compare(flax, theirs, [X], checks=["forward"]).difference
    assert found.ended
    assert not found.repaired
    assert "the search takes no longer" in str(found).lower()
    assert found.as_dict()["ended"]
