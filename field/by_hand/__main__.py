"""Judge ports without the harness: `python -m field.by_hand`.

Options: `[--only PART] [--resume] [--widened]`. See `--help`.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import math
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from field.by_hand import lines, verdict, widened

RESULTS = Path(__file__).with_name("results")  # a file for each library
PACKAGES = ("jax", "flax", "torch", "numpy")
LIMIT = 240  # seconds a port may take


def records() -> dict[str, dict[str, Any]]:
    """Return what was measured before, by port."""
    return {row["port"]: row for row in lines.read(RESULTS)}


def measured(make: Callable[[], Any]) -> dict[str, Any]:
    """Return what a port measures, or why it cannot be compared."""
    from field.by_hand import both
    from field.by_hand.transformers_models import OtherParametersError

    try:
        return {"measures": [_rounded(measure) for measure in both.measures(make())]}
    except OtherParametersError as error:
        return {"other parameters": str(error)[:300]}
    except both.JaxError as error:
        return {"Flax raises": str(error).strip()[:300]}
    except Exception as error:
        if os.environ.get("FIELD_RAISE"):
            raise
        return {"does not run": f"{type(error).__name__}: {str(error).strip()[:300]}"}


def _rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _rounded(part) for key, part in value.items()}
    return (
        value if isinstance(value, str) else float(f"{value:.3g}") if math.isfinite(value) else None
    )


def _late(*_: Any) -> None:
    raise TimeoutError(f"no result within {LIMIT} s")


def main() -> None:
    """Measure what is asked for, and keep what was measured of the rest."""
    parser = argparse.ArgumentParser(
        prog="python -m field.by_hand", description="Judge ports without the harness."
    )
    parser.add_argument(
        "--only", nargs="+", default=[""], metavar="PART", help="ports that have this in their name"
    )
    parser.add_argument("--resume", action="store_true", help="leave out ports that were measured")
    parser.add_argument(
        "--widened",
        action="store_true",
        help="measure again what is not equal, every float32 written as float64",
    )
    arguments = parser.parse_args()
    if arguments.widened:
        widened.widen()
    ports, rows = _prepared(), records()
    names = [name for name in ports if any(part in name for part in arguments.only)]
    if arguments.widened:
        names = [name for name in names if verdict.differs(rows[name])]
    names = [
        name
        for name in names
        if not (arguments.resume and _done(rows.get(name), arguments.widened))
    ]
    signal.signal(signal.SIGALRM, _late)
    for name in names:
        start = time.monotonic()
        signal.alarm(LIMIT)
        found = measured(ports[name])
        signal.alarm(0)
        if arguments.widened:
            rows[name] |= {"widened": found.get("measures")}
        else:
            rows[name] = {"port": name, "versions": _versions(name), **found}
        lines.write(RESULTS, name.partition("/")[0], [rows[port] for port in sorted(rows)])
        print(
            f"{name:60} {verdict.verdict(rows[name]):24} {time.monotonic() - start:5.1f} s",
            flush=True,
        )
    ours = [name for name in sys.modules if name.partition(".")[0] in ("flax_attn", "torch_ref")]
    if ours:
        raise SystemExit(f"{ours[0]} was imported: what is measured here must not rest on it")


def _prepared() -> dict[str, Callable[[], Any]]:
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    # Each program runs once: optimising it takes longer than running it.
    os.environ.setdefault(
        "XLA_FLAGS", "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
    )
    import jax
    import torch

    jax.config.update("jax_enable_x64", True)
    torch.set_num_threads(1)
    # For tables that are made with a module, and for numbers while it runs.
    torch.set_default_dtype(torch.float64)
    from field.by_hand import cases

    return cases.all_cases()


def _done(row: Mapping[str, Any] | None, wide: bool) -> bool:
    return row is not None and (not wide or "widened" in row)


def _versions(name: str) -> dict[str, str]:
    library = {"haiku": "dm-haiku"}.get(name.partition("/")[0], name.partition("/")[0])
    return {
        package: importlib.metadata.version(package)
        for package in dict.fromkeys((library, *PACKAGES))
    }


if __name__ == "__main__":
    main()
