"""The mixture of experts: a feed-forward layer with a choice of experts for each token."""

from jaxtyping import Float
from torch import Tensor, nn

from attn_spec.checks import check_type
from attn_spec.mixture_checks import check_experts
from torch_ref.modules.experts import Experts
from torch_ref.modules.router import Router
from torch_ref.modules.typed import TypedModule


class MixtureOfExperts(TypedModule):
    """A feed-forward layer of experts; a router chooses some of them for each token.

        y = sum_j weights_j E_(experts_j)(x) + sigmoid(shared_gate(x)) shared(x)
        with weights, experts = router(x)

    It is a feed-forward part of a `TransformerBlock`. No token is dropped. For a loss that balances
    the load of the experts see `load_balancing_loss`, which takes what `router` returns.

    Shapes:
        `(..., d_model)`, kept.

    Example:
        >>> import torch
        >>> from torch_ref import Experts, GatedFeedForward, Router
        >>> router = Router(3, num_experts=4, top_k=2)
        >>> experts, shared = Experts(4, 3, 6), GatedFeedForward(3, 8)
        >>> MixtureOfExperts(router, experts, shared)(torch.ones((5, 3))).shape
        torch.Size([5, 3])
    """

    def __init__(
        self,
        router: Router,
        experts: Experts,
        shared: nn.Module | None = None,
        shared_gate: nn.Module | None = None,
    ):
        super().__init__()
        # Both by class: the loss reads what a `Router` returns, and a mesh splits `Experts`.
        check_type("router", router, Router, "router=Router(...)")
        check_type("experts", experts, Experts, "experts=Experts(...)")
        sizes = (router.num_experts, router.d_model), (experts.num_experts, experts.d_model)
        check_experts(
            *sizes, getattr(shared, "d_model", None), shared is None and shared_gate is not None
        )
        self.d_model = router.d_model
        self.router = router
        self.experts = experts
        self.shared = shared
        self.shared_gate = shared_gate

    def forward(self, x: Float[Tensor, "*shape d"]) -> Float[Tensor, "*shape d"]:
        y = self.experts(x, self.router(x))
        if self.shared is None:
            return y
        # Every token has it, whatever the router chooses for the token.
        shared = self.shared(x)
        return y + (shared if self.shared_gate is None else self.shared_gate(x).sigmoid() * shared)
