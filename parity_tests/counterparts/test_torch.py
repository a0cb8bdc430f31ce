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
SEEN[..., 0] = True  # no query is left without a key


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
    "attn_mask, one a head": (  # True hides there, and shows here
        ours(**WIDTHS),
        theirs(**WIDTHS),
        CROSS,
        lambda layer, *inputs: weighed(layer, *inputs, mask=jnp.asarray(SEEN)),
        lambda layer, *inputs: weighed_by_torch(
            layer, *inputs, attn_mask=~torch.tensor(SEEN).flatten(0, 1)
        ),
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


def padded(layer, x, lengths=None):
    return layer(x, mask=None if lengths is None else Mask.lengths(key=lengths))


def padded_by_torch(layer, x, lengths=None):
    return layer(x, x, x, key_padding_mask=padding(x, lengths), need_weights=False)[0]


def test_everything_with_padding(checks):
    # Without weights torch takes a kernel that gives 0 to a query without keys, as ours do. NaN in
    # the padding passes.
    inapplicable = "dropout", "running statistics", "cache = full"
    names = checks.all_but(*inapplicable, "long sequence", "non-finite padding")
    options = {"layout": "torch_mha", "flax_call": padded, "torch_call": padded_by_torch}
    report = assert_parity(ours(), theirs(), SELF, checks=names, **options)
    assert (
        "no effect on the outputs: 8 of 24 elements of in_proj_bias"
        in report.check("gradients").note
    )  # those of the key

    given = assert_parity(
        ours(),
        theirs(),
        SELF,
        checks=["forward"],
        extras={"lengths": np.array([2, 5, 4])},
        **options,
    )
    where = [r.check("forward").where["flax"] for r in (report, given)]
    assert where[0] != where[1], "the lengths do not reach the calls"


def test_asked_for_weights_torch_gives_nan_where_nothing_is_seen(checks):
    def call(layer, x, lengths=None):
        return weighed(layer, x, mask=None if lengths is None else Mask.lengths(key=lengths))

    def torch_call(layer, x, lengths=None):
        return weighed_by_torch(layer, x, key_padding_mask=padding(x, lengths))

    names = (*checks.core, "padded rows", "non-finite padding")
    options = {"layout": "torch_mha", "flax_call": call, "torch_call": torch_call, "locate": False}
    report = compare(ours(), theirs(), SELF, checks=names, **options)
    assert [check.name for check in report.failed] == ["padded rows", "non-finite padding"]
    line = report.failed[0].explain()
    assert "worst element (0, 0, 0): flax" in line
    assert "torch nan, not finite in torch alone" in line
    assert "PyTorch lets padding reach real tokens of 0, 1" in report.failed[1].explain()


def test_nan_of_empty_rows_is_avoided_by_the_call(checks):
    def torch_call(layer, x, lengths=None):
        if lengths is None:
            return weighed_by_torch(layer, x)
        hidden = padding(x, lengths)
        empty = hidden.all(dim=1)
        output, weights = weighed_by_torch(layer, x, key_padding_mask=hidden & ~empty[:, None])
        output = torch.where(empty[:, None, None], layer.out_proj.bias, output)
        return output, torch.where(empty[:, None, None, None], 0.0, weights)

    def call(layer, x, lengths=None):
        return weighed(layer, x, mask=None if lengths is None else Mask.lengths(key=lengths))

    assert_parity(
        ours(),
        theirs(),
        SELF,
        layout="torch_mha",
        checks=["padded rows"],
        flax_call=call,
        torch_call=torch_call,
    )


class WithExtraKeys(flax_attn.MultiHeadAttention):
    """Self-attention with `add_bias_kv` and `add_zero_attn`.

    They append keys that every query may see.
    """

    def __init__(self, add_bias_kv, add_zero_attn):
        super().__init__(D, D, None, 0.0, HEADS, True, causal=False, rngs=nnx.Rngs(0))
        if add_bias_kv:
            self.bias_k, self.bias_v = (nnx.Param(jnp.zeros((1, 1, D))) for _ in range(2))
        self.add_bias_kv, self.add_zero_attn = add_bias_kv, add_zero_attn

    def __call__(self, x, lengths=None):
        key, value = self.W_key(x), self.W_value(x)
        if self.add_bias_kv:
            key, value = self._append(key, self.bias_k[...]), self._append(value, self.bias_v[...])
        if self.add_zero_attn:
            key, value = (self._append(y, jnp.zeros((1, 1, D), y.dtype)) for y in (key, value))
        query, key, value = (
            rearrange(y, "b s (n h) -> b s n h", n=HEADS) for y in (self.W_query(x), key, value)
        )
        places = jnp.arange(key.shape[1])
        seen = jnp.ones((B, len(places)), bool) if lengths is None else places < lengths[:, None]
        mask = rearrange(seen | (places >= x.shape[1]), "b s -> b 1 1 s")
        found = flax_attn.attend(query, key, value, mask=mask, return_weights=True)
        return self.out_proj(rearrange(found.output, "b t n h -> b t (n h)")), found.weights

    @staticmethod
    def _append(y, row):
        return jnp.concatenate([y, repeat(row, "1 1 d -> b 1 d", b=len(y))], axis=1)


@pytest.mark.parametrize(("add_bias_kv", "add_zero_attn"), [(False, True), (True, True)])
def test_extra_keys(add_bias_kv, add_zero_attn, checks):
    def torch_call(layer, x, lengths=None):
        return weighed_by_torch(layer, x, key_padding_mask=padding(x, lengths))

    assert_parity(
        WithExtraKeys(add_bias_kv, add_zero_attn),
        theirs(add_bias_kv=add_bias_kv, add_zero_attn=add_zero_attn),
        SELF,
        layout="torch_mha",
        checks=(*checks.core, "padded rows"),  # no row is empty: all see the extra keys
        torch_call=torch_call,
    )
