"""Layers of Flax beside those of torch.nn: attention, norms, convolutions and recurrent cells."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import torch
from flax import linen, nnx
from torch.nn.functional import scaled_dot_product_attention

from field.port import CHECKS, Built, Port
from flax_attn.convert import Layout, Rule

# Checks of ports that have tokens.
STRESSED = (*CHECKS, "huge logits", "small activations", "mean offset", "long sequence")
CELL = ("weights", "forward", "gradients", "huge logits", "small activations")
IMAGES = (*CELL, "mean offset")
FUNCTION = ("forward", "gradients", "huge logits", "small activations")  # of what has no parameters


def ports() -> list[Port]:
    """Return the ports of Flax."""
    return [*_attention(), *_norms(), *_convolutions(), *_cells()]


def _port(name, configuration, build, twin, checks=STRESSED):
    return Port(f"flax/{name}", "flax", configuration, lambda dtype: build(), twin, checks)


# Attention.


def _attention():
    mha, sdpa = (
        "torch.nn.MultiheadAttention",
        "torch's scaled_dot_product_attention between Linear layers",
    )
    linen_name, nnx_name = "linen.MultiHeadDotProductAttention", "nnx.MultiHeadAttention"
    return [
        _port(f"{linen_name}/self", "self-attention, padding", _linen_self, mha),
        _port(f"{linen_name}/no-bias", "no biases", partial(_linen_self, use_bias=False), mha),
        _port(f"{linen_name}/cross", "widths of query, key and value differ", _linen_cross, mha),
        _port(f"{nnx_name}/self", "self-attention, padding", _nnx_self, mha, CHECKS),
        _port(
            f"{nnx_name}/weights",
            "self-attention, weights asked for",
            partial(_nnx_self, sow_weights=True),
            mha,
        ),
        _port(
            f"{nnx_name}/causal",
            "causal, and decoded with its cache",
            _nnx_causal,
            mha,
            (*CHECKS, "cache = full"),
        ),
        _port(
            f"{nnx_name}/grouped",
            "two key/value heads for four query heads",
            _nnx_grouped,
            sdpa,
            CHECKS,
        ),
        _port(f"{nnx_name}/qk-norm", "query and key normalised", _nnx_normalised, sdpa, CHECKS),
    ]


def torch_attention(layer, x, mask=None):
    """Call torch.nn.MultiheadAttention on x alone; True in its masks hides."""
    return layer(x, x, x, key_padding_mask=None if mask is None else ~mask, need_weights=False)[0]


def flax_attention(layer, x, mask=None, **options):
    """Call attention of Flax on x alone."""
    return layer(x, mask=None if mask is None else mask[:, None, None], **options)


def _mha(**options):
    return torch.nn.MultiheadAttention(12, 3, batch_first=True, **options).eval()


def _linen(module, *inputs):
    return module.bind(module.init(jax.random.key(0), *inputs))


def _linen_self(use_bias=True):
    layer = linen.MultiHeadDotProductAttention(3, use_bias=use_bias)
    bound = _linen(layer, jnp.ones((2, 5, 12)))
    calls = {"flax_call": flax_attention, "torch_call": torch_attention}
    return Built(bound, _mha(bias=use_bias), [(3, 7, 12)], **calls)


def _linen_cross():
    layer = linen.MultiHeadDotProductAttention(3, qkv_features=12, out_features=12)
    bound = _linen(layer, jnp.ones((2, 5, 12)), jnp.ones((2, 4, 7)), jnp.ones((2, 4, 9)))

    def theirs(layer, query, key, value):
        return layer(query, key, value, need_weights=False)[0]

    return Built(bound, _mha(kdim=7, vdim=9), [(2, 5, 12), (2, 4, 7), (2, 4, 9)], torch_call=theirs)


def _nnx_self(**options):
    layer = nnx.MultiHeadAttention(3, 12, decode=False, rngs=nnx.Rngs(0))

    def ours(layer, x, mask=None):
        return flax_attention(layer, x, mask, **options)

    return Built(layer, _mha(), [(3, 7, 12)], flax_call=ours, torch_call=torch_attention)


def _nnx_causal():
    layer = nnx.MultiHeadAttention(3, 12, decode=False, rngs=nnx.Rngs(0))

    def ours(layer, x):
        return layer(x, is_causal=True)

    def in_steps(layer, x):
        layer.init_cache(x.shape, x.dtype)
        return jnp.concatenate(
            [layer(x[:, i : i + 1], decode=True) for i in range(x.shape[1])], axis=1
        )

    def theirs(layer, x):
        hidden = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
        return layer(x, x, x, attn_mask=hidden, need_weights=False)[0]

    cached = {"flax_cached": in_steps}
    return Built(layer, _mha(), [(3, 7, 12)], flax_call=ours, torch_call=theirs, options=cached)


class GroupedAttention(torch.nn.Module):
    """Grouped-query attention by torch's own function, query and key normalised if `norm`."""

    def __init__(self, d, n, k, norm=False, bias=True):
        super().__init__()
        self.width = d // n
        self.query, self.key, self.value = (
            torch.nn.Linear(d, self.width * heads, bias) for heads in (n, k, k)
        )
        self.out = torch.nn.Linear(d, d, bias)
        self.norms = torch.nn.ModuleDict()
        if norm:
            self.norms = torch.nn.ModuleDict(
                {name: torch.nn.LayerNorm(self.width, bias=False) for name in "qk"}
            )

    def forward(self, x):
        """Return the output of the layer."""
        q, k, v = (
            linear(x).unflatten(-1, (-1, self.width))
            for linear in (self.query, self.key, self.value)
        )
        if self.norms:
            q, k = self.norms["q"](q), self.norms["k"](k)
        found = scaled_dot_product_attention(
            *(y.transpose(1, 2) for y in (q, k, v)), enable_gqa=True
        )
        return self.out(found.transpose(1, 2).flatten(2))


