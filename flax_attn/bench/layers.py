"""Implementations as whole layers, projections included, all with the same weights."""

from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from flax_attn import convert
from flax_attn.bench.implementation import (
    Arrays,
    Implementation,
    PreparedCall,
    as_float64,
    prepare_jax,
    prepare_torch,
    torch_tensor,
)
from flax_attn.bench.workload import Workload, inputs, with_gradients
from flax_attn.convert.rules import Layout, Rule
from flax_attn.modules.multi_head import MultiHeadAttention

COMMON = "torch_mha"  # the layout in which weights are exchanged and gradients compared
_NAMES = {
    "W_query": "query_proj",
    "W_key": "key_proj",
    "W_value": "value_proj",
    "out_proj": "output_proj",
}
ATTNAX = Layout(
    tuple(
        Rule((f"{ours}.{part}",), f"{theirs}.{part}")
        for ours, theirs in _NAMES.items()
        for part in ("kernel", "bias")
    )
)


def layers(backends: Sequence[str]) -> list[Implementation]:
    """Return our layer with each backend, and then the other implementations."""
    ours = [Implementation(f"ours {name}", partial(_prepare_ours, name)) for name in backends]
    return [*ours, *_OTHERS]


def formula(work: Workload, dtype: str) -> Arrays:
    """Return output and gradients of the layer, computed by the reference backend in `dtype`."""
    compute, params, named = _as_function(
        _ours(work, "reference"), lambda layer, x: layer(x), dtype
    )
    arguments = [jnp.asarray(x.astype(dtype)) for x in inputs(work)]
    return named(jax.jit(with_gradients(compute, work.backward))(params, *arguments))


@lru_cache(maxsize=2)
def _weights(n: int, h: int) -> dict[str, np.ndarray]:
    # Drawn once: the other layers get these weights, through a layout that all can read.
    layer = MultiHeadAttention(n * h, n * h, None, 0.0, n, qkv_bias=True, rngs=nnx.Rngs(0))
    return convert.state_dict(layer, COMMON)


def _ours(work: Workload, backend: str) -> MultiHeadAttention:
    d = work.n * work.h
    layer = MultiHeadAttention(
        d, d, None, 0.0, work.n, qkv_bias=True, backend=backend, rngs=nnx.Rngs(0)
    )
    convert.load_state_dict(layer, _weights(work.n, work.h), COMMON)
    return layer


def _as_function(
    layer: nnx.Module,
    call: Callable[..., Any],
    dtype: str,
    common: Callable[..., Arrays] | None = None,
) -> tuple[Callable[..., Any], Any, Callable[[Any], Arrays]]:
    """Return a function of `(params, x)`, its parameters, and what names the arrays of a result.

    The parameters are in `dtype`.
    """
    graph, params, rest = nnx.split(layer, nnx.Param, ...)
    common = common or (lambda layer: convert.state_dict(layer, COMMON))

    def compute(params: Any, x: Any) -> Any:
        return call(nnx.merge(graph, params, rest), x)

    def named(result: tuple) -> Arrays:
        output, *gradients = result
        found = {"output": output}
        if gradients:
            of_params, found["input"] = gradients
            found |= common(nnx.merge(graph, of_params, rest))
        return {name: as_float64(array) for name, array in found.items()}

    return compute, jax.tree.map(lambda x: x.astype(dtype), params), named


def _prepare(
    work: Workload, layer: nnx.Module, call: Callable[..., Any], common: Callable | None = None
) -> PreparedCall:
    compute, params, named = _as_function(layer, call, work.dtype, common)
    return prepare_jax(compute, (params, *inputs(work)), work, named)


def _prepare_ours(backend: str, work: Workload) -> PreparedCall:
    return _prepare(work, _ours(work, backend), lambda layer, x: layer(x))


def _prepare_like(
    work: Workload, layer: nnx.Module, layout: str | Layout, call: Callable[..., Any]
) -> PreparedCall:
    """Prepare a layer whose parameters are those of ours in a layout."""
    ours = _ours(work, "auto")
    parameters = _parameters(layer)
    for name, array in convert.state_dict(ours, layout).items():
        parameters[name][...] = jnp.asarray(array)

    def common(gradients: nnx.Module) -> Arrays:
        # They cross the other way, as if they were weights.
        found = _parameters(gradients)
        named = {name: as_float64(gradient[...]) for name, gradient in found.items()}
        layer = _ours(work, "auto")
        convert.load_state_dict(layer, named, layout)
        return convert.state_dict(layer, COMMON)

    return _prepare(work, layer, call, common)


def _parameters(layer: nnx.Module) -> dict[str, nnx.Param]:
    found = ((path, node) for path, node in nnx.iter_graph(layer) if isinstance(node, nnx.Param))
    return {".".join(map(str, path)): node for path, node in found}


def _prepare_nnx(work: Workload) -> PreparedCall:
    layer = nnx.MultiHeadAttention(work.n, work.n * work.h, decode=False, rngs=nnx.Rngs(0))
    return _prepare_like(work, layer, "flax", lambda layer, x: layer(x, is_causal=True))


def _prepare_attnax(work: Workload) -> PreparedCall:
    import attnax  # pyright: ignore[reportMissingImports]

    layer = attnax.MultiHeadAttention(nnx.Rngs(0), num_heads=work.n, in_features=work.n * work.h)
    return _prepare_like(
        work, layer, ATTNAX, lambda layer, x: layer(x, mask=attnax.make_causal_mask(work.t))
    )


def _prepare_torch(work: Workload) -> PreparedCall:
    import torch

    x, cotangent = (torch_tensor(x) for x in inputs(work))
    layer = _torch_layer(work).to(x.device, x.dtype)
    # It wants the mask as well as the flag, of which it reads one.
    hidden = torch.nn.Transformer.generate_square_subsequent_mask(
        work.t, device=x.device, dtype=x.dtype
    )
    names = ["output", "input", *dict(layer.named_parameters())]

    def compute(x):
        # With is_causal and without weights it calls its fused kernel; the mask itself is then not
        # read.
        return layer(x, x, x, attn_mask=hidden, is_causal=True, need_weights=False)[0]

    def named(result: tuple) -> Arrays:
        return {name: as_float64(array) for name, array in zip(names, result, strict=False)}

    return prepare_torch(compute, [x, cotangent], [x, *layer.parameters()], work, named)


def _torch_layer(work: Workload) -> Any:
    import torch

    layer = torch.nn.MultiheadAttention(work.n * work.h, work.n, batch_first=True)
    weights = _weights(work.n, work.h)
    layer.load_state_dict({name: torch.from_numpy(array) for name, array in weights.items()})
    return layer


_OTHERS = (
    Implementation("torch.nn.MultiheadAttention", _prepare_torch, "torch"),
    Implementation("nnx.MultiHeadAttention", _prepare_nnx),
    Implementation("attnax.MultiHeadAttention", _prepare_attnax, "attnax"),
)
