"""Layers of Equinox, which take one example: calls are mapped over the batch."""

import equinox
import jax
import torch

from flax_attn.convert import Layout, Rule
from parity_tests.right_pairs.pairs import Build, Sides, Size

KEY = jax.random.key(0)


def _over_tokens(layer, x):
    # Once for examples, once for tokens: the layer takes a vector.
    return jax.vmap(jax.vmap(layer))(x)


def _over_examples(layer, *inputs):
    return jax.vmap(layer)(*inputs)


TOKENS = {"flax_call": _over_tokens}
EXAMPLES = {"flax_call": _over_examples}


def _first(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape with the channels first."""
    return shape[0], shape[-1], *shape[1:-1]


def equinox_linear(size: Size) -> Sides:
    ours = equinox.nn.Linear(size.width, size.out, key=KEY)
    return Sides(ours, torch.nn.Linear(size.width, size.out), [size.sequence], TOKENS)


def equinox_mlp(size: Size) -> Sides:
    width, hidden = size.width, 2 * size.width
    ours = equinox.nn.MLP(width, size.out, hidden, 1, key=KEY)
    up = torch.nn.Linear(width, hidden)
    down = torch.nn.Linear(hidden, size.out)
    theirs = torch.nn.Sequential(up, torch.nn.ReLU(), down)
    return Sides(ours, theirs, [size.sequence], TOKENS)


def equinox_layer_norm(size: Size) -> Sides:
    ours, theirs = equinox.nn.LayerNorm(size.width), torch.nn.LayerNorm(size.width)
    return Sides(ours, theirs, [size.sequence], TOKENS)


def equinox_group_norm(size: Size) -> Sides:
    ours = equinox.nn.GroupNorm(size.heads, size.channels)
    theirs = torch.nn.GroupNorm(size.heads, size.channels)
    return Sides(ours, theirs, [_first(size.image)], EXAMPLES)


def equinox_convolution(size: Size) -> Sides:
    ours = equinox.nn.Conv2d(size.channels, size.out, 3, padding=1, key=KEY)
    theirs = torch.nn.Conv2d(size.channels, size.out, 3, padding=1)
    return Sides(ours, theirs, [_first(size.image)], EXAMPLES)


def equinox_average_pool(size: Size) -> Sides:
    # Without parameters the harness takes a function, here one over the batch.
    pool = equinox.nn.AvgPool2d(2, 2)
    inputs = [_first(size.image)]
    return Sides(lambda x: jax.vmap(pool)(x), torch.nn.AvgPool2d(2), inputs)


GRU = Layout(
    (
        Rule(("weight_ih",), "weight_ih"),
        Rule(("weight_hh",), "weight_hh"),
        Rule(("bias",), "bias_ih"),
        Rule(("bias_n",), "bias_hn"),
    )
)


def equinox_gru_cell(size: Size) -> Sides:
    ours = equinox.nn.GRUCell(size.width, size.out, key=KEY)
    options = {"layout": GRU, **EXAMPLES}
    return Sides(ours, _Gru(size), [size.vectors, size.states], options)


class _Gru(torch.nn.Module):
    """torch.nn.GRUCell, with the one bias of the hidden state that Equinox has."""

    def __init__(self, size: Size):
        super().__init__()
        cell = torch.nn.GRUCell(size.width, size.out)
        # The cell draws them, and its second bias is left out.
        self.weight_ih, self.weight_hh, self.bias_ih = cell.weight_ih, cell.weight_hh, cell.bias_ih
        self.bias_hn = torch.nn.Parameter(torch.zeros(size.out))

    def forward(self, x, hidden):
        # Only the new state has a bias of its own; for both gates one bias is enough.
        bias = torch.cat([torch.zeros(2 * len(self.bias_hn), dtype=x.dtype), self.bias_hn])
        return torch.gru_cell(x, hidden, self.weight_ih, self.weight_hh, self.bias_ih, bias)


LAYERS: tuple[Build, ...] = (
    equinox_linear,
    equinox_mlp,
    equinox_layer_norm,
    equinox_group_norm,
    equinox_convolution,
    equinox_average_pool,
    equinox_gru_cell,
)
PAIRS: dict[str, Build] = {build.__name__: build for build in LAYERS}
