"""`flax-attn compare --watch`: compare again whenever one of the files changes."""

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path

from flax_attn.cli.guard import BAD_USAGE
from flax_attn.cli.specs import sha256
from flax_attn.convert.replacing import unfinished

# Seconds between two looks at the files.
POLL = 0.2


def at_changes(arguments: Sequence[str], files: Sequence[str]) -> int:
    """Compare, and again whenever a file of the comparison changes, until the process is ended.

    Each comparison has a process of its own, so that nothing of the last one is left. It imports
    what it needs while the files are edited, and reads them when one has changed.

    Args:
        arguments: arguments of the command.
        files: files that are watched where a comparison ends before it says which it read.

    Returns:
        The exit code where there is nothing to wait for: of bad usage, or without a file.
    """
    known: dict[str, str] = {}
    # It goes where the process is interrupted, too.
    with unfinished(Path(tempfile.mkdtemp())) as folder:
        read = folder / "files.json"
        while True:
            worker = _standby([*arguments, "--standby", str(read)])
            _wait_for_change(known)
            known = _hashes(known or dict.fromkeys(files, ""))
            read.unlink(missing_ok=True)
            # It may have ended already, over bad usage.
            worker.communicate("\n")
            if read.exists():
                known = json.loads(read.read_text())
            if worker.returncode == BAD_USAGE or not known:
                return worker.returncode
            print(f"flax-attn: watching {', '.join(known)}", file=sys.stderr, flush=True)


def stand_by() -> bool:
    """Warm up, and return whether a comparison is asked for by a line of input."""
    # An export is compared with where it is not.
    if find_spec("torch"):
        _compare_small_layers()
    return bool(sys.stdin.readline())


def _compare_small_layers() -> None:
    """Import all that a comparison needs, and compile what every one compiles."""
    import torch
    from flax import nnx

    from flax_attn.parity import compare
    from flax_attn.parity.cpu import on_cpu

    with on_cpu():
        compare(nnx.Linear(2, 2, rngs=nnx.Rngs(0)), torch.nn.Linear(2, 2), [(2, 2)])


def _standby(arguments: Sequence[str]) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "flax_attn", *arguments]
    return subprocess.Popen(command, stdin=subprocess.PIPE, text=True)


def _wait_for_change(known: Mapping[str, str]) -> None:
    """Return when a file differs from what was read; at once where nothing was."""
    found: Mapping[str, str] = {}
    # Until it stays as it is: an editor writes a file in parts.
    while known and (found in ({}, known) or found != _hashes(known)):
        found = _hashes(known)
        time.sleep(POLL)


def _hashes(known: Mapping[str, str]) -> dict[str, str]:
    return {name: _hash(name, sha) for name, sha in known.items()}


def _hash(name: str, before: str) -> str:
    try:
        return sha256(Path(name))
    # An editor may be about to put another one in its place.
    except OSError:
        return before
