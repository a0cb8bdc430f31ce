"""Attention in tiles, in plain JAX on any device.

Memory is linear in t, hidden tiles are skipped, and the backward pass is its own.

Forward, a block of queries over the chunks of keys that it sees, with a running maximum m, sum l
and output o:

    m' = max(m, max x);  e = exp(x - m')
    l' = l exp(m - m') + sum e;  o' = o exp(m - m') + e @ value

Backward, from the output and the log-sum-exp, kept as its two parts m and l so that a large m
cannot absorb l:

    w = exp(x - m) / l;  dx = w * (do @ value^T - delta);  delta = sum(do * o)

`tiling` divides `(t, s)` into tiles, `tiles` computes the scores of one, `passes` goes over the
tiles of one head, forward and backward, and `heads` over all heads.

References:
    Rabe and Staats 2021, "Self-attention Does Not Need O(n^2) Memory" (arXiv:2112.05682);
    Dao 2023, FlashAttention-2 (arXiv:2307.08691).
"""

import jax.numpy as jnp
from jaxtyping import Array

from attn_spec.checks import DTYPES
from flax_attn.backends.backend import Backend
from flax_attn.backends.blocked.batched import (
    attend_batched,
    backward_batched,
    batched_memory,
    batched_work,
    forward_batched,
)
from flax_attn.backends.blocked.heads import (
    attend_heads,
    backward_heads,
    forward_heads,
    heads_memory,
)
from flax_attn.backends.blocked.tiling import Tiling, make_tiling
from flax_attn.backends.call import ARRAY_SCALE, Call, Floats
from flax_attn.backends.softmax import Softmax
from flax_attn.backends.work import KernelWork
from flax_attn.functional.dtypes import accumulation_dtype


class Blocked(Backend):
    """Attention in tiles.

    Attributes:
        block: number of queries, and of keys, taken at once on CPU, where smaller products run on
            one core only.
        edge: number of queries that share an edge tile; with fewer, less is computed in vain; with
            more, at a better rate.
    """

    name = "blocked"
    dtypes = DTYPES
    honours = ("bias", "soft_cap", "sinks", "dropout", "precision", "score", ARRAY_SCALE)
    in_parts = True
    nonfinite = "clean copies of the head at hand"
    structure = (
        "causal, windows, lengths, prefix, segments, functions with a summary: hidden tiles are"
        " skipped"
    )
    block = 1024
    edge = 128

    def preferred(self, call: Call) -> bool:
        return True

    def attend(self, call: Call) -> Array:
        """Return `(b, t, n, v)`, once differentiable in reverse mode, then in forward mode."""
        if 0 in call.shape:
            return jnp.zeros((*call.query.shape[:3], call.value.shape[3]), call.query.dtype)
        if call.platform != "cpu":
            return attend_batched(call)
        return jnp.asarray(attend_heads(self.tiling(call), call), call.query.dtype)

    def forward(self, call: Call) -> Softmax:
        """Return the output `(b, t, n, v)`, and the softmax's maxima and sums `(b, n, t, 1)`."""
        if call.platform != "cpu":
            return forward_batched(call, accumulation_dtype(call.query.dtype))
        return forward_heads(self.tiling(call), call)

    def backward(self, call: Call, saved: Softmax, cotangent: Array) -> Floats:
        """Return the gradients, where `saved` is over these keys and maybe others."""
        if call.platform != "cpu":
            return backward_batched(call, saved, cotangent)
        return backward_heads(self.tiling(call), call, saved, cotangent)

    def memory(self, call: Call) -> int:
        """Return the bytes of tiles of scores, of copies, of maxima and sums.

        On CPU of three tiles and one padded head; elsewhere of a tile, its weights and all keys.
        """
        on_cpu = call.platform == "cpu"
        return heads_memory(self.tiling(call), call) if on_cpu else batched_memory(call)

    def work(self, call: Call) -> KernelWork:
        """Return the work of the tiles of all heads."""
        return batched_work(call)

    def tiling(self, call: Call) -> Tiling:
        """Return the tiling, which follows the band of the mask."""
        _, _, t, s = call.shape
        (low, high), _ = call.mask.split_band()
        return make_tiling(t, s, low, high, self.block, min(self.edge, self.block))


BACKEND = Blocked()
