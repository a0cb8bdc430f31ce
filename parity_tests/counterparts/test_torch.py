"""torch.nn.MultiheadAttention, all its flags, against our multi-head attention."""

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from einops import rearrange, repeat
from flax import nnx

import flax_attn
from flax_attn import Mask
from flax_attn.parity import assert_parity, compare

B, T, S, D, HEADS, KDIM, VDIM = 3, 5, 7, 8, 2, 6, 4
SELF, CROSS = [(B, T, D)], [(B, T, D), (B, S, KDIM), (B, S, VDIM)]
WIDTHS = {"kdim": KDIM, "vdim": VDIM}
SEEN = np.random.default_rng(0).random((B, HEADS, T, S)) < 0.6
# No query is left without a key.
SEEN[..., 0] = True


def ours(bias=True, **widths):
    return flax_attn.MultiHeadAttention(
        D, D, None, 0.0, HEADS, bias, out_bias=bias, causal=False, rngs=nnx.Rngs(0), **widths
    )


def theirs(**flags):
    return torch.nn.MultiheadAttention(D, HEADS, **{"batch_first": True, **flags}).eval()


def weighed(layer, query, key=None, value=None, **options):
    attended = layer.attend(query, key, value, return_weights=True, **options)
    return attended.output, attended.weights


def weighed_by_torch(layer, query, key=None, value=None, average_attn_weights=False, **options):
    key = query if key is None else key
    value = key if value is None else value
    return layer(query, key, value, average_attn_weights=average_attn_weights, **options)


def averaged(layer, x):
    output, weights = weighed(layer, x)
    return output, weights.mean(axis=1)


def causal(layer, x, **options):
    hidden = torch.nn.Transformer.generate_square_subsequent_mask(x.shape[1], dtype=x.dtype)
    return weighed_by_torch(layer, x, attn_mask=hidden, is_causal=True, **options)


def tokens_first(layer, x):
    output, weights = weighed_by_torch(layer, x.transpose(0, 1))
    return output.transpose(0, 1), weights


# True hides there, and shows here; and heads are part of the batch.
HIDDEN = ~torch.tensor(SEEN).flatten(0, 1)
FLAGS = {
    "no bias": (ours(bias=False), theirs(bias=False), SELF, weighed, weighed_by_torch),
    "kdim and vdim": (ours(**WIDTHS), theirs(**WIDTHS), CROSS, weighed, weighed_by_torch),
    "kdim and vdim, no bias": (
        ours(bias=False, **WIDTHS),
        theirs(bias=False, **WIDTHS),
        CROSS,
        weighed,
        weighed_by_torch,
    ),
    "average_attn_weights": (
        ours(),
        theirs(),
        SELF,
        averaged,
        lambda layer, x: weighed_by_torch(layer, x, average_attn_weights=True),
    ),
    "batch_first=False": (ours(), theirs(batch_first=False), SELF, weighed, tokens_first),
    "attn_mask, one a head": (
        ours(**WIDTHS),
        theirs(**WIDTHS),
        CROSS,
        lambda layer, *inputs: weighed(layer, *inputs, mask=jnp.asarray(SEEN)),
        lambda layer, *inputs: weighed_by_torch(layer, *inputs, attn_mask=HIDDEN),
    ),
    "attn_mask, added": (
        ours(),
        theirs(),
        [*SELF, (T, T)],
        lambda layer, x, bias: weighed(layer, x, bias=bias),
        lambda layer, x, bias: weighed_by_torch(layer, x, attn_mask=bias),
    ),
    "is_causal": (
        ours(),
        theirs(),
        SELF,
        lambda layer, x: weighed(layer, x, mask=Mask.causal()),
        causal,
    ),
}


@pytest.mark.parametrize("flag", FLAGS)
def test_flags(flag, checks):
    layer, torch_layer, inputs, call, torch_call = FLAGS[flag]
    assert_parity(
        layer,
        torch_layer,
        inputs,
        layout="torch_mha",
        checks=checks.core,
        flax_call=call,
        torch_call=torch_call,
    )


def padding(x, lengths):
    return None if lengths is None else torch.arange(x.shape[1]) >= lengths[:, None]


def mask_of(lengths):
    return None if lengths is None else Mask.lengths(key=lengths)


def padded(layer, x, lengths=None):
    return layer(x, mask=mask_of(lengths))


def padded_by_torch(layer, x, lengths=None):
    return layer(x, x, x, key_padding_mask=padding(x, lengths), need_weights=False)[0]


def weighed_padded(layer, x, lengths=None):
    return weighed(layer, x, mask=mask_of(lengths))


def weighed_padded_by_torch(layer, x, lengths=None):
    return weighed_by_torch(layer, x, key_padding_mask=padding(x, lengths))


PADDED = {"layout": "torch_mha", "flax_call": padded, "torch_call": padded_by_torch}
WEIGHED = {
    "layout": "torch_mha",
    "flax_call": weighed_padded,
    "torch_call": weighed_padded_by_torch,
}
# Neither layer has any.
INAPPLICABLE = ("dropout", "running statistics", "cache = full")


def where_worst(report):
    """Return the value where both sides differ most."""
    return report.check("forward").where["flax"]


