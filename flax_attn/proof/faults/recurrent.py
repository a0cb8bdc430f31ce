"""Faults of recurrent attentions: the delta rule, its decay, its convolution and its state."""

import torch
from torch.nn import functional

from flax_attn.proof.faults.fault import Modify, Patch, Wrap, fault, swapped, zeros
from torch_ref.functional.delta_rule import Recurrence
from torch_ref.functional.short_convolution import Convolved
from torch_ref.modules import delta_attention, short_convolution
from torch_ref.modules.decay import DecayRate
from torch_ref.modules.delta_attention import DeltaAttention
from torch_ref.modules.gated_delta_net import GatedDeltaNet
from torch_ref.modules.kimi_delta_attention import KimiDeltaAttention

CHECK = "cache = full"
# The rows that are patched.
GDN, PACKED, RAGGED = "gated_delta_net", "gated_delta_net_packed", "gated_delta_net_ragged"
KDA, NEXT = "kimi_delta_attention", "qwen3next"


def rule_patch(replacement):
    """Return the patch of the delta rule, as layers call it."""
    return Wrap(delta_attention, "gated_delta_rule", replacement)


def convolution_patch(replacement):
    """Return the patch of the short convolution, as layers call it."""
    return Wrap(short_convolution, "short_convolution", replacement)


def decayed_after(rule, query, key, value, decay, beta, **options):
    """The delta rule that reads, replaces, and then decays."""
    groups = value.shape[2] // key.shape[2]
    query = query.repeat_interleave(groups, dim=2)
    key = key.repeat_interleave(groups, dim=2)
    now = value.new_zeros(*value[:, 0].shape, key.shape[-1])
    tokens = [x.unbind(dim=1) for x in (query, key, value, decay, beta)]
    outputs = []
    for q, k, v, rate, share in zip(*tokens, strict=True):
        new = share[..., None] * (v - read(now, k))
        now = now + torch.einsum("bnv,bnh->bnvh", new, k)
        now = now * rate[..., None, None].exp()
        outputs.append(read(now, q))
    output = torch.stack(outputs, dim=1) * query.shape[-1] ** -0.5
    return Recurrence(output, now)


def read(state, by):
    """Read a state `(b, n, v, h)` by a key or a query `(b, n, h)`."""
    return torch.einsum("bnvh,bnh->bnv", state, by)