def _nnx_grouped():
    layer = nnx.MultiHeadAttention(4, 16, num_kv_heads=2, decode=False, rngs=nnx.Rngs(0))
    return Built(layer, GroupedAttention(16, 4, 2).eval(), [(3, 7, 16)])


def _nnx_normalised():
    layer = nnx.MultiHeadAttention(4, 16, normalize_qk=True, decode=False, rngs=nnx.Rngs(0))

    def paired(ours, theirs):
        from flax_attn.convert import auto

        rules = [
            Rule((f"{name}_ln.scale",), f"norms.{name[0]}.weight") for name in ("query", "key")
        ]
        return auto(ours, theirs, rules=rules)

    return Built(
        layer, GroupedAttention(16, 4, 4, norm=True).eval(), [(3, 7, 16)], layouts=[paired]
    )


# Norms and activations.


def _norms():
    layer, rms = "torch.nn.LayerNorm", "torch.nn.RMSNorm"
    matched = {"epsilon": 1e-5, "rngs": nnx.Rngs(0)}
    two_passes = {**matched, "use_fast_variance": False}
    return [
        _port(
            "nnx.LayerNorm/default",
            "default arguments",
            lambda: _norm(nnx.LayerNorm(12, rngs=nnx.Rngs(0))),
            layer,
        ),
        _port(
            "nnx.LayerNorm/epsilon",
            "epsilon=1e-5",
            lambda: _norm(nnx.LayerNorm(12, **matched)),
            layer,
        ),
        _port(
            "nnx.LayerNorm/two-passes",
            "epsilon=1e-5, use_fast_variance=False",
            lambda: _norm(nnx.LayerNorm(12, **two_passes)),
            layer,
        ),
        _port(
            "linen.LayerNorm/default",
            "default arguments",
            lambda: _norm(_linen(linen.LayerNorm(), jnp.ones((1, 12)))),
            layer,
        ),
        _port("nnx.RMSNorm/default", "default arguments", partial(_rms_norm, 1e-6, None), rms),
        _port(
            "nnx.RMSNorm/epsilon", "epsilon=1e-6 on both sides", partial(_rms_norm, 1e-6, 1e-6), rms
        ),
        _port(
            "nnx.GroupNorm/default",
            "default arguments",
            partial(_group_norm, 1e-6),
            "torch.nn.GroupNorm",
        ),
        _port(
            "nnx.GroupNorm/epsilon",
            "epsilon=1e-5",
            partial(_group_norm, 1e-5),
            "torch.nn.GroupNorm",
        ),
        _port(
            "nnx.BatchNorm/eval",
            "default arguments, eval mode",
            partial(_batch_norm, False),
            "torch.nn.BatchNorm1d",
        ),
        _port(
            "nnx.BatchNorm/train",
            "momentum=0.9, train mode; the running statistics are compared too",
            partial(_batch_norm, True),
            "torch.nn.BatchNorm1d",
        ),
        _port(
            "nnx.gelu/default",
            "default arguments",
            lambda: _activation(nnx.gelu),
            "torch.nn.GELU",
            FUNCTION,
        ),
        _port(
            "nnx.gelu/exact",
            "approximate=False",
            lambda: _activation(partial(nnx.gelu, approximate=False)),
            "torch.nn.GELU",
            FUNCTION,
        ),
    ]


