"""The router of a mixture of experts: the experts of each token, and their weights."""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from einops import rearrange
from flax import nnx
from flax.typing import Dtype, PrecisionLike
from jaxtyping import Array, Float, Integer

from attn_spec.checks import check_choice, check_positive, check_width
from attn_spec.mixture_checks import check_router
from flax_attn.functional.dtypes import accumulation_dtype
from flax_attn.modules.initialisation import check_dtypes, filled
from flax_attn.modules.linear import Linear
from flax_attn.sharding.axes import constrain
from flax_attn.sharding.mapped import by_tokens
from flax_attn.sharding.parameters import named

SCORES = {"softmax": jax.nn.softmax, "sigmoid": jax.nn.sigmoid}


class Routing(NamedTuple):
    """The experts of each token.

    Args:
        weights: weights of the chosen experts, `(..., k)`.
        experts: indices of the chosen experts, `(..., k)`.
        logits: logits of all experts, `(..., e)`.

    Example:
        >>> routing = Routing(jnp.ones((1, 2)) / 2, jnp.array([[0, 2]]), jnp.ones((1, 4)))
        >>> routing.experts.tolist()
        [[0, 2]]
    """

    weights: Float[Array, "*shape k"]
    experts: Integer[Array, "*shape k"]
    logits: Float[Array, "*shape e"]


class _SelectionBias(nnx.BatchStat):
    """A bias on the choice of experts: stored with the weights, without a gradient."""


class Router(nnx.Module):
    """Chooses `top_k` of `num_experts` experts for each token.

        scores = softmax(W x + b)  or  sigmoid(W x + b)
        experts = the top_k largest of scores + selection_bias, in the best groups
        weights = scale * scores[experts] / sum(scores[experts])

    Without `renormalize` the weights are not divided by their sum. With it, softmax scores give the
    softmax over the logits of the chosen experts alone (gpt-oss, Mixtral). With `groups` the
    experts are divided into groups of equal size. A group scores the sum of its two best experts,
    and only experts of the best `top_groups` groups are chosen (DeepSeek-V3). All of it is computed
    in at least float32.

    Args:
        d_model: width of the tokens.
        num_experts: number of experts.
        top_k: number of experts for each token.
        scores: `"softmax"` or `"sigmoid"`.
        renormalize: whether the weights of a token are divided by their sum.
        scale: factor on the weights.
        bias: whether the logits have a bias.
        selection_bias: whether the choice of experts has a bias `(num_experts,)`. It starts at 0
            and is not a parameter: training moves it by the load of the experts.
        groups: number of groups of experts; 1 is no grouping.
        top_groups: number of groups that a token's experts are chosen from.
        dtype: not used, see above; accepted so that every layer is built alike.
        param_dtype: dtype of the parameters.
        precision: precision of the matrix product, as in `jax.lax.dot_general`.
        rngs: random streams; parameters are drawn from `params`, with the distribution of
            `torch.nn.Linear`.

    Shapes:
        `(..., d_model)` to a `Routing`: weights and experts `(..., top_k)`, logits
        `(..., num_experts)`.

    Raises:
        ValueError: if a size is not positive, `top_k` is above the experts that can be chosen, the
            groups do not divide the experts or are of one expert, the scores are unknown, `rngs` is
            missing, or the input has another width.

    Example:
        >>> routing = Router(3, num_experts=4, top_k=2, rngs=nnx.Rngs(0))(jnp.ones((5, 3)))
        >>> routing.weights.shape, routing.logits.shape
        ((5, 2), (5, 4))

    References:
        Shazeer et al. 2017 (arXiv:1701.06538); Jiang et al. 2024, Mixtral (arXiv:2401.04088);
        DeepSeek-AI 2024, groups and selection bias (arXiv:2412.19437).
    """

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
        dtype: Dtype | None = None,
        param_dtype: Dtype = jnp.float32,
        precision: PrecisionLike = None,
        rngs: nnx.Rngs | None = None,
    ):
        check_dtypes(dtype=dtype, param_dtype=param_dtype)
        check_choice("scores", scores, tuple(SCORES))
        check_positive(d_model=d_model)
        check_router(num_experts, top_k, groups, top_groups)
        self.d_model, self.num_experts, self.top_k = d_model, num_experts, top_k
        self.scores, self.renormalize, self.scale = scores, renormalize, scale
        self.groups, self.top_groups = groups, top_groups
        numerics = {"param_dtype": param_dtype, "precision": precision, "rngs": rngs}
        self.W_router = Linear(d_model, num_experts, bias, axes=("embed", None), **numerics)
        zeros = filled(num_experts, 0, accumulation_dtype(jnp.dtype(param_dtype)))
        self.selection_bias = _SelectionBias(zeros, **named(None)) if selection_bias else None

    def __call__(self, x: Float[Array, "*shape d"]) -> Routing:
        check_width("x", x, "d_model", self.d_model)
        # In float32 for lower dtypes: a rounded logit would choose another expert.
        x = x.astype(accumulation_dtype(x.dtype))
        logits = self.W_router(x)
        split = constrain(logits, "batch", "tokens", None)
        scores = SCORES[self.scores](split)
        weights, experts = by_tokens(self._chosen, scores, self._preferred(scores))
        if self.renormalize:
            # Sigmoids may all vanish.
            total = weights.sum(axis=-1, keepdims=True) + 1e-20
            weights = weights / total
        # The loss is about the logits; the scale is of the output alone.
        return Routing(self.scale * weights, experts, logits)

    def _preferred(self, scores: Array) -> Array:
        """Return the scores that experts are chosen by."""
        # A choice has no gradient: without this JAX would carry zeros through the search.
        scores = jax.lax.stop_gradient(scores)
        if self.selection_bias is None:
            return scores
        bias = self.selection_bias[...].astype(scores.dtype)
        return scores + jnp.broadcast_to(bias, scores.shape)

    def _chosen(self, scores: Array, preferred: Array) -> tuple[Array, Array]:
        """Return the scores and the numbers of the experts of each token."""
        experts = jax.lax.top_k(self._eligible(preferred), self.top_k)[1]
        return jnp.take_along_axis(scores, experts, axis=-1), experts

    def _eligible(self, scores: Array) -> Array:
        """Return the scores that experts are chosen by, -inf outside the chosen groups."""
        if self.groups == 1:
            return scores
        grouped = rearrange(scores, "... (g e) -> ... g e", g=self.groups)
        # A group is as good as its two best experts together, as in DeepSeek-V3.
        best_two, _ = jax.lax.top_k(grouped, 2)
        of_group = best_two.sum(axis=-1)
        _, chosen = jax.lax.top_k(of_group, self.top_groups)
        open_groups = jax.nn.one_hot(chosen, self.groups, dtype=bool).any(axis=-2)
        eligible = jnp.where(open_groups[..., None], grouped, -jnp.inf)
        return rearrange(eligible, "... g e -> ... (g e)")


