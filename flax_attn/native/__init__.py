"""The kernels for CPUs in C++: an optional library, built at install where there is a compiler.

It is called by XLA itself, through `jax.ffi`; the sources lie in the folder `source`.
"""

from __future__ import annotations

import ctypes
import warnings
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import jax
import jax.export

_AGAIN = (
    "install one (g++ 12 or newer), and then flax_attn again with pip install --force-reinstall"
    " --no-deps"
)
# What holds the package: site-packages, or the folder of a clone.
_FOLDER = Path(__file__).parents[2]
# What its functions take; all sums are in float32.
DTYPES = ("float32", "bfloat16", "float16")
# All of their arrays begin with a batch axis, by which XLA may split them over devices.
_ATTENTION = ("attention_forward", "attention_backward")
_FUNCTIONS = (*_ATTENTION, "matrix_product", "grouped_product", "quantized_product", "write_tokens")


@cache
def library() -> ctypes.CDLL | None:
    """Return the library, its functions made known to XLA, or None where there is none.

    `missing` says why: it was not built, or fails to load.
    """
    found = find_spec("flax_attn.native.library")
    if found is None or found.origin is None:
        return None
    try:
        loaded = ctypes.cdll.LoadLibrary(found.origin)
    # Calls then run in other backends.
    except OSError:
        warnings.warn(f"no native kernels: {missing()}", RuntimeWarning, stacklevel=2)
        return None
    for name in _FUNCTIONS:
        function = jax.ffi.pycapsule(getattr(loaded, name))
        jax.ffi.register_ffi_target(target(name), function, platform="cpu")
    for name in _ATTENTION:
        jax.ffi.register_ffi_target_as_batch_partitionable(target(name))
    loaded.level_name.restype = ctypes.c_char_p
    loaded.is_amd.restype = ctypes.c_bool
    return loaded


def missing() -> str:
    """Return why there is no library, and how to get it."""
    found = find_spec("flax_attn.native.library")
    if found is not None and found.origin is not None:
        reason = _load_error(found.origin)
        return f"its library fails to load: {reason}. Build it here with a C++ compiler: {_AGAIN}"
    # A library that was installed elsewhere is not found from there.
    if (_FOLDER / "pyproject.toml").exists():
        return (
            f"its library was not built in {_FOLDER}, from which Python imports flax_attn, as where"
            " it is started there: start it elsewhere, or build it there with pip install -e . and"
            " a C++ compiler (g++ 12 or newer)"
        )
    return (
        "its library was not built, which takes a C++ compiler when flax_attn is installed:"
        f" {_AGAIN}"
    )


def _load_error(path: str) -> str:
    try:
        ctypes.cdll.LoadLibrary(path)
    except OSError as error:
        return str(error)
    return "it loads now: start Python again"


def target(name: str) -> str:
    """Return the name of a function of the library in XLA and in exported programs.

    A function that takes other arrays or options, or computes another function of them, gets a new
    version, and the old one stays beside it.
    """
    return f"flax_attn.{name}.v1"


def export_checks() -> list[jax.export.DisabledSafetyCheck]:
    """Return the `disabled_checks` of `jax.export.export` for programs that call the CPU kernels.

    JAX exports calls of its own libraries alone unless others are named. Those of flax_attn keep
    their names and what they mean from version to version. Where a program is loaded, call this
    before it runs: it makes the kernels known.

    Example:
        >>> x = jax.ShapeDtypeStruct((1, 64, 2, 16), "float32")
        >>> from flax_attn import dot_product_attention
        >>> attend = jax.jit(lambda x: dot_product_attention(x, x, x))
        >>> exported = jax.export.export(attend, disabled_checks=export_checks())(x)
        >>> exported.out_avals
        (ShapedArray(float32[1,64,2,16]),)
    """
    library()
    return [jax.export.DisabledSafetyCheck.custom_call(target(name)) for name in _FUNCTIONS]


def levels() -> list[str]:
    """Return the instruction levels of this processor, fastest first; the first is the default."""
    loaded = library()
    names = []
    # The library returns null behind the last one.
    while loaded is not None:
        name = loaded.level_name(len(names))
        if name is None:
            break
        names.append(name.decode())
    return names


def is_amd() -> bool:
    """Return whether the processor is one of AMD's, as far as the library knows."""
    loaded = library()
    return loaded is not None and loaded.is_amd()


def choose_level(name: str) -> None:
    """Use an instruction level of `levels()` in all later calls, also those compiled before.

    Raises:
        ValueError: if the processor does not have it, or the library was not built.
    """
    loaded = library()
    if loaded is None or name not in levels():
        raise ValueError(
            f"instruction level must be one of {levels()} on this machine; got {name!r}"
        )
    loaded.choose_level(levels().index(name))
