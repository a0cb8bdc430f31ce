"""Options of attention over divided tokens: the strategy, the balance, the order of the tokens."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import jax

from attn_spec.checks import check_choice

STRATEGIES = ("auto", "all_gather", "ulysses", "ring", "ulysses+ring")
BALANCES = ("auto", "none", "zigzag")
ORDERS = ("natural", "zigzag")


@dataclass(frozen=True)
class ContextOptions:
    """How attention is computed where tokens are divided over devices; see `context_parallel`."""

    strategy: str = "auto"
    balance: str = "auto"
    order: str = "natural"


_in_use = jax.make_user_context(None)  # part of the key of every compiled function


@contextmanager
def context_parallel(
    strategy: str | None = None, balance: str | None = None, order: str | None = None
) -> Iterator[ContextOptions]:
    """Set how attention over divided tokens is computed inside a `with` statement.

    Args:
        strategy: `"all_gather"` brings all keys to every device. `"ulysses"` divides the heads
            instead of the tokens while attention is computed. `"ring"` passes the keys from device
            to device: memory does not grow with the number of devices. `"ulysses+ring"` divides the
            heads among neighbours and passes keys between groups of them. `"auto"` chooses one that
            fits the call, which `explain` shows.
        balance: `"zigzag"` gives each device an early and a late piece of a causal sequence, so
            that all have the same work. `"none"` leaves the tokens where they are. `"auto"`
            balances causal attention.
        order: order of the tokens that arrive. `"zigzag"` says that `zigzag` put them in that order
            already: then attention need not move them. `next_token_loss` and `train_step` take a
            batch in its own order, and reorder it themselves, once for all layers.

    None leaves an option as it was. Functions that were compiled outside are compiled again inside.

    Raises:
        ValueError: if an option is unknown, or if `order="zigzag"` meets `balance="none"`.

    Example:
        >>> with context_parallel(strategy="ring") as options:
        ...     options
        ContextOptions(strategy='ring', balance='auto', order='natural')

    References:
        Liu et al. 2023, ring attention (arXiv:2310.01889);
        Jacobs et al. 2023, Ulysses (arXiv:2309.14509);
        Fang and Zhao 2024, both together (arXiv:2405.07719);
        Brandon et al. 2023, balance (arXiv:2311.09431).
    """
    given = {"strategy": strategy, "balance": balance, "order": order}
    changes = {name: value for name, value in given.items() if value is not None}
    # Those around stay in use where none is given.
    around = in_use()
    options = replace(around, **changes)
    check_choice("strategy", options.strategy, STRATEGIES)
    check_choice("balance", options.balance, BALANCES)
    check_choice("order", options.order, ORDERS)
    if options.order == "zigzag" and options.balance == "none":
        raise ValueError(
            'order="zigzag" is balanced; got balance="none". Pass balance="auto", or'
            ' order="natural"'
        )
    with _in_use(options):
        yield options


def in_use() -> ContextOptions:
    """Return the options in use."""
    return _in_use.value or ContextOptions()
