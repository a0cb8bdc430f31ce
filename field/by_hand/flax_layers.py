"""Layers of Flax: weights of torch.nn are placed by hand."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from flax import linen, nnx
from flax.traverse_util import flatten_dict, unflatten_dict
from torch.nn.functional import batch_norm, layer_norm, scaled_dot_product_attention

from field.by_hand.both import Case, Values, layer_case, placed, random_values

IMAGES = ("times 100", "times 1/1000", "plus 1000")
STRESSED = (*IMAGES, "long")
X = {"x": (3, 7, 12)}
CROSS = {"query": (2, 5, 12), "key": (2, 4, 7), "value": (2, 4, 9)}


def cases() -> Iterator[tuple[str, Callable[[], Case]]]:
    """Yield the ports by name."""
    linen_name, nnx_name = "linen.MultiHeadDotProductAttention", "nnx.MultiHeadAttention"
    rows = {
        f"{linen_name}/self": _linen_self,
        f"{linen_name}/no-bias": partial(_linen_self, bias=False),
        f"{linen_name}/cross": _linen_cross,
        f"{nnx_name}/self": partial(_nnx_self, ()),
        f"{nnx_name}/weights": partial(_nnx_self, STRESSED, sow_weights=True),
        f"{nnx_name}/causal": _nnx_causal,
        f"{nnx_name}/grouped": partial(_grouped, 2),
        f"{nnx_name}/qk-norm": partial(_grouped, 4, norm=True),
        "nnx.LayerNorm/default": partial(_norm, torch.nn.LayerNorm, nnx.LayerNorm),
        "nnx.LayerNorm/epsilon": partial(_norm, torch.nn.LayerNorm, nnx.LayerNorm, epsilon=1e-5),
        "nnx.LayerNorm/two-passes": partial(
            _norm, torch.nn.LayerNorm, nnx.LayerNorm, epsilon=1e-5, use_fast_variance=False
        ),
        "linen.LayerNorm/default": _linen_norm,
        "nnx.RMSNorm/default": partial(_norm, torch.nn.RMSNorm, nnx.RMSNorm),
        "nnx.RMSNorm/epsilon": partial(
            _norm, partial(torch.nn.RMSNorm, eps=1e-6), nnx.RMSNorm, epsilon=1e-6
        ),
        "nnx.GroupNorm/default": _group_norm,
        "nnx.GroupNorm/epsilon": partial(_group_norm, epsilon=1e-5),
        "nnx.BatchNorm/eval": partial(_batch_norm, False),
        "nnx.BatchNorm/train": partial(_batch_norm, True),
        "nnx.gelu/default": _gelu,
        "nnx.gelu/exact": partial(_gelu, approximate=False),
        "nnx.Conv/valid": partial(_conv, "VALID", {}),
        "nnx.Conv/same-stride-2": partial(_conv, "SAME", {"padding": 1}, strides=2),
        "nnx.Conv/circular": partial(_conv, "CIRCULAR", {"padding": 1, "padding_mode": "circular"}),
        "nnx.ConvTranspose/same-stride-2": _transposed,
    }
    yield from ((f"flax/{name}", make) for name, make in rows.items())


def filled(layer: Any, values: Values) -> Any:
    """Return a module of NNX with these parameters."""
    graph, params, rest = nnx.split(layer, nnx.Param, ...)
    own = {name: x.shape for name, x in flatten_dict(nnx.to_pure_dict(params), sep=".").items()}
    nnx.replace_by_pure_dict(params, unflatten_dict(dict(placed(own, values)), sep="."))
    return nnx.merge(graph, params, rest)


def attention(v: Values, heads: int) -> dict[str, Any]:
    """Return the parameters of Flax's attention, of those of torch.nn.MultiheadAttention."""
    names = ("query", "key", "value")
    apart = "in_proj_weight" not in v
    weights = (
        [v[f"{name[0]}_proj_weight"] for name in names]
        if apart
        else jnp.split(v["in_proj_weight"], 3)
    )
    found = {
        f"{name}.kernel": w.T.reshape(w.shape[1], heads, -1)
        for name, w in zip(names, weights, strict=True)
    }
    found["out.kernel"] = v["out_proj.weight"].T.reshape(heads, -1, len(v["out_proj.weight"]))
    if "in_proj_bias" in v:
        parts = zip(names, jnp.split(v["in_proj_bias"], 3), strict=True)
        found |= {f"{name}.bias": b.reshape(heads, -1) for name, b in parts} | {
            "out.bias": v["out_proj.bias"]
        }
    return found


