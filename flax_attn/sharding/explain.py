"""Which backend runs a call, on one device or on each device of a mesh, and why no other does."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from itertools import takewhile
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from attn_spec.checks import check_choice
from flax_attn.backends.call import Call, Unsupported, as_argument, prepare
from flax_attn.backends.choose import choose, for_parts, refusal, runs_on
from flax_attn.backends.platform import PLATFORMS, platform_of
from flax_attn.backends.registry import BACKENDS, load
from flax_attn.sharding.attention import attend
from flax_attn.sharding.partition import Division, divide
from flax_attn.sharding.ring_schedule import Route
from flax_attn.sharding.shards import Shard
from flax_attn.sharding.strategies import Kernel


@dataclass(frozen=True)
class Explanation:
    """The result of `explain`.

    Args:
        backend: name of the backend that would run, or None if the one asked for refuses.
        platform: platform that it would run on.
        refusals: reason why each backend cannot run the call, or None.
        memory: estimated bytes of temporaries of one forward
            call, for each backend that can run it.
        passed_over: backends that `"auto"` would have taken before this one, had they not
            refused, best first.
        division: division of the call over the mesh in use; then all else is about the part of
            one device.
    """

    backend: str | None
    platform: str
    refusals: dict[str, str | None]
    memory: dict[str, int]
    passed_over: tuple[str, ...]
    division: Division | None = None

    def __str__(self) -> str:
        lines = [f"{self.backend or 'nothing'} runs on {self.platform}", *_lines(self.division)]
        for name, note in self.refusals.items():
            if note is None:
                mib = self.memory[name] / 2**20
                note = f"can run, in about {mib:.1f} MiB beside inputs and output"
            sign = "->" if name == self.backend else "  "
            lines.append(f"{sign} {name:9}  {note}")
        return "\n".join(lines)


def explain(
    query: Any, key: Any, value: Any, bias: Any = None, mask: Any = None, **options: Any
) -> Explanation:
    """Return which backend `dot_product_attention` would run for a call, and why not another.

    Nothing is computed: arrays may be `jax.ShapeDtypeStruct`, also inside a mask. Options are those
    of `dot_product_attention`, and `platform`, to ask about `"cpu"`, `"gpu"` or `"tpu"` instead of
    the machine at hand.

    Under a mesh the answer is about the part of one device, and `division` says what it has of the
    call.

    Raises:
        ValueError: where `dot_product_attention` does, except that a refusal is part of the result.

    Example:
        >>> import jax.numpy as jnp
        >>> from flax_attn import Mask
        >>> x = jax.ShapeDtypeStruct((1, 8192, 8, 64), jnp.float32)
        >>> found = explain(x, x, x, mask=Mask.causal(), platform="gpu")
        >>> found.backend, found.refusals["splash"]
        ('blocked', 'splash runs on TPU; got platform "gpu". Pass backend="auto"')
    """
    backend = options.pop("backend", "auto")
    options.pop("return_weights", None)
    options["platform"] = options.get("platform") or platform_of(query)
    check_choice("platform", options["platform"], PLATFORMS)
    arrays = {"query": query, "key": key, "value": value, "bias": bias}
    arrays = {name: _known(name, x) for name, x in arrays.items()}
    leaves, structure = jax.tree.flatten((arrays | options, mask))
    # Arrays of a mask stay known where they are, as kernels may need them.
    of_mask = len(leaves) - len(jax.tree.leaves(mask))
    traced = {}
    for i, leaf in enumerate(leaves):
        if _is_abstract(leaf) or (i < of_mask and isinstance(leaf, jax.Array)):
            traced[i] = leaf
    found = []

    def trace(traced: dict[int, Array]) -> None:
        own = [traced.get(i, leaf) for i, leaf in enumerate(leaves)]
        arguments, mask = structure.unflatten(own)
        call = prepare(**arguments, mask=mask)
        division = divide(call, backend)
        if division is None:
            found.append(_explain(call, backend))
        else:
            found.append(_of_one_device(division, call, backend))

    # An explanation is no array: it leaves the trace beside it.
    jax.eval_shape(trace, traced)
    return found[0]


def _known(name: str, x: Any) -> Any:
    if x is None and name == "bias":
        return None
    return x if _is_abstract(x) else as_argument(name, x)


def _is_abstract(x: Any) -> bool:
    return isinstance(x, jax.ShapeDtypeStruct)


def _lines(division: Division | None) -> list[str]:
    if division is None:
        return []
    names = {
        "rows": division.batch,
        "heads": division.heads,
        "queries": division.queries,
        "keys": division.keys,
    }
    split = [f"{name} over {' x '.join(axes)}" for name, axes in names.items() if axes]
    balance = ", balanced in zigzag order" if division.balanced else ""
    return [f"on each device: {', '.join(split)}; {division.strategy}{balance}: {division.reason}"]


def _of_one_device(division: Division, call: Call, backend: str) -> Explanation:
    kernel = _Explainer(backend)
    attend(division, call, kernel)
    return replace(kernel.found[0], division=division)


@dataclass(frozen=True, eq=False)
class _Explainer(Kernel):
    """A kernel that computes nothing and keeps the explanation of what it is asked to compute."""

    found: list[Explanation] = field(default_factory=list)

    def attend(self, call: Call) -> Array:
        self.found.append(_explain(call, self.backend))
        return _nothing(call)

    def attend_pieces(self, route: Route, shard: Shard, over: tuple[str, ...] = ()) -> Array:
        call = shard.as_call()
        reason = "attends to all keys at once, and here they lie on several devices"
        refusals: dict[str, str | None] = {}
        for name in BACKENDS:
            one = load(name)
            refusals[name] = refusal(one, call) if one.in_parts else f"{name} {reason}"
        chosen = for_parts(call)
        memory = {chosen.name: chosen.memory(call)}
        self.found.append(Explanation(chosen.name, call.platform, refusals, memory, ()))
        return _nothing(call)


def _nothing(call: Call) -> Array:
    *rows, _ = call.query.shape
    return jnp.zeros((*rows, call.value.shape[3]), call.query.dtype)


def _explain(call: Call, backend: str) -> Explanation:
    refusals = {}
    memory = {}
    for name in BACKENDS:
        refusals[name] = refusal(load(name), call)
        if refusals[name] is None:
            memory[name] = load(name).memory(call)
    try:
        chosen = choose(call, backend).name
    except Unsupported:
        chosen = None
    passed_over = []
    # The table is in the order of preference: `"auto"` asked those before the chosen one.
    for name in takewhile(lambda name: name != chosen, BACKENDS):
        one = load(name)
        if refusals[name] and runs_on(one, call.platform) and one.preferred(call):
            passed_over.append(name)
    return Explanation(chosen, call.platform, refusals, memory, tuple(passed_over))
