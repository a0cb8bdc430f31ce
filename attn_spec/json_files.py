"""JSON objects in files that may come from anywhere."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

# The largest file that is read, in bytes: as large as a header of safetensors may be.
LIMIT = 100 * 10**6


def read_object(path: Path, limit: int = LIMIT) -> dict[str, Any]:
    """Return the JSON object in a file.

    Args:
        path: path of the file.
        limit: the largest size in bytes that is read.

    Raises:
        ValueError: if the file is larger, is not JSON in UTF-8, or holds something else than an
            object, or an object that has a name twice.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     file = Path(folder, "config.json")
        ...     file.write_text('{"n_embd": 768}'), read_object(file)
        (15, {'n_embd': 768})
    """
    size = path.stat().st_size
    if size > limit:
        raise ValueError(f"{path} must have up to {limit} bytes; it has {size}. Copy it once more")
    try:
        text = path.read_text(encoding="utf-8")
        values = json.loads(text, object_pairs_hook=distinct)
    except RecursionError as error:
        reason = "it is nested too deeply"
        raise ValueError(f"{path} is not JSON: {reason}. Copy it once more") from error
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}. Copy it once more") from error
    if not isinstance(values, dict):
        kind = type(values).__name__
        raise ValueError(
            f"{path} must hold an object, fields by name; got {kind}. Copy it once more"
        )
    return values


def distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return the pairs of a JSON object as a dictionary; raise if a name occurs twice.

    Use it as `object_pairs_hook`.
    """
    values = dict(pairs)
    if len(values) < len(pairs):
        counts = Counter(name for name, _ in pairs)
        twice = counts.most_common(1)[0][0]
        raise ValueError(f"the name {twice!r} is there twice")
    return values