def other_groups(rule, query, key, value, *others, **options):
    """The delta rule whose value head i has the key of head `i % k`."""
    query, key = (x.repeat(1, 1, value.shape[2] // key.shape[2], 1) for x in (query, key))
    return rule(query, key, value, *others, **options)


def transposed_state(rule, *tokens, state=None, **options):
    """The delta rule that goes on with the transpose of the state."""
    return rule(*tokens, state=None if state is None else state.mT, **options)


def without(*names):
    """Return a replacement that leaves out options of a call."""
    return lambda call, *arguments, **options: call(*arguments, **options | dict.fromkeys(names))


def old_state(convolve, x, kernel, state=None, **options):
    """The convolution that hands on the inputs before the call."""
    found = convolve(x, kernel, state, **options)
    return found if state is None else Convolved(found.output, state)


# The delta rule: what is removed, added, read and handed on.
RULE = (
    fault("no_decay", "The delta rule has no decay.", GDN,
          rule_patch(lambda rule, q, k, v, decay, *beta, **options: rule(
              q, k, v, 0 * decay, *beta, **options))),
    fault("decay_after_the_update", "The state is decayed after the update, not before.", GDN,
          rule_patch(decayed_after), check="forward"),
    fault("no_beta", "All that the state holds under a key is replaced: beta is missing.", GDN,
          Patch(DeltaAttention, "beta", lambda layer, x: torch.ones_like(layer.W_beta(x)))),
    fault("beta_up_to_two", "Beta is twice the sigmoid.", GDN,
          Wrap(DeltaAttention, "beta", lambda beta, layer, x: 2 * beta(layer, x))),
    fault("nothing_removed", "The delta rule adds and removes nothing: linear attention.", GDN,
          rule_patch(lambda rule, q, k, v, decay, beta, **options: rule(
              q, k, v * beta[..., None], decay, **options))),
    fault("keys_not_normalised", "Queries and keys are not normalised.", GDN,
          Patch(delta_attention, "_unit", lambda x: x)),
    fault("normalised_by_the_mean",
          "Queries and keys are divided by the root of the mean square.", GDN,
          Wrap(delta_attention, "_unit", lambda unit, x: unit(x) * x.shape[-1] ** 0.5)),
    fault("reading_not_scaled", "What is read is not divided by the root of the width.", GDN,
          rule_patch(lambda rule, *tokens, **options: rule(*tokens, scale=1.0, **options))),
    fault("value_heads_in_turn", "Value heads take the heads of keys in turn, not in groups.", GDN,
          rule_patch(other_groups)),
    fault("state_transposed", "A step goes on with the transpose of the state.", RAGGED,
          rule_patch(transposed_state), check=CHECK),
    fault("state_not_reset", "The state is not reset where a document begins.", PACKED,
          rule_patch(without("starts"))),
    fault("state_forgotten", "Each call begins with an empty state.", RAGGED,
          rule_patch(without("state")), check=CHECK),
    fault("padding_in_the_state", "Padding changes the state.", RAGGED,
          rule_patch(without("lengths")), check=CHECK),
)  # fmt: skip

# The short convolution before it.
CONVOLUTION = (
    fault("convolution_sees_the_future", "The convolution sees one token ahead.", GDN,
          convolution_patch(lambda convolve, x, *others, **options: convolve(
              x.roll(-1, dims=1), *others, **options))),
    fault("kernel_reversed", "The kernel of the convolution is reversed.", GDN,
          convolution_patch(lambda convolve, x, kernel, *state, **options: convolve(
              x, kernel.flip(0), *state, **options))),
    fault("convolution_across_documents", "The convolution sees the document before.", PACKED,
          convolution_patch(without("starts"))),
    fault("convolution_not_activated", "There is no activation after the convolution.", GDN,
          Patch(short_convolution, "functional",
                type("Plain", (), {"silu": staticmethod(lambda x: x)}))),
    fault("convolution_keeps_old_inputs",
          "The inputs handed on are those of the call before.", RAGGED,
          convolution_patch(old_state), check=CHECK),
    fault("convolution_keeps_padding",
          "The inputs handed on are padding where a row is shorter.", RAGGED,
          convolution_patch(without("lengths")), check=CHECK),
)  # fmt: skip

# The decay and the gate.
PARTS = (
    fault("rate_without_exp", "A_log is taken for the rate itself.", GDN,
          Wrap(DecayRate, "forward", lambda forward, rate, x: forward(rate, x) * (
              rate.A_log / rate.A_log.exp())[:, None])),
    fault("no_dt_bias", "The decay has no bias.", GDN, Modify("rate", "dt_bias", zeros)),
    fault("gate_before_the_norm", "The gate comes before the norm.", GDN,
          Patch(DeltaAttention, "_gated",
                lambda layer, heads, x: layer.norm(heads * layer.gate(x)))),
    fault("sigmoid_gate", "The gate is a sigmoid, not SiLU.", GDN,
          Wrap(GatedDeltaNet, "gate", lambda gate, layer, x: layer.W_gate(x).sigmoid().unflatten(
              -1, (layer.num_heads, -1)))),
    fault("silu_gate_of_kimi", "The gate of Kimi Delta Attention is SiLU, not a sigmoid.", KDA,
          Patch(KimiDeltaAttention, "gate", lambda layer, x: functional.silu(
              layer.W_gate_up(layer.W_gate_down(x)).unflatten(-1, (layer.num_heads, -1))))),
    fault("one_decay_a_head", "All features of a key have the mean of their decays.", KDA,
          Wrap(KimiDeltaAttention, "decay", lambda decay, layer, x: decay(layer, x).mean(-1))),
    fault("norm_of_a_delta_net_centred",
          "The norm within a DeltaNet has the factor 1 + scale.", NEXT,
          Patch("trf_blocks.0.att.norm", "zero_centred", True)),
    fault("query_and_gate_swapped", "The query and the gate of packed heads are swapped.", NEXT,
          *swapped("trf_blocks.1.att.W_query", "trf_blocks.1.att.W_gate")),
)  # fmt: skip

FAULTS = (*RULE, *CONVOLUTION, *PARTS)
