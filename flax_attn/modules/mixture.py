"""The mixture of experts: a feed-forward layer with a choice of experts for each token."""

from collections.abc import Callable

import jax
from flax import nnx
from jaxtyping import Array, Float

from attn_spec.checks import check_type
from attn_spec.mixture_checks import check_experts
from flax_attn.functional.parameter_sums import widened
from flax_attn.modules.experts import Experts
from flax_attn.modules.router import Router
from flax_attn.modules.work import Work, products, work_of_parts


class MixtureOfExperts(nnx.Module):
    """A feed-forward layer of experts; a router chooses some of them for each token.

        y = sum_j weights_j E_(experts_j)(x) + sigmoid(shared_gate(x)) shared(x)
        with weights, experts = router(x)

    It is a feed-forward part of a `TransformerBlock`. No token is dropped. For a loss that balances
    the load of the experts see `load_balancing_loss`, which takes what `router` returns.

    Args:
        router: router that chooses the experts and their weights.
        experts: the experts, as many as the router chooses from.
        shared: layer that computes every token, such as a `GatedFeedForward`; None is no such layer
            (DeepSeek-V3 has one).
        shared_gate: linear layer to one feature; its sigmoid is a factor on the shared output. None
            is no gate (Qwen2 has one).

    Shapes:
        `(..., d_model)`, kept.

    Raises:
        ValueError: if router and experts differ in number or width, the shared layer in width, or
            there is a gate of no shared layer.

    Example:
        >>> import jax.numpy as jnp
        >>> from flax_attn import Experts, GatedFeedForward, Router
        >>> rngs = nnx.Rngs(0)
        >>> router = Router(3, num_experts=4, top_k=2, rngs=rngs)
        >>> experts, shared = Experts(4, 3, 6, rngs=rngs), GatedFeedForward(3, 8, rngs=rngs)
        >>> MixtureOfExperts(router, experts, shared)(jnp.ones((5, 3))).shape
        (5, 3)

    References:
        Shazeer et al. 2017 (arXiv:1701.06538); Dai et al. 2024, shared experts (arXiv:2401.06066).
    """

    def __init__(
        self,
        router: Router,
        experts: Experts,
        shared: Callable[[Array], Array] | None = None,
        shared_gate: Callable[[Array], Array] | None = None,
    ):
        # Both by class: the loss reads what a `Router` returns, and a mesh splits `Experts`.
        check_type("router", router, Router, "router=Router(...)")
        check_type("experts", experts, Experts, "experts=Experts(...)")
        of_router = router.num_experts, router.d_model
        of_experts = experts.num_experts, experts.d_model
        of_shared = getattr(shared, "d_model", None)
        gate_alone = shared is None and shared_gate is not None
        check_experts(of_router, of_experts, of_shared, gate_alone)
        self.d_model = router.d_model
        self.router = router
        self.experts = experts
        self.shared = shared
        self.shared_gate = shared_gate

    def __call__(self, x: Float[Array, "*shape d"]) -> Float[Array, "*shape d"]:
        y = self.experts(x, self.router(x))
        if self.shared is None:
            return y
        shared = self.shared(x)
        if self.shared_gate is not None:
            # In float32 for lower dtypes, and rounded once, as one kernel computes it.
            gate = widened(self.shared_gate(x))
            gated = jax.nn.sigmoid(gate) * widened(shared)
            shared = gated.astype(shared.dtype)
        return y + shared

    def work(self, t: int, s: int) -> Work:
        """Return the operations of `t` tokens, each with the experts that it is given to."""
        idle = self.router.num_experts - self.router.top_k
        unused = products(self.experts, t).parameters * idle // self.router.num_experts
        return work_of_parts(self, t, s) + Work(-unused)
