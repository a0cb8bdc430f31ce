"""`convert.auto` on models of vision: outputs are equal with no rule written."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx
from torch import nn

import flax_attn
from flax_attn import convert
from flax_attn.parity import tolerance

D, HEADS, HIDDEN, CLASSES = 8, 2, 20, 7
F64 = {"param_dtype": jnp.float64}
R = nnx.Rngs(0)
NORM = {"epsilon": 1e-5, "use_fast_variance": False, "rngs": R, **F64}


@pytest.fixture(autouse=True)
def usual_promotion():
    """Let Flax's own layers promote as they do."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


def randomised(module, seed=0):
    """Return a PyTorch module in float64 and eval mode: every parameter and statistic is random."""
    draw = np.random.default_rng(seed)
    module = module.double().eval()
    for tensor in module.state_dict().values():
        if tensor.is_floating_point():
            tensor.copy_(torch.from_numpy(draw.uniform(0.2, 1.0, tuple(tensor.shape))))
    return module


def assert_equal(ours, theirs):
    errors = tolerance.relative({"output": np.asarray(ours)}, {"output": theirs.detach().numpy()})
    assert errors["output"] <= tolerance.FORWARD, errors


def assert_loads(ours, theirs, *inputs, last=False):
    """Load their weights into our NNX module by `auto` and compare outputs; `last`: our channels are the last axis."""
    randomised(theirs)
    convert.load_state_dict(ours, theirs.state_dict(), layout=convert.auto(ours, theirs))
    ours.eval()
    arrays = [np.moveaxis(x, 1, -1) if last else x for x in inputs]
    output = nnx.jit(lambda module, *x: module(*x))(ours, *map(jnp.asarray, arrays))
    with torch.no_grad():
        assert_equal(output, theirs(*map(torch.from_numpy, inputs)))


def normal(*shape):
    return np.random.default_rng(1).normal(size=shape)


# A vision transformer of nnx layers, and twins of it in several styles.


def attend(query, key, value, mask=None, **options):
    """Compute attention in float64; Flax's own takes the softmax in float32."""
    scores = jnp.einsum("...tnh,...snh->...nts", query, key) / query.shape[-1] ** 0.5
    return jnp.einsum("...nts,...snh->...tnh", jax.nn.softmax(scores), value)


class Block(nnx.Module):
    def __init__(self):
        self.norm1 = nnx.LayerNorm(D, **NORM)
        self.attn = nnx.MultiHeadAttention(HEADS, D, decode=False, attention_fn=attend, rngs=R, **F64)
        self.norm2 = nnx.LayerNorm(D, **NORM)
        self.fc1, self.fc2 = nnx.Linear(D, HIDDEN, rngs=R, **F64), nnx.Linear(HIDDEN, D, rngs=R, **F64)

    def __call__(self, x):
        x = x + self.attn(self.norm1(x))
        return x + self.fc2(jax.nn.gelu(self.fc1(self.norm2(x)), approximate=False))


class ViT(nnx.Module):
    def __init__(self, block=Block):
        self.patch = nnx.Conv(3, D, (4, 4), strides=4, padding="VALID", rngs=R, **F64)
        self.cls = nnx.Param(jnp.zeros((1, 1, D), jnp.float64))
        self.pos = nnx.Param(jnp.zeros((1, 7, D), jnp.float64))
        self.blocks = nnx.List([block() for _ in range(4)])
        self.norm = nnx.LayerNorm(D, **NORM)
        self.head = nnx.Linear(D, CLASSES, rngs=R, **F64)

    def __call__(self, images):
        x = self.patch(images)
        x = x.reshape(len(x), -1, D)
        x = jnp.concatenate([jnp.tile(self.cls[...], (len(x), 1, 1)), x], axis=1) + self.pos[...]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)[:, 0])


