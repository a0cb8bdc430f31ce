"""Weights between layouts: both directions from one table, numpy in the middle, no torch needed.

    from flax_attn import convert

    convert.load_state_dict(module, state_dict, layout="torch_mha")   # into the module
    state_dict = convert.state_dict(module, layout="hf_gpt2")         # out of it
    convert.save(module, "weights.safetensors")                       # and the same with files
    convert.load(module, "weights.safetensors")

The layouts are `"torch_ref"` (this package's PyTorch twin and the modules it shares names with), `"fused_qkv"`,
`"torch_mha"` (`torch.nn.MultiheadAttention`), `"hf_gpt2"` (the attention of Hugging Face's GPT-2) and `"flax"`
(Flax's own attention, Linen and NNX).
"""

from flax_attn.convert.api import load_state_dict, state_dict, to_numpy
from flax_attn.convert.files import load, read_file, save
from flax_attn.convert.layouts import LAYOUTS
from flax_attn.convert.rules import ConversionError, Layout, Rule

__all__ = [
    "LAYOUTS",
    "ConversionError",
    "Layout",
    "Rule",
    "load",
    "load_state_dict",
    "read_file",
    "save",
    "state_dict",
    "to_numpy",
]
