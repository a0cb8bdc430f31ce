"""One projection of one side beside several of the other: the outputs tell how it holds them."""

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from torch import nn

from flax_attn import convert
from flax_attn.convert import ConversionError, Rule
from flax_attn.parity import compare
from flax_attn.parity.adapters.recording import Recording

pytestmark = pytest.mark.usefixtures("usual_promotion")

D, HEADS, WIDTH, HIDDEN = 8, 2, 4, 12
X = [(2, 5, D)]
CHECKS = ["forward", "gradients", "training"]


def linear(width, d_in=D):
    return nnx.Linear(d_in, width, rngs=nnx.Rngs(0))


def zeros(*shape):
    return nnx.Param(jnp.zeros(shape))


class TorchAttention(nn.Module):
    """Attention of three projections, with fewer heads of keys and values if `kv_heads` says so."""

    def __init__(self, kv_heads=HEADS):
        super().__init__()
        self.q_proj = nn.Linear(D, HEADS * WIDTH)
        self.k_proj = nn.Linear(D, kv_heads * WIDTH)
        self.v_proj = nn.Linear(D, kv_heads * WIDTH)
        self.o_proj = nn.Linear(HEADS * WIDTH, D)

    def project(self, x):
        return self.q_proj(x), self.k_proj(x), self.v_proj(x)

    def forward(self, x):
        in_heads = [one.unflatten(-1, (-1, WIDTH)).transpose(1, 2) for one in self.project(x)]
        attended = nn.functional.scaled_dot_product_attention(
            *in_heads, is_causal=True, enable_gqa=True
        )
        return self.o_proj(attended.transpose(1, 2).flatten(2))


class TorchFused(TorchAttention):
    """Attention of one projection, in which each head has its own query, key and value."""

    def __init__(self, by_head=True):
        super().__init__()
        del self.q_proj, self.k_proj, self.v_proj
        self.c_attn = nn.Linear(D, 3 * D)
        self.by_head = by_head

    def project(self, x):
        if not self.by_head:
            return self.c_attn(x).chunk(3, -1)
        in_heads = self.c_attn(x).unflatten(-1, (HEADS, 3, WIDTH))
        return (one.flatten(2) for one in in_heads.unbind(-2))


def attend(q, k, v):
    """Return attention over projections of shape (b, t, width), joined over heads."""
    b, t, _ = q.shape
    in_heads = [one.reshape(b, t, -1, WIDTH) for one in (q, k, v)]
    return jax.nn.dot_product_attention(*in_heads, is_causal=True).reshape(b, t, -1)


class Fused(nnx.Module):
    def __init__(self, kv_heads=HEADS, by_head=False):
        self.qkv, self.out = linear((HEADS + 2 * kv_heads) * WIDTH), linear(D, HEADS * WIDTH)
        self.kv_heads, self.by_head = kv_heads, by_head

    def project(self, x):
        joined = self.qkv(x)
        of_query, of_key = HEADS * WIDTH, self.kv_heads * WIDTH
        if not self.by_head:
            return jnp.split(joined, [of_query, of_query + of_key], -1)
        in_groups = joined.reshape(*x.shape[:2], self.kv_heads, -1)
        end = of_query // self.kv_heads
        parts = jnp.split(in_groups, [end, end + WIDTH], -1)
        return [part.reshape(*x.shape[:2], -1) for part in parts]

    def __call__(self, x):
        return self.out(attend(*self.project(x)))


class Apart(Fused):
    def __init__(self):
        self.wq, self.wk, self.wv, self.out = linear(D), linear(D), linear(D), linear(D)

    def project(self, x):
        return self.wq(x), self.wk(x), self.wv(x)


