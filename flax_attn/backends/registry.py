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
    lines = [["", *(f"`{name}`" for name in BACKENDS)], ["---"] * (len(backends) + 1)]
    features = [_supported(backend) for backend in backends]
    lines += [[feature, *_marks(features, feature)] for feature in features[0]]
    table = [f"| {' | '.join(line)} |".replace("|  |", "| |") for line in lines]
    return "\n".join([*table, "", *map(_described, backends)])


def _marks(features: list[dict[str, bool]], feature: str) -> list[str]:
    return ["yes" if supported[feature] else "-" for supported in features]


def _supported(backend: Backend) -> dict[str, bool]:
    """Return the platforms, dtypes and options, and whether a backend supports each."""
    platforms = tuple(_SHOWN) if backend.platforms is None else backend.platforms
    found = {_SHOWN[platform]: platform in platforms for platform in _SHOWN}
    found |= {dtype: dtype in backend.dtypes for dtype in DTYPES}
    return found | {f"`{option}`": option in backend.honours for option in OPTIONS}


def _described(backend: Backend) -> str:
    """Return what a table of features cannot hold, as an item of a list."""
    lines = [
        f"- **`{backend.name}`** ({backend.source}): {_summary(backend)}",
        f"  - masks that stay structure: {backend.structure}",
        f"  - NaN and infinity: {backend.nonfinite}",
    ]
    if backend.limits:
        lines.append(f"  - also refused: {backend.limits}")
    return "\n".join(lines)


def _summary(backend: Backend) -> str:
    about = import_module(type(backend).__module__).__doc__ or ""
    return about.partition("\n")[0].rstrip(".")
