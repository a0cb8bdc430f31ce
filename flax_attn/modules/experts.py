"""The experts of a mixture: gated feed-forward layers of equal shape, their weights stacked."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from flax.typing import Dtype, PrecisionLike
from jaxtyping import Array, Float

from attn_spec.checks import check_choice, check_positive, check_type, check_width
from attn_spec.swiglu import SwiGLUBounds
from flax_attn.backends.platform import platform_of
from flax_attn.functional.dtypes import accumulation_dtype
from flax_attn.functional.parameter_sums import add, lookup
from flax_attn.functional.quantized import QuantizedMatrix
from flax_attn.modules.feed_forward import ACTIVATIONS
from flax_attn.modules.grouped_product import grouped_product, tiled
from flax_attn.modules.initialisation import check_dtypes, check_rngs, next_key, redrawn, uniform
from flax_attn.modules.quantized_linear import QuantizedLinear
from flax_attn.modules.router import Routing
from flax_attn.sharding.axes import mesh_of
from flax_attn.sharding.experts import by_token, on_mesh
from flax_attn.sharding.parameter_axes import check_may_split
from flax_attn.sharding.parameters import named

FORMS = ("auto", "dense", "sorted")
# Arrays, and matrices that are held in 8 or 4 bits.
_Weights = Mapping[str, Any]


class ClampedSwiGLU(SwiGLUBounds, portable=True):
    """The clamped SwiGLU of gpt-oss.

        min(gate, limit) * sigmoid(alpha * min(gate, limit)) * (clip(up, -limit, limit) + 1)

    Args:
        limit: bound of both branches; the gate has no lower bound.
        alpha: slope of the sigmoid.

    Raises:
        ValueError: if the limit is not positive.

    Example:
        >>> gate, up = jnp.array([-1.0, 9.0]), jnp.array([0.0, 5.0])
        >>> activated = ClampedSwiGLU(limit=2.0)(gate, up)
        >>> [round(number, 3) for number in activated.tolist()]
        [-0.154, 5.807]

    References:
        OpenAI 2025, gpt-oss (arXiv:2508.10925).
    """

    def __call__(
        self, gate: Float[Array, "*shape h"], up: Float[Array, "*shape h"]
    ) -> Float[Array, "*shape h"]:
        dtype = accumulation_dtype(gate.dtype)
        high = jnp.asarray(self.limit, dtype)
        low = jnp.asarray(-self.limit, dtype)
        bounded = jnp.minimum(gate.astype(dtype), high)
        other = jnp.clip(up.astype(dtype), low, high)
        swish = bounded * jax.nn.sigmoid(self.alpha * bounded)
        gated = swish * (other + 1)
        return gated.astype(gate.dtype)


class _Linears(nnx.Module):
    """One linear layer for each expert: kernel `(e, d_in, d_out)`, bias `(e, d_out)`."""

    def __init__(
        self,
        num_experts: int,
        d_in: int,
        d_out: int,
        bias: bool,
        axes: tuple[str, str],
        *,
        param_dtype: Dtype,
        rngs: nnx.Rngs | None,
    ):
        stream = check_rngs(rngs).params
        draw = redrawn(uniform(d_in))
        kernel = draw(next_key(stream), (num_experts, d_in, d_out), param_dtype)
        self.kernel = nnx.Param(kernel, **named("expert", *axes))
        own = None
        if bias:
            # Split over devices that split the batch too, a bias would have to be gathered for each
            # sum.
            metadata = named("expert", None if axes[1] == "embed" else axes[1])
            values = draw(next_key(stream), (num_experts, d_out), param_dtype)
            own = nnx.Param(values, **metadata)
        self.bias = own

    @property
    def param_dtype(self) -> Dtype:
        """The dtype of the parameters."""
        return self.kernel.dtype


class Experts(nnx.Module):
    """The weighted sum of the outputs of each token's experts.

        y = sum_j weights_j E_(experts_j)(x)
        with E_e(x) = W_down_e(activation(W_gate_e x) * W_up_e x)

    No token is dropped, whatever the load of an expert. Two forms compute the same:

    - `"dense"`: every expert computes every token, and most weights are 0.
    - `"sorted"`: tokens are sorted by expert, and each expert computes only its own; see
      `grouped_product`.

    `"auto"` is `"sorted"`, except on meshes of CPUs, where it is `"dense"`: there XLA computes all
    experts either way. Where `native` has no kernel, `jax.jvp` needs `"dense"` on CPUs, and
    `jax.vmap` needs `"dense"` elsewhere. On a mesh each device computes its own tokens with its own
    experts (mesh axis `expert`) and hidden features (`tensor`), and the results are summed.

    Args:
        num_experts: number of experts.
        d_model: width of the tokens.
        d_hidden: width inside an expert.
        activation: `"silu"`, `"gelu_tanh"`, `"gelu_exact"`, or a function of gate and up that
            replaces `activation(gate) * up`, such as a `ClampedSwiGLU`.
        bias: whether the three layers of an expert have a bias.
        form: `"auto"`, `"dense"` or `"sorted"`.
        dtype: dtype of the computation; None promotes the dtypes of the input and the parameters.
        param_dtype: dtype of the parameters.
        precision: precision of the matrix products, as in `jax.lax.dot_general`.
        rngs: random streams; parameters are drawn from `params`, with the distribution of
            `torch.nn.Linear`.

    Shapes:
        `(..., d_model)`, kept; kernels `(num_experts, d_model, d_hidden)`, for `W_down`
        `(num_experts, d_hidden, d_model)`.

    Raises:
        ValueError: if a size is not positive, the activation or the form is unknown, `rngs` is
            missing, or the input has another width.

    Example:
        >>> from flax_attn import Router
        >>> x, rngs = jnp.ones((5, 3)), nnx.Rngs(0)
        >>> Experts(4, 3, 6, rngs=rngs)(x, Router(3, 4, top_k=2, rngs=rngs)(x)).shape
        (5, 3)

    References:
        Shazeer et al. 2017 (arXiv:1701.06538); Gale et al. 2022, dropless (arXiv:2211.15841).
    """

    # Quantized where the files of a model hold them so.
    W_gate: _Linears | QuantizedLinear
    W_up: _Linears | QuantizedLinear
    W_down: _Linears | QuantizedLinear

    def __init__(
        self,
        num_experts: int,
        d_model: int,
        d_hidden: int,
        activation: str | Callable[[Array, Array], Array] = "silu",
        bias: bool = False,
        form: str = "auto",
        *,
        dtype: Dtype | None = None,
        param_dtype: Dtype = jnp.float32,
        precision: PrecisionLike = None,
        rngs: nnx.Rngs | None = None,
    ):
        check_choice("form", form, FORMS)
        check_positive(num_experts=num_experts, d_model=d_model, d_hidden=d_hidden)
        check_dtypes(dtype=dtype, param_dtype=param_dtype)
        numerics = {"param_dtype": param_dtype, "rngs": rngs}
        self.num_experts, self.d_model, self.form = num_experts, d_model, form
        self.activation = gated(activation)
        self.grouped_product = grouped_product
        self.dtype, self.precision = dtype, precision
        self.W_gate = _Linears(
            num_experts, d_model, d_hidden, bias, ("embed", "hidden"), **numerics
        )
        self.W_up = _Linears(num_experts, d_model, d_hidden, bias, ("embed", "hidden"), **numerics)
        self.W_down = _Linears(
            num_experts, d_hidden, d_model, bias, ("hidden", "embed"), **numerics
        )

    def __call__(self, x: Float[Array, "*shape d"], routing: Routing) -> Float[Array, "*shape d"]:
        check_width("x", x, "d_model", self.d_model)
        dtype = self.dtype
        if dtype is None:
            dtype = jnp.result_type(x, self.W_gate.param_dtype)
        form = self.form
        if form == "auto":
            # On a CPU's mesh a grouped product multiplies every row with every matrix in any case.
            form = "dense" if platform_of(x) == "cpu" and not tiled(x) else "sorted"
        compute = partial(_FORMS[form], self.activation, self.grouped_product, self.precision)
        weights = routing.weights.astype(dtype)
        tokens = x.astype(dtype), weights, routing.experts
        variables, held = self._parts()
        if not held:
            return on_mesh(compute, *tokens, variables, dtype)
        check_may_split("Experts", mesh_of(x))
        arrays: dict[str, Any] = {}
        for name, variable in variables.items():
            arrays[name] = variable[...].astype(dtype)
        for name, matrix in held.items():
            arrays[name] = matrix if form == "sorted" else matrix.kernels(dtype)
        return by_token(compute, *tokens, arrays)

    def _parts(self) -> tuple[dict[str, nnx.Variable], dict[str, QuantizedMatrix]]:
        """Return the parameters, and the matrices that are held in 8 or 4 bits."""
        layers = {"gate": self.W_gate, "up": self.W_up, "down": self.W_down}
        variables, held = {}, {}
        for name, layer in layers.items():
            if isinstance(layer, _Linears):
                variables[name] = layer.kernel
            else:
                held[name] = layer.matrix
            if layer.bias is not None:
                variables[f"{name} bias"] = layer.bias
        return variables, held


def gated(activation: str | Callable[[Array, Array], Array]) -> Callable[[Array, Array], Array]:
    """Return the function of gate and up that an activation stands for.

    Raises:
        ValueError: if there is no activation of that name.

    Example:
        >>> gated("silu")(jnp.array([0.0]), jnp.array([3.0]))
        Array([0.], dtype=float32)
    """
    if not isinstance(activation, str):
        remedy = 'activation="silu", or a function of gate and up'
        check_type("activation", activation, Callable, remedy)
        return activation
    check_choice("activation", activation, tuple(ACTIVATIONS))
    return _Gated(ACTIVATIONS[activation])


@dataclass(frozen=True)
class _Gated:
    """`activation(gate) * up`; equal for equal activations, so that layers can be stacked."""

    activation: Callable[[Array], Array]

    def __call__(self, gate: Array, up: Array) -> Array:
        return self.activation(gate) * up


def _dense(
    activation, grouped, precision, x: Array, weights: Array, experts: Array, own: _Weights
) -> Array:
    """Return the sum over all experts here; those not chosen have weight 0."""

    def linear(name: str, form: str, x: Array) -> Array:
        y = einsum(form, x, own[name])
        bias = own.get(f"{name} bias")
        return y if bias is None else add(y, bias[:, None])

    einsum = partial(jnp.einsum, precision=precision)
    gate = linear("gate", "td,edh->eth", x)
    up = linear("up", "td,edh->eth", x)
    hidden = activation(gate, up)
    y = linear("down", "eth,ehd->etd", hidden)
    # Experts of other devices have numbers outside, for which one-hot has no 1.
    chosen = jax.nn.one_hot(experts, len(own["gate"]), dtype=weights.dtype)
    weights = einsum("tk,tke->te", weights, chosen)
    return einsum("te,etd->td", weights, y)


def _sorted(
    activation, grouped, precision, x: Array, weights: Array, experts: Array, own: _Weights
) -> Array:
    """Return the sum over the experts here, each of which computes its own tokens."""
    count = len(own["gate"])
    t, k = experts.shape
    here = (experts >= 0) & (experts < count)
    # The experts of other devices come last, in no group.
    flat = jnp.where(here, experts, count).reshape(-1)
    order = jnp.argsort(flat)
    sizes = jnp.bincount(flat, length=count).astype(jnp.int32)
    of_row = jnp.minimum(flat[order], count - 1)

    def linear(name: str, x: Array) -> Array:
        y = grouped(x, own[name], sizes, precision)
        bias = own.get(f"{name} bias")
        return y if bias is None else add(y, lookup(bias, of_row))

    rows = lookup(x, order // k)
    hidden = activation(linear("gate", rows), linear("up", rows))
    rows = linear("down", hidden)
    back = jnp.argsort(order)
    rows = rows.at[back].get(unique_indices=True)
    # Not einops: it divides by t, which may be 0.
    rows = rows.reshape(t, k, rows.shape[-1])
    weights = jnp.where(here, weights, 0)
    return jnp.einsum("tk,tkd->td", weights, rows, precision=precision)


_FORMS = {"dense": _dense, "sorted": _sorted}
