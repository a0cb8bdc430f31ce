"""`flax-attn backends`: which backend would run a call, and why the others would not."""

import argparse
from typing import Any

from attn_spec.checks import DTYPES, check_choice
from flax_attn.cli import common

PLATFORMS = ("cpu", "gpu", "tpu")


def add(commands: Any) -> None:
    """Add the command."""
    backends = commands.add_parser(
        "backends",
        help=(
            "say which backend would run a call, why every other would not, and the memory each"
            " would take"
        ),
        description="Nothing is computed. The defaults are the attention of GPT-2 small.",
    )
    shape = {"type": common.sizes("b,t,n,h"), "metavar": "B,T,N,H"}
    backends.add_argument(
        "--shape", default=(1, 1024, 12, 64), help="of the query (default 1,1024,12,64)", **shape
    )
    backends.add_argument(
        "--keys",
        type=common.count,
        metavar="S",
        help="number of keys (default: as many as queries)",
    )
    backends.add_argument(
        "--kv-heads",
        type=common.count,
        help="number of key/value heads (default: as many as heads)",
    )
    backends.add_argument("--dtype", default="float32", help="of the inputs (default float32)")
    backends.add_argument(
        "--platform",
        metavar="CHIP",
        help="where it would run: cpu, gpu, tpu, or a chip such as h100 or v5e (default: here)",
    )
    backends.add_argument("--no-causal", action="store_true", help="let every query see every key")
    backends.add_argument("--window", type=common.count, help="causal, and so many keys in all")
    backends.add_argument(
        "--models",
        action="store_true",
        help="ask about the attention of well-known models (default: on all platforms)",
    )
    backends.add_argument(
        "--times",
        action="store_true",
        help=(
            "with --models: the time that is predicted for each backend (default: on"
            " A100, H200, B200, v5e and v6e)"
        ),
    )
    backends.set_defaults(
        run=_backends, of_one_call={name: backends.get_default(name) for name in _OF_ONE_CALL}
    )


_OF_ONE_CALL = ("shape", "keys", "kv_heads", "dtype", "no_causal", "window")


def _backends(options: argparse.Namespace) -> int:
    if options.models:
        return _models(options)
    if options.times:
        raise common.UsageError("--times is about the calls of models: give --models with it")
    import jax
    import jax.numpy as jnp

    from flax_attn.sharding.explain import explain

    b, t, n, h = options.shape
    s = options.keys or t
    with common.usage_errors(TypeError, ValueError):
        check_choice("--dtype", options.dtype, DTYPES)
        # For float64 the answer is the one with float64 switched on.
        with jax.enable_x64(options.dtype == "float64"):
            dtype = jnp.dtype(options.dtype)
            query = jax.ShapeDtypeStruct((b, t, n, h), dtype)
            key = jax.ShapeDtypeStruct((b, s, options.kv_heads or n, h), dtype)
            # The last query is the last token, as it is behind a cache.
            found = explain(query, key, key, mask=_mask(options, s - t), platform=options.platform)
    print(found)
    return 0


def _models(options: argparse.Namespace) -> int:
    from flax_attn.bench import calls, predicted

    # A default cannot be told from the same value given: it changes nothing either.
    given = [
        name for name, default in options.of_one_call.items() if getattr(options, name) != default
    ]
    if given:
        names = ", ".join(f"--{name.replace('_', '-')}" for name in given)
        raise common.UsageError(
            f"--models asks about calls of its own, and {names} about another: give one of them"
        )
    # No device is asked for: a table tells what the backends take there.
    everywhere = predicted.CHIPS if options.times else PLATFORMS
    make = predicted.table if options.times else calls.table
    for platform in [options.platform] if options.platform else everywhere:
        with common.usage_errors(ValueError):
            table = make(platform)
        common.console(150).print(table)
    return 0


def _mask(options: argparse.Namespace, offset: int) -> Any:
    from flax_attn.functional.masks import Mask

    if options.window:
        return Mask.sliding_window(options.window, offset)
    return None if options.no_causal else Mask.causal(offset)
