"""The table of backends.

A new one is a module, or a folder, beside this file and a line in the table.
"""

from importlib import import_module

from attn_spec.checks import DTYPES, check_choice
from flax_attn.backends.backend import Backend
from flax_attn.backends.call import OPTIONS

# In order of preference: of those that prefer the call and do not refuse it "auto" takes the first
# on a CPU, and the first whose predicted time is about the least elsewhere.
BACKENDS = (
    "native",
    "decode",
    "reference",
    "cudnn",
    "splash",
    "fused",
    "blocked",
    "tokamax",
)


def check_backend(backend: str) -> None:
    """Raise unless `backend` is `"auto"` or the name of one."""
    check_choice("backend", backend, ("auto", *BACKENDS))


def load(name: str) -> Backend:
    """Return a backend by name; its module is imported when it is first needed.

    Example:
        >>> load("splash").platforms
        ('tpu',)
    """
    return import_module(f"flax_attn.backends.{name}").BACKEND


_SHOWN = {"cpu": "CPU", "gpu": "GPU", "tpu": "TPU"}


def markdown_table() -> str:
    """Return what each backend supports as Markdown, for the documentation.

    Example:
        >>> print(markdown_table().splitlines()[3])
        | GPU | - | yes | yes | yes | - | yes | yes | yes |
    """
    backends = [load(name) for name in BACKENDS]
    features = [_supported(backend) for backend in backends]
    lines = [["", *(f"`{backend.name}`" for backend in backends)], ["---"] * (len(backends) + 1)]
    for feature in features[0]:
        marks = ["yes" if supported[feature] else "-" for supported in features]
        lines.append([feature, *marks])
    table = (f"| {' | '.join(line)} |".replace("|  |", "| |") for line in lines)
    return "\n".join([*table, "", *map(_described, backends)])


def _supported(backend: Backend) -> dict[str, bool]:
    """Return the platforms, dtypes and options, and whether a backend supports each."""
    found = {}
    for platform, shown in _SHOWN.items():
        found[shown] = backend.platforms is None or platform in backend.platforms
    for dtype in DTYPES:
        found[dtype] = dtype in backend.dtypes
    for option in OPTIONS:
        found[f"`{option}`"] = option in backend.honours
    return found


def _described(backend: Backend) -> str:
    """Return what a table of features cannot hold, as an item of a list."""
    about = import_module(type(backend).__module__).__doc__ or ""
    summary = about.partition("\n")[0].rstrip(".")
    lines = [
        f"- **`{backend.name}`** ({backend.source}): {summary}",
        f"  - masks that stay structure: {backend.structure}",
        f"  - NaN and infinity: {backend.nonfinite}",
    ]
    if backend.limits:
        lines.append(f"  - also refused: {backend.limits}")
    return "\n".join(lines)
