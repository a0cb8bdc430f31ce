"""SDPA and FlexAttention of PyTorch, where it has CUDA."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from flax_attn.bench.calls import ModelCall
from flax_attn.device.calls import drawn
from flax_attn.functional.masks import Mask

TURNS, REPEATS = 5, 8


def torch_timers(result: Callable[[float, float], Any]) -> dict[str, Callable[[ModelCall], Any]]:
    """Return SDPA and FlexAttention by name; nothing where PyTorch has no CUDA.

    `result` is made of the seconds forward, and forward with backward.
    """
    if jax.default_backend() != "gpu" or find_spec("torch") is None:
        return {}
    import torch

    if not torch.cuda.is_available():
        return {}
    return {
        "torch SDPA": lambda call: result(*_seconds(call, sdpa(call), "cuda")),
        "torch FlexAttention": lambda call: result(*_seconds(call, flex(call), "cuda")),
    }


def sdpa(call: ModelCall) -> Callable[..., Any]:
    """Return `scaled_dot_product_attention` as a call needs it, of tensors with heads first.

    Raises:
        ValueError: if the call has a part that SDPA has not.
    """
    from torch.nn.functional import scaled_dot_product_attention

    missing = [name for name in ("soft_cap", "score", "sinks") if name in call.arguments]
    if missing:
        raise ValueError(
            f"SDPA has no {', '.join(missing)}; got a call with one. Compare FlexAttention"
        )
    options: dict[str, Any] = {"scale": call.options.get("scale"), "enable_gqa": True}
    dropout = call.arrays.get("dropout")
    options["dropout_p"] = 0.0 if dropout is None else dropout.rate
    t, s = call.arrays["query"].shape[1], call.arrays["key"].shape[1]
    mask = call.arrays.get("mask", Mask())
    if "bias" not in call.arrays and mask in (Mask(), Mask.causal()) and t == s:
        options["is_causal"] = mask == Mask.causal()
        return partial(scaled_dot_product_attention, **options)
    return partial(scaled_dot_product_attention, **options, attn_mask=_added)


def _added(arrays: dict[str, Any], shape: tuple[int, int, int, int], dtype: Any) -> np.ndarray:
    """Return mask and bias of a call as one array that is added."""
    mask = arrays.get("mask", Mask()).resolve(*shape)
    visible = mask.block(jnp.arange(shape[2]), jnp.arange(shape[3]))
    bias = jnp.asarray(arrays.get("bias", 0.0), jnp.float32)
    return np.asarray(jnp.where(visible, bias, -jnp.inf))


def flex(call: ModelCall) -> Callable[..., Any]:
    """Return `flex_attention`, compiled, with the soft cap and the band of a call.

    Raises:
        ValueError: if the call has a part that is not translated.
    """
    import torch
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    from flax_attn.backends.band import sides
    from flax_attn.backends.call import prepare

    others = [name for name in ("score", "sinks", "bias", "dropout") if name in call.arguments]
    made = jax.eval_shape(lambda arrays: prepare(**arrays, **call.options), call.arrays)
    left, right = sides(made)
    (_, rest) = made.mask.split_band()
    if others or rest.parts:
        raise ValueError(
            "FlexAttention is compared on causal masks, windows and soft caps; got"
            f" {', '.join(others) or 'another mask'}. Compare SDPA"
        )
    cap = call.options.get("soft_cap")

    def shown(b: Any, n: Any, i: Any, j: Any) -> Any:
        # A side that is open is one beyond every token.
        far = 2**30
        return (i - j <= (far if left is None else left)) & (
            j - i <= (far if right is None else right)
        )

    def capped(score: Any, b: Any, n: Any, i: Any, j: Any) -> Any:
        assert cap is not None, "it is given where there is a cap"
        return cap * torch.tanh(score / cap)

    t, s = call.arrays["query"].shape[1], call.arrays["key"].shape[1]
    blocks = create_block_mask(shown, None, None, t, s)
    options = {"block_mask": blocks, "score_mod": capped if cap else None, "enable_gqa": True}
    return partial(torch.compile(flex_attention), scale=call.options.get("scale"), **options)


def tensors(call: ModelCall, attend: Callable[..., Any], device: str) -> tuple[Callable, list, Any]:
    """Return the function, its tensors with heads first and the cotangent, on a device."""
    import torch

    arrays, cotangent = drawn(call)
    dtype = getattr(torch, call.arrays["query"].dtype.name)

    def tensor(x: Any) -> Any:
        return torch.from_numpy(np.array(x, np.float32)).to(device, dtype)

    heads_first = [
        tensor(arrays[name]).transpose(1, 2).requires_grad_() for name in ("query", "key", "value")
    ]
    options = getattr(attend, "keywords", {})
    if options.get("attn_mask") is _added:
        b, t, n, _ = arrays["query"].shape
        shape = b, n, t, arrays["key"].shape[1]
        attend = partial(attend, attn_mask=tensor(_added(arrays, shape, dtype)))
    return attend, heads_first, tensor(cotangent).transpose(1, 2)


def _seconds(call: ModelCall, attend: Callable[..., Any], device: str) -> tuple[float, float]:
    import torch

    attend, inputs, cotangent = tensors(call, attend, device)

    def alone() -> None:
        with torch.no_grad():
            attend(*inputs)

    def whole() -> None:
        torch.autograd.grad(attend(*inputs), inputs, cotangent)

    return _least(alone), _least(whole)


def _least(run: Callable[[], None]) -> float:
    import torch

    def turn(repeats: int) -> float:
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(repeats):
            run()
        torch.cuda.synchronize()
        return (time.perf_counter() - start) / repeats

    turn(1)  # compiles
    return min(turn(REPEATS) for _ in range(TURNS))
