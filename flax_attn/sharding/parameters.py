"""The shardings of parameters on a mesh, from the names of their axes."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import PyTree

from flax_attn.sharding.axes import axes_in, spec, table

M = TypeVar("M", bound=nnx.Pytree)
S = TypeVar("S")
_UNIT = "sharding_unit"


def named(*axes: str | None, unit: tuple[int, ...] = ()) -> dict[str, Any]:
    """Return keyword arguments for an `nnx.Param` with named axes; None is never split.

    Flax's own metadata has the names, `out_sharding`. They are of the table, not of a mesh, so Flax
    is told not to split arrays by them where they are made.

    Args:
        axes: name of each axis, or None.
        unit: number of elements along each axis that stay on one device, such as those of a head;
            1 by default.

    Example:
        >>> import jax.numpy as jnp
        >>> nnx.Param(jnp.ones((3, 4)), **named("embed", "hidden")).out_sharding
        ('embed', 'hidden')
    """
    found: dict[str, Any] = {"out_sharding": axes, "eager_sharding": False}
    if max(unit, default=1) > 1:
        found[_UNIT] = unit
    return found


def name_first_axis(variable: nnx.Variable) -> None:
    """Put a name before those of a variable that got a first axis: none, it is not split.

    Example:
        >>> import jax.numpy as jnp
        >>> kernels = nnx.Param(jnp.ones((2, 3, 4)), **named("embed", "hidden"))
        >>> name_first_axis(kernels)
        >>> kernels.out_sharding
        (None, 'embed', 'hidden')
    """
    for field, first in {"out_sharding": None, _UNIT: 1}.items():
        if variable.get_metadata().get(field):
            variable.set_metadata(field, (first, *variable.get_metadata(field)))


def unname_first_axis(variable: nnx.Variable) -> None:
    """Remove the first axis name of a variable that lost that axis; inverts `name_first_axis`.

    Example:
        >>> import jax.numpy as jnp
        >>> kernel = nnx.Param(jnp.ones((3, 4)), **named(None, "embed", "hidden"))
        >>> unname_first_axis(kernel)
        >>> kernel.out_sharding
        ('embed', 'hidden')
    """
    for field in ("out_sharding", _UNIT):
        if variable.get_metadata().get(field):
            variable.set_metadata(field, variable.get_metadata(field)[1:])


def shardings(tree: Any, mesh: Any) -> PyTree[NamedSharding]:
    """Return the shardings of a model or an optimizer on a mesh, in the form of its `nnx.state`.

    The names of their axes and the table decide, see `rules`. Variables without names are on every
    device, and axes that their mesh axes do not divide are whole. What optax keeps of a parameter
    lies as the parameter does.

    Args:
        tree: a module, an `nnx.Optimizer` or the state of one; `abstract` makes one without arrays.
        mesh: mesh with at least one axis of the table.

    Raises:
        ValueError: if the mesh has no axis of the table.

    Example:
        >>> from flax_attn import FeedForward
        >>> mesh = jax.sharding.AbstractMesh((4, 2), ("data", "tensor"))
        >>> found = shardings(FeedForward(6, 8, rngs=nnx.Rngs(0)), mesh)
        >>> kernel = found["layers"][0]["kernel"].get_value()
        >>> kernel.spec == PartitionSpec(None, "tensor")
        True
    """
    check_mesh(mesh)
    state = tree if isinstance(tree, nnx.State) else nnx.state(tree)
    return jax.tree.map(lambda to: NamedSharding(mesh, to), specs(state, mesh))


def shard(tree: M, mesh: Any) -> M:
    """Place the arrays of a model or an optimizer on a mesh, as `shardings` says, and return it.

    Raises:
        ValueError: if the mesh has no axis of the table.

    Example:
        >>> from flax_attn import FeedForward
        >>> model = shard(FeedForward(6, 8, rngs=nnx.Rngs(0)), jax.make_mesh((1,), ("data",)))
        >>> model.layers[0].kernel.sharding.mesh.axis_names
        ('data',)
    """
    state = nnx.state(tree)
    nnx.update(tree, jax.tree.map(_put, state, shardings(state, mesh)))
    return tree


def _put(array: Any, where: NamedSharding) -> Any:
    if not jnp.issubdtype(array.dtype, jax.dtypes.prng_key):
        return jax.device_put(array, where)
    # JAX puts keys on devices of this process alone, but their data on those of others, too.
    data = jax.device_put(jax.random.key_data(array), where)
    return jax.random.wrap_key_data(data, impl=jax.random.key_impl(array))


def create(build: Callable[..., M], mesh: Any, *modules: nnx.Pytree) -> M:
    """Return `build(*modules)` with its arrays made in place on a mesh.

    No array is ever whole on one device.

    Args:
        build: function that makes a model or an optimizer.
        mesh: mesh with at least one axis of the table.
        modules: arguments of `build`, modules that lie on the mesh already.

    Raises:
        ValueError: if the mesh has no axis of the table.

    Example:
        >>> import optax
        >>> from flax_attn import FeedForward
        >>> mesh = jax.make_mesh((1,), ("tensor",))
        >>> model = create(lambda: FeedForward(6, 8, rngs=nnx.Rngs(0)), mesh)
        >>> make = lambda model: nnx.Optimizer(model, optax.adam(0.1), wrt=nnx.Param)
        >>> optimizer = create(make, mesh, model)
        >>> moment = optimizer.opt_state[0].mu["layers"][0]["kernel"]
        >>> moment.sharding == model.layers[0].kernel.sharding
        True
    """
    graph, state = nnx.split(modules)

    def run(state: Any) -> M:
        return build(*nnx.merge(graph, state))

    # Traced twice: the shardings follow from the shapes, and must be known to compile.
    shapes = abstract(run, state)
    make = jax.jit(lambda state: nnx.state(run(state)), out_shardings=shardings(shapes, mesh))
    return nnx.merge(nnx.graphdef(shapes), make(state))


def abstract(build: Callable[..., M], *arguments: Any) -> M:
    """Return `build(*arguments)` with shapes in the place of values.

    Under a mesh `nnx.eval_shape` takes the names of axes for those of the mesh.

    Example:
        >>> from flax_attn import FeedForward
        >>> abstract(lambda: FeedForward(6, 8, rngs=nnx.Rngs(0))).layers[0].kernel.get_value()
        ShapeDtypeStruct(shape=(6, 8), dtype=float32)
    """
    return nnx.merge(*jax.eval_shape(lambda *arguments: nnx.split(build(*arguments)), *arguments))


def check_mesh(mesh: Any) -> None:
    """Raise unless a mesh has an axis of the table."""
    known = dict.fromkeys(axis for axes in table().values() for axis in axes)
    if known.keys().isdisjoint(mesh.axis_names):
        raise ValueError(
            f"a mesh must have an axis of the table, {', '.join(known)}; got the axes"
            f" {', '.join(mesh.axis_names)}. Name an axis of the mesh so, or change the table with"
            " flax_attn.sharding.rules"
        )


def sharding_of(variable: nnx.Variable, mesh: Any) -> NamedSharding:
    """Return where a variable lies on a mesh; see `shardings`."""
    return NamedSharding(mesh, specs(variable, mesh).get_value())


def specs(state: S, mesh: Any, only: str | None = None, but: Collection[str] = ()) -> S:
    """Return how the variables of a state are split over a mesh.

    Args:
        state: state of Flax variables.
        mesh: mesh with axes of the table.
        only: the one name whose axes are split; None is all.
        but: mesh axes that are used otherwise: what would be split over one of them is whole.

    Example:
        >>> import jax.numpy as jnp
        >>> mesh = jax.sharding.AbstractMesh((4, 2), ("fsdp", "tensor"))
        >>> param = nnx.Param(jnp.ones((6, 8)), **named("vocab", "embed"))
        >>> specs(param, mesh, only="vocab").get_value() == PartitionSpec("tensor", None)
        True
    """

    def of_one(x: nnx.Variable) -> nnx.Variable:
        metadata, shape = x.get_metadata(), x.shape
        names = metadata.get("out_sharding")
        # Some optimizers keep sums over axes of a parameter, with the names of all.
        if not names or len(names) != len(shape):
            return x.replace(PartitionSpec())
        # What must stay together counts as one: a head is on one device.
        unit = metadata.get(_UNIT, (1,) * len(shape))
        counts = [size // each for size, each in zip(shape, unit, strict=True)]
        entries = list(spec(names, mesh, counts))
        for axis, name in enumerate(names):
            if only not in (None, name) or set(axes_in(entries[axis])) & set(but):
                entries[axis] = None
        return x.replace(PartitionSpec(*entries))

    return jax.tree.map(of_one, state, is_leaf=lambda x: isinstance(x, nnx.Variable))
