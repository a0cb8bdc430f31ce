"""The division of one attention call over a mesh.

It says which mesh axes the batch, heads, queries and keys of the call are split over.
"""

from dataclasses import dataclass, replace
from math import gcd, lcm
from typing import Any

from flax_attn.backends.call import Call, Unsupported
from flax_attn.backends.choose import few_queries
from flax_attn.backends.registry import load
from flax_attn.sharding.axes import device_count, mesh_axes, mesh_of
from flax_attn.sharding.options import ContextOptions, in_use
from flax_attn.sharding.zigzag_order import check_pieces

_IN_PIECES = ("ring", "ulysses+ring")  # strategies that attend to pieces of the keys


class IndivisibleError(ValueError):
    """Rows, heads or tokens that the axes of a mesh do not divide."""


@dataclass(frozen=True)
class Division:
    """The mesh axes that a call is split over, and the strategy for tokens that are split.

    Args:
        mesh: mesh that these axes belong to.
        batch: mesh axes of the batch.
        heads: mesh axes of the heads.
        queries: mesh axes of the query tokens.
        keys: mesh axes of the key tokens.
        copies: number of copies of each key/value head, so that every device has those
            that its queries read.
        strategy: "local" where tokens are whole, "merge" where keys alone are split, else one of
            `STRATEGIES`.
        within: number of neighbouring devices along the tokens that divide the heads instead.
        balanced: whether each device computes an early and a late piece.
        ordered: whether the tokens arrive in zigzag order.
        reason: reason for this strategy.
    """

    mesh: Any
    batch: tuple[str, ...]
    heads: tuple[str, ...]
    queries: tuple[str, ...]
    keys: tuple[str, ...]
    copies: int = 1
    strategy: str = "local"
    within: int = 1
    balanced: bool = False
    ordered: bool = False
    reason: str = "all tokens are on each device"

    @property
    def axes(self) -> frozenset[str]:
        """All mesh axes that are used."""
        return frozenset((*self.batch, *self.heads, *self.keys))

    @property
    def heads_alone(self) -> bool:
        """Whether heads are divided instead of tokens among all devices that share the tokens."""
        return self.within == self.size(self.keys)

    def size(self, axes: tuple[str, ...]) -> int:
        """Return over how many devices these axes divide."""
        return device_count(self.mesh, axes)


def divide(call: Call, backend: str = "auto") -> Division | None:
    """Return how a call is divided over the mesh in use, or None where it is not divided.

    It is not where one device has all of it, or where the code around divides it already.

    Raises:
        IndivisibleError: if an axis of the mesh does not divide batch, heads or tokens.
        ValueError: if a strategy cannot run the call.
    """
    mesh = mesh_of(call.query, call.key, call.value)
    few = few_queries(call)
    _check_order(call, mesh, few)
    split = [mesh_axes(name, mesh) for name in ("batch", "heads", "tokens")]
    if 0 in call.shape or not any(split):
        return None
    division = _divided(call, mesh, few)
    if not division.keys:
        return division
    if not division.queries:
        reason = "the queries are few: each device attends to its keys"
        return replace(division, strategy="merge", reason=reason)
    return _with_strategy(division, call, backend)


def _check_order(call: Call, mesh: Any, few: bool) -> None:
    if in_use().order != "zigzag":
        return
    # Of few queries, as in decoding, each device has all.
    if few or not mesh_axes("tokens", mesh):
        _, _, t, s = call.shape
        raise ValueError(
            f"tokens in zigzag order are those of a sequence that a mesh splits; got t={t}, s={s}"
            f" and a mesh with axes {mesh.axis_names}. Pass"
            ' order="natural", or set a mesh with an axis for tokens'
        )


def _divided(call: Call, mesh: Any, few: bool) -> Division:
    """Return which mesh axes divide rows, heads and tokens, before a strategy is chosen."""
    b, n, t, s = call.shape
    k = call.key.shape[2]
    batch = _split(mesh, "batch", "rows", b)
    tokens = mesh_axes("tokens", mesh, batch)
    taken = (*batch, *tokens)
    heads = _split(mesh, "heads", "query heads", n, taken)
    # The least number of copies that the devices divide.
    devices = device_count(mesh, heads)
    copies = lcm(k, devices) // k
    division = Division(mesh, batch, heads, queries=(), keys=(), copies=copies)
    if not few:
        queries = _split(mesh, "tokens", "query tokens", t, batch)
        division = replace(division, queries=queries)
    # A cache whose capacity does not divide is on every device.
    apart = device_count(mesh, tokens)
    if few and s % apart:
        return division
    keys = _split(mesh, "tokens", "key tokens", s, batch)
    return replace(division, keys=keys)