class Raw(Fused):
    """Arrays of a user's own, with heads apart in one of several orders of axes."""

    AXES = {"c": 3, "d": D, "n": HEADS, "h": WIDTH, "o": D}

    def __init__(self, axes):
        self.axes, self.bias_axes = axes, axes.replace("d", "")
        self.w_qkv = zeros(*(self.AXES[axis] for axis in axes))
        self.b_qkv = zeros(*(self.AXES[axis] for axis in self.bias_axes))
        self.out = linear(D)

    def project(self, x):
        behind = "nh" if "n" in self.axes else "o"
        moved = jnp.einsum(f"{self.bias_axes}->c{behind}", self.b_qkv[...])
        q, k, v = jnp.einsum(f"btd,{self.axes}->cbt{behind}", x, self.w_qkv[...]) + moved.reshape(
            3, 1, 1, *moved.shape[1:]
        )
        return [one.reshape(*x.shape[:2], -1) for one in (q, k, v)]


class RawApart(Fused):
    def __init__(self, heads=True):
        shape = (HEADS, WIDTH) if heads else (D,)
        self.w_q, self.w_k, self.w_v = (zeros(D, *shape) for _ in range(3))
        self.b_q, self.b_k, self.b_v = (zeros(*shape) for _ in range(3))
        self.out = linear(D)

    def project(self, x):
        kernels, biases = (self.w_q, self.w_k, self.w_v), (self.b_q, self.b_k, self.b_v)
        pairs = zip(kernels, biases, strict=True)
        return [x @ w[...].reshape(D, -1) + b[...].reshape(-1) for w, b in pairs]


class TorchPacked(nn.Module):
    def __init__(self):
        super().__init__()
        self.attn = nn.MultiheadAttention(D, HEADS, batch_first=True)

    def forward(self, x):
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1], dtype=x.dtype)
        return self.attn(x, x, x, attn_mask=mask, need_weights=False)[0]


RIGHT = {
    "one after the other": (lambda: Fused(), TorchAttention),
    "by head": (lambda: Fused(by_head=True), TorchAttention),
    "grouped queries": (lambda: Fused(1), lambda: TorchAttention(1)),
    "apart in JAX": (Apart, lambda: TorchFused(by_head=False)),
    "apart in JAX, by head in PyTorch": (Apart, TorchFused),
    "one array": (lambda: Raw("dco"), TorchAttention),
    "counted first": (lambda: Raw("cdo"), TorchAttention),
    "heads": (lambda: Raw("dcnh"), TorchAttention),
    "heads first": (lambda: Raw("dnch"), TorchAttention),
    "arrays apart": (RawApart, lambda: TorchFused(by_head=False)),
    "arrays apart, by head in PyTorch": (RawApart, TorchFused),
    "arrays apart, packed in PyTorch": (RawApart, TorchPacked),
    "square arrays apart, packed in PyTorch": (lambda: RawApart(heads=False), TorchPacked),
}


@pytest.mark.parametrize("name", RIGHT)
def test_a_right_port_is_equal(name):
    ours, theirs = RIGHT[name]
    report = compare(ours(), theirs().eval(), X, checks=CHECKS)
    assert report.passed, report.explain()
    # The only thing left to say is which checks did not run.
    assert len(report.coverage.untested) == 1


class Block(nnx.Module):
    """Attention and a gated feed-forward, each of one projection, in two layers."""

    def __init__(self, up_first):
        def layer():
            parts = {"attn": Fused(by_head=True), "norm": nnx.RMSNorm(D, rngs=nnx.Rngs(0))}
            parts |= {"gate_up": linear(2 * HIDDEN), "down": linear(D, HIDDEN)}
            return nnx.Dict(parts)

        self.layers = nnx.List([layer(), layer()])
        self.up_first = up_first

    def __call__(self, x):
        for layer in self.layers:
            x = x + layer["attn"](layer["norm"](x))
            gate, up = jnp.split(layer["gate_up"](x), 2, -1)
            if self.up_first:
                gate, up = up, gate
            x = x + layer["down"](jax.nn.silu(gate) * up)
        return x


