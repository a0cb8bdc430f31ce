"""Judge each port in its own process: `python -m field.judge [--only PART] [--resume]`.

See `--help`.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import json
import multiprocessing
import os
import pkgutil
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from field.by_hand import lines

RESULTS = Path(__file__).with_name("results")  # a file for each library
PRELOADED = [
    "jax",
    "torch",
    "transformers",
    "flax.linen",
    "flax.nnx",
    "flax_attn.parity",
    "field.judging",
]


def all_ports() -> dict[str, Any]:
    """Return every port by name.

    Raises:
        ValueError: if two have one name.
    """
    found: dict[str, Any] = {}
    for port in (port for module in _modules() for port in module.ports()):
        if port.name in found:
            raise ValueError(f"two ports are named {port.name}: rename one")
        found[port.name] = port
    return found


def _modules() -> list[Any]:
    from field import ports

    names = sorted(module.name for module in pkgutil.iter_modules(ports.__path__))
    return [
        importlib.import_module(f"field.ports.{name}") for name in names if not name.startswith("_")
    ]


def kept_results() -> dict[str, dict[str, Any]]:
    """Return the results of earlier runs by port."""
    return {row["port"]: row for row in lines.read(RESULTS)}


def chosen(names: Sequence[str], only: Sequence[str]) -> list[str]:
    """Return the names that contain one of the parts; all if there are none.

    Raises:
        ValueError: if none does.
    """
    found = [name for name in names if not only or any(part in name for part in only)]
    if not found:
        raise ValueError(
            f"no port has {' or '.join(only)} in its name; there are {', '.join(names)}"
        )
    return found


def judged(names: Sequence[str], limit: float) -> Iterator[tuple[dict[str, Any], float]]:
    """Judge ports one after another, each in a process of its own with a time limit in seconds.

    Yields:
        The result of each, and how many seconds it took.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)  # what takes seconds to import is imported once
    for name in names:
        with tempfile.NamedTemporaryFile(suffix=".json") as file:
            start = time.monotonic()
            process = context.Process(target=_judge, args=(name, file.name))
            process.start()
            process.join(limit)
            late = process.is_alive()
            process.kill()
            process.join()
            text = Path(file.name).read_text()
        died = (
            f"no result within {limit:.0f} s"
            if late
            else f"its process ended with {process.exitcode}"
        )
        row = json.loads(text) if text else {"verdict": "does not run", "reason": died}
        port = all_ports()[name]
        yield {"port": name, **_about(port), **row}, time.monotonic() - start


def _about(port: Any) -> dict[str, str]:
    try:
        version = importlib.metadata.version(port.package)
    except importlib.metadata.PackageNotFoundError:
        version = "not installed"
    return {
        "package": port.package,
        "version": version,
        "configuration": port.configuration,
        "twin": port.twin,
    }


def _judge(name: str, path: str) -> None:
    from field.judging import judge

    Path(path).write_text(json.dumps(judge(all_ports()[name])))


def main() -> None:
    """Judge what is asked for, and keep the results of the rest."""
    parser = argparse.ArgumentParser(
        prog="python -m field.judge", description="Judge the ports of field/ports."
    )
    parser.add_argument(
        "--only", nargs="+", default=[], metavar="PART", help="ports that have this in their name"
    )
    parser.add_argument("--resume", action="store_true", help="leave out ports that have a result")
    parser.add_argument("--list", action="store_true", help="print the names, and judge nothing")
    parser.add_argument("--limit", type=float, default=300, help="seconds a port may take (300)")
    arguments = parser.parse_args()
    ports = all_ports()
    rows = kept_results()
    names = chosen(list(ports), arguments.only)
    names = [name for name in names if not (arguments.resume and name in rows)]
    if arguments.list:
        print("\n".join(names))
        return
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    for row, seconds in judged(names, arguments.limit):
        rows[row["port"]] = row
        library = row["port"].partition("/")[0]
        lines.write(RESULTS, library, [rows[name] for name in ports if name in rows])
        reason = row.get("reason", "")[:100]
        print(f"{row['port']:55} {row['verdict']:26} {seconds:6.1f} s  {reason}", flush=True)


if __name__ == "__main__":
    main()