def torch_attention(run: Callable, mask: Any, x: Any) -> Any:
    """Call torch.nn.MultiheadAttention on x alone; True in its masks hides."""
    return run(x, x, x, key_padding_mask=None if mask is None else ~mask, need_weights=False)[0]


def mha(**options: Any) -> torch.nn.Module:
    """Return the attention of torch.nn, 3 heads of 4."""
    return torch.nn.MultiheadAttention(12, 3, batch_first=True, **options)


def hidden_keys(mask: Any) -> Any:
    """Return a mask of tokens as Flax takes it."""
    return None if mask is None else mask[:, None, None]


def _linen_self(bias=True):
    layer = linen.MultiHeadDotProductAttention(3, use_bias=bias)

    def ours(v, mask):
        return layer.apply(
            {"params": unflatten_dict(attention(v, 3), sep=".")}, v["x"], mask=hidden_keys(mask)
        )

    return layer_case(mha(bias=bias), X, ours, torch_attention, True, STRESSED)


def _linen_cross():
    layer = linen.MultiHeadDotProductAttention(3, qkv_features=12, out_features=12)

    def ours(v, mask):
        params = unflatten_dict(attention(v, 3), sep=".")
        return layer.apply({"params": params}, v["query"], v["key"], v["value"])

    return layer_case(
        mha(kdim=7, vdim=9), CROSS, ours, lambda run, mask, *x: run(*x)[0], False, STRESSED
    )


def _nnx_self(stresses, **options):
    layer = nnx.MultiHeadAttention(3, 12, decode=False, rngs=nnx.Rngs(0))

    def ours(v, mask):
        return filled(layer, attention(v, 3))(v["x"], mask=hidden_keys(mask), **options)

    return layer_case(mha(), X, ours, torch_attention, True, stresses)


def _nnx_causal():
    layer = nnx.MultiHeadAttention(3, 12, decode=False, rngs=nnx.Rngs(0))

    def ours(v, mask):
        x, full = v["x"], filled(layer, attention(v, 3))
        cached = filled(layer, attention(v, 3))
        cached.init_cache(x.shape, x.dtype)
        steps = [cached(x[:, i : i + 1], decode=True) for i in range(x.shape[1])]
        return {"full": full(x, is_causal=True), "in steps": jnp.concatenate(steps, axis=1)}

    def theirs(run, mask, x):
        hidden = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
        found = run(x, x, x, attn_mask=hidden, need_weights=False)[0]
        return {"full": found, "in steps": found}

    return layer_case(mha(), X, ours, theirs)


def _grouped(kv_heads, norm=False):
    """Four heads of 4, from the matrices of four Linear layers."""
    layer = nnx.MultiHeadAttention(
        4, 16, num_kv_heads=kv_heads, normalize_qk=norm, decode=False, rngs=nnx.Rngs(0)
    )
    heads = {"query": 4, "key": kv_heads, "value": kv_heads}
    shapes = {f"{name}.weight": (4 * n, 16) for name, n in heads.items()} | {"out.weight": (16, 16)}
    shapes |= {f"{name}.bias": (4 * n,) for name, n in heads.items()} | {"out.bias": (16,)}
    shapes |= {f"{name}_ln.weight": (4,) for name in ("query", "key") if norm}
    values = random_values(shapes) | {"x": np.random.default_rng(3).normal(size=(3, 7, 16))}

    def ours(v, mask):
        params = {
            f"{name}.kernel": v[f"{name}.weight"].T.reshape(16, n, 4) for name, n in heads.items()
        }
        params |= {f"{name}.bias": v[f"{name}.bias"].reshape(n, 4) for name, n in heads.items()}
        params |= {"out.kernel": v["out.weight"].T.reshape(4, 4, 16), "out.bias": v["out.bias"]}
        params |= {f"{name}_ln.scale": v[f"{name}_ln.weight"] for name in ("query", "key") if norm}
        return filled(layer, params)(v["x"])

    def theirs(v, mask):
        q, k, w = (
            torch.nn.functional.linear(v["x"], v[f"{name}.weight"], v[f"{name}.bias"])
            for name in heads
        )
        q, k, w = (x.unflatten(-1, (-1, 4)).transpose(1, 2) for x in (q, k, w))
        if norm:
            q, k = (
                layer_norm(x, (4,), v[f"{name}_ln.weight"])
                for name, x in (("query", q), ("key", k))
            )
        found = scaled_dot_product_attention(q, k, w, enable_gqa=True).transpose(1, 2).flatten(2)
        return torch.nn.functional.linear(found, v["out.weight"], v["out.bias"])

    return Case(ours, theirs, values, ("x",))