def _norm(layer, theirs=None):
    return Built(layer, theirs or torch.nn.LayerNorm(12), [(3, 7, 12)])


def _rms_norm(ours, theirs):
    return _norm(nnx.RMSNorm(12, epsilon=ours, rngs=nnx.Rngs(0)), torch.nn.RMSNorm(12, eps=theirs))


def _activation(function):
    return Built(lambda x: function(x), torch.nn.GELU(), [(3, 7, 12)])


def channels_first(layer, x):
    """Call a layer of torch on images with the channels last."""
    return layer(x.movedim(-1, 1)).movedim(1, -1)


def _group_norm(epsilon):
    layer = nnx.GroupNorm(12, num_groups=3, epsilon=epsilon, rngs=nnx.Rngs(0))
    return Built(layer, torch.nn.GroupNorm(3, 12), [(2, 4, 3, 12)], torch_call=channels_first)


def _batch_norm(train):
    def ours(layer, x):
        output = layer(x, use_running_average=not train)
        return {"output": output, "mean": layer.mean[...], "var": layer.var[...]}

    def theirs(layer, x):
        layer.train(train)
        output = layer(x.movedim(-1, 1)).movedim(1, -1)
        return {
            "output": output,
            "mean": layer.running_mean.clone(),
            "var": layer.running_var.clone(),
        }

    layer = nnx.BatchNorm(5, momentum=0.9, rngs=nnx.Rngs(0))
    return Built(
        layer, torch.nn.BatchNorm1d(5).eval(), [(3, 7, 5)], flax_call=ours, torch_call=theirs
    )


# Convolutions, on images with the channels last.


def _convolutions():
    conv, transposed = "torch.nn.Conv2d", "torch.nn.ConvTranspose2d"
    return [
        _port("nnx.Conv/valid", "3x3, padding=VALID", partial(_conv, "VALID", 1, 0), conv, IMAGES),
        _port(
            "nnx.Conv/same-stride-2",
            "3x3, stride 2, padding=SAME",
            partial(_conv, "SAME", 2, 1),
            conv,
            IMAGES,
        ),
        _port(
            "nnx.Conv/circular",
            "3x3, padding=CIRCULAR",
            partial(_conv, "CIRCULAR", 1, 1, "circular"),
            conv,
            IMAGES,
        ),
        _port(
            "nnx.ConvTranspose/same-stride-2",
            "4x4, stride 2, SAME",
            _conv_transpose,
            transposed,
            IMAGES,
        ),
    ]


def _conv(padding, stride, theirs, mode="zeros"):
    layer = nnx.Conv(3, 4, (3, 3), strides=stride, padding=padding, rngs=nnx.Rngs(0))
    twin = torch.nn.Conv2d(3, 4, 3, stride=stride, padding=theirs, padding_mode=mode)
    return Built(layer, twin, [(2, 8, 6, 3)], torch_call=channels_first)


def _conv_transpose():
    layer = nnx.ConvTranspose(
        3, 4, (4, 4), strides=2, padding="SAME", transpose_kernel=True, rngs=nnx.Rngs(0)
    )
    twin = torch.nn.ConvTranspose2d(3, 4, 4, stride=2, padding=1)
    return Built(layer, twin, [(2, 5, 6, 3)], torch_call=channels_first)


# Recurrent cells: one step.


def _cells():
    lstm, gru = "torch.nn.LSTMCell", "torch.nn.GRUCell"
    one = "one step; torch's bias_ih, which Flax does not have, is 0"
    return [
        _port("linen.LSTMCell/step", one, _linen_lstm, lstm, CELL),
        _port("nnx.OptimizedLSTMCell/step", one, _nnx_lstm, lstm, CELL),
        _port(
            "linen.GRUCell/step",
            "one step; of torch's bias_hh the part of n alone is there",
            _linen_gru,
            gru,
            CELL,
        ),
        _port(
            "nnx.GRUCell/step",
            "one step, with the bias b_hn that its formula has",
            _nnx_gru,
            gru,
            CELL,
        ),
        _port(
            "nnx.GRUCell/no-bias-of-n",
            "one step; torch's b_hn is 0",
            partial(_nnx_gru, 0.0),
            gru,
            CELL,
        ),
        _port(
            "nnx.SimpleCell/step",
            "one step; torch's bias_hh is 0",
            _nnx_rnn,
            "torch.nn.RNNCell",
            CELL,
        ),
    ]