def load_balancing_loss(routings: Sequence[Routing], mask: Array | None = None) -> Float[Array, ""]:
    """Return the auxiliary loss that balances the load of the experts.

        num_experts * sum_e f_e p_e
        with f_e = tokens given to expert e / tokens, p_e = mean softmax of its logits

    It is `top_k` where all experts have the same load, and more elsewhere. The tokens of all layers
    count together. The gradient is that of p alone.

    Args:
        routings: results of the routers of all layers.
        mask: booleans, one for each token, True where it counts; None counts all.

    Raises:
        ValueError: if there is no routing.

    Example:
        >>> router = Router(3, num_experts=4, top_k=2, rngs=nnx.Rngs(0))
        >>> load_balancing_loss([router(jnp.ones((5, 3)))]).shape
        ()

    References:
        Fedus et al. 2021, equations 4 to 6 (arXiv:2101.03961).
    """
    if not routings:
        raise ValueError(
            "the load is that of the routers of one layer at least; got no routing. Pass those of a"
            " model"
        )
    logits = routings[0].logits
    *shape, count = logits.shape
    real = jnp.ones(shape, bool) if mask is None else jnp.asarray(mask, bool)
    loads = probabilities = 0
    for routing in routings:
        load, probability = _load(routing, count, real)
        loads += load
        probabilities += probability
    tokens = len(routings) * real.sum().astype(logits.dtype)
    return count * (loads / tokens * (probabilities / tokens)).sum()


def _load(routing: Routing, count: int, real: Array) -> tuple[Array, Array]:
    """Return how many real tokens each expert is given, and the sum of its probabilities."""
    dtype = routing.logits.dtype
    given = jax.nn.one_hot(routing.experts, count, dtype=dtype).sum(axis=-2)
    tokens = tuple(range(real.ndim))
    real = real[..., None]
    probabilities = jax.nn.softmax(routing.logits)
    load = jnp.where(real, given, 0).sum(tokens)
    probability = jnp.where(real, probabilities, 0).sum(tokens)
    return load, probability
