"""Train mode of PyTorch without dropout: no function of it draws a random number."""

import pytest
import torch
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_padded_sequence

from flax_attn.parity.adapters.torch_dropout import WithoutDropout

X = torch.linspace(-1, 1, 24).reshape(3, 2, 4)


def attend(x, **options):
    return F.scaled_dot_product_attention(x, x, x, **options)


def heads():
    layer = torch.nn.MultiheadAttention(4, 2, dropout=0.5)
    return lambda x: layer(x, x, x)[0]


def recurrent(kind, packed=False):
    layer = kind(4, 3, 2, dropout=0.5)
    if packed:
        return lambda x: layer(pack_padded_sequence(x, [3, 2]))[0].data
    return lambda x: layer(x)[0]


# A function that makes each call: layers are drawn behind the seed.
CALLS = {
    "dropout": lambda: torch.nn.Dropout(0.5),
    "torch.dropout": lambda: lambda x: torch.dropout(x, 0.5, True),
    "channels": lambda: torch.nn.Dropout1d(0.5),
    "alpha": lambda: lambda x: F.feature_alpha_dropout(x, 0.5, True),
    "attention": lambda: lambda x: F.scaled_dot_product_attention(x, x, x, None, 0.5),
    "attention by name": lambda: lambda x: attend(x, dropout_p=0.5, scale=0.3),
    "heads": heads,
    "lstm": lambda: recurrent(torch.nn.LSTM),
    "gru": lambda: recurrent(torch.nn.GRU),
    "rnn": lambda: recurrent(torch.nn.RNN),
    "packed": lambda: recurrent(torch.nn.LSTM, packed=True),
}


def results(name, seeds):
    """Return what a call returns for each seed; its weights are those of one seed."""
    found = []
    for seed in seeds:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            call = CALLS[name]()
            torch.manual_seed(seed)
            found.append(call(X))
    return found


@pytest.mark.parametrize("name", CALLS)
def test_nothing_is_dropped(name):
    first, second = results(name, (1, 2))
    # Else it drops nothing anyway.
    assert not torch.equal(first, second)
    with WithoutDropout():
        first, second = results(name, (1, 2))
    torch.testing.assert_close(first, second, rtol=0, atol=0)
