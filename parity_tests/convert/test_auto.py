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
from parity_tests.asserts import assert_near

pytestmark = pytest.mark.usefixtures("usual_promotion")

D, HEADS, HIDDEN, CLASSES = 8, 2, 20, 7
F64 = {"param_dtype": jnp.float64}
R = nnx.Rngs(0)
NORM = {"epsilon": 1e-5, "use_fast_variance": False, "rngs": R, **F64}


def randomised(module, seed=0):
    """Return a PyTorch module in float64 and eval mode: every parameter and statistic is random."""
    draw = np.random.default_rng(seed)
    module = module.double().eval()
    for tensor in module.state_dict().values():
        if tensor.is_floating_point():
            tensor.copy_(torch.from_numpy(draw.uniform(0.2, 1.0, tuple(tensor.shape))))
    return module


def assert_equal(ours, theirs):
    assert_near({"output": np.asarray(ours)}, {"output": theirs.detach().numpy()})


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
        self.attn = nnx.MultiHeadAttention(
            HEADS, D, decode=False, attention_fn=attend, rngs=R, **F64
        )
        self.norm2 = nnx.LayerNorm(D, **NORM)
        self.fc1, self.fc2 = (
            nnx.Linear(D, HIDDEN, rngs=R, **F64),
            nnx.Linear(HIDDEN, D, rngs=R, **F64),
        )

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
        self.ln_1, self.self_attention = (
            nn.LayerNorm(D),
            nn.MultiheadAttention(D, HEADS, batch_first=True),
        )
        self.ln_2 = nn.LayerNorm(D)
        self.mlp = nn.Sequential(
            nn.Linear(D, HIDDEN), nn.GELU(), nn.Dropout(0.0), nn.Linear(HIDDEN, D)
        )

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
        q, k, v = (
            f(x).view(b, t, HEADS, -1).transpose(1, 2)
            for f in (self.q_proj, self.k_proj, self.v_proj)
        )
        y = nn.functional.scaled_dot_product_attention(q, k, v)
        return self.o_proj(y.transpose(1, 2).reshape(b, t, D))


class NestedBlock(nn.Module):
    """Unlike names in the same order, and parts within parts."""

    def __init__(self):
        super().__init__()
        self.mixing = nn.ModuleDict({"before": nn.LayerNorm(D), "mixer": Projections()})
        self.feeding = nn.ModuleDict(
            {
                "before": nn.LayerNorm(D),
                "inner": nn.ModuleDict({"a": nn.Linear(D, HIDDEN), "b": nn.Linear(HIDDEN, D)}),
            }
        )

    def forward(self, x):
        x = x + self.mixing["mixer"](self.mixing["before"](x))
        inner = self.feeding["inner"]
        return x + inner["b"](nn.functional.gelu(inner["a"](self.feeding["before"](x))))


class TorchViT(nn.Module):
    def __init__(
        self, block, names=("patch", "cls", "pos", "blocks", "norm", "head"), squeeze=False
    ):
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
                self.attn = flax_attn.MultiHeadAttention(
                    D, D, None, 0.0, HEADS, True, causal=False, rngs=R, **F64
                )

        assert_loads_images(ViT(Ours), TWINS["torchvision's names"]())

    def test_the_table(self):
        lines = str(convert.auto(ViT(), TWINS["torchvision's names"]())).splitlines()
        assert lines[0] == "56 parameters paired"
        assert lines[1].split() == [
            "torch",
            "kind",
            "shape",
            "flax",
            "shape",
            "flax",
            "to",
            "torch",
            "settled",
            "by",
        ]
        found = {line.split()[0]: line for line in lines[2:]}
        packed = found["layers.1.self_attention.in_proj_weight"]
        for cell in (
            "Linear",
            "(24, 8)",
            "blocks.1.attn.query.kernel + key.kernel + value.kernel",
            "(8, 2, 4)",
        ):
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
