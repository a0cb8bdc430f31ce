"""The verdicts on other people's ports, reached without the harness.

Each claim has a record, and both agree.
"""

import ast
import importlib.util
import sys
from importlib.machinery import SourceFileLoader
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

ROOT = Path(__file__).parents[1]
sys.path.append(str(ROOT))  # the study is not installed

from field import page  # noqa: E402, found there
from field.by_hand import both, verdict, widened  # noqa: E402

ROWS = page.load()[0]
RECORDS = page.load_by_hand()


def test_every_verdict_was_reached_again_with_the_same_versions():
    for row in ROWS:
        record = RECORDS[row["port"]]
        assert (row["port"], verdict.verdict(record)) == (row["port"], row["verdict"])
        assert record["versions"][row["package"]] == row["version"]
    assert page.reproduced(ROWS, RECORDS) == [row["port"] for row in ROWS]
    assert f"{len(ROWS)} of these verdicts were reached a second time" in page.text()


def test_what_float32_explains_is_equal_without_it():
    low = [RECORDS[row["port"]] for row in ROWS if row["verdict"] == "equal up to float32"]
    rest = [
        record["port"]
        for record in low
        if not all(map(verdict.holds, _not_empty(record.get("widened") or [{}])))
    ]
    assert rest == [
        "attnax/MultiHeadAttention/tiles"
    ]  # which adds 1e-10, less than float32 can tell


def _not_empty(measures):
    return [measure for measure in measures if measure.get("inputs") != verdict.EMPTY]


def test_a_port_without_a_record_is_not_claimed():
    some = {name: RECORDS[name] for name in list(RECORDS)[:3]}
    wrong = {name: {**record, "other parameters": "lm_head"} for name, record in some.items()}
    assert len(page.reproduced(ROWS, some)) == 3
    assert page.reproduced(ROWS, wrong) == []


@pytest.mark.parametrize(
    "path", sorted((ROOT / "field" / "by_hand").glob("*.py")), ids=lambda path: path.stem
)
def test_nothing_by_hand_rests_on_the_harness(path):
    for node in ast.walk(ast.parse(path.read_text())):
        names = [node.module] if isinstance(node, ast.ImportFrom) else []
        names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        for name in names:
            assert name.partition(".")[0] not in ("flax_attn", "torch_ref")
            if name.startswith("field") and not name.startswith("field.by_hand"):
                assert name == "field.ports"
                assert all(alias.name.startswith("hf_") for alias in node.names), (
                    "only configurations are shared"
                )


def measure(outputs, gradients=0.0, inputs="plain", rounding=0.0):
    return {
        "inputs": inputs,
        "outputs": outputs,
        "gradients": gradients,
        "rounding": {"outputs": rounding, "gradients": rounding},
    }


EMPTY = measure(0.3, inputs=verdict.EMPTY)


@pytest.mark.parametrize(
    ("record", "expected"),
    [
        ({"measures": [measure(1e-13, 1e-12)]}, "equal"),
        (
            {"measures": [measure(1e-13, 1e-10)]},
            "equal up to float32",
        ),  # less than a rounding of float32
        ({"measures": [measure(1e-10, 0.0, rounding=1e-11)]}, "equal"),
        ({"measures": [measure(1e-10, inputs="plus 1000")]}, "different"),
        ({"measures": [measure(1e-6)]}, "different"),
        ({"measures": [measure(None)]}, "different"),
        ({"measures": [measure(1e-13), EMPTY]}, "differs in empty rows"),
        (
            {"measures": [measure(1e-6), EMPTY], "widened": [measure(1e-15), EMPTY]},
            "equal up to float32",
        ),
        ({"measures": [measure(1e-6)], "widened": [measure(1e-9)]}, "different"),
        ({"measures": [measure(0.0), {"inputs": "padding", "raises": "TypeError"}]}, "different"),
        ({"other parameters": "lm_head"}, "other parameters"),
        ({"Flax raises": "TypeError"}, "Flax raises"),
        ({"does not run": "TypeError"}, "does not run"),
    ],
)
def test_the_verdict_follows_from_what_was_measured(record, expected):
    assert verdict.verdict(record) == expected
    assert verdict.differs(record) == (
        "measures" in record and expected not in ("equal", "differs in empty rows")
    )