def _cell(layer, twin, rules, ignored, ours, theirs=None, states=1):
    inputs = [(3, 4), *[(3, 5)] * states]
    return Built(
        layer, twin, inputs, [Layout(tuple(rules), ignored)], flax_call=ours, torch_call=theirs
    )


def _without(cell, bias):
    torch.nn.init.zeros_(getattr(cell, bias))
    return cell


def _packed(bias):
    """The rules of a cell of NNX whose gates are one matrix each for input and state."""
    kernels = [Rule((f"dense_{side}.kernel",), f"weight_{side}h", "i o -> o i") for side in "ih"]
    return [*kernels, Rule((f"dense_{bias}.bias",), f"bias_{bias}h")]


def _gates(gates, side):
    return Rule(tuple(f"{side}{gate}.kernel" for gate in gates), f"weight_{side}h", "i o -> o i")


def _lstm_call(cell, x, hidden, state):
    (state, hidden), _ = cell((state, hidden), x)
    return {"hidden": hidden, "state": state}


def _torch_lstm(cell, x, hidden, state):
    hidden, state = cell(x, (hidden, state))
    return {"hidden": hidden, "state": state}


def _linen_lstm():
    bound = _linen(linen.LSTMCell(5), (jnp.ones((3, 5)), jnp.ones((3, 5))), jnp.ones((3, 4)))
    rules = [
        _gates("ifgo", "i"),
        _gates("ifgo", "h"),
        Rule(tuple(f"h{gate}.bias" for gate in "ifgo"), "bias_hh"),
    ]
    return _cell(
        bound,
        _without(torch.nn.LSTMCell(4, 5), "bias_ih"),
        rules,
        "bias_ih",
        _lstm_call,
        _torch_lstm,
        2,
    )


def _nnx_lstm():
    cell, twin = (
        nnx.OptimizedLSTMCell(4, 5, rngs=nnx.Rngs(0)),
        _without(torch.nn.LSTMCell(4, 5), "bias_ih"),
    )
    return _cell(cell, twin, _packed("h"), "bias_ih", _lstm_call, _torch_lstm, 2)


def _recurrent_call(cell, x, hidden):
    return cell(hidden, x)[1]


class TorchGRU(torch.nn.Module):
    """torch.nn.GRUCell with the biases that Flax documents: of the hidden state that of n alone."""

    def __init__(self):
        super().__init__()
        cell = torch.nn.GRUCell(4, 5)
        self.weight_ih, self.weight_hh, self.bias_ih = cell.weight_ih, cell.weight_hh, cell.bias_ih
        self.bias_hn = torch.nn.Parameter(cell.bias_hh[10:].detach().clone())

    def forward(self, x, hidden):
        """Return the next state."""
        bias = torch.cat([torch.zeros(10, dtype=x.dtype), self.bias_hn])
        return torch.gru_cell(x, hidden, self.weight_ih, self.weight_hh, self.bias_ih, bias)


def _linen_gru():
    bound = _linen(linen.GRUCell(5), jnp.ones((3, 5)), jnp.ones((3, 4)))
    biases = [
        Rule(tuple(f"i{gate}.bias" for gate in "rzn"), "bias_ih"),
        Rule(("hn.bias",), "bias_hn"),
    ]
    return _cell(
        bound, TorchGRU(), [_gates("rzn", "i"), _gates("rzn", "h"), *biases], "", _recurrent_call
    )


def _nnx_gru(bias=0.5):
    twin = TorchGRU()
    torch.nn.init.constant_(twin.bias_hn, bias)
    return _cell(
        nnx.GRUCell(4, 5, rngs=nnx.Rngs(0)), twin, _packed("i"), "bias_hn", _recurrent_call
    )


def _nnx_rnn():
    cell, twin = nnx.SimpleCell(4, 5, rngs=nnx.Rngs(0)), _without(torch.nn.RNNCell(4, 5), "bias_hh")
    return _cell(cell, twin, _packed("i"), "bias_hh", _recurrent_call)