class TorchBlock(nn.Module):
    """The same names."""

    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(D), nn.LayerNorm(D)
        self.attn = nn.MultiheadAttention(D, HEADS, batch_first=True)
        self.fc1, self.fc2 = nn.Linear(D, HIDDEN), nn.Linear(HIDDEN, D)

    def attend(self, x):
        return self.attn(x, x, x, need_weights=False)[0]

    def forward(self, x):
        x = x + self.attend(self.norm1(x))
        return x + self.fc2(nn.functional.gelu(self.fc1(self.norm2(x))))


class TorchvisionBlock(nn.Module):
    """Other names, and an MLP that is a sequence."""

    def __init__(self):
        super().__init__()
        self.ln_1, self.self_attention = nn.LayerNorm(D), nn.MultiheadAttention(D, HEADS, batch_first=True)
        self.ln_2 = nn.LayerNorm(D)
        self.mlp = nn.Sequential(nn.Linear(D, HIDDEN), nn.GELU(), nn.Dropout(0.0), nn.Linear(HIDDEN, D))

    def forward(self, x):
        y = self.ln_1(x)
        x = x + self.self_attention(y, y, y, need_weights=False)[0]
        return x + self.mlp(self.ln_2(x))


class Projections(nn.Module):
    def __init__(self):
        super().__init__()
        # Not in the order of ours: the names decide.
        self.v_proj, self.o_proj, self.k_proj, self.q_proj = (nn.Linear(D, D) for _ in range(4))

    def forward(self, x):
        b, t, _ = x.shape
        q, k, v = (f(x).view(b, t, HEADS, -1).transpose(1, 2) for f in (self.q_proj, self.k_proj, self.v_proj))
        y = nn.functional.scaled_dot_product_attention(q, k, v)
        return self.o_proj(y.transpose(1, 2).reshape(b, t, D))


class NestedBlock(nn.Module):
    """Unlike names in the same order, and parts within parts."""

    def __init__(self):
        super().__init__()
        self.mixing = nn.ModuleDict({"before": nn.LayerNorm(D), "mixer": Projections()})
        self.feeding = nn.ModuleDict(
            {"before": nn.LayerNorm(D), "inner": nn.ModuleDict({"a": nn.Linear(D, HIDDEN), "b": nn.Linear(HIDDEN, D)})}
        )

    def forward(self, x):
        x = x + self.mixing["mixer"](self.mixing["before"](x))
        inner = self.feeding["inner"]
        return x + inner["b"](nn.functional.gelu(inner["a"](self.feeding["before"](x))))


class TorchViT(nn.Module):
    def __init__(self, block, names=("patch", "cls", "pos", "blocks", "norm", "head"), squeeze=False):
        super().__init__()
        self.names = names
        parts = (
            nn.Conv2d(3, D, 4, 4),
            nn.Parameter(torch.zeros(*(() if squeeze else (1, 1)), D)),
            nn.Parameter(torch.zeros(*(() if squeeze else (1,)), 7, D)),
            nn.ModuleList([block() for _ in range(4)]),
            nn.LayerNorm(D),
            nn.Linear(D, CLASSES),
        )
        for name, part in zip(names, parts, strict=True):
            setattr(self, name, part)

    def forward(self, images):
        patch, token, position, blocks, norm, head = (getattr(self, name) for name in self.names)
        x = patch(images).flatten(2).transpose(1, 2)
        x = torch.cat([token.view(1, 1, D).expand(len(x), -1, -1), x], dim=1) + position
        for block in blocks:
            x = block(x)
        return head(norm(x)[:, 0])


OTHERS = ("conv_proj", "class_token", "pos_embedding", "layers", "ln", "classifier")
TWINS = {
    "same names": lambda: TorchViT(TorchBlock),
    "torchvision's names": lambda: TorchViT(TorchvisionBlock, OTHERS),
    "no name alike": lambda: TorchViT(NestedBlock, tuple("abcdef")),
    "squeezed": lambda: TorchViT(TorchBlock, OTHERS, squeeze=True),
}


