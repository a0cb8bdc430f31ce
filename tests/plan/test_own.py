"""Plans of modules that are not of this library."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from flax_attn.cli import main
from flax_attn.parity import tolerance
from flax_attn.plan.estimate import changes
from flax_attn.plan.models import OwnModel, logits_loss
from flax_attn.plan.phases import Phase
from flax_attn.plan.placement import held_bytes
from flax_attn.plan.plan import plan

FILE = """
from flax import nnx

class Model(nnx.Module):
    def __init__(self, *, rngs):
        self.embed = nnx.Embed(40, 24, rngs=rngs)
        self.linear = nnx.Linear(24, 48, rngs=rngs)
        self.head = nnx.Linear(48, 40, rngs=rngs)
    def __call__(self, ids):
        return self.head(nnx.relu(self.linear(self.embed(ids))))

def pooled():
    model = Model(rngs=nnx.Rngs(0))
    return nnx.Sequential(model, lambda logits: logits.mean(axis=1))

def broken():
    raise RuntimeError("out of luck")

made = Model(rngs=nnx.Rngs(0))
"""
MESH = {"data": 2, "fsdp": 4}
SIZES = ["--topology", "cpu:8", "--mesh", "data=2,fsdp=4", "--batch", "8", "--tokens", "16"]

pytestmark = pytest.mark.usefixtures("dtype_promotion")


class Bigrams(nnx.Module):
    """Logits of the next token from a token."""

    def __init__(self):
        self.table = nnx.Embed(40, 40, rngs=nnx.Rngs(0))

    def __call__(self, ids):
        return self.table(ids)


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "planned_model.py"
    path.write_text(FILE)
    return path


def test_a_module_of_your_own_is_planned(file, capsys):
    assert main(["plan", "--model", f"{file}:Model", *SIZES, "--train", "--markdown"]) == 0
    line = capsys.readouterr().out.splitlines()[-1]
    # The parameters and two moments in float32, the matrices over fsdp; two counts.
    matrices = (40 * 24 + 24 * 48 + 48 * 40) // 4
    size = 4 * 3 * (matrices + 48 + 40) + 4 + 4
    assert f"| {size / 1024:.2f} KiB |" in line


def test_its_step_is_told_and_counted(job):
    told = []
    found = plan(job(MESH, model=OwnModel(Bigrams)), told.append)
    assert told == ["building small from shapes", "compiling the training step for 8 devices"]
    (phase,) = found.phases
    assert phase.arguments == found.held.total + 4 * 16
    assert found.as_dict()["dtype"] == "its own dtypes"


def test_its_loss_is_the_mean_cross_entropy_of_the_next_tokens():
    ids = np.array([[1, 2, 3], [5, 0, 7]])
    logits = np.random.default_rng(0).normal(size=(2, 3, 40))
    exps = np.exp(logits[:, :-1])
    chances = exps / exps.sum(axis=-1, keepdims=True)
    expected = -np.log(np.take_along_axis(chances, ids[:, 1:, None], axis=-1)).mean()
    with jax.enable_x64(True):
        found = float(logits_loss(lambda ids: jnp.asarray(logits), jnp.asarray(ids)))
    assert abs(found - expected) <= tolerance.FORWARD * expected


def test_remat_is_not_offered(job):
    one = job(MESH, model=OwnModel(Bigrams))
    found = changes(one, held_bytes(one), Phase("step", 0, peak=10**6), 60_000)
    assert found[0].what == "more fsdp"


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        (
            "pooled",
            ["--train"],
            (
                "a model that is planned maps ids (8, 16) to logits (8, 16, vocabulary); got shape"
                " (8, 40). Name a function that makes a module which returns logits"
            ),
        ),
        ("broken", ["--train"], "broken raised RuntimeError: out of luck ("),
        (
            "made",
            ["--train"],
            "made is of type Model: name a class or a function that makes a module",
        ),
        (
            "Model",
            ["--generate"],
            ("is a module of your own. Plan its training, with --train"),
        ),
        (
            "Model",
            ["--train", "--remat", "--dtype", "float32"],
            "models of this library take --remat, --dtype; ",
        ),
        (
            "Model",
            ["--train", "--layers", "1"],
            "--layers takes the first layers of a model that is known by name or folder",
        ),
    ],
)
def test_what_cannot_be_planned_is_refused(file, name, options, message, capsys):
    assert main(["plan", "--model", f"{file}:{name}", *SIZES, *options]) == 64
    assert message in capsys.readouterr().err
