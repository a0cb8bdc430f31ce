"""A cause is named only if its formula fits.

Both sides are computed by PyTorch here, which checks the formulas too.
"""

import dataclasses
import re
from copy import deepcopy

import numpy as np
import pytest
import torch
from einops import rearrange
from torch.nn import functional as F

import torch_ref
from flax_attn.parity import tolerance
from flax_attn.parity.trace.causes import causes_of
from flax_attn.parity.trace.localise import localise
from flax_attn.parity.trace.substitute import Evidence, Target
from flax_attn.proof.prove import pair_of
from flax_attn.proof.variants import select

B, T, S, N, K, H, D = 2, 5, 7, 4, 2, 6, 8
RANDOM = np.random.default_rng(0)


def draw(*shape):
    return torch.tensor(RANDOM.normal(size=shape))


def sentences(name, theirs, ours, sources, weights=None, label="output", without=""):
    """Return the causes named for a node that is `theirs` in PyTorch and `ours` in Flax."""
    target = Target(label, ours.numpy(), theirs.numpy(), without)
    evidence = Evidence(name, "step" if "/" in name else "module", [target], arrays(sources))
    return causes_of(evidence, arrays(weights or {}))


def arrays(tensors):
    return {name: tensor.numpy() for name, tensor in tensors.items()}


def says(lines, torch_form, flax_form):
    """Check the one sentence.

    It repeats neither what both formulas share nor the name of a setting.
    """
    assert len(lines) == 1
    ours, theirs = (
        re.fullmatch(r"(.*\b)(\w+=)(\S+)(.*)", form) for form in (flax_form, torch_form)
    )
    short = ours and theirs and ours.group(1, 2, 4) == theirs.group(1, 2, 4)
    said = (
        f"flax has {ours[2]}{ours[3]}, torch {theirs[3]}"
        if short
        else f"flax has {flax_form}, torch has {torch_form}"
    )
    assert lines[0].rpartition(": ")[2] == said


# Norms.

X, SCALE, SHIFT = draw(3, T, D), draw(D), draw(D)


def layer_norm(eps=1e-5, scale=SCALE, shift=SHIFT):
    return F.layer_norm(X, (D,), scale, shift, eps)


def rms_norm(eps=1e-5):
    return F.rms_norm(X, (D,), SCALE, eps) + SHIFT


def unbiased_norm():
    variance, mean = torch.var_mean(X, -1, keepdim=True)
    return (X - mean) / torch.sqrt(variance + 1e-5) * SCALE + SHIFT


def epsilon_outside():
    return (X - X.mean(-1, keepdim=True)) / (
        X.std(-1, keepdim=True, correction=0) + 1e-3
    ) * SCALE + SHIFT


@pytest.mark.parametrize(
    ("theirs", "said"),
    [
        (layer_norm(1e-6), "layer norm with eps=1e-06"),
        (layer_norm(1e-12), "layer norm with eps=1e-12"),
        (layer_norm(0.0), "layer norm with eps=0"),
        (layer_norm(1.01e-5), "layer norm with eps=1.01e-05"),
        (layer_norm(1e-5, SHIFT, SCALE), "layer norm with eps=1e-05, scale and shift swapped"),
        (layer_norm(1e-5, 1 + SCALE), "layer norm with eps=1e-05, times 1 + scale"),
        (layer_norm(1e-5, shift=None), "layer norm with eps=1e-05, without its shift"),
        (layer_norm(1e-5, None, None), "layer norm with eps=1e-05, without scale and shift"),
        (rms_norm(1e-3), "RMS norm with eps=0.001"),
        (unbiased_norm(), "layer norm with the variance divided by d - 1 with eps=1e-05"),
        (epsilon_outside(), "layer norm with eps=0.001 added to the standard deviation"),
    ],
)
def test_norms(theirs, said):
    weights = {"a.norm.scale": SCALE, "a.norm.shift": SHIFT, "b.norm.scale": SHIFT}
    lines = sentences("a.norm", theirs, layer_norm(), {"input": X}, weights)
    says(lines, said, "layer norm with eps=1e-05")