class TestVisionTransformer:
    @pytest.mark.parametrize("style", TWINS)
    def test_of_nnx_layers(self, style):
        assert_loads_images(ViT(), TWINS[style]())

    def test_of_our_attention(self):
        class Ours(Block):
            def __init__(self):
                super().__init__()
                self.attn = flax_attn.MultiHeadAttention(D, D, None, 0.0, HEADS, True, causal=False, rngs=R, **F64)

        assert_loads_images(ViT(Ours), TWINS["torchvision's names"]())

    def test_the_table(self):
        lines = str(convert.auto(ViT(), TWINS["torchvision's names"]())).splitlines()
        assert lines[0] == "56 parameters paired"
        assert lines[1].split() == ["torch", "kind", "shape", "flax", "shape", "flax", "to", "torch", "settled", "by"]
        found = {line.split()[0]: line for line in lines[2:]}
        packed = found["layers.1.self_attention.in_proj_weight"]
        for cell in ("Linear", "(24, 8)", "blocks.1.attn.query.kernel + key.kernel + value.kernel", "(8, 2, 4)"):
            assert cell in packed
        assert "i n h -> (n h) i" in packed
        assert packed.endswith("name")
        assert found["class_token"].split()[-2:] == ["same", "shape"]


def assert_loads_images(ours, theirs):
    randomised(theirs)
    convert.load_state_dict(ours, theirs.state_dict(), layout=convert.auto(ours, theirs))
    images = normal(2, 3, 8, 12)
    output = nnx.jit(lambda module, x: module(x))(ours, jnp.asarray(np.moveaxis(images, 1, -1)))
    assert_equal(output, theirs(torch.from_numpy(images)))


# Convolutional networks.


def conv(d_in, d_out, size, strides=1):
    return nnx.Conv(d_in, d_out, (size, size), strides, padding=size // 2, use_bias=False, rngs=R, **F64)


def batch_norm(d):
    norm = nnx.BatchNorm(d, use_running_average=True, epsilon=1e-5, rngs=R, **F64)
    norm.mean, norm.var = (nnx.BatchStat(jnp.zeros(d, jnp.float64)) for _ in range(2))  # float32 otherwise
    return norm


class Residual(nnx.Module):
    def __init__(self, d_in, d_out, strides=1):
        self.conv1, self.bn1 = conv(d_in, d_out, 3, strides), batch_norm(d_out)
        self.conv2, self.bn2 = conv(d_out, d_out, 3), batch_norm(d_out)
        self.shortcut = nnx.Sequential(conv(d_in, d_out, 1, strides), batch_norm(d_out)) if strides > 1 else None

    def __call__(self, x):
        y = self.bn2(self.conv2(jax.nn.relu(self.bn1(self.conv1(x)))))
        return jax.nn.relu(y + (x if self.shortcut is None else self.shortcut(x)))


class ResNet(nnx.Module):
    def __init__(self):
        self.conv1, self.bn1 = conv(3, 4, 3), batch_norm(4)
        self.stages = nnx.List(
            [nnx.List([Residual(4, 4), Residual(4, 4)]), nnx.List([Residual(4, 6, 2), Residual(6, 6)])]
        )
        self.fc = nnx.Linear(6, CLASSES, rngs=R, **F64)

    def __call__(self, x):
        x = jax.nn.relu(self.bn1(self.conv1(x)))
        for block in (block for stage in self.stages for block in stage):
            x = block(x)
        return self.fc(x.mean((1, 2)))


class TorchResidual(nn.Module):
    def __init__(self, d_in, d_out, strides=1):
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(d_in, d_out, 3, strides, 1, bias=False), nn.BatchNorm2d(d_out)
        self.conv2, self.bn2 = nn.Conv2d(d_out, d_out, 3, 1, 1, bias=False), nn.BatchNorm2d(d_out)
        if strides > 1:
            down = nn.Conv2d(d_in, d_out, 1, strides, bias=False)
            self.downsample = nn.Sequential(down, nn.BatchNorm2d(d_out))

    def forward(self, x):
        y = self.bn2(self.conv2(torch.relu(self.bn1(self.conv1(x)))))
        return torch.relu(y + (self.downsample(x) if hasattr(self, "downsample") else x))


class TorchResNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4))
        self.layer1 = nn.Sequential(TorchResidual(4, 4), TorchResidual(4, 4))
        self.layer2 = nn.Sequential(TorchResidual(4, 6, 2), TorchResidual(6, 6))
        self.fc = nn.Linear(6, CLASSES)

    def forward(self, x):
        return self.fc(self.layer2(self.layer1(torch.relu(self.stem(x)))).mean((2, 3)))


