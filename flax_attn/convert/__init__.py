"""Weights between layouts: both directions from one table, numpy in the middle, no torch needed.

    from flax_attn import convert

    convert.load_state_dict(module, state_dict, layout="torch_mha")  # into the module
    state_dict = convert.state_dict(module, layout="hf_gpt2")        # out of it
    convert.save(module, "weights.safetensors")                      # the same with files
    convert.load(module, "weights.safetensors")
    state_dict = convert.to_layout(arrays, layout="nnx_mha")         # arrays by name, no module
    arrays = convert.from_layout(state_dict, "nnx_mha", like=arrays)
    layout = convert.auto(module, torch_module)                      # the layout, from both models

A layout is a name in `LAYOUTS`, a `Layout`, the `Rule`s of your own model, or what `auto` returns.
"""

from flax_attn.convert.api import load_state_dict, parameters, state_dict, statistics, tensors
from flax_attn.convert.arrays import from_layout, to_layout, to_numpy
from flax_attn.convert.files import load, read_file, save
from flax_attn.convert.layouts import LAYOUTS, LayoutLike, as_layout
from flax_attn.convert.match.auto import auto
from flax_attn.convert.match.pairing import PairedTensor, Pairing
from flax_attn.convert.rules import ConversionError, Layout, Rule

__all__ = [
    "LAYOUTS",
    "ConversionError",
    "Layout",
    "LayoutLike",
    "PairedTensor",
    "Pairing",
    "Rule",
    "as_layout",
    "auto",
    "from_layout",
    "load",
    "load_state_dict",
    "parameters",
    "read_file",
    "save",
    "state_dict",
    "statistics",
    "tensors",
    "to_layout",
    "to_numpy",
]