class TorchLayer(nn.Module):
    def __init__(self):
        super().__init__()
        self.self_attn, self.input_norm = TorchAttention(), nn.RMSNorm(D, eps=1e-6)
        self.gate_proj, self.up_proj = nn.Linear(D, HIDDEN), nn.Linear(D, HIDDEN)
        self.down_proj = nn.Linear(HIDDEN, D)

    def forward(self, x):
        x = x + self.self_attn(self.input_norm(x))
        return x + self.down_proj(nn.functional.silu(self.gate_proj(x)) * self.up_proj(x))


@pytest.mark.parametrize("up_first", [False, True])
def test_layers_with_two_fused_projections(up_first):
    theirs = nn.Sequential(TorchLayer(), TorchLayer())
    report = compare(Block(up_first), theirs.eval(), X, checks=CHECKS)
    assert report.passed, report.explain()
    # With the two exchanged the function is the same, and a checkpoint is not.
    exchanged = [one for one in report.coverage.untested if "then gate_proj" in one]
    assert bool(exchanged) == up_first
    assert len(report.coverage.untested) == 1 + len(exchanged)


def test_swapped_keys_and_values_are_different():
    class Swapped(Fused):
        def project(self, x):
            q, k, v = super().project(x)
            return q, v, k

    report = compare(Swapped(), TorchAttention().eval(), X, checks=["forward"])
    assert not report.passed
    assert any("the outputs agree with none of them" in one for one in report.coverage.untested)


class Scaled(Fused):
    def __call__(self, x):
        return 2.0 * super().__call__(x)


class Unmasked(Fused):
    def __call__(self, x):
        b, t, _ = x.shape
        in_heads = [one.reshape(b, t, -1, WIDTH) for one in self.project(x)]
        return self.out(jax.nn.dot_product_attention(*in_heads).reshape(b, t, -1))


# How the projection holds the three is told by the values before the fault.
@pytest.mark.parametrize(
    ("kind", "said"),
    [
        (Scaled, "flax multiplies by 2, torch by 1"),
        (Unmasked, "torch has where(tril(1, diagonal=0)"),
    ],
    ids=["scale", "mask"],
)
def test_a_fault_beside_a_fused_projection_is_located(kind, said):
    (cause,) = compare(kind(by_head=True), TorchAttention().eval(), X, checks=["forward"]).causes
    assert said in cause


NAMES = ("q_proj", "k_proj", "v_proj")
KERNEL = Rule(("qkv.kernel",), "*.weight", "i o -> o i", names=NAMES, shares=(2, 1, 1))
BIAS = Rule(("qkv.bias",), "*.bias", names=NAMES, shares=(2, 1, 1))


def test_auto_asks_for_a_rule_and_writes_it():
    ours, theirs = Fused(1), TorchAttention(1)
    with pytest.raises(ConversionError) as caught:
        convert.auto(ours, theirs)
    _, kernel, bias, _ = str(caught.value).splitlines()
    assert kernel == (
        "  flax qkv.kernel (8, 16) may be torch q_proj.weight + k_proj.weight + v_proj.weight"
        f" (8, 8) + (4, 8). In which order is not known; one after the other: {KERNEL}"
    )
    assert bias.endswith(repr(BIAS))
    assert eval(repr(KERNEL)) == KERNEL
    pairing = convert.auto(ours, theirs, rules=[KERNEL, BIAS])
    convert.load_state_dict(ours, theirs.state_dict(), pairing)
    back = convert.state_dict(ours, pairing)
    assert back.keys() == theirs.state_dict().keys()
    for name, tensor in theirs.state_dict().items():
        assert (back[name] == tensor.numpy()).all()
    assert (theirs.k_proj.weight.detach().numpy() == ours.qkv.kernel[:, 8:12].T).all()


def test_a_fused_projection_is_exported_and_repeated(tmp_path):
    options = {"checks": ["forward", "gradients"]}
    ours = Fused(by_head=True)
    live = compare(ours, TorchAttention().eval(), X, record=True, **options)
    found = Recording(live.export(tmp_path))
    repeated = compare(ours, found, found.inputs, **options)
    assert repeated.passed, repeated.explain()
    assert [check.error for check in repeated.checks] == [check.error for check in live.checks]
