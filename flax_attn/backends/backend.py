"""What a backend is: a kernel that computes attention calls, and says which ones it takes."""

from jaxtyping import Array

from flax_attn.backends.call import Call


class Backend:
    """One way to compute an attention call.

    Attributes:
        name: name for `dot_product_attention(backend=...)`; the name of its module.
        platforms: platforms it runs on, of `"cpu"`, `"gpu"` and `"tpu"`; None is everywhere.
        dtypes: dtypes that query, key and value may have, of `attn_spec.checks.DTYPES`.
        source: source of the kernel, for the documentation.
        structure: masks that it takes without an array over all queries and keys, for the
            documentation.
        limits: calls it refuses, apart from other dtypes, for the documentation.
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
        """Return why the backend cannot run the call, or None.

        The platform and the dtype are checked before.
        """
        return None

    def attend(self, call: Call) -> Array:
        """Return the output `(b, t, n, v)` of a call that is not refused."""
        raise NotImplementedError

    def memory(self, call: Call) -> int:
        """Return an estimate of the bytes of temporaries of one forward call."""
        raise NotImplementedError
