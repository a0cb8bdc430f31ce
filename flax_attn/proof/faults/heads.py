"""Faults of the projections, and of how they are cut into heads."""

from __future__ import annotations

from collections.abc import Callable

from einops import rearrange
from torch import Tensor

from flax_attn.proof.faults.fault import Plant, fault
from torch_ref.functional import reference
from torch_ref.modules import multi_head


@fault("multi_head_causal")
def no_output_bias(plant: Plant) -> None:
    """The bias of the output projection is missing."""
    plant.module.out_proj.bias.data.zero_()


@fault("multi_head_square")
def no_value_bias(plant: Plant) -> None:
    """The bias of the values is missing."""
    plant.module.W_value.bias.data.zero_()


@fault("multi_head_square")
def swapped_biases(plant: Plant) -> None:
    """The biases of queries and keys are swapped."""
    query, key = plant.module.W_query, plant.module.W_key
    query.bias, key.bias = key.bias, query.bias


@fault("multi_head_square")
def swapped_projections(plant: Plant) -> None:
    """The projections of keys and values are swapped."""
    plant.module.W_key, plant.module.W_value = plant.module.W_value, plant.module.W_key


@fault("multi_head_square")
def tied_projections(plant: Plant) -> None:
    """Queries and keys share one projection."""
    plant.module.W_key = plant.module.W_query


@fault("multi_head_square")
def transposed_kernel(plant: Plant) -> None:
    """A square kernel is transposed."""
    weight = plant.module.W_value.weight
    weight.data = weight.data.T.contiguous()


@fault("multi_head_causal")
def reversed_heads(plant: Plant) -> None:
    """The heads are joined in reverse order."""
    _joined(plant, lambda heads: heads.flip(-2))


@fault("multi_head_causal")
def heads_side_by_side(plant: Plant) -> None:
    """The heads are joined feature by feature."""
    _joined(plant, lambda heads: rearrange(heads, "... t n h -> ... t h n"))


@fault("multi_head_causal")
def heads_cut_across_tokens(plant: Plant) -> None:
    """Heads are cut by a reshape, without a transpose."""

    def cut(original, x, pattern, **axes):
        if not pattern.endswith("n h"):
            return original(x, pattern, **axes)
        return rearrange(x.reshape(x.shape[0], axes["n"], x.shape[1], -1), "b n t h -> b t n h")

    plant.wrap(multi_head, "rearrange", cut)


@fault("multi_head_gqa")
def tiled_heads(plant: Plant) -> None:
    """Key/value heads are tiled, not repeated."""

    def tiled(original, x, pattern, **axes):
        return original(x, pattern.replace("(k g)", "(g k)"), **axes)

    plant.wrap(reference, "rearrange", tiled)


@fault("multi_head_gqa")
def reversed_key_value_heads(plant: Plant) -> None:
    """Key/value heads are in reverse order."""
    for layer in (plant.module.W_key, plant.module.W_value):
        for parameter in layer.parameters():
            heads = parameter.data.unflatten(0, (plant.module.num_kv_heads, -1))
            parameter.data = heads.flip(0).flatten(0, 1)


def _joined(plant: Plant, change: Callable[[Tensor], Tensor]) -> None:
    def join(original, x, pattern, **axes):
        return change(x).flatten(-2) if pattern.endswith("(n h)") else original(x, pattern, **axes)

    plant.wrap(multi_head, "rearrange", join)
