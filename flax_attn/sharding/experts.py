"""Experts over a mesh: each device runs its experts on its tokens, and the results are summed."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from flax.typing import Dtype
from jax.sharding import PartitionSpec
from jaxtyping import Array

from flax_attn.sharding.axes import axes_in, mesh_in_use, spec
from flax_attn.sharding.mapped import on_devices, rows_of

Compute = Callable[[Array, Array, Array, Mapping[str, Array]], Array]


def on_mesh(
    compute: Compute,
    x: Array,
    weights: Array,
    experts: Array,
    variables: Mapping[str, nnx.Variable],
    dtype: Dtype,
) -> Array:
    """Return `compute(x, weights, experts, arrays)` for tokens in one axis, over the mesh in use.

    A device has its tokens, its experts and their hidden features. Numbers of experts are counted
    from its first one, so that those of other devices lie outside its own. Devices that share the
    experts and have tokens of their own gather these, and each gets back the sums of its own. What
    `fsdp` splits is gathered.

    Args:
        compute: computation of one device.
        x: tokens `(..., d)`.
        weights: weights of the experts of each token, `(..., k)`.
        experts: numbers of the experts of each token, `(..., k)`.
        variables: parameters of the experts, with the name `"expert"` for the first axis.
        dtype: dtype that the parameters are cast to.

    Example:
        >>> weights, experts = jnp.ones((2, 5, 1)), jnp.zeros((2, 5, 1), int)
        >>> twice = lambda x, weights, experts, arrays: 2 * x
        >>> on_mesh(twice, jnp.ones((2, 5, 3)), weights, experts, {}, jnp.float32).shape
        (2, 5, 3)
    """
    arrays = {name: variable[...].astype(dtype) for name, variable in variables.items()}
    mesh = mesh_in_use(x)
    if mesh is None:
        return by_token(compute, x, weights, experts, arrays)
    rows = rows_of(x, mesh)
    taken = set(chain.from_iterable(map(axes_in, rows)))
    specs = {name: _spec(variable, mesh, taken) for name, variable in variables.items()}
    own = _expert_axes(specs, variables, rows, taken)

    def of_device(given: tuple) -> Array:
        return _of_device(compute, own, *given)

    tokens = PartitionSpec(*rows, None)
    given = x, weights, experts, arrays
    where = tokens, tokens, tokens, specs
    return on_devices(of_device, mesh, given, where, tokens, typed=True)


@dataclass(frozen=True)
class _ExpertAxes:
    """The mesh axes that experts and tokens are split over.

    Args:
        experts: mesh axes that split the experts.
        hidden: mesh axes that split the hidden features of the experts.
        shared: mesh axes that split both the experts and the tokens.
        rows: mesh axes that split each axis of the tokens.
        gathered: mesh axes of a parameter's axis that is gathered, by the name of that axis.
    """

    experts: tuple[str, ...]
    hidden: tuple[str, ...]
    shared: tuple[str, ...]
    rows: PartitionSpec
    gathered: Mapping[str, tuple[int, tuple[str, ...]]]

    @property
    def summed(self) -> tuple[str, ...]:
        """The mesh axes over which each device has a part of the sum, except `shared`."""
        split = (*self.experts, *self.hidden)
        return tuple(axis for axis in split if axis not in self.shared)

    @property
    def axis(self) -> int:
        """The axis of the tokens that is split over `shared`."""
        shared = set(self.shared)
        return next(i for i, entry in enumerate(self.rows) if shared & set(axes_in(entry)))


def _expert_axes(
    specs: Mapping[str, PartitionSpec],
    variables: Mapping[str, nnx.Variable],
    rows: PartitionSpec,
    taken: set[str],
) -> _ExpertAxes:
    # Its axes are experts, width and hidden features: all that the other parameters have, too.
    gate = specs["gate"]
    over = axes_in(gate[0])
    hidden = axes_in(gate[2])
    shared = tuple(axis for axis in over if axis in taken)
    return _ExpertAxes(
        experts=over,
        hidden=hidden,
        shared=shared,
        rows=rows,
        gathered=_gathered(specs, variables),
    )


def _gathered(
    specs: Mapping[str, PartitionSpec], variables: Mapping[str, nnx.Variable]
) -> dict[str, tuple[int, tuple[str, ...]]]:
    found = {}
    for name, variable in variables.items():
        names = _names(variable)
        # A bias of hidden features has no width.
        if "embed" in names:
            axis = names.index("embed")
            found[name] = axis, axes_in(specs[name][axis])
    return found


def _names(variable: nnx.Variable) -> tuple[str | None, ...]:
    """Return the names of the axes of a parameter, without that of the layers of a stack."""
    return variable.get_metadata()["out_sharding"][-len(variable.shape) :]


def _spec(variable: nnx.Variable, mesh: Any, taken: set[str]) -> PartitionSpec:
    """Return how a parameter is split, beside tokens that are split over the mesh axes `taken`.

    Over these the width of the model is split, which is gathered, and experts are, for which tokens
    are.
    """
    names = _names(variable)
    split = spec(names, mesh, variable.shape)
    pairs = zip(names, split, strict=True)
    entries = [entry if _is_kept(name, entry, taken) else None for name, entry in pairs]
    return PartitionSpec(*entries)


def _is_kept(name: str | None, entry: Any, taken: set[str]) -> bool:
    axes = set(axes_in(entry))
    if name == "embed":
        return axes <= taken
    return name == "expert" or axes.isdisjoint(taken)


def _of_device(
    compute: Compute, own: _ExpertAxes, x: Array, weights: Array, experts: Array, arrays: Any
) -> Array:
    """Return the sum over all experts, of one device's tokens."""
    arrays = _arrays_of_device(own, arrays)
    tokens = x, weights, experts
    if own.shared:
        gather = partial(jax.lax.all_gather, axis_name=own.shared, axis=own.axis, tiled=True)
        tokens = map(gather, tokens)
    if own.summed:
        # JAX loses the sum of the gradient of what is the same everywhere and gathered by indices
        # that are not.
        varying = partial(jax.lax.pcast, axis_name=own.summed, to="varying")
        tokens = map(varying, tokens)
    x, weights, experts = tokens
    if own.experts:
        first = jax.lax.axis_index(own.experts) * len(arrays["gate"])
        experts = experts - first
    y = by_token(compute, x, weights, experts, arrays)
    if own.summed:
        y = jax.lax.psum(y, own.summed)
    if own.shared:
        y = jax.lax.psum_scatter(y, own.shared, scatter_dimension=own.axis, tiled=True)
    return y