def norm_case(epsilon, empty=0.0):
    """A layer norm of what is no padding; JAX adds `empty` to a row of padding."""

    def ours(v, mask):
        x = v["x"] if mask is None else jnp.where(mask[..., None], v["x"], 0.0)
        mean, variance = x.mean(-1, keepdims=True), x.var(-1, keepdims=True)
        found = (x - mean) / jnp.sqrt(variance + epsilon) * v["weight"] + v["bias"]
        return found if mask is None else found + jnp.where(mask.any(-1)[:, None, None], 0.0, empty)

    def theirs(run, mask, x):
        return run(x if mask is None else torch.where(mask[..., None], x, 0.0))

    twin = torch.nn.LayerNorm(5)
    return both.layer_case(
        twin, {"x": (3, 4, 5)}, ours, theirs, padded=True, stresses=["times 1/1000"]
    )


def test_both_sides_are_measured():
    with jax.enable_x64(True), jax.numpy_rank_promotion("allow"):
        cases = [norm_case(1e-5), norm_case(1e-6), norm_case(1e-5, empty=1.0)]
        equal, other, empty = ({"measures": list(both.measures(case))} for case in cases)
    assert [found["inputs"] for found in equal["measures"]] == [
        "plain",
        "padding",
        verdict.EMPTY,
        "times 1/1000",
    ]
    assert verdict.verdict(equal) == "equal"
    assert verdict.verdict(other) == "different"
    assert verdict.verdict(empty) == "differs in empty rows"


def test_what_the_jax_side_raises_is_kept():
    def ours(v, mask):
        if mask is not None:
            raise TypeError("no mask")
        return 2 * v["x"]

    case = both.Case(ours, lambda v, mask: 2 * v["x"], {"x": np.ones((2, 3))}, ("x",), (2, 3))
    with jax.enable_x64(True):
        plain, padding, _ = both.measures(case)
    assert verdict.holds(plain)
    assert padding["raises"] == "TypeError: no mask"
    with pytest.raises(both.JaxError, match="KeyError: 'missing'"):
        next(both.measures(both.Case(lambda v, mask: v["missing"], case.theirs, case.values)))


def test_arrays_of_other_names_are_refused():
    with pytest.raises(ValueError, match=r"JAX gives arrays of .*'a'.*, PyTorch of .*'b'"):
        both.relative({"a": np.ones(2)}, {"b": np.ones(2)})
    with pytest.raises(ValueError, match=r"lacks bias \(3,\), weight \(2,\): place each"):
        both.placed({"bias": (3,)}, {"weight": np.ones(2)})


def test_tied_weights_stay_tied():
    embedding = torch.nn.Embedding(3, 2)
    module = torch.nn.ModuleDict(
        {"first": embedding, "again": embedding, "head": torch.nn.Linear(2, 3, bias=False)}
    )
    module["head"].weight = embedding.weight
    module.forward = lambda ids: module["head"](module["again"](ids))
    values = {name: torch.full_like(weight, 2.0) for name, weight in module.named_parameters()}
    for _ in range(2):
        assert both.call_with(module, values, torch.tensor([0])).tolist() == [[8.0, 8.0, 8.0]]
    assert module["head"].weight is module["first"].weight
    assert isinstance(embedding.weight, torch.nn.Parameter)


def test_sources_are_imported_without_float32(monkeypatch, tmp_path):
    monkeypatch.setattr(SourceFileLoader, "get_code", SourceFileLoader.get_code)
    widened.widen()
    for folder, expected in (("transformers", "float64"), ("other", "float32")):
        path = tmp_path / folder / "activations.py"
        path.parent.mkdir()
        path.write_text("FOUND = 'float32'\n")
        spec = importlib.util.spec_from_file_location(folder, path)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        assert expected == module.FOUND
    source = "x.float() + y.to(torch.float) + z.astype('f4') + torch.FloatTensor(jnp.float32(w))"
    wide = "x.double() + y.to(torch.float64) + z.astype('f8') + torch.DoubleTensor(jnp.float64(w))"
    assert widened.rewritten(source) == wide
