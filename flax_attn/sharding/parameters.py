"""The shardings of parameters on a mesh, from the names of their axes."""

from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from flax import nnx
from jax.core import Tracer
from jax.sharding import NamedSharding
from jaxtyping import PyTree

from flax_attn.sharding.axes import place
from flax_attn.sharding.parameter_axes import (
    ON_ONE_DEVICE,
    UNIT,
    check_may_split,
    check_mesh,
    check_tree_and_mesh,
    specs,
)
from flax_attn.sharding.sharding_table import warn_of_whole

M = TypeVar("M", bound=nnx.Pytree)


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
        found[UNIT] = unit
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
    for field, first in {"out_sharding": None, UNIT: 1}.items():
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
    for field in ("out_sharding", UNIT):
        if variable.get_metadata().get(field):
            variable.set_metadata(field, variable.get_metadata(field)[1:])


def shardings(tree: Any, mesh: Any) -> PyTree[NamedSharding]:
    """Return the shardings of a model or an optimizer on a mesh, in the form of its `nnx.state`.

    The names of their axes decide: lines of the table, see `rules`, axes of the mesh, and what
    Flax's `logical_axis_rules` make of them. Of a parameter of two axes or more that names none,
    the largest axis that divides is split over `fsdp`, if the mesh has it; other variables without
    names are on every device. Axes that their mesh axes do not divide are whole. What optax keeps
    of a parameter lies as the parameter does. `sharding_table` prints it.

    Args:
        tree: a module, an `nnx.Optimizer` or the state of one; `abstract` makes one without arrays.
        mesh: mesh with at least one axis of the table.

    Raises:
        ValueError: if an axis has a name that is neither in the table nor an axis of the mesh, if
            the mesh has no axis of the table and no parameter names one of its axes, if a layer is
            quantized, or if tree or mesh is something else.

    Example:
        >>> from flax_attn import FeedForward
        >>> from jax.sharding import PartitionSpec
        >>> mesh = jax.sharding.AbstractMesh((4, 2), ("data", "tensor"))
        >>> found = shardings(FeedForward(6, 8, rngs=nnx.Rngs(0)), mesh)
        >>> kernel = found["layers"][0]["kernel"].get_value()
        >>> kernel.spec == PartitionSpec(None, "tensor")
        True
    """
    check_tree_and_mesh(tree, mesh)
    state = tree if isinstance(tree, nnx.State) else nnx.state(tree)
    for _, variable in nnx.to_flat_state(state):
        stays = variable.get_metadata().get(ON_ONE_DEVICE)
        check_may_split(stays, mesh)
    found = specs(state, mesh)
    is_split = map(any, jax.tree.leaves(found))
    if not any(is_split):
        check_mesh(mesh)
    return jax.tree.map(lambda to: NamedSharding(mesh, to), found)


def shard(tree: M, mesh: Any) -> M:
    """Place the arrays of a model or an optimizer on a mesh, as `shardings` says, and return it.

    At the end of a step that you compile yourself, it keeps them there: else XLA may return
    parameters that name no axes in other places, and compiles the step again for these.

    Warns of large parameters that stay whole on every device because their axes have no names.

    Raises:
        ValueError: where `shardings` does.

    Example:
        >>> from flax_attn import FeedForward
        >>> model = shard(FeedForward(6, 8, rngs=nnx.Rngs(0)), jax.make_mesh((1,), ("data",)))
        >>> model.layers[0].kernel.sharding.mesh.axis_names
        ('data',)
    """
    where = shardings(tree, mesh)
    state = nnx.state(tree)
    warn_of_whole(state, mesh)
    nnx.update(tree, jax.tree.map(_put, state, where))
    return tree


def _put(array: Any, where: NamedSharding) -> Any:
    # In a program, `jax.device_put` does not hold XLA to a place.
    if isinstance(array, Tracer):
        return place(array, where.mesh, where.spec)
    if not jnp.issubdtype(array.dtype, jax.dtypes.prng_key):
        return jax.device_put(array, where)
    # JAX puts keys on devices of this process alone, but their data on those of others, too.
    data = jax.device_put(jax.random.key_data(array), where)
    return jax.random.wrap_key_data(data, impl=jax.random.key_impl(array))


def create(build: Callable[..., M], mesh: Any, *modules: nnx.Pytree) -> M:
    """Return `build(*modules)` with its arrays made in place on a mesh.

    No array is ever whole on one device, except those of which it warns, as `shard` does.

    Args:
        build: function that makes a model or an optimizer.
        mesh: mesh with at least one axis of the table.
        modules: arguments of `build`, modules that lie on the mesh already.

    Raises:
        ValueError: where `shardings` does.

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
    made, shapes = nnx.split(abstract(run, state))
    where = shardings(shapes, mesh)
    warn_of_whole(shapes, mesh)
    make = jax.jit(lambda state: nnx.state(run(state)), out_shardings=where)
    arrays = make(state)
    return nnx.merge(made, arrays)


def abstract(build: Callable[..., M], *arguments: Any) -> M:
    """Return `build(*arguments)` with shapes in the place of values.

    Under a mesh `nnx.eval_shape` takes the names of axes for those of the mesh.

    Example:
        >>> from flax_attn import FeedForward
        >>> abstract(lambda: FeedForward(6, 8, rngs=nnx.Rngs(0))).layers[0].kernel.get_value()
        ShapeDtypeStruct(shape=(6, 8), dtype=float32)
    """

    def run(*arguments: Any) -> tuple[Any, Any]:
        return nnx.split(build(*arguments))

    # The graph holds no arrays, and passes through as it is.
    graph, shapes = jax.eval_shape(run, *arguments)
    return nnx.merge(graph, shapes)


def sharding_of(variable: nnx.Variable, mesh: Any) -> NamedSharding:
    """Return where a variable lies on a mesh; see `shardings`."""
    return NamedSharding(mesh, specs(variable, mesh).get_value())
