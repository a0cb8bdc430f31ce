"""Layers of Equinox: weights of torch.nn are placed by hand."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import equinox
import jax
import jax.numpy as jnp
import numpy as np
import torch

from field.by_hand.both import Case, Values, layer_case, placed
from field.by_hand.flax_cells import cell_case, lstm_case
from field.by_hand.flax_layers import CROSS, IMAGES, STRESSED, X, mha, torch_attention

KEY = jax.random.key(0)


def cases() -> Iterator[tuple[str, Callable[[], Case]]]:
    """Yield the ports by name."""
    rows = {
        "MultiheadAttention/default": partial(_attention, False),
        "MultiheadAttention/biases": partial(_attention, True),
        "MultiheadAttention/cross": _cross,
        "RotaryPositionalEmbedding/default": partial(_rope, 10000.0),
        "RotaryPositionalEmbedding/second-theta": partial(_rope, 500000.0, 10000.0),
        "LayerNorm/default": _layer_norm,
        "RMSNorm/default": partial(_rms_norm, None),
        "RMSNorm/epsilon": partial(_rms_norm, 1e-5),
        "GroupNorm/default": _group_norm,
        "Conv2d/same-stride-2": _conv,
        "ConvTranspose2d/stride-2": _transposed,
        "GRUCell/step": _gru,
        "LSTMCell/step": _lstm,
        "AdaptiveAvgPool2d/uneven": _pool,
    }
    yield from ((f"equinox/nn.{name}", make) for name, make in rows.items())


def filled(module: Any, values: Values) -> Any:
    """Return a module of Equinox with these arrays, by path; lists are counted, `layers.0`."""
    leaves = jax.tree_util.tree_flatten_with_path(equinox.filter(module, equinox.is_inexact_array))[
        0
    ]
    own = {
        ".".join(str(getattr(key, "name", getattr(key, "idx", key))) for key in path): x.shape
        for path, x in leaves
    }
    whole = placed(own, values)
    return equinox.tree_at(
        lambda m: [inside(m, name) for name in whole], module, list(whole.values())
    )


def inside(module: Any, path: str) -> Any:
    """Return what stands at a path."""
    for name in path.split("."):
        module = module[int(name)] if name.isdigit() else getattr(module, name)
    return module


def _projections(v: Values) -> dict[str, Any]:
    names = ("query", "key", "value")
    if "in_proj_weight" in v:
        found = dict(zip(names, jnp.split(v["in_proj_weight"], 3), strict=True))
    else:
        found = {name: v[f"{name[0]}_proj_weight"] for name in names}
    params = {f"{name}_proj.weight": w for name, w in found.items()} | {
        "output_proj.weight": v["out_proj.weight"]
    }
    if "in_proj_bias" in v:
        biases = zip(names, jnp.split(v["in_proj_bias"], 3), strict=True)
        params |= {f"{name}_proj.bias": b for name, b in biases} | {
            "output_proj.bias": v["out_proj.bias"]
        }
    return params


def _attention(bias):
    options = {f"use_{name}_bias": bias for name in ("query", "key", "value", "output")}
    layer = equinox.nn.MultiheadAttention(3, 12, key=KEY, **options)

    def ours(v, mask):
        full, x = filled(layer, _projections(v)), v["x"]
        seen = jnp.ones(x.shape[:2], bool) if mask is None else mask
        square = jnp.broadcast_to(seen[:, None], (*x.shape[:2], x.shape[1]))
        return jax.vmap(lambda x, square: full(x, x, x, square))(x, square)

    return layer_case(mha(bias=bias), X, ours, torch_attention, True, STRESSED)


def _cross():
    layer = equinox.nn.MultiheadAttention(3, 12, key_size=7, value_size=9, key=KEY)

    def ours(v, mask):
        return jax.vmap(filled(layer, _projections(v)))(v["query"], v["key"], v["value"])

    twin = mha(bias=False, kdim=7, vdim=9)
    return layer_case(twin, CROSS, ours, lambda run, mask, *x: run(*x)[0], stresses=STRESSED)


def turned(x: torch.Tensor, theta: float) -> torch.Tensor:
    """Turn pairs `(i, i + h/2)` of `(..., tokens, h)` as complex numbers, by angles in float64."""
    half = x.shape[-1] // 2
    frequencies = torch.tensor(theta, dtype=torch.float64) ** (
        -torch.arange(half, dtype=torch.float64) / half
    )
    angles = torch.arange(x.shape[-2], dtype=torch.float64)[:, None] * frequencies
    both = torch.complex(x[..., :half], x[..., half:]) * torch.polar(
        torch.ones_like(angles), angles
    )
    return torch.cat([both.real, both.imag], dim=-1)


def _rope(theta, before=None):
    if before is not None:
        equinox.nn.RotaryPositionalEmbedding(6, before)(jnp.ones((9, 6)))
    layer = equinox.nn.RotaryPositionalEmbedding(6, theta)
    values = {"x": np.random.default_rng(3).normal(size=(2, 9, 6))}
    return Case(
        lambda v, mask: jax.vmap(layer)(v["x"]),
        lambda v, mask: turned(v["x"], theta),
        values,
        ("x",),
    )


def _over_tokens(layer, x):
    return jax.vmap(jax.vmap(layer))(x)


def _layer_norm():
    layer = equinox.nn.LayerNorm(12)

    def ours(v, mask):
        return _over_tokens(filled(layer, {name: v[name] for name in ("weight", "bias")}), v["x"])

    return layer_case(torch.nn.LayerNorm(12), X, ours, stresses=STRESSED)


def _rms_norm(epsilon):
    options = {} if epsilon is None else {"eps": epsilon}
    layer = equinox.nn.RMSNorm(12, use_bias=False, **options)

    def ours(v, mask):
        return _over_tokens(filled(layer, {"weight": v["weight"]}), v["x"])

    stresses = () if epsilon is None else STRESSED
    return layer_case(torch.nn.RMSNorm(12, eps=epsilon), X, ours, stresses=stresses)


def _plain(layer, twin, shape, place=lambda v: v, stresses=IMAGES):
    def ours(v, mask):
        values = {name: x for name, x in v.items() if name != "x"}
        return jax.vmap(filled(layer, place(values)))(v["x"])

    return layer_case(twin, {"x": shape}, ours, stresses=stresses)


def _group_norm():
    return _plain(equinox.nn.GroupNorm(3, 12), torch.nn.GroupNorm(3, 12), (2, 12, 4, 3))


def _with_image_bias(v):
    return {"weight": v["weight"], "bias": v["bias"][:, None, None]}


def _conv():
    layer = equinox.nn.Conv2d(3, 4, 3, stride=2, padding=1, key=KEY)
    return _plain(
        layer, torch.nn.Conv2d(3, 4, 3, stride=2, padding=1), (2, 3, 8, 7), _with_image_bias
    )


def _transposed():
    layer = equinox.nn.ConvTranspose2d(3, 4, 4, stride=2, padding=1, key=KEY)
    twin = torch.nn.ConvTranspose2d(3, 4, 4, stride=2, padding=1)

    def place(v):
        return _with_image_bias(v) | {"weight": v["weight"].swapaxes(0, 1)}

    return _plain(layer, twin, (2, 3, 5, 6), place)


def _gru():
    cell = equinox.nn.GRUCell(4, 5, key=KEY)

    def ours(v, mask):
        params = {name: v[name] for name in ("weight_ih", "weight_hh")}
        params["bias"] = v["bias_ih"] + v["bias_hh"].at[10:].set(0.0)
        return jax.vmap(filled(cell, params | {"bias_n": v["bias_hh"][10:]}))(v["x"], v["hidden"])

    return cell_case(torch.nn.GRUCell(4, 5), ours)


def _lstm():
    cell = equinox.nn.LSTMCell(4, 5, key=KEY)

    def ours(v, mask):
        params = {name: v[name] for name in ("weight_ih", "weight_hh")}
        full = filled(cell, params | {"bias": v["bias_ih"] + v["bias_hh"]})
        hidden, state = jax.vmap(lambda x, *states: full(x, states))(
            v["x"], v["hidden"], v["state"]
        )
        return {"hidden": hidden, "state": state}

    return lstm_case(ours)


def _pool():
    layer = equinox.nn.AdaptiveAvgPool2d((3, 4))
    twin = torch.nn.AdaptiveAvgPool2d((3, 4))
    return layer_case(twin, {"x": (2, 3, 8, 7)}, lambda v, mask: jax.vmap(layer)(v["x"]))