# Norms.


def scale_and_bias(v: Values) -> dict[str, Any]:
    """Return the parameters of a norm of Flax."""
    return {new: v[old] for new, old in (("scale", "weight"), ("bias", "bias")) if old in v}


def _norm(twin, kind, **options):
    layer = kind(12, rngs=nnx.Rngs(0), **options)
    return layer_case(
        twin(12), X, lambda v, mask: filled(layer, scale_and_bias(v))(v["x"]), stresses=STRESSED
    )


def _linen_norm():
    def ours(v, mask):
        return linen.LayerNorm().apply({"params": scale_and_bias(v)}, v["x"])

    return layer_case(torch.nn.LayerNorm(12), X, ours, stresses=STRESSED)


def channels_first(run: Callable, mask: Any, x: Any) -> Any:
    """Call a layer of torch on images with the channels last."""
    return run(x.movedim(-1, 1)).movedim(1, -1)


def _group_norm(**options):
    layer = nnx.GroupNorm(12, num_groups=3, rngs=nnx.Rngs(0), **options)

    def ours(v, mask):
        return filled(layer, scale_and_bias(v))(v["x"])

    return layer_case(
        torch.nn.GroupNorm(3, 12), {"x": (2, 4, 3, 12)}, ours, channels_first, stresses=STRESSED
    )


def _batch_norm(train):
    mean, var = random_values({"running_mean": (5,), "running_var": (5,)}).values()
    values = random_values({"weight": (5,), "bias": (5,)}) | {
        "x": np.random.default_rng(3).normal(size=(3, 7, 5))
    }

    def ours(v, mask):
        norm = filled(nnx.BatchNorm(5, momentum=0.9, rngs=nnx.Rngs(0)), scale_and_bias(v))
        norm.mean.set_value(jnp.asarray(mean))
        norm.var.set_value(jnp.asarray(var))
        output = norm(v["x"], use_running_average=not train)
        # torch does not differentiate the running statistics.
        kept = [jax.lax.stop_gradient(x[...]) for x in (norm.mean, norm.var)]
        return {"output": output, "mean": kept[0], "var": kept[1]}

    def theirs(v, mask):
        kept = [torch.tensor(x) for x in (mean, var)]
        output = batch_norm(
            v["x"].movedim(-1, 1), *kept, v["weight"], v["bias"], train, 0.1
        ).movedim(1, -1)
        return {"output": output, "mean": kept[0], "var": kept[1]}

    return Case(ours, theirs, values, ("x",), stresses=STRESSED)


def _gelu(**options):
    return layer_case(
        torch.nn.GELU(), X, lambda v, mask: nnx.gelu(v["x"], **options), stresses=IMAGES[:2]
    )


# Convolutions, on images with the channels last.


def _conv(padding, theirs, **options):
    layer = nnx.Conv(3, 4, (3, 3), padding=padding, rngs=nnx.Rngs(0), **options)
    twin = torch.nn.Conv2d(3, 4, 3, stride=options.get("strides", 1), **theirs)

    def ours(v, mask):
        return filled(layer, {"kernel": v["weight"].transpose(2, 3, 1, 0), "bias": v["bias"]})(
            v["x"]
        )

    return layer_case(twin, {"x": (2, 8, 6, 3)}, ours, channels_first, stresses=IMAGES)


def _transposed():
    layer = nnx.ConvTranspose(
        3, 4, (4, 4), strides=2, padding="SAME", transpose_kernel=True, rngs=nnx.Rngs(0)
    )

    def ours(v, mask):
        # PyTorch's weight (in, out, h, w) is that of the convolution whose gradient this is, and so
        # is Flax's here.
        return filled(layer, {"kernel": v["weight"].transpose(2, 3, 1, 0), "bias": v["bias"]})(
            v["x"]
        )

    twin = torch.nn.ConvTranspose2d(3, 4, 4, stride=2, padding=1)
    return layer_case(twin, {"x": (2, 5, 6, 3)}, ours, channels_first, stresses=IMAGES)
