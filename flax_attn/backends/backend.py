"""What a backend is: a kernel that computes attention calls, and says which ones it takes."""

from jaxtyping import Array

from flax_attn.backends.call import Call, Floats
from flax_attn.backends.softmax import Softmax
from flax_attn.backends.work import KernelWork


class Backend:
    """One way to compute an attention call.

    Attributes:
        name: name for `dot_product_attention(backend=...)`; the name of its module.
        platforms: platforms it runs on, of `"cpu"`, `"gpu"` and `"tpu"`; None is everywhere.
        dtypes: dtypes that query, key and value may have, of `attn_spec.checks.DTYPES`.
        honours: options that a call may have, of `flax_attn.backends.call.OPTIONS`.
        few: number of queries up to which it reads keys once for all of them; 0 is none.
        typed: whether its results are typed by the axes of a mesh that they vary over, as
            `jax.shard_map` asks unless it is called with `check_vma=False`.
        every_mode: whether it is differentiable in forward mode, too; what is not gets it from the
            formula, by `flax_attn.backends.derivatives`.
        in_parts: whether it computes the softmax over a part of the keys, with `forward` and
            `backward`.
        any_sinks: whether it takes sinks that are NaN or infinity, for which all others get a copy
            of the query.
        nonfinite: how numbers that are not finite only reach the rows that see them, for
            the documentation.
        source: source of the kernel, for the documentation.
        structure: masks that it takes without an array over all queries and keys, for the
            documentation.
        limits: calls it refuses, apart from other dtypes and options, for the documentation.
    """

    name: str
    platforms: tuple[str, ...] | None = None
    dtypes: tuple[str, ...] = ()
    honours: tuple[str, ...] = ()
    few: int = 0
    typed: bool = False
    every_mode: bool = False
    in_parts: bool = False
    any_sinks: bool = False
    nonfinite: str = ""
    source: str = "flax_attn"
    structure: str = "none"
    limits: str = ""

    def preferred(self, call: Call) -> bool:
        """Return whether `"auto"` may take this backend for a call that it does not refuse."""
        return False

    def refuse(self, call: Call) -> str | None:
        """Return why the backend cannot run the call, or None.

        The platform, the dtype and the options are checked before.
        """
        return None

    def attend(self, call: Call) -> Array:
        """Return the output `(b, t, n, v)` of a call that is not refused."""
        raise NotImplementedError

    def forward(self, call: Call) -> Softmax:
        """Return the softmax of a call over these keys, which may be a part of all."""
        raise NotImplementedError

    def backward(self, call: Call, saved: Softmax, cotangent: Array) -> Floats:
        """Return the gradients, where `saved` is over these keys and maybe others."""
        raise NotImplementedError

    def memory(self, call: Call) -> int:
        """Return an estimate of the bytes of temporaries of one forward call."""
        raise NotImplementedError

    def work(self, call: Call) -> KernelWork:
        """Return what one forward call asks of a chip, an accelerator."""
        raise NotImplementedError
