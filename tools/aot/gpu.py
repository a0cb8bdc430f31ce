"""What is compiled for H200."""

from collections.abc import Iterator

from flax_attn.aot import gpu
from flax_attn.backends.chips import CHIPS
from flax_attn.bench.calls import MODEL_CALLS
from tools.aot.devices import AbsentDevices

CALLS = MODEL_CALLS
KERNELS = ("decode", "reference", "cudnn", "blocked", "tokamax", "tokamax triton")
QUICK_CALLS = tuple(call for call in MODEL_CALLS if call.name.startswith(("BERT", "ViT")))
QUICK_KERNELS = ("cudnn", "blocked", "tokamax")


def targets() -> Iterator[AbsentDevices]:
    """Yield eight H200 that share a host; compile for them before the next is asked for.

    Raises:
        ImportError: if a package or a C compiler is not installed.
    """
    # JAX asks the devices for their capability while it compiles: so this stays open.
    with gpu.described() as devices:
        yield AbsentDevices("H200", devices, CHIPS["h200"].memory)
