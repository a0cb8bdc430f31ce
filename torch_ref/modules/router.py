"""The router of a mixture of experts: the experts of each token, and their weights."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from einops import rearrange
from jaxtyping import Float, Integer
from torch import Tensor, nn
from torch.nn import functional

from attn_spec.checks import check_choice, check_positive, check_width
from attn_spec.mixture_checks import check_router
from torch_ref.functional.dtypes import accumulation_dtype
from torch_ref.modules.linear import Linear
from torch_ref.modules.typed import TypedModule

SCORES = {"softmax": nn.Softmax(dim=-1), "sigmoid": nn.Sigmoid()}


class Routing(NamedTuple):
    """The experts of each token.

    Example:
        >>> routing = Routing(torch.ones((1, 2)) / 2, torch.tensor([[0, 2]]), torch.ones((1, 4)))
        >>> routing.experts.tolist()
        [[0, 2]]
    """

    weights: Float[Tensor, "*shape k"]
    experts: Integer[Tensor, "*shape k"]
    logits: Float[Tensor, "*shape e"]


class Router(TypedModule):
    """Chooses `top_k` of `num_experts` experts for each token.

        scores = softmax(W x + b)  or  sigmoid(W x + b)
        experts = the top_k largest of scores + selection_bias, in the best groups
        weights = scale * scores[experts] / sum(scores[experts])

    Without `renormalize` the weights are not divided by their sum. With it, softmax scores give the
    softmax over the logits of the chosen experts alone (gpt-oss, Mixtral). With `groups` the
    experts are divided into groups of equal size. A group scores the sum of its two best experts,
    and only experts of the best `top_groups` groups are chosen (DeepSeek-V3). All of it is computed
    in at least float32.

    Shapes:
        `(..., d_model)` to a `Routing`: weights and experts `(..., top_k)`, logits
        `(..., num_experts)`.

    Raises:
        ValueError: if a size is not positive, `top_k` is above the experts that can be chosen, the
            groups do not divide the experts or are of one expert, the scores are unknown, or the
            input has another width.

    Example:
        >>> routing = Router(3, num_experts=4, top_k=2)(torch.ones((5, 3)))
        >>> routing.weights.shape, routing.logits.shape
        (torch.Size([5, 2]), torch.Size([5, 4]))
    """

    selection_bias: Tensor | None

    def __init__(
        self,
        d_model: int,
        num_experts: int,
        top_k: int,
        scores: str = "softmax",
        *,
        renormalize: bool = True,
        scale: float = 1.0,
        bias: bool = False,
        selection_bias: bool = False,
        groups: int = 1,
        top_groups: int = 1,
    ):
        super().__init__()
        check_choice("scores", scores, tuple(SCORES))
        check_positive(d_model=d_model)
        check_router(num_experts, top_k, groups, top_groups)
        self.d_model, self.num_experts, self.top_k = d_model, num_experts, top_k
        self.scores, self.renormalize, self.scale = scores, renormalize, scale
        self.groups, self.top_groups = groups, top_groups
        self.W_router = Linear(d_model, num_experts, bias)
        self.register_buffer("selection_bias", torch.zeros(num_experts) if selection_bias else None)

    def forward(self, x: Float[Tensor, "*shape d"]) -> Routing:
        check_width("x", x, "d_model", self.d_model)
        # In float32 for lower dtypes: a rounded logit would choose another expert.
        weight, bias = self.W_router.weight, self.W_router.bias
        dtype = accumulation_dtype(torch.promote_types(x.dtype, weight.dtype))
        if bias is not None:
            bias = bias.to(dtype)
        logits = functional.linear(x.to(dtype), weight.to(dtype), bias)
        scores = SCORES[self.scores](logits)
        weights, experts = self._chosen(scores, self._preferred(scores))
        if self.renormalize:
            # Sigmoids may all vanish.
            total = weights.sum(dim=-1, keepdim=True) + 1e-20
            weights = weights / total
        # The loss is about the logits; the scale is of the output alone.
        return Routing(self.scale * weights, experts, logits)

    def _preferred(self, scores: Tensor) -> Tensor:
        """Return the scores that experts are chosen by."""
        if self.selection_bias is None:
            return scores
        return scores + self.selection_bias.to(scores.dtype)

    def _chosen(self, scores: Tensor, preferred: Tensor) -> tuple[Tensor, Tensor]:
        """Return the scores and the numbers of the experts of each token."""
        experts = self._eligible(preferred).topk(self.top_k, dim=-1).indices
        return scores.gather(-1, experts), experts

    def _eligible(self, scores: Tensor) -> Tensor:
        """Return the scores that experts are chosen by, -inf outside the chosen groups."""
        if self.groups == 1:
            return scores
        grouped = rearrange(scores, "... (g e) -> ... g e", g=self.groups)
        # A group is as good as its two best experts together, as in DeepSeek-V3.
        best_two = grouped.topk(2, dim=-1).values.sum(dim=-1)
        chosen = best_two.topk(self.top_groups, dim=-1).indices
        closed = torch.ones_like(best_two, dtype=torch.bool)
        closed = closed.scatter(-1, chosen, False)
        eligible = grouped.masked_fill(closed[..., None], -torch.inf)
        return rearrange(eligible, "... g e -> ... (g e)")


def load_balancing_loss(
    routings: Sequence[Routing], mask: Tensor | None = None
) -> Float[Tensor, ""]:
    """Return the auxiliary loss that balances the load of the experts.

        num_experts * sum_e f_e p_e
        with f_e = tokens given to expert e / tokens, p_e = mean softmax of its logits

    It is `top_k` where all experts have the same load, and more elsewhere. The tokens of all layers
    count together. The gradient is that of p alone.

    Example:
        >>> router = Router(3, num_experts=4, top_k=2)
        >>> load_balancing_loss([router(torch.ones((5, 3)))]).shape
        torch.Size([])
    """
    if not routings:
        raise ValueError(
            "the load is that of the routers of one layer at least; got no routing. Pass those of a"
            " model"
        )
    # All layers count together, so that one of them may be uneven.
    logits = torch.stack([routing.logits for routing in routings])
    chosen = torch.stack([routing.experts for routing in routings])
    *shape, count = logits.shape
    real = logits.new_ones(()) if mask is None else torch.as_tensor(mask)
    real = real.bool().expand(shape)
    # Only real tokens are counted: padding is routed as well.
    given = functional.one_hot(chosen, count).sum(dim=-2).to(logits.dtype)
    load = given[real].mean(dim=0)
    probability = logits.softmax(dim=-1)[real].mean(dim=0)
    return count * (load * probability).sum()