def test_a_norm_without_a_shift():
    theirs, ours = (F.rms_norm(X, (D,), SCALE, eps) for eps in (1e-6, 1e-5))
    lines = sentences("norm", theirs, ours, {"input": X}, {"norm.weight": SCALE})
    says(lines, "RMS norm with eps=1e-06", "RMS norm with eps=1e-05")


# Linear layers.

W, BIAS, OTHER_W, OTHER_BIAS = draw(D, D), draw(D), draw(D, D), draw(D)
WEIGHTS = {
    "fc.weight": W,
    "fc.bias": BIAS,
    "out.weight": OTHER_W,
    "out.bias": OTHER_BIAS,
    "rest.weight": draw(D, 3),
}


@pytest.mark.parametrize(
    ("theirs", "said"),
    [
        (X @ W + BIAS, "x @ weight + bias"),
        (X @ W.T, "x @ weight.T without its bias"),
        (X @ W.T + OTHER_BIAS, "x @ weight.T + out.bias"),
        (X @ OTHER_W.T + BIAS, "x @ out.weight.T + bias"),
        (X @ OTHER_W.T + OTHER_BIAS, "x @ out.weight.T + out.bias"),
    ],
)
def test_linear_layers(theirs, said):
    says(
        sentences("fc", theirs, X @ W.T + BIAS, {"input": X}, WEIGHTS), said, "x @ weight.T + bias"
    )


# Between the layers.

FORMS = {
    "exact GELU": F.gelu(X),
    "tanh GELU": F.gelu(X, approximate="tanh"),
    "quick GELU, x * sigmoid(1.702 x)": X * torch.sigmoid(1.702 * X),
    "ReLU": F.relu(X),
    "SiLU": F.silu(X),
}


@pytest.mark.parametrize("said", [name for name in FORMS if name != "tanh GELU"])
def test_activations(said):
    ours = FORMS["tanh GELU"]
    lines = sentences(
        "ff",
        FORMS[said],
        ours,
        {"input": draw(3, T, D), "fc": X},
        label="input of out",
        without="out",
    )
    assert lines[0].startswith("ff, input of out: ")
    says(lines, f"{said} of fc", "tanh GELU of fc")


def test_sums():
    a, b, c = draw(3, T, D), draw(3, T, D), draw(3, T, D)
    sources = {"input": a, "att": b, "drop": b, "ff": c}
    says(sentences("block", b + c, a + b + c, sources), "att + ff", "input + att + ff")
    says(sentences("block", c, a + c, sources), "ff alone", "input + ff")


# Attention.

Q, KEY, VALUE = draw(B, T, N, H), draw(B, S, K, H), draw(B, S, K, H)