def _arrays_of_device(own: _ExpertAxes, arrays: Mapping[str, Array]) -> dict[str, Array]:
    """Return a device's parameters in their whole width."""
    found = {name: _in_whole_width(own, name, x) for name, x in arrays.items()}
    # The bias is added once, not on each device that has a part of the sum.
    if own.hidden and "down bias" in found:
        found["down bias"] = _on_first(found["down bias"], own.hidden)
    return found


def _in_whole_width(own: _ExpertAxes, name: str, x: Array) -> Array:
    axis, axes = own.gathered.get(name, (0, ()))
    # Gathered here, their gradients are summed and split again by one collective.
    return jax.lax.all_gather(x, axes, axis=axis, tiled=True) if axes else x


def _on_first(x: Array, axes: tuple[str, ...]) -> Array:
    first = jax.lax.axis_index(axes) == 0
    return jnp.where(first, x, 0)


def by_token(
    compute: Callable[..., Array], x: Array, weights: Array, experts: Array, arrays: Mapping
) -> Array:
    """Return `compute(x, weights, experts, arrays)` for tokens in one axis, without a mesh.

    Example:
        >>> weights, experts = jnp.ones((2, 5, 1)), jnp.zeros((2, 5, 1), int)
        >>> twice = lambda x, weights, experts, arrays: 2 * x
        >>> by_token(twice, jnp.ones((2, 5, 3)), weights, experts, {}).shape
        (2, 5, 3)
    """
    tokens = x.reshape(-1, x.shape[-1])
    weights = weights.reshape(-1, weights.shape[-1])
    experts = experts.reshape(-1, experts.shape[-1])
    return compute(tokens, weights, experts, arrays).reshape(x.shape)
