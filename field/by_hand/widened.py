"""Import the libraries with float64 for every float32 in their source.

This shows which part of a difference remains.
"""

from __future__ import annotations

import re
from importlib.machinery import SourceFileLoader

# Files whose casts are a matter of taste, not of what they can run on.
WIDENED = re.compile(
    r"/(transformers/(models/.*/modeling_\w+|activations|modeling_rope_utils|masking_utils|modeling_attn_mask_utils)"
    r"|jax/_src/nn/functions|flax/nnx/nn/\w+|flax/linen/\w+|equimo/(layers|models)/\w+|attnax/[\w/]+"
    r"|keras/src/(backend/(jax|torch)/nn|layers/.*/\w+)|diffusers/models/[\w/]+)\.py$"
)
# Where Keras replaces 64 bits by 32, except on TensorFlow.
CLIPPED = re.compile(r"/keras/src/backend/common/dtypes\.py$")
REPLACED = (
    (re.compile(r"\bfloat32\b"), "float64"),
    (re.compile(r"(['\"])f4\1"), r"\1f8\1"),
    (re.compile(r"\btorch\.float\b"), "torch.float64"),
    (re.compile(r"\.float\(\)"), ".double()"),
    (re.compile(r"\btorch\.FloatTensor\b"), "torch.DoubleTensor"),
)


def widen() -> None:
    """Rewrite the libraries' source as it is imported; what was imported before stays as it is."""
    plain = SourceFileLoader.get_code

    def get_code(self, fullname):
        path = self.get_filename(fullname)
        if WIDENED.search(path):
            return self.source_to_code(rewritten(self.get_data(path).decode()), path)
        if CLIPPED.search(path):
            return self.source_to_code(
                self.get_data(path).decode().replace('else "float32"', 'else "float64"'), path
            )
        return plain(self, fullname)

    SourceFileLoader.get_code = get_code


def rewritten(source: str) -> str:
    """Return source without float32."""
    for pattern, new in REPLACED:
        source = pattern.sub(new, source)
    return source