def test_resnet_with_running_statistics():
    ours, theirs = ResNet(), TorchResNet()
    pairing = convert.auto(ours, theirs)
    assert str(pairing).startswith("32 parameters paired, and 20 running statistics\n")
    assert {row.theirs.rpartition(".")[2] for row in pairing.rows if not row.trainable} == {
        "running_mean",
        "running_var",
    }
    assert_loads(ours, theirs, normal(2, 3, 6, 8), last=True)
    stored = convert.state_dict(ours, pairing)
    published = {name: value for name, value in theirs.state_dict().items() if not name.endswith("tracked")}
    assert stored.keys() == published.keys()
    assert all((stored[name] == value.numpy()).all() for name, value in published.items())


@pytest.mark.parametrize("rank", [1, 2, 3])
def test_transposed_convolutions(rank):
    size = (2, 3, 4)[:rank]
    kind = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)[rank - 1]
    options = {"padding": "VALID", "rngs": R, **F64}
    ours = nnx.ConvTranspose(3, 5, size, strides=2, transpose_kernel=True, **options)
    theirs = randomised(kind(3, 5, size, stride=2))
    convert.load_state_dict(ours, theirs.state_dict(), convert.auto(ours, theirs))
    x = normal(2, 3, *(4, 5, 6)[:rank])
    assert_equal(np.moveaxis(np.asarray(ours(jnp.asarray(np.moveaxis(x, 1, -1)))), -1, 1), theirs(torch.from_numpy(x)))
    with pytest.raises(convert.ConversionError, match="kernel is flipped: build it with transpose_kernel=True"):
        convert.auto(nnx.ConvTranspose(3, 5, size, strides=2, **options), theirs)


class Mixer(nnx.Module):
    def __init__(self):
        self.norms = nnx.List([nnx.LayerNorm(D, **NORM) for _ in range(2)])
        self.tokens = nnx.Sequential(nnx.Linear(5, 9, rngs=R, **F64), jnp.tanh, nnx.Linear(9, 5, rngs=R, **F64))
        self.channels = nnx.Sequential(nnx.Linear(D, 9, rngs=R, **F64), jnp.tanh, nnx.Linear(9, D, rngs=R, **F64))

    def __call__(self, x):
        x = x + self.tokens(self.norms[0](x).mT).mT
        return x + self.channels(self.norms[1](x))


class TorchMixer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm_a, self.norm_b = nn.LayerNorm(D), nn.LayerNorm(D)
        self.token_mixer = nn.Sequential(nn.Linear(5, 9), nn.Tanh(), nn.Linear(9, 5))
        self.channel_mixer = nn.Sequential(nn.Linear(D, 9), nn.Tanh(), nn.Linear(9, D))

    def forward(self, x):
        x = x + self.token_mixer(self.norm_a(x).mT).mT
        return x + self.channel_mixer(self.norm_b(x))


def test_mixer():
    ours = nnx.Sequential(*(Mixer() for _ in range(3)))
    theirs = randomised(nn.Sequential(*(TorchMixer() for _ in range(3))))
    pairing = convert.auto(ours, theirs)
    assert {row.evidence for row in pairing.rows} == {"shape", "order"}  # the norms have no name alike
    convert.load_state_dict(ours, theirs.state_dict(), pairing)
    x = normal(2, 5, D)
    assert_equal(ours(jnp.asarray(x)), theirs(torch.from_numpy(x)))
