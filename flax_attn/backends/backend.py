"""What a backend is: a kernel that computes attention calls, and says which ones it takes."""

from jaxtyping import Array

from flax_attn.backends.call import Call


class Backend:
    """One way to compute an attention call.

    Attributes:
        name: as passed to `dot_product_attention(backend=...)`; the name of its module.
        platforms: where it runs, of `"cpu"`, `"gpu"` and `"tpu"`; None is everywhere.
        dtypes: that query, key and value may have, of `flax_attn.functional.checks.DTYPES`.
        source: of the kernel, for the documentation.
        structure: the masks that it takes without an array over all queries and keys, for the
            documentation.
        limits: what it refuses beside other dtypes, for the documentation.
    """

    name: str
    platforms: tuple[str, ...] | None = None
    dtypes: tuple[str, ...] = ()
    source: str = "flax_attn"
    structure: str = "none"
    limits: str = ""

    def preferred(self, call: Call) -> bool:
        """Return whether `"auto"` takes this backend for a call that it does not refuse."""
        return False

    def refuse(self, call: Call) -> str | None:
        """Return why the backend cannot run the call, or None; the platform and the dtype are checked before."""
        return None

    def attend(self, call: Call) -> Array:
        """Return the output `(b, t, n, v)` of a call that is not refused."""
        raise NotImplementedError

    def memory(self, call: Call) -> int:
        """Return an estimate of the bytes of temporaries of one forward call."""
        raise NotImplementedError
