"""Which backend runs a call, on one device or on each device of a mesh, and why no other does."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import takewhile
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from attn_spec.other_libraries import ASKS_NOTHING, OF_FUNCTIONS, names_remedies
from flax_attn.backends.call import Call, Unsupported, as_argument, prepare
from flax_attn.backends.choose import choose, for_parts, in_order, predicted, refusal, runs_on
from flax_attn.backends.platform import asked_about, machine, platform_of
from flax_attn.backends.registry import BACKENDS, load
from flax_attn.functional.dropout import KeyedDropout
from flax_attn.functional.masks import as_mask
from flax_attn.functional.score_function import ScoreFunction
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
        seconds: predicted seconds of one forward call, for each backend of an accelerator, whether
            it refuses or not.
        chip: name of the chip that was asked about; None is that of this machine.
        in_order: first backend in the order of preference that takes the call: what `"auto"` would
            take if no time was predicted.
    """

    backend: str | None
    platform: str
    refusals: dict[str, str | None]
    memory: dict[str, int]
    passed_over: tuple[str, ...]
    division: Division | None = None
    seconds: dict[str, float] = field(default_factory=dict)
    chip: str | None = None
    in_order: str | None = None

    @property
    def fastest(self) -> str | None:
        """The backend with the least predicted time, whether it refuses or not; None on a CPU."""
        return min(self.seconds, key=lambda name: self.seconds[name], default=None)

    def __str__(self) -> str:
        where = self.platform if self.chip is None else f"{self.platform} ({self.chip})"
        lines = [f"{self.backend or 'nothing'} runs on {where}", *_lines(self.division)]
        lines += map(self._line, self.refusals)
        return "\n".join([*lines, *self._faster()])

    def _faster(self) -> list[str]:
        name = self.fastest
        if name is None or self.refusals[name] is None:
            return []
        time = _milliseconds(self.seconds[name])
        # Its reason says what would help, such as a cast.
        return [f"{name} would be the fastest, in about {time}: {self.refusals[name]}"]

    def _line(self, name: str) -> str:
        sign = "->" if name == self.backend else "  "
        result = self.refusals[name] or self._cost(name)
        return f"{sign} {name:9}  {result}"

    def _cost(self, name: str) -> str:
        time = f", {_milliseconds(self.seconds[name])} forward" if name in self.seconds else ""
        memory = f"{self.memory[name] / 2**20:.1f} MiB beside inputs and output"
        return f"can run, in about {memory}{time}"


@names_remedies(OF_FUNCTIONS, ASKS_NOTHING)
def explain(
    query: Any,
    key: Any,
    value: Any,
    bias: Any = None,
    mask: Any = None,
    *,
    is_causal: bool = False,
    scale: Any = None,
    soft_cap: float | None = None,
    score: Callable | ScoreFunction | None = None,
    sinks: Any = None,
    dropout: KeyedDropout | None = None,
    precision: jax.lax.PrecisionLike = None,
    backend: str = "auto",
    return_weights: bool = False,
    platform: str | None = None,
) -> Explanation:
    """Return which backend `dot_product_attention` would run for a call, and why not another.

    Nothing is computed: arrays may be `jax.ShapeDtypeStruct`, also those that a mask is made of,
    as in `Mask.lengths(key=jax.ShapeDtypeStruct((4,), jnp.int32))`. The arguments are
    those of `attend`, which takes the same backend with and without `return_weights`, and
    `platform`, to ask about another machine than the one at hand: `"cpu"`, `"gpu"`, `"tpu"`, or a
    chip such as `"h100"`, `"a100"` or `"v5e"` (`flax_attn.backends.chips.CHIPS`), as it would be
    installed. Where nothing of the kind is attached, `"gpu"` is an H100 and `"tpu"` a v5e. Times
    are predicted from published rates.

    Under a mesh the answer is about the part of one device, and `division` says what it has of the
    call.

    Raises:
        ValueError: where `dot_product_attention` does, except that a refusal is part of the result.
        TypeError: where `dot_product_attention` does.

    Example:
        >>> import jax.numpy as jnp
        >>> from flax_attn import Mask
        >>> x = jax.ShapeDtypeStruct((1, 8192, 8, 64), jnp.float32)
        >>> found = explain(x, x, x, mask=Mask.causal(), platform="gpu")
        >>> found.backend, found.refusals["splash"]
        ('fused', 'splash runs on TPU; got platform "gpu"')
        >>> f"{1000 * found.seconds['blocked']:.1f} ms on {found.chip}"
        '2.8 ms on h100'
    """
    platform, chip = (platform_of(query), None) if platform is None else machine(platform)
    options = {
        "is_causal": is_causal,
        "scale": scale,
        "soft_cap": soft_cap,
        "score": score,
        "sinks": sinks,
        "dropout": dropout,
        "precision": precision,
        "platform": platform,
    }
    # Read here, where the values of a mask of 0 and 1 are known.
    if not is_abstract(mask):
        mask = as_mask(mask)
    arrays = {"query": query, "key": key, "value": value, "bias": bias}
    arrays = {name: _known(name, x) for name, x in arrays.items()}
    leaves, structure = jax.tree.flatten((arrays | options, mask))
    # Arrays of a mask stay known where they are, as kernels may need them.
    of_mask = len(leaves) - len(jax.tree.leaves(mask))
    traced = {}
    for i, leaf in enumerate(leaves):
        if is_abstract(leaf) or (i < of_mask and isinstance(leaf, jax.Array)):
            traced[i] = leaf
    found = []

    def trace(traced: dict[int, Array]) -> None:
        own = [traced.get(i, leaf) for i, leaf in enumerate(leaves)]
        arguments, mask = structure.unflatten(own)
        call = prepare(**arguments, mask=mask)
        found.append(on_devices(call, backend))

    # An explanation is no array: it leaves the trace beside it.
    with asked_about(chip):
        jax.eval_shape(trace, traced)
    return replace(found[0], chip=chip)


