"""GPUs described by files, and what compiling their kernels takes without a GPU or a driver."""

import ctypes
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest import mock

import jax
from jax._src.cudnn import fused_attention_stablehlo
from jax.experimental import topologies
from jax.extend import backend

from flax_attn import aot

_DATA = files(aot)
GPUS = ("a100", "h200", "b200")
# Else XLA leaves cuDNN's calls unchecked, and a refused one "compiles".
_FLAG = "--xla_gpu_cudnn_deviceless_compilation_mode=CUDNN_DEVICELESS_COMPILATION_AUTO"
_PACKAGES = ("jax_cuda13_plugin", "tokamax", "nvidia.cudnn", "nvidia.cu13")
_NEEDED = (
    "compiling for GPUs needs {missing}, not a GPU, and Python 3.12 or newer: pip install"
    " 'flax-attn[aot-gpu]'"
)


@contextmanager
def described(count: int = 8, chip: str = "h200") -> Iterator[Sequence[Any]]:
    """Return GPUs that share a host, eight at most, to be compiled for inside the `with` statement.

    Args:
        count: number of GPUs.
        chip: name of the chip, of `GPUS`.

    Raises:
        ImportError: if a package or a C compiler is not installed.
    """
    _check_installed()
    _check_calls_of_cudnn()
    jax.config.update("jax_platforms", "cpu")
    load_driver()
    description = _DATA.joinpath(f"{chip}.txtpb").read_text()
    shape = f"1x1x{count}"
    topology = topologies.get_topology_desc(
        platform="cuda", target_config=description, topology=shape
    )
    devices = topology.devices
    with pretend(devices[0], _capability(description)):  # in all threads
        yield devices


def _capability(description: str) -> float:
    found = re.search(r"cuda_compute_capability \{ major: (\d+)(?: minor: (\d+))?", description)
    assert found is not None, "every description has a compute capability"
    return float(f"{found[1]}.{found[2] or 0}")


def _check_calls_of_cudnn() -> None:
    # XLA reads its flags once, when the first backend starts.
    flags = os.environ.get("XLA_FLAGS", "")
    os.environ["XLA_FLAGS"] = f"{flags} {_FLAG}".strip()


def _check_installed() -> None:
    missing = [name for name in _PACKAGES if not _installed(name)]
    if missing:
        raise ImportError(_NEEDED.format(missing=", ".join(missing)))


def _installed(name: str) -> bool:
    with suppress(ModuleNotFoundError):  # of a parent
        return find_spec(name) is not None
    return False


def load_driver() -> None:
    """Load the driver's library, or where there is none one that has its functions and no GPU.

    Raises:
        ImportError: if that needs a C compiler and there is none.
    """
    with suppress(OSError):
        ctypes.CDLL("libcuda.so.1", mode=ctypes.RTLD_GLOBAL)
        return
    with tempfile.TemporaryDirectory() as folder:
        library = _compile_driver(Path(folder))
        # XLA looks the functions up among all that is loaded.
        ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)


def _compile_driver(folder: Path) -> Path:
    library = folder / "libcuda.so.1"
    # From here and not from the package, which may lie in an archive that no compiler reads.
    source = folder / "libcuda.c"
    code = _DATA.joinpath("libcuda.c").read_text()
    source.write_text(code)
    options = ["-shared", "-fPIC", f"-Wl,-soname,{library.name}"]
    compiler = _compiler()
    command = [compiler, *options, "-o", str(library), str(source)]
    subprocess.run(command, check=True)
    return library


def _compiler() -> str:
    for name in (os.environ.get("CC", "cc"), "gcc", "clang"):
        if found := shutil.which(name):
            return found
    missing = "a C compiler (cc, gcc or clang, or the one that CC names)"
    raise ImportError(_NEEDED.format(missing=missing))


@contextmanager
def pretend(device: Any, capability: float = 9.0) -> Iterator[None]:
    """Give jax and tokamax the compute capability of the device compiled for, not of this one."""
    # Both read the capability of a device that is attached, which here is a processor.
    at_least = mock.patch.object(
        fused_attention_stablehlo,
        "check_compute_capability",
        lambda least: float(least) <= capability,
    )
    with at_least, mock.patch.object(backend, "get_default_device", return_value=device):
        yield
