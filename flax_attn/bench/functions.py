"""The rivals on query, key and value."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
import numpy as np
from einops import rearrange

from flax_attn.attention import dot_product_attention
from flax_attn.bench.rivals import Prepared, Rival, as_float64, prepare_jax, prepare_torch, torch_tensor
from flax_attn.bench.truth import NAMES, probe
from flax_attn.bench.work import Work, inputs

JAX_LAYOUT, TORCH_LAYOUT = "b t n h", "b n t h"


def functions(backends: Sequence[str], platform: str) -> list[Rival]:
    """Return our backends, the first being the one that ratios are about, and then the others."""
    rest = _ON_GPU if platform == "gpu" else (Rival("torch SDPA", _torch_sdpa(), "torch"),)
    return [*(ours(backend) for backend in backends), *rest, *_ANYWHERE]


def ours(backend: str) -> Rival:
    """Return `dot_product_attention` with a backend."""

    def attend(work: Work, query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
        return dot_product_attention(query, key, value, mask=work.mask(), backend=backend)

    return _jax_rival(f"ours {backend}", attend)


def _jax_rival(name: str, attend: Callable[..., Any], layout: str = JAX_LAYOUT, package: str = "jax") -> Rival:
    def prepare(work: Work) -> Prepared:
        arguments = tuple(rearrange(x, f"{JAX_LAYOUT} -> {layout}") for x in inputs(work))
        return prepare_jax(lambda *x: attend(work, *x), arguments, work, _at_probe(work, layout))

    return Rival(name, prepare, package)


def _at_probe(work: Work, layout: str) -> Callable[[Any], dict[str, np.ndarray]]:
    row, head = probe(work)

    def named(result: tuple) -> dict[str, np.ndarray]:
        heads = (x[row, :, head] if layout == JAX_LAYOUT else x[row, head] for x in result)
        return {name: as_float64(x) for name, x in zip(NAMES, heads, strict=False)}

    return named


def _jax_nn(implementation: Literal["cudnn"] | None) -> Callable[..., jax.Array]:
    return lambda work, q, k, v: jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation=implementation)


def _attnax(work: Work, query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
    import attnax  # pyright: ignore[reportMissingImports]

    return attnax.flash_attention(query, key, value, mask=attnax.make_causal_mask(work.t))


def _torch_sdpa(kernel: str | None = None) -> Callable[[Work], Prepared]:
    def prepare(work: Work) -> Prepared:
        from torch.nn.attention import SDPBackend, sdpa_kernel
        from torch.nn.functional import scaled_dot_product_attention

        def attend(query, key, value):
            if kernel is None:
                return scaled_dot_product_attention(query, key, value, is_causal=True)
            with sdpa_kernel(getattr(SDPBackend, kernel)):
                return scaled_dot_product_attention(query, key, value, is_causal=True)

        tensors = [torch_tensor(rearrange(x, f"{JAX_LAYOUT} -> {TORCH_LAYOUT}")) for x in inputs(work)]
        return prepare_torch(attend, tensors, tensors[:3], work, _at_probe(work, TORCH_LAYOUT))

    return prepare


_ANYWHERE = (
    _jax_rival("jax.nn", _jax_nn(None)),
    _jax_rival("attnax flash", _attnax, TORCH_LAYOUT, "attnax"),
)
_ON_GPU = (
    Rival("torch SDPA flash", _torch_sdpa("FLASH_ATTENTION"), "torch"),
    Rival("torch SDPA cudnn", _torch_sdpa("CUDNN_ATTENTION"), "torch"),
    Rival("torch SDPA efficient", _torch_sdpa("EFFICIENT_ATTENTION"), "torch"),
    _jax_rival("jax.nn cudnn", _jax_nn("cudnn")),
)
