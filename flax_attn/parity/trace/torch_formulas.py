"""What an operation of PyTorch is recorded as: the operations that it is made of."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch.nn import functional
from torch.overrides import TorchFunctionMode

aten = torch.ops.aten
# Operations that are recorded as what they are made of: their values are compared as well.
COMPOSED = [
    aten.native_layer_norm,
    aten.native_batch_norm,
    aten._native_batch_norm_legit,
    aten._native_batch_norm_legit_no_training,
    aten._softmax,
    aten._log_softmax,
    aten._safe_softmax,
    aten.gelu,
    aten.silu,
    aten.addcmul,
    aten.glu,
    aten.hardswish,
    aten.hardsigmoid,
    aten.softplus,
    aten.elu,
    aten.leaky_relu,
    aten.rsub,
    aten._weight_norm_interface,
    aten.mse_loss,
    aten.mse_loss_backward,
    aten.masked_fill,
    aten.lerp,
    aten.logsumexp,
    aten.log_sigmoid_forward,
    aten.mish,
    aten.hardtanh,
    aten.threshold,
    aten.softshrink,
    aten.hardshrink,
    aten._prelu_kernel,
    aten.smooth_l1_loss,
    aten.huber_loss,
    aten.binary_cross_entropy,
    aten.grid_sampler_2d,
    aten.upsample_nearest2d,
    aten.upsample_bilinear2d,
    aten.upsample_bicubic2d,
    aten.reflection_pad1d,
    aten.reflection_pad2d,
    aten.replication_pad2d,
    aten.pixel_shuffle,
    aten.pixel_unshuffle,
]


def _addmm(bias: Any, left: Any, right: Any, *, beta: Any = 1, alpha: Any = 1) -> Any:
    product = left @ right
    if alpha != 1:
        product = product * alpha
    if beta != 1:
        bias = bias * beta
    return product + bias


def _var_mean(x: Any, dim: Any = None, *, correction: Any = None, keepdim: bool = False) -> Any:
    axes = range(x.ndim) if dim is None else dim
    # Negative axes count from the last.
    summed = tuple(axis % x.ndim for axis in axes)
    count = math.prod(x.shape[axis] for axis in summed)
    correction = 1 if correction is None else correction
    mean = x.mean(summed, keepdim=True)
    squares = (x - mean).square().sum(summed, keepdim=True)
    variance = squares / (count - correction)
    if keepdim:
        return variance, mean
    shape = [size for axis, size in enumerate(x.shape) if axis not in summed]
    return variance.reshape(shape), mean.reshape(shape)


def _var(x: Any, dim: Any = None, **options: Any) -> Any:
    return _var_mean(x, dim, **options)[0]


def _std(x: Any, dim: Any = None, **options: Any) -> Any:
    return _var(x, dim, **options).sqrt()


def _group_norm(x, weight, bias, batch, channels, pixels, groups, eps):
    grouped = x.reshape(batch, groups, -1)
    variance, mean = _var_mean(grouped, (2,), correction=0, keepdim=True)
    inverse = (variance + eps).rsqrt()
    scaled = (grouped - mean) * inverse
    normed = scaled.reshape(x.shape)
    if weight is not None:
        normed = normed * _of_channels(weight, x.ndim)
    if bias is not None:
        normed = normed + _of_channels(bias, x.ndim)
    each = batch, groups
    return normed, mean.reshape(each), inverse.reshape(each)


def _of_channels(parameter: Any, rank: int) -> Any:
    """Return a parameter with a number for each channel, to compute with images of a rank."""
    shape = [1] * rank
    shape[1] = -1
    return parameter.reshape(shape)


def _flash_attention(
    query, key, value, dropout_p=0.0, is_causal=False, *, attn_mask=None, scale=None
):
    out = _attention(query, key, value, attn_mask, dropout_p, is_causal, scale)
    scores = _scores(query, key, scale)
    if is_causal:
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        scores = torch.where(hidden, -torch.inf, scores)
    elif attn_mask is not None:
        scores = scores + attn_mask
    return out, scores.logsumexp(-1)


def _scores(query: torch.Tensor, key: torch.Tensor, scale: float | None) -> torch.Tensor:
    size = query.shape[-1]
    products = query @ key.transpose(-2, -1)
    return products * (size**-0.5 if scale is None else scale)


def _convolution(x: Any, weight: Any, bias: Any, *options: Any) -> Any:
    if bias is None:
        return NotImplemented
    found = aten.convolution.default(x, weight, None, *options)
    return found + _of_channels(bias, weight.ndim)


FORMULAS: dict[Any, Callable[..., Any]] = {
    aten.addmm.default: _addmm,
    aten.baddbmm.default: _addmm,
    aten._scaled_dot_product_flash_attention_for_cpu.default: _flash_attention,
    aten.convolution.default: _convolution,
    aten.native_group_norm.default: _group_norm,
    aten.var_mean.correction: _var_mean,
    aten.var.correction: _var,
    aten.std.correction: _std,
}


class Attention(TorchFunctionMode):
    """Computes attention by its formula, whose steps have values."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        called = _attention if func is functional.scaled_dot_product_attention else func
        return called(*args, **(kwargs or {}))


def _attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    if enable_gqa:
        groups = query.shape[-3] // key.shape[-3]
        key = key.repeat_interleave(groups, -3)
        value = value.repeat_interleave(groups, -3)
    scores = _scores(query, key, scale)
    if is_causal:
        attn_mask = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
    if attn_mask is None:
        return scores.softmax(-1) @ value
    if attn_mask.dtype != torch.bool:
        scores = scores + attn_mask
    else:
        scores = torch.where(attn_mask, scores, -torch.inf)
    weights = scores.softmax(-1)
    # A row that sees nothing returns zeros. Asked in NumPy, this is no step of the run.
    hidden = np.isneginf(as_numpy(scores)).all(-1, keepdims=True)
    if hidden.any():
        weights = torch.where(torch.from_numpy(hidden), 0.0, weights)
    return weights @ value


def as_numpy(tensor: torch.Tensor) -> np.ndarray:
    """Return a copy of a tensor, which PyTorch may change in place."""
    tensor = tensor.detach()
    if tensor.dtype in (torch.bfloat16, torch.float16):
        tensor = tensor.float()
    return np.array(tensor.numpy(force=True))
