"""A model of shapes, its optimizer and its inputs on a mesh: how much of each is on one device."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.experimental import mesh_utils
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from flax_attn.functional.cache_base import Cache
from flax_attn.functional.delta_cache import DeltaCache
from flax_attn.models.language_model import LanguageModel
from flax_attn.modules.experts import Experts
from flax_attn.plan.job import Job
from flax_attn.sharding.axes import spec
from flax_attn.sharding.parameters import abstract, shardings
from flax_attn.training.precision import float32_state

N = TypeVar("N")
# The axes of what a cache stores; the layers of a stack come before these.
_OF_TOKENS: dict[str, tuple[str | None, ...]] = dict.fromkeys(
    ("key", "value"), ("batch", "kv_heads", "tokens", None)
)
_OF_A_STATE: dict[str, tuple[str | None, ...]] = {
    **dict.fromkeys(("query", "key", "value"), ("batch", None, "heads")),
    "state": ("batch", "heads", None, None),
}


@dataclass(frozen=True)
class Held:
    """Bytes on one device that follow from shapes alone.

    Args:
        parameters: bytes of the parameters of the model and the state of its random streams.
        optimizer: bytes of the state of the optimizer.
        gradients: bytes of the gradients of the parameters, in a training step.
        cache: bytes of keys and values, in generation.
        experts: bytes of the parameters of experts, in mixtures.
    """

    parameters: int
    optimizer: int = 0
    gradients: int = 0
    cache: int = 0
    experts: int = 0

    @property
    def total(self) -> int:
        """What stays from one step to the next."""
        return self.parameters + self.optimizer + self.cache


def held_bytes(job: Job) -> Held:
    """Return what a device holds of a job; no devices are needed."""
    mesh = AbstractMesh(tuple(job.mesh.values()), tuple(job.mesh))
    model = model_on(job, mesh)
    # Experts are most of a mixture, and split over an axis of their own.
    experts = 0
    for _, part in nnx.iter_modules(model):
        if isinstance(part, Experts):
            experts += bytes_on_device(part)
    found = Held(bytes_on_device(model), experts=experts)
    if not job.train:
        cache = cache_on(job, model, mesh)
        return replace(found, cache=bytes_on_device(cache))
    optimizer = optimizer_on(model, mesh)
    # Each gradient is as large as its parameter, and lies where that is.
    params = nnx.state(model, nnx.Param)
    return replace(found, optimizer=bytes_on_device(optimizer), gradients=bytes_on_device(params))


def mesh_for(job: Job, devices: Sequence[Any]) -> Mesh:
    """Return the mesh of a job, its axes along those of the torus where that is known."""
    shape = tuple(job.mesh.values())
    # Neighbours on the torus exchange fastest, so that JAX chooses the order there.
    if job.topology.chip.kind == "tpu":
        grid = mesh_utils.create_device_mesh(shape, devices, allow_split_physical_axes=True)
    else:
        grid = np.array(devices).reshape(shape)
    return Mesh(grid, tuple(job.mesh), axis_types=(AxisType.Auto,) * len(shape))


def model_on(job: Job, mesh: Mesh | AbstractMesh) -> nnx.Module:
    """Return the model of a job with shapes in the place of arrays, and where they lie."""
    build = job.build()
    return _placed(abstract(lambda: build(nnx.Rngs(0))), mesh)


def optimizer_on(model: nnx.Module, mesh: Mesh | AbstractMesh) -> nnx.Optimizer:
    """Return AdamW in float32 for such a model; its state lies as the parameters do."""
    graph, state = nnx.split(model)
    adamw = float32_state(optax.adamw(1e-4))

    def build(state: Any) -> nnx.Optimizer:
        return nnx.Optimizer(nnx.merge(graph, state), adamw, wrt=nnx.Param)

    return _placed(abstract(build, state), mesh)


def tokens_on(job: Job, mesh: Mesh, tokens: int) -> jax.ShapeDtypeStruct:
    """Return the tokens of a batch."""
    return place(jax.ShapeDtypeStruct((job.batch, tokens), jnp.int32), ("batch", "tokens"), mesh)


def place(x: Any, names: Sequence[str | None], mesh: Mesh | AbstractMesh) -> jax.ShapeDtypeStruct:
    """Return the shape of an array on a mesh by the names of its axes.

    Without names it is on every device.
    """
    where = NamedSharding(mesh, spec(names, mesh, x.shape) if names else PartitionSpec())
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where)


def cache_on(job: Job, model: nnx.Module, mesh: Mesh | AbstractMesh) -> Any:
    """Return the empty cache of a job."""
    assert isinstance(model, LanguageModel), "only decoders of this library are planned to generate"
    return place_cache(jax.eval_shape(lambda: model.init_cache(job.batch, job.tokens)), mesh)


def place_cache(cache: Any, mesh: Mesh | AbstractMesh) -> Any:
    """Return the shapes of a cache on a mesh."""
    return tuple(_place_layer(one, mesh) for one in cache)


def _place_layer(cache: Cache, mesh: Any) -> Cache:
    names = _OF_A_STATE if isinstance(cache, DeltaCache) else _OF_TOKENS
    leaves = [_place_last(x, names[name], mesh) for name, x in cache.arrays.items()]
    if not isinstance(cache.length, int):
        leaves.append(place(cache.length, (), mesh))
    # Not by `replace`: a cache takes arrays, and these are shapes. The length is its last leaf.
    return jax.tree.unflatten(jax.tree.structure(cache), leaves)


def _place_last(x: Any, names: Sequence[str | None], mesh: Any) -> jax.ShapeDtypeStruct:
    # The axes in front of these are those of a stack: every device has all layers.
    return place(x, (*[None] * (x.ndim - len(names)), *names), mesh)


def bytes_on_device(tree: Any) -> int:
    """Return how many bytes of arrays that lie on a mesh one device holds."""
    # What a device holds of an array is one shard; without an axis of the mesh that is all of it.
    arrays = jax.tree.leaves(nnx.state(tree) if isinstance(tree, nnx.Pytree) else tree)
    return sum(prod(x.sharding.shard_shape(x.shape)) * _itemsize(x.dtype) for x in arrays)


def _placed(module: N, mesh: Mesh | AbstractMesh) -> N:
    """Return a module of shapes with where they lie."""
    state = nnx.state(module)

    def lie(x: Any, where: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where)

    nnx.update(module, jax.tree.map(lie, state, shardings(state, mesh)))
    return module


def _itemsize(dtype: Any) -> int:
    # The keys of random streams have no size that is theirs alone.
    return 0 if jnp.issubdtype(dtype, jax.dtypes.extended) else jnp.dtype(dtype).itemsize