def test_everything_with_padding(checks):
    # Without weights torch takes a kernel that gives 0 to a query without keys, as ours do. NaN in
    # the padding passes.
    names = checks.all_but(*INAPPLICABLE, "long sequence", "non-finite padding")
    report = assert_parity(ours(), theirs(), SELF, checks=names, **PADDED)
    # Those of the key.
    note = "no effect on the outputs: 8 of 24 elements of in_proj_bias"
    assert note in report.check("gradients").note
    options = {"checks": ["forward"], "extras": {"lengths": np.array([2, 5, 4])}, **PADDED}
    given = assert_parity(ours(), theirs(), SELF, **options)
    assert where_worst(report) != where_worst(given), "the lengths do not reach the calls"


@pytest.fixture
def asked_for_weights(checks):
    names = (*checks.core, "padded rows", "non-finite padding")
    return compare(ours(), theirs(), SELF, checks=names, locate=False, **WEIGHED)


def test_asked_for_weights_torch_gives_nan_where_nothing_is_seen(asked_for_weights):
    rows, padding = asked_for_weights.failed
    assert [rows.name, padding.name] == ["padded rows", "non-finite padding"]
    line = rows.explain()
    assert "worst element (0, 0, 0): flax" in line
    assert "torch nan, not finite in torch alone" in line
    assert "PyTorch lets padding reach real tokens of 0, 1" in padding.explain()


def zero_where_empty(layer, empty, output, weights):
    """Return what follows from a sum over no values: the bias of the projection."""
    output = torch.where(empty[:, None, None], layer.out_proj.bias, output)
    return output, torch.where(empty[:, None, None, None], 0.0, weights)


def without_nan(layer, x, lengths=None):
    """Let rows without a key see all keys, and replace what comes of it."""
    if lengths is None:
        return weighed_by_torch(layer, x)
    hidden = padding(x, lengths)
    empty = hidden.all(dim=1)
    outputs = weighed_by_torch(layer, x, key_padding_mask=hidden & ~empty[:, None])
    return zero_where_empty(layer, empty, *outputs)


def test_nan_of_empty_rows_is_avoided_by_the_call(checks):
    options = {**WEIGHED, "torch_call": without_nan}
    assert_parity(ours(), theirs(), SELF, checks=["padded rows"], **options)


ZERO = np.zeros((1, 1, D))


def append(tokens, row):
    """Return tokens (b, s, d) and a row (1, 1, d) behind each sequence."""
    rows = repeat(row, "1 1 d -> b 1 d", b=len(tokens))
    return jnp.concatenate([tokens, rows.astype(tokens.dtype)], axis=1)


def seen_with_extra(x, count, lengths):
    """Return the mask (b, 1, 1, s) of keys, of which those behind the tokens are always seen."""
    places = jnp.arange(count)
    limits = jnp.full(len(x), x.shape[1]) if lengths is None else lengths
    seen = (places < limits[:, None]) | (places >= x.shape[1])
    return rearrange(seen, "b s -> b 1 1 s")


def split_heads(tokens):
    return rearrange(tokens, "b s (n h) -> b s n h", n=HEADS)


class WithExtraKeys(flax_attn.MultiHeadAttention):
    """Self-attention with `add_bias_kv` and `add_zero_attn`.

    They append keys that every query may see.
    """

    def __init__(self, add_bias_kv, add_zero_attn):
        super().__init__(D, D, None, 0.0, HEADS, True, causal=False, rngs=nnx.Rngs(0))
        if add_bias_kv:
            self.bias_k = nnx.Param(jnp.zeros((1, 1, D)))
            self.bias_v = nnx.Param(jnp.zeros((1, 1, D)))
        self.add_bias_kv = add_bias_kv
        self.add_zero_attn = add_zero_attn

    def __call__(self, x, lengths=None):
        keys, values = self._extended(x)
        mask = seen_with_extra(x, keys.shape[1], lengths)
        heads = map(split_heads, (self.W_query(x), keys, values))
        found = flax_attn.attend(*heads, mask=mask, return_weights=True)
        output = rearrange(found.output, "b t n h -> b t (n h)")
        return self.out_proj(output), found.weights

    def _extended(self, x):
        """Return keys and values, and behind them those that PyTorch appends."""
        keys, values = self.W_key(x), self.W_value(x)
        if self.add_bias_kv:
            keys, values = append(keys, self.bias_k[...]), append(values, self.bias_v[...])
        if self.add_zero_attn:
            keys, values = append(keys, ZERO), append(values, ZERO)
        return keys, values


@pytest.mark.parametrize(("add_bias_kv", "add_zero_attn"), [(False, True), (True, True)])
def test_extra_keys(add_bias_kv, add_zero_attn, checks):
    flags = {"add_bias_kv": add_bias_kv, "add_zero_attn": add_zero_attn}
    sides = WithExtraKeys(**flags), theirs(**flags)
    options = {"layout": "torch_mha", "torch_call": weighed_padded_by_torch}
    # No row is empty: all see the extra keys.
    assert_parity(*sides, SELF, checks=(*checks.core, "padded rows"), **options)
