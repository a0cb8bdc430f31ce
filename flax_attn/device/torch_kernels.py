"""SDPA and FlexAttention of PyTorch, where it has CUDA."""

import time
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from flax_attn.bench.calls import ModelCall
from flax_attn.device.kernels import check_parts
from flax_attn.functional.masks import Mask

TURNS, REPEATS = 5, 8


Timer = Callable[[ModelCall], Any]


def torch_timers(result: Callable[[float, float], Any]) -> dict[str, Timer]:
    """Return SDPA and FlexAttention by name; nothing where PyTorch has no CUDA.

    `result` is made of the seconds forward, and forward with backward.
    """
    if jax.default_backend() != "gpu" or find_spec("torch") is None:
        return {}
    import torch

    # It may be installed for processors alone.
    if not torch.cuda.is_available():
        return {}
    return {
        "torch SDPA": partial(_timer, result, sdpa),
        "torch FlexAttention": partial(_timer, result, flex),
    }


def _timer(result: Callable, translate: Callable, call: ModelCall) -> Callable:
    # PyTorch compiles when it is run first.
    return partial(_measured, result, translate, call)


def _measured(result: Callable, translate: Callable, call: ModelCall, numbers: Any) -> Any:
    import torch

    # Compiled once per call: after a few other shapes PyTorch would give up compiling.
    torch.compiler.reset()
    attend, inputs, cotangent = tensors(call, translate(call), numbers, "cuda")
    forward = _least(partial(_forward, attend, inputs))
    backward = _least(partial(_backward, attend, inputs, cotangent))
    # The rest of the memory is JAX's.
    torch.cuda.empty_cache()
    return result(forward, backward)


def sdpa(call: ModelCall) -> Callable[..., Any]:
    """Return `scaled_dot_product_attention` as a call needs it, of tensors with heads first.

    Raises:
        ValueError: if the call has a part that SDPA has not.
    """
    from torch.nn.functional import scaled_dot_product_attention

    check_parts("SDPA", call.arguments, ("soft_cap", "score", "sinks"))
    arrays = call.arrays
    dropout = arrays.get("dropout")
    rate = 0.0 if dropout is None else dropout.rate
    scale = call.options.get("scale")
    options: dict[str, Any] = {
        "scale": scale,
        "enable_gqa": True,
        "dropout_p": rate,
    }
    mask = arrays.get("mask", Mask())
    causal = Mask.causal()
    queries = arrays["query"].shape[1]
    keys = arrays["key"].shape[1]
    # Without an array SDPA takes its fastest kernels.
    named = mask in (Mask(), causal) and queries == keys
    if named and "bias" not in arrays:
        is_causal = mask == causal
        options["is_causal"] = is_causal
    else:
        options["attn_mask"] = _added
    attend = scaled_dot_product_attention
    return partial(attend, **options)


def _added(arrays: dict[str, Any]) -> np.ndarray:
    """Return mask and bias of a call as one array that is added."""
    b, t, n, _ = arrays["query"].shape
    s = arrays["key"].shape[1]
    mask = arrays.get("mask", Mask()).resolve(b, n, t, s)
    visible = mask.block(jnp.arange(t), jnp.arange(s))
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
    _, rest = made.mask.split_band()
    if others or rest.parts:
        got = ", ".join(others) or "another mask"
        raise ValueError(
            "FlexAttention is compared on causal masks, windows and soft caps; got"
            f" {got}. Compare SDPA"
        )
    cap = call.options.get("soft_cap")
    # A side that is open is one beyond every token.
    left, right = (2**30 if side is None else side for side in sides(made))

    def shown(b: Any, n: Any, i: Any, j: Any) -> Any:
        return (i - j <= left) & (j - i <= right)

    def capped(score: Any, b: Any, n: Any, i: Any, j: Any) -> Any:
        assert cap is not None, "it is given where there is a cap"
        return cap * torch.tanh(score / cap)

    _, _, t, s = made.shape
    return partial(
        torch.compile(flex_attention, dynamic=False),
        block_mask=create_block_mask(shown, None, None, t, s),
        score_mod=capped if cap else None,
        scale=call.options.get("scale"),
        enable_gqa=True,
    )


def tensors(
    call: ModelCall, attend: Callable[..., Any], numbers: tuple[dict[str, Any], Any], device: str
) -> tuple[Callable, list, Any]:
    """Return the function, its tensors with heads first and the cotangent, on a device."""
    import torch

    arrays, cotangent = numbers
    dtype = getattr(torch, call.arrays["query"].dtype.name)

    def tensor(x: Any) -> Any:
        # NumPy has no bfloat16 that torch would read.
        return torch.from_numpy(np.array(x, np.float32)).to(device, dtype)

    def heads_first(x: Any) -> Any:
        # torch has the heads before the tokens.
        return tensor(x).transpose(1, 2)

    names = "query", "key", "value"
    inputs = [heads_first(arrays[name]).requires_grad_() for name in names]
    options = getattr(attend, "keywords", {})
    if options.get("attn_mask") is _added:
        mask = _added(arrays)
        attend = partial(attend, attn_mask=tensor(mask))
    return attend, inputs, heads_first(cotangent)


def _forward(attend: Callable[..., Any], inputs: list) -> None:
    import torch

    with torch.no_grad():
        attend(*inputs)


def _backward(attend: Callable[..., Any], inputs: list, cotangent: Any) -> None:
    import torch

    torch.autograd.grad(attend(*inputs), inputs, cotangent)


def _least(run: Callable[[], None]) -> float:
    import torch

    def turn(repeats: int) -> float:
        # A GPU computes on after a call has returned.
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(repeats):
            run()
        torch.cuda.synchronize()
        return (time.perf_counter() - start) / repeats

    # The first one compiles.
    turn(1)
    return min(turn(REPEATS) for _ in range(TURNS))
