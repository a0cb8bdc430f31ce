"""Names and parameters of the operations of JAX in plain notation."""

from __future__ import annotations

from typing import Any

import numpy as np

from flax_attn.parity.trace.jax_numpy import REDUCTIONS

# How an operation is called in plain notation, where JAX has another name for it.
NAMES: dict[str, str] = {
    "dot_general": "dot",
    "reduce_sum": "sum",
    "reduce_max": "amax",
    "reduce_min": "amin",
    "reduce_prod": "prod",
    "reduce_and": "all",
    "reduce_or": "any",
    "select_n": "where",
    "convert_element_type": "cast",
    "broadcast_in_dim": "broadcast",
    "logistic": "sigmoid",
    "integer_pow": "pow",
    "concatenate": "concat",
    "conv_general_dilated": "conv",
    "rev": "flip",
    "dynamic_slice": "slice",
    "top_k": "topk",
}
# Transforms from real or complex numbers to real or complex ones, as PyTorch calls them.
FFT = {"FFT": "fft_c2c", "IFFT": "fft_c2c", "RFFT": "fft_r2c", "IRFFT": "fft_c2r"}
# The parameters that are shown, by operation: name in JAX, and in plain notation.
SHOWN = {
    "integer_pow": {"y": "exponent"},
    "transpose": {"permutation": "axes"},
    "reshape": {"new_sizes": "shape"},
    "broadcast_in_dim": {"shape": "shape", "broadcast_dimensions": "axes"},
    "concatenate": {"dimension": "axis"},
    "convert_element_type": {"new_dtype": "dtype"},
    "rev": {"dimensions": "axes"},
    "squeeze": {"dimensions": "axes"},
    "expand_dims": {"dimensions": "axes"},
    "iota": {"shape": "shape", "dimension": "axis"},
    "dot_general": {"dimension_numbers": "dimensions"},
    "conv_general_dilated": {
        "window_strides": "stride",
        "padding": "padding",
        "lhs_dilation": "input_dilation",
        "rhs_dilation": "dilation",
        "feature_group_count": "groups",
    },
    "slice": {"start_indices": "start", "limit_indices": "stop", "strides": "step"},
    "cumsum": {"axis": "axis", "reverse": "reverse"},
    "cumprod": {"axis": "axis", "reverse": "reverse"},
    "cummax": {"axis": "axis", "reverse": "reverse"},
    "argmax": {"axes": "axis"},
    "tile": {"reps": "repetitions"},
    "argmin": {"axes": "axis"},
    "top_k": {"k": "k"},
    "sort": {"dimension": "axis"},
    "split": {"sizes": "sizes", "axis": "axis"},
    "pad": {"padding_config": "padding"},
    "reduce_window_max": {"window_dimensions": "window", "window_strides": "stride"},
    "reduce_window_sum": {"window_dimensions": "window", "window_strides": "stride"},
    **{name: {"axes": "axes"} for name in REDUCTIONS},
}


def name_of(eqn: Any) -> str:
    """Return the name of an operation in plain notation."""
    name: str = eqn.primitive.name
    if name == "fft":
        return FFT[eqn.params["fft_type"].name]
    return NAMES.get(name, name)


def _plain(value: Any) -> Any:
    # Numbers of NumPy are written in another way than those of Python.
    if isinstance(value, tuple | list):
        return tuple(_plain(inner) for inner in value)
    return value.item() if isinstance(value, np.generic) else value


def parameters_of(eqn: Any) -> dict[str, Any]:
    """Return the parameters of an operation that its result depends on, in plain notation."""
    shown = SHOWN.get(eqn.primitive.name, {})
    found = {name: _plain(eqn.params[own]) for own, name in shown.items()}
    if eqn.primitive.name == "fft":
        lengths = tuple(eqn.params["fft_lengths"])
        return {"lengths": lengths, "inverse": eqn.params["fft_type"].name.startswith("I")}
    # Its operands are the condition, and the case for False before that for True.
    return {**found, "false_first": True} if eqn.primitive.name == "select_n" else found