def _known(name: str, x: Any) -> Any:
    if x is None and name == "bias":
        return None
    if callable(x) and not hasattr(x, "__jax_array__"):
        raise ValueError(
            "explain takes the arrays of a call, query (b, t, n, h), key and value, and no layer;"
            f" got {type(x).__name__} as {name}. Pass arrays, or jax.ShapeDtypeStruct of their"
            " shapes; flax_attn.explain_calls takes a layer"
        )
    return x if is_abstract(x) else as_argument(name, x)


def is_abstract(x: Any) -> bool:
    """Return whether of an array shape and dtype alone are known."""
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
    parts = ", ".join(split)
    strategy = division.strategy
    if division.balanced:
        strategy += ", balanced in zigzag order"
    return [f"on each device: {parts}; {strategy}: {division.reason}"]


def on_devices(call: Call, backend: str) -> Explanation:
    """Return the explanation of a call on one device, or of its part on each device of a mesh."""
    division = divide(call, backend)
    if division is None:
        return _explain(call, backend)
    kernel = _Explainer(backend)
    attend(division, call, kernel)
    return replace(kernel.found[0], division=division)


@dataclass(frozen=True, eq=False)
class _Explainer(Kernel):
    """A kernel that computes nothing and keeps the explanation of what it is asked to compute."""

    found: list[Explanation] = field(default_factory=list)

    # Else it would be equal to any other, and JAX would find what it traced for that one.
    def __eq__(self, other: object) -> bool:
        return self is other

    def __hash__(self) -> int:
        return id(self)

    def attend(self, call: Call) -> Array:
        self.found.append(_explain(call, self.backend))
        return without_values(call)

    def attend_pieces(self, route: Route, shard: Shard, over: tuple[str, ...] = ()) -> Array:
        call = shard.as_call()
        refusals = {name: _refusal_in_parts(name, call) for name in BACKENDS}
        chosen = for_parts(call)
        memory = {chosen.name: chosen.memory(call)}
        self.found.append(Explanation(chosen.name, call.platform, refusals, memory, ()))
        return without_values(call)


def _refusal_in_parts(name: str, call: Call) -> str | None:
    backend = load(name)
    if backend.in_parts:
        return refusal(backend, call)
    return f"{name} attends to all keys at once, and here they lie on several devices"


def without_values(call: Call) -> Array:
    """Return zeros in the place of the output of a call."""
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
    seconds = _predicted(call)
    return Explanation(
        backend=chosen,
        platform=call.platform,
        refusals=refusals,
        memory=memory,
        passed_over=_passed_over(call, chosen, refusals, seconds),
        seconds=seconds,
        in_order=in_order(call).name,
    )


def _predicted(call: Call) -> dict[str, float]:
    # Nothing is published about CPUs, on which the order of the table decides.
    if call.platform == "cpu":
        return {}
    candidates = [load(name) for name in BACKENDS]
    return {x.name: predicted(x, call) for x in candidates if runs_on(x, call.platform)}


def _passed_over(
    call: Call, chosen: str | None, refusals: dict[str, str | None], seconds: dict[str, float]
) -> tuple[str, ...]:
    refused = [load(name) for name in _before(chosen, seconds) if refusals[name]]
    usable = [x for x in refused if runs_on(x, call.platform)]
    return tuple(x.name for x in usable if x.preferred(call))


def _before(chosen: str | None, seconds: dict[str, float]) -> list[str]:
    """Return the backends before the chosen one: the faster ones, or those above in the table."""
    if chosen not in seconds:
        return list(takewhile(lambda name: name != chosen, BACKENDS))
    ordered = sorted(seconds, key=lambda name: seconds[name])
    return [name for name in ordered if seconds[name] < seconds[chosen]]


def _milliseconds(seconds: float) -> str:
    return f"{1000 * seconds:.3g} ms"