def repeated(x):
    return x.repeat_interleave(N // K, dim=2)


def tiled(x):
    return torch.cat([x] * (N // K), dim=2)


def scored(key, scale=H**-0.5):
    return torch.einsum("btnh,bsnh->bnts", Q, key) * scale


@pytest.mark.parametrize(
    ("theirs", "said"),
    [
        (scored(repeated(KEY), 1.0), "query . key without a scale"),
        (scored(repeated(KEY), (N * H) ** -0.5), "query . key / sqrt(d_out)"),
        (scored(repeated(KEY), 1 / H), "query . key / h"),
        (scored(repeated(KEY), 0.3), "query . key * 0.3"),
        (scored(tiled(KEY)), "query . key with key heads tiled, not repeated, / sqrt(h)"),
    ],
)
def test_scores(theirs, said):
    lines = sentences("att/scores", theirs, scored(repeated(KEY)), {"query": Q, "key": KEY})
    says(lines, said, "query . key / sqrt(h)")


def test_query_and_key_swapped():
    key = draw(*Q.shape)
    theirs, ours = (
        torch.einsum("btnh,bsnh->bnts", *both) / H**0.5 for both in ((key, Q), (Q, key))
    )
    lines = sentences("att/scores", theirs, ours, {"query": Q, "key": key})
    says(lines, "key . query, the two swapped, / sqrt(h)", "query . key / sqrt(h)")


SCORES = scored(repeated(KEY))
CAUSAL = torch.ones(T, S, dtype=bool).tril()


def hidden(visible, fill=-torch.inf):
    return torch.where(visible, SCORES, fill)


@pytest.mark.parametrize(
    ("theirs", "said"),
    [
        (hidden(CAUSAL, -10.0), "a mask that sets -10 where the other side hides"),
        (hidden(CAUSAL, -1e4), "a mask that sets -10000 where the other side hides"),
        (
            SCORES + torch.where(CAUSAL, 0.0, -1e4),
            "a mask that adds -10000 where the other side hides",
        ),
        (hidden(~CAUSAL), "a mask of earlier keys, query i sees keys from i + 1"),
        (SCORES, "no mask"),
        (hidden(CAUSAL.roll(-1, 0)), "a mask that is neither causal nor a window"),
        (
            hidden(torch.ones(T, S, dtype=bool).tril(-1)),
            "a causal mask, query i sees keys up to i - 1",
        ),
        (
            hidden(torch.ones(T, S, dtype=bool).tril(2)),
            "a causal mask, query i sees keys up to i + 2",
        ),
        (hidden(CAUSAL.triu(-2)), "a sliding window, query i sees keys i - 2 to i"),
        (
            hidden(torch.ones(T, S, dtype=bool).triu(-1)),
            "a mask of earlier keys, query i sees keys from i - 1",
        ),
        (hidden(torch.zeros(T, S, dtype=bool)), "a mask that hides everything"),
    ],
)
def test_masks(theirs, said):
    lines = sentences("att/masked", theirs, hidden(CAUSAL), {"scores": SCORES})
    says(lines, said, "a causal mask, query i sees keys up to i")


def test_what_is_masked_alike_is_judged_by_the_scores():
    theirs, ours = (
        torch.where(CAUSAL, scored(repeated(KEY), scale), -torch.inf) for scale in (1.0, H**-0.5)
    )
    lines = sentences("att/masked", theirs, ours, {"query": Q, "key": KEY})
    says(lines, "query . key without a scale", "query . key / sqrt(h)")


MASKED = hidden(CAUSAL)


@pytest.mark.parametrize(
    ("theirs", "said"),
    [
        (MASKED[..., :T].softmax(-2), "softmax over the queries"),
        (
            torch.where(CAUSAL[:, :T], SCORES[..., :T].softmax(-1), 0),
            "softmax before the mask, not divided anew",
        ),
    ],
)
def test_softmax(theirs, said):
    square = MASKED[..., :T]  # no key is hidden from all
    lines = sentences(
        "att/weights", theirs, square.softmax(-1), {"scores": SCORES[..., :T], "masked": square}
    )
    says(lines, said, "softmax over the keys")


def test_a_row_that_sees_nothing():
    masked = MASKED.clone()
    masked[:, :, 0] = -torch.inf
    ours = masked.softmax(-1).nan_to_num(0.0)
    theirs = ours.clone()
    theirs[:, :, 0] = 1 / S
    lines = sentences("att/weights", theirs, ours, {"masked": masked})
    says(lines, "softmax over the keys, the mean where nothing is visible", "softmax over the keys")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_softmax_in_a_lower_dtype(dtype):
    ours = MASKED.softmax(-1)
    lines = sentences(
        "att/weights", MASKED.to(dtype).softmax(-1).double(), ours, {"masked": MASKED}
    )
    assert len(lines) == 1
    assert (
        lines[0]
        == f"att/weights: flax has numbers of float64, torch of {str(dtype).removeprefix('torch.')}"
    )


def test_value_heads():
    weights = MASKED.softmax(-1)
    theirs, ours = (
        torch.einsum("bnts,bsnh->btnh", weights, x) for x in (tiled(VALUE), repeated(VALUE))
    )
    lines = sentences("att/context", theirs, ours, {"weights": weights, "value": VALUE})
    says(lines, "weights . value with value heads tiled, not repeated", "weights . value")


@pytest.mark.parametrize(
    ("theirs", "said"),
    [
        (lambda x: rearrange(x, "b t (h n) -> b t n h", n=N), "W_query, heads interleaved"),
        (
            lambda x: x.view(B, N, T, H).transpose(1, 2),
            "W_query, heads by reshape without a transpose",
        ),
    ],
)
def test_heads_split(theirs, said):
    x = draw(B, T, N * H)
    lines = sentences(
        "att/query", theirs(x), x.unflatten(-1, (N, H)), {"input": draw(B, T, 3), "W_query": x}
    )
    says(lines, said, "W_query, heads side by side")


@pytest.mark.parametrize(
    ("theirs", "said"),
    [
        (Q.transpose(2, 3).flatten(2), "context, heads interleaved"),
        (Q.transpose(1, 2).reshape(B, T, N * H), "context, heads by reshape without a transpose"),
    ],
)
def test_heads_joined(theirs, said):
    lines = sentences(
        "att", theirs, Q.flatten(2), {"context": Q}, label="input of out_proj", without="out_proj"
    )
    says(lines, said, "context, heads side by side")


class Moved:
    def __init__(self, rope):
        self.rope = rope

    def __call__(self, x, positions=None):
        return self.rope(x, torch.arange(x.shape[1]) + 1)


class Backwards(Moved):
    def __call__(self, x, positions=None):
        return self.rope(x, -torch.arange(x.shape[1]))


ROPE = torch_ref.RoPE()


@pytest.mark.parametrize(
    ("rope", "said"),
    [
        (dataclasses.replace(ROPE, interleaved=True), "interleaved, base 10000"),
        (dataclasses.replace(ROPE, base=500000.0), "half-split, base 500000"),
        (Moved(ROPE), "half-split, base 10000, positions shifted by 1"),
        (Backwards(ROPE), "half-split, base 10000, turned backwards"),
    ],
)
def test_rope(rope, said):
    x = draw(B, T, N * H)
    heads = x.unflatten(-1, (N, H))
    lines = sentences("att/query", rope(heads), ROPE(heads), {"W_query": x})
    says(lines, f"RoPE of W_query, {said}", "RoPE of W_query, half-split, base 10000")


# What is not claimed.


def test_nothing_is_said_of_a_right_node():
    assert (
        sentences(
            "norm",
            layer_norm(),
            layer_norm(),
            {"input": X},
            {"norm.scale": SCALE, "norm.shift": SHIFT},
        )
        == []
    )


def test_nothing_is_said_of_an_unknown_fault():
    assert (
        sentences("norm", draw(3, T, D), draw(3, T, D), {"input": X}, {"norm.scale": SCALE}) == []
    )
    assert sentences("att/other", draw(3, T, D), draw(3, T, D), {"input": X}) == []


@pytest.mark.parametrize("error", [1e-7, 1e-9, 10 * tolerance.FORWARD])
def test_a_form_that_fits_but_almost_is_not_named(error):
    theirs, ours = layer_norm(1e-6) + error * draw(3, T, D), layer_norm()
    lines = sentences(
        "norm", theirs, ours, {"input": X}, {"norm.scale": SCALE, "norm.shift": SHIFT}
    )
    assert lines == [
        "norm: flax has layer norm with eps=1e-05, torch has none of the known formulas"
    ]


def test_a_fault_that_is_none_here_is_not_named():
    # One key head: to tile it is to repeat it. What is wrong is something else.
    key = KEY[:, :, :1]
    ours = torch.einsum("btnh,bskh->bnts", Q, key) * H**-0.5
    lines = sentences("att/scores", ours + 1e-3 * draw(*ours.shape), ours, {"query": Q, "key": key})
    assert lines == [
        "att/scores: flax has query . key / sqrt(h), torch has none of the known formulas"
    ]


def test_small_errors_are_not_taken_for_a_lower_dtype():
    ours = MASKED.softmax(-1)
    lines = sentences("att/weights", ours + 1e-8 * draw(*ours.shape), ours, {"masked": MASKED})
    assert lines == [
        "att/weights: flax has softmax over the keys, torch has none of the known formulas"
    ]


def test_the_sides_of_a_pair_are_told_apart():
    pair = pair_of(*select(["rms_norm"]))
    side = deepcopy(pair.torch)
    side.module.eps = 2e-3
    assert localise(pair.with_torch(side)).causes == (
        "the whole module: flax has eps=0.001, torch 0.002",
    )
