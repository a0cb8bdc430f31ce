"""What is compiled for H200."""

from collections.abc import Iterator

from flax_attn.aot import gpu
from flax_attn.aot.target import Target
from flax_attn.bench.calls import MODEL_CALLS

CALLS = MODEL_CALLS
KERNELS = ("decode", "reference", "cudnn", "blocked", "tokamax", "tokamax triton")
QUICK_CALLS = tuple(call for call in MODEL_CALLS if call.name.startswith(("BERT", "ViT")))
QUICK_KERNELS = ("cudnn", "blocked", "tokamax")


def targets() -> Iterator[Target]:
    """Return eight H200 that share a host; compile for them before the next is asked for.

    Raises:
        ImportError: if a package or a C compiler is not installed.
    """
    with gpu.described() as target:
        yield target
