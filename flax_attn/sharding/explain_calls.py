"""Which backend runs each attention call of a layer, a model or a function."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from inspect import ismethod
from typing import Any

import jax
import numpy as np
from jaxtyping import Array

from flax_attn.backends.call import Call
from flax_attn.backends.interception import intercepted
from flax_attn.backends.platform import asked_about, machine
from flax_attn.sharding.explain import Explanation, is_abstract, on_devices, without_values


@dataclass(frozen=True)
class ExplainedCall:
    """One attention call of a program.

    Args:
        query: shape `(b, t, n, h)` of the query.
        key: shape `(b, s, k, h)` of the key.
        dtype: dtype of the query.
        mask: expression that makes the mask.
        options: names of the options that it has, such as `"dropout"`.
        explanation: what `explain` returns for the call.
    """

    query: tuple[int, ...]
    key: tuple[int, ...]
    dtype: str
    mask: str
    options: tuple[str, ...]
    explanation: Explanation

    def __str__(self) -> str:
        backend = self.explanation.backend or "nothing"
        options = ", ".join((self.mask, *self.options))
        return f"{backend}: query {self.query}, key {self.key}, {self.dtype}, {options}"


class ExplainedCalls(tuple[ExplainedCall, ...]):
    """The attention calls of a program in order; printed, with one line for equal calls."""

    def __str__(self) -> str:
        # Layers of a model make equal calls, most of the time.
        lines = list(map(str, self))
        different = dict.fromkeys(lines)
        return "\n".join(f"{lines.count(line)} x {line}" for line in different)


def explain_calls(
    function: Callable, *arguments: Any, platform: str | None = None, **keywords: Any
) -> ExplainedCalls:
    """Return which backend each attention call of a layer, a model or a function takes.

    The function is traced, and nothing is computed: arrays among the arguments may be
    `jax.ShapeDtypeStruct`, and a model one of `nnx.eval_shape`. Calls inside a loop that JAX traces
    once, such as `nnx.scan` over layers, are found once.

    Args:
        function: layer, model, its method, or function of your own.
        arguments: arguments that it is called with.
        platform: platform or chip that is asked about, as in `explain`; None is this machine.
        keywords: its arguments by name.

    Raises:
        ValueError: if the platform is unknown, and where the function itself raises.

    Example:
        >>> import jax.numpy as jnp
        >>> from flax import nnx
        >>> from flax_attn import GPT2, GPT2Config
        >>> config = GPT2Config(d_model=256, num_heads=4, num_layers=3)
        >>> model = nnx.eval_shape(lambda: GPT2(config, dtype=jnp.bfloat16, rngs=nnx.Rngs(0)))
        >>> tokens = jax.ShapeDtypeStruct((8, 1024), jnp.int32)
        >>> model.eval()
        >>> print(explain_calls(model, tokens, platform="v5e"))
        3 x splash: query (8, 1024, 4, 64), key (8, 1024, 4, 64), bfloat16, Mask.causal(offset=0)
    """
    kind, chip = (None, None) if platform is None else machine(platform)
    found: list[ExplainedCall] = []

    def note(call: Call, backend: str) -> Array:
        asked = call if kind is None else replace(call, platform=kind)
        explanation = replace(on_devices(asked, backend), chip=chip)
        explained = ExplainedCall(
            query=call.query.shape,
            key=call.key.shape,
            dtype=call.query.dtype.name,
            mask=repr(call.mask),
            options=tuple(call.options),
            explanation=explanation,
        )
        found.append(explained)
        return without_values(call)

    # The arrays of a model whose method it is are arguments as well.
    if ismethod(function):
        function, arguments = function.__func__, (function.__self__, *arguments)
    leaves, structure = jax.tree.flatten((function, arguments, keywords))
    traced = {i: leaf for i, leaf in enumerate(leaves) if _is_array(leaf)}

    def run(traced: dict[int, Array]) -> None:
        own = [traced.get(i, leaf) for i, leaf in enumerate(leaves)]
        called, positional, named = structure.unflatten(own)
        called(*positional, **named)

    # What is chosen for a chip depends on its numbers, such as its memory.
    with asked_about(chip), intercepted(note):
        jax.eval_shape(run, traced)
    return ExplainedCalls(found)


def _is_array(x: Any) -> bool:
    return is_abstract(x) or isinstance(x, jax.Array | np.ndarray)
