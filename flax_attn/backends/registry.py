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


def markdown_table() -> str:
    """Return the backends as a table in Markdown, for the documentation.

    Example:
        >>> print(markdown_table().splitlines()[0])
        | backend | runs on | what it is | source | masks kept as structure | numbers that are not \
finite | refuses |
    """
    heading = (
        "backend",
        "runs on",
        "what it is",
        "source",
        "masks kept as structure",
        "numbers that are not finite",
        "refuses",
    )
    rows = [heading, ("---",) * len(heading), *(_row(load(name)) for name in BACKENDS)]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _row(backend: Backend) -> tuple[str, ...]:
    where = (
        "everywhere"
        if backend.platforms is None
        else ", ".join(p.upper() for p in backend.platforms)
    )
    summary = (import_module(type(backend).__module__).__doc__ or "").partition("\n")[0].rstrip(".")
    dtypes = [dtype for dtype in DTYPES if dtype not in backend.dtypes]
    options = [f"`{option}`" for option in OPTIONS if option not in backend.honours]
    others = [backend.limits] if backend.limits else []
    limits = ", ".join([*dtypes, *options, *others]) or "nothing"
    return (
        f"`{backend.name}`",
        where,
        summary,
        backend.source,
        backend.structure,
        backend.nonfinite,
        limits,
    )
