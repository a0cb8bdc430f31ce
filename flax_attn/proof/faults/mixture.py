"""Faults of mixtures of experts: of the router, the experts and what is shared."""

from dataclasses import replace

import torch
from einops import rearrange

from flax_attn.proof.faults.fault import Modify, Patch, Wrap, fault, swapped
from torch_ref import ClampedSwiGLU, Experts, Router

# The rows that are patched.
MIXTRAL, QWEN = "moe_mixtral", "moe_qwen2"
GPT_OSS, DEEPSEEK = "moe_gpt_oss", "moe_deepseek_v3"


def softmax_of_chosen_scores(forward, router, x):
    """Take a softmax of the chosen probabilities, which were a softmax already."""
    routing = forward(router, x)
    scores = routing.logits.softmax(dim=-1).gather(-1, routing.experts)
    return routing._replace(weights=scores.softmax(dim=-1))


def weights_with_bias(forward, router, x):
    """Weigh the experts by what they were chosen by."""
    routing = forward(router, x)
    weights = (routing.logits.sigmoid() + router.selection_bias).gather(-1, routing.experts)
    return routing._replace(weights=router.scale * weights / weights.sum(dim=-1, keepdim=True))


def router_groups_patch(score):
    """Return the patch of a router whose groups are chosen by `score` of their experts."""

    def eligible(router, scores):
        grouped = rearrange(scores, "... (g e) -> ... g e", g=router.groups)
        chosen = score(grouped).topk(router.top_groups, dim=-1).indices
        is_open = torch.zeros_like(grouped[..., 0], dtype=torch.bool).scatter(-1, chosen, True)
        return rearrange(grouped.where(is_open[..., None], -torch.inf), "... g e -> ... (g e)")

    return Patch(Router, "_eligible", eligible)


def shifted_by_one(forward, experts, x, routing):
    """Give tokens to the experts after theirs."""
    return forward(
        experts, x, routing._replace(experts=(routing.experts + 1) % experts.num_experts)
    )


def swiglu_bounds_patch(gate, up):
    """Return the patch of a clamped SwiGLU whose branches are bounded otherwise."""
    return Wrap(ClampedSwiGLU, "__call__", lambda call, act, g, u: call(
        replace(act, limit=1e9), gate(g, act.limit), up(u, act.limit)))  # fmt: skip


# Which experts are chosen, and with which weights.
ROUTER = (
    fault("router_not_renormalised",
          "The weights of the chosen experts are not divided by their sum.", MIXTRAL,
          Patch("router", "renormalize", False)),
    fault("router_renormalised",
          "The weights are divided by their sum where the model does not.", QWEN,
          Patch("router", "renormalize", True)),
    fault("softmax_twice", "The chosen probabilities go through a second softmax.", MIXTRAL,
          Wrap(Router, "forward", softmax_of_chosen_scores)),
    fault("softmax_for_sigmoid", "The scores of the router are a softmax, not sigmoids.", DEEPSEEK,
          Patch("router", "scores", "softmax")),
    fault("bias_in_the_weights", "The bias for the selection is in the weights too.", DEEPSEEK,
          Wrap(Router, "forward", weights_with_bias)),
    fault("no_selection_bias", "The experts are chosen without the bias.", DEEPSEEK,
          Modify("router", "selection_bias", torch.zeros_like)),
    fault("groups_by_the_best",
          "A group is chosen by its best expert, not by its best two.", DEEPSEEK,
          router_groups_patch(lambda grouped: grouped.amax(dim=-1))),
    fault("groups_ignored", "Experts are chosen from all groups.", DEEPSEEK,
          Patch("router", "groups", 1)),
    fault("routed_scale_missing", "The factor of the routed experts is 1.", DEEPSEEK,
          Patch("router", "scale", 1.0)),
    fault("one_expert_too_few", "One expert fewer is chosen.", MIXTRAL,
          Modify("router", "top_k", lambda k: k - 1)),
)  # fmt: skip

# What the experts compute, and what all tokens share.
EXPERTS = (
    fault("experts_shifted", "Every token is given to the experts after its own.", MIXTRAL,
          Wrap(Experts, "forward", shifted_by_one)),
    fault("expert_halves_swapped",
          "The fused gate and up projections are split in the other order.", MIXTRAL,
          *swapped("experts.W_gate", "experts.W_up")),
    fault("no_shared_expert", "The shared expert is left out.", DEEPSEEK,
          Patch("", "shared", None)),
    fault("no_gate_of_the_shared", "The shared expert is not gated.", QWEN,
          Patch("", "shared_gate", None)),
    fault("gate_clamped_below", "The gate is bounded below, not above.", GPT_OSS,
          swiglu_bounds_patch(lambda g, limit: g.clamp(min=-limit),
                              lambda u, limit: u.clamp(-limit, limit))),
    fault("gate_clamped_twice", "The gate is bounded on both sides.", GPT_OSS,
          swiglu_bounds_patch(lambda g, limit: g.clamp(-limit, limit),
                              lambda u, limit: u.clamp(-limit, limit))),
    fault("up_without_one", "The up branch is not raised by 1.", GPT_OSS,
          swiglu_bounds_patch(lambda g, limit: g.clamp(max=limit),
                              lambda u, limit: u.clamp(-limit, limit) - 1)),
    fault("plain_silu_in_the_gate", "The sigmoid of the gate has the slope 1, not 1.702.", GPT_OSS,
          Modify("experts", "activation", lambda act: replace(act, alpha=1.0))),
)  # fmt: skip

FAULTS = (*ROUTER, *EXPERTS)
