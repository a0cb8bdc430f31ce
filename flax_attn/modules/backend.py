"""One call that moves a whole model to another backend.

Only in flax_attn: torch_ref has one backend.
"""

from typing import Any

from flax import nnx

from attn_spec.checks import check_type
from flax_attn.backends.registry import check_backend
from flax_attn.modules.experts import Experts
from flax_attn.modules.grouped_product import grouped_product, grouped_product_of_xla
from flax_attn.modules.matrix_product import PRODUCTS, dot_general, dot_general_of_xla


def set_backend(model: nnx.Module, backend: str) -> None:
    """Set the backend of every attention layer of a model, and that of its products on CPUs.

    An attention layer is a submodule with an attribute `backend`. The attribute is static: a
    function under `nnx.jit` is compiled again for the changed model. Linear layers, embeddings and
    experts multiply with the kernels of `native` for `"auto"` and `"native"`, and without them for
    every other backend.

    Args:
        model: any module that holds attention layers, or is one.
        backend: name of a backend, or `"auto"`.

    Raises:
        ValueError: if the backend is unknown, or if the model holds no attention layer.

    Example:
        >>> from flax_attn import MultiHeadAttention, RMSNorm
        >>> rngs = nnx.Rngs(0)
        >>> att = MultiHeadAttention(6, 6, num_heads=2, rngs=rngs)
        >>> model = nnx.Sequential(RMSNorm(6), att)
        >>> set_backend(model, "blocked")
        >>> att.backend
        'blocked'
    """
    check_backend(backend)
    check_type("model", model, nnx.Module, "an nnx.Module; a list of them as nnx.List(layers)")
    if not any(hasattr(module, "backend") for _, module in nnx.iter_modules(model)):
        raise ValueError(
            "set_backend needs a model with an attention layer, a submodule that has an attribute"
            f" `backend`; got {type(model).__name__}, which has none. Pass the model that holds the"
            " layers"
        )
    model.set_attributes(backend=backend)
    product, grouped = dot_general, grouped_product
    if backend not in ("auto", "native"):
        product, grouped = dot_general_of_xla, grouped_product_of_xla
    part: Any
    for _, part in nnx.iter_modules(model):
        # A product that somebody else has set stays.
        if getattr(part, "dot_general", None) in PRODUCTS:
            part.dot_general = product
        if isinstance(part, Experts):
            part.grouped_product = grouped