def _split(
    mesh: Any, name: str, what: str, size: int, taken: tuple[str, ...] = ()
) -> tuple[str, ...]:
    axes = mesh_axes(name, mesh, taken)
    devices = device_count(mesh, axes)
    # One row, head or token is on every device.
    if size == 1 or devices == 1:
        return ()
    if size % devices:
        remedies = {
            "rows": f"Pass a batch of a multiple of {devices} rows",
            "query heads": "Use fewer devices for them",
        }
        missing = -size % devices
        padding = f"Add {missing} tokens of padding and hide them with Mask.lengths"
        remedy = remedies.get(what, padding)
        split = [f"{axis}={mesh.shape[axis]}" for axis in axes]
        sizes = " x ".join(split)
        whole = f"flax_attn.sharding.rules({name}=None)"
        raise IndivisibleError(
            f"the mesh splits {name} over {sizes}, which must divide the {size} {what}. {remedy},"
            f" or leave them whole: with {whole}"
        )
    return axes


def _with_strategy(division: Division, call: Call, backend: str) -> Division:
    options = in_use()
    devices = division.size(division.keys)
    # The heads of one device.
    over = division.size(division.heads)
    n = call.query.shape[2] // over
    k = call.key.shape[2] * division.copies // over
    strategy, reason = options.strategy, "asked for"
    if strategy == "auto":
        strategy, reason = _chosen(call, backend, devices, n, k)
    within = 1
    if strategy.startswith("ulysses"):
        within = devices if strategy == "ulysses" else gcd(devices, n, k)
        if n % within or within == 1:
            raise ValueError(
                f"Ulysses divides the heads among the devices that share the tokens; got {n} query"
                f" and {k} key/value heads a device for {devices} devices. Use"
                ' strategy="ring", or fewer devices for tokens'
            )
    if strategy in _IN_PIECES and not _in_parts(backend):
        raise Unsupported(
            f"backend {backend!r} does not support this call: strategy {strategy!r} attends to"
            f' parts of the keys, which {backend} does not. Pass backend="auto", or'
            ' strategy="all_gather"'
        )
    return replace(
        division,
        strategy=strategy,
        reason=reason,
        within=within,
        balanced=_balanced(call, options, strategy, devices),
        ordered=options.order == "zigzag",
    )


def _in_parts(backend: str) -> bool:
    return backend == "auto" or load(backend).in_parts


def _chosen(call: Call, backend: str, devices: int, n: int, k: int) -> tuple[str, str]:
    divided = f"{devices} devices divide the {n} heads"
    if not _in_parts(backend):
        if n % devices == 0:
            return "ulysses", f"{backend} needs whole sequences, and {divided}"
        return "all_gather", f"{backend} needs all keys"
    shown = _shown_keys(call)
    share = call.query.shape[1] // devices
    # A window no wider than a piece reaches into one neighbour: nothing sends less.
    if shown is not None and shown <= share + 1:
        reason = f"so only pieces of neighbours of {share} tokens are sent"
        return "ring", f"the mask shows {shown} keys, {reason}"
    if n % devices == 0:
        return "ulysses", f"{divided}, so that each runs the backend of one device"
    within = gcd(devices, n, k)
    if within > 1:
        return "ulysses+ring", f"{within} neighbours divide the {n} query and {k} key/value heads"
    return "ring", f"{devices} devices and {k} key/value heads have no common divisor"


def _shown_keys(call: Call) -> int | None:
    """Return how many keys a window shows to a query, None where it is open on a side."""
    (low, high), _ = call.mask.split_band()
    if low is None or high is None:
        return None
    return high - low + 1


def _balanced(call: Call, options: ContextOptions, strategy: str, devices: int) -> bool:
    _, _, t, s = call.shape
    # With Ulysses each device has all tokens of its heads, and the same work as it is.
    asked = options.balance == "zigzag" and strategy != "ulysses"
    if options.order == "zigzag" or asked:
        if t != s:
            raise ValueError(
                f"the zigzag order is that of one sequence; got t={t}, s={s}. Pass balance='none'"
            )
        check_pieces(t, devices)
        return True
    if options.balance != "auto" or strategy == "ulysses":
        return False
    # Of a window every device has the same work as it is.
    (low, high), _ = call.mask.split_band()
    causal = high is not None and low is None
    return causal and t == s and t % (2 * devices) == 0
