"""What a call returns is known from its name: type checkers know it, and it is never `Any`."""

import ast
import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

import flax_attn

ROOT = Path(flax_attn.__file__).parent.parent
FRAMEWORKS = {
    "flax_attn": ("jax", "from jax import Array"),
    "torch_ref": ("torch", "from torch import Tensor as Array"),
}
EXAMPLES = """
from typing import assert_type
{array}
from {package} import *
from {package}.models import T5
from {package}.models.generate import generate

Caches = tuple[Cache, ...]


def one_head(layer: SimplifiedSelfAttention | SelfAttention | CausalAttention, x: Array, w: bool):
    assert_type(layer(x), Array)
    assert_type(layer.attend(x, return_weights=w), Outputs[Cache])
    assert_type(layer.attend(x, return_weights=True).weights, Array | None)


def causal_heads(layer: CausalAttention | MultiHeadAttentionWrapper, x: Array):
    assert_type(layer(x, mask=x, dropout_key=x), Array)
    assert_type(layer.attend(x, mask=Mask.causal(), return_weights=True).output, Array)


def heads(layer: MultiHeadAttention, x: Array, cache: KVCache, maybe: KVCache | None, w: bool):
    assert_type(layer(x), Array)
    assert_type(layer(x, x, x, mask=Mask.causal(), bias=x, lengths=3), Array)
    assert_type(layer(x, None, bias=lambda query, key: query), Array)
    assert_type(layer.attend(x, cache=maybe, return_weights=w), Outputs[KVCache])
    first = layer.attend(x, x, cache=cache)
    assert_type(first.cache, KVCache | None)
    assert_type(layer.attend(x, cache=first.cache).output, Array)
    assert_type(layer.init_cache(2, 9), KVCache)


def other_layers(latent: MultiHeadLatentAttention, delta: GatedDeltaNet, own: Attention, x: Array):
    assert_type(latent(x, lengths=3), Array)
    assert_type(latent.attend(x, return_weights=True), Outputs[KVCache])
    assert_type(delta(x), Array)
    assert_type(delta.attend(x, cache=delta.init_cache(2, 9)), Outputs[DeltaCache])
    assert_type(own(x, positions=[0, 1]), Array)


def block(block: TransformerBlock, cross: CrossBlock, x: Array, cache: KVCache, w: bool):
    assert_type(block(x), Array)
    assert_type(block(x, dropout_key=x, positions=[0, 1]), Array)
    assert_type(block.attend(x, cache=cache, return_weights=w), Outputs[Cache])
    assert_type(cross(x, cache), Array)
    assert_type(cross.attend(x, cache, cache=cache), Outputs[Cache])


def layers(
    norm: RMSNorm | LayerNorm,
    ff: FeedForward | GatedFeedForward,
    drop: Dropout,
    table: Embedding,
    x: Array,
):
    assert_type(ff(norm(x)), Array)
    assert_type(drop(x, dropout_key=x), Array)
    assert_type(table(x), Array)
    assert_type(table.attend(x), Array)


def function(x: Array, w: bool):
    assert_type(dot_product_attention(x, x, x, x, x, soft_cap=3.0), Array)
    assert_type(attend(x, x, x, x, x, soft_cap=3.0, return_weights=w), Outputs[Cache])
    assert_type(single_head_attention(x, x, x), Array)
    assert_type(attend_one_head(x, x, x, return_weights=True).weights, Array | None)


def model(model: GPT2 | Llama, tokens: Array, caches: Caches):
    assert_type(model(tokens), Array)
    assert_type(model(tokens, positions=tokens, lengths=tokens), Array)
    assert_type(model.hidden(tokens, lengths=3), Array)
    assert_type(model.attend(tokens, cache=caches), Outputs[Caches])
    first = model.decode(tokens, cache=model.init_cache(2, 9))
    assert_type(first, Outputs[Caches])
    assert_type(model.attend(tokens, cache=first.cache).output, Array)


def encoder_decoder(model: T5, inputs: Array, tokens: Array):
    assert_type(model(inputs, tokens), Array)
    kept = model.keep(model.encode(inputs))
    assert_type(model.hidden(tokens, kept), Array)
    assert_type(model.attend(tokens, kept, cache=model.init_cache(2, 9)), Outputs[Caches])


def tokens(model: GPT2, prompt: list[int], prompts: list[list[int]]):
    one_or_more: list[int] | list[list[int]] = generate(model, prompt, 3)
    one_or_more = generate(model, prompts, 3)
"""
REFUSED = """
from {package} import MultiHeadAttention
{array}


def refused(layer: MultiHeadAttention, x: Array):
    layer(x, masks=x)
    layer(x, return_weights=True)
    layer(x, cache=layer.init_cache(2, 9))
    layer.attend(x, masks=x)
    layer.attend(x, return_weights=True).shape
"""


@pytest.fixture(scope="module")
def problems(tmp_path_factory):
    """Return pyright's findings in the examples of each installed package, from a single run."""
    folder, written = tmp_path_factory.mktemp("types"), []
    for package, (framework, array) in FRAMEWORKS.items():
        for name, text in (("examples", EXAMPLES), ("refused", REFUSED)):
            if importlib.util.find_spec(framework):
                written.append(folder / f"{package}_{name}.py")
                written[-1].write_text(text.format(package=package, array=array))
    settings = {"extraPaths": [str(ROOT)], "reportWildcardImportFromLibrary": False}
    (folder / "pyrightconfig.json").write_text(json.dumps(settings))
    command = [
        sys.executable,
        "-m",
        "pyright",
        "--outputjson",
        "--pythonpath",
        sys.executable,
        "--project",
        folder,
    ]
    output = json.loads(subprocess.run(command, capture_output=True, text=True, check=False).stdout)
    assert output["summary"]["filesAnalyzed"] == len(written)
    found = {path.stem: [] for path in written}
    for problem in output["generalDiagnostics"]:
        line = problem["range"]["start"]["line"] + 1
        found[Path(problem["file"]).stem].append(f"line {line}: {problem['message']}")
    return found


@pytest.mark.parametrize("package", FRAMEWORKS)
def test_what_calls_return(problems, package):
    if f"{package}_examples" not in problems:
        pytest.skip(f"{package} needs a framework that is not installed")
    assert not problems[f"{package}_examples"], "\n".join(problems[f"{package}_examples"])
    assert len(problems[f"{package}_refused"]) == 5


LAYERS = ("functional", "backends", "convert", "sharding", "modules", "models", "training")


def public_functions(tree, prefix=""):
    """Yield the public functions and methods of a file by name, without those inside functions."""
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            yield from public_functions(node, f"{node.name}.")
        elif isinstance(node, ast.FunctionDef) and (
            node.name == "__call__" or not node.name.startswith("_")
        ):
            yield prefix + node.name, node


@pytest.mark.parametrize("package", FRAMEWORKS)
def test_no_public_callable_returns_any(package):
    files = [path for layer in LAYERS for path in (ROOT / package / layer).rglob("*.py")]
    found = [
        f"{path.relative_to(ROOT)}: {name}"
        for path in [*files, ROOT / package / "attention.py"]
        for name, function in public_functions(ast.parse(path.read_text()))
        if function.returns is not None and ast.unparse(function.returns) == "Any"
    ]
    assert not found, "\n".join(found)
