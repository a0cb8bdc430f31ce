"""The gallery in the documentation has a card for all that is public.

What the cards say follows from runs.
"""

import importlib
import inspect
import json
import re
import runpy
import sys
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
from flax import nnx

import flax_attn
from attn_spec.frequencies import Scaling
from flax_attn.models.language_model import LanguageModel
from flax_attn.proof.variants import VARIANTS

DOCS = Path(__file__).parents[1] / "docs"
sys.path.insert(0, str(DOCS))

from cards import GROUPS, page, picture, proof  # noqa: E402
from cards.card import code, formula_of, references_of  # noqa: E402
from cards.run import Outcome, run  # noqa: E402

CARDS = {card.name: card for cards in GROUPS.values() for card in cards}
RECORDED = proof.recorded()
each = pytest.mark.parametrize("card", CARDS.values(), ids=CARDS)


def public():
    """Names that need a card.

    Layers, caches, scalings, functions of positions, constructors of masks.
    """
    for name in flax_attn.__all__:
        found = getattr(flax_attn, name)
        if inspect.isclass(found):
            if issubclass(found, nnx.Module | flax_attn.Cache | Scaling) and not issubclass(
                found, LanguageModel
            ):
                yield name
        elif inspect.isfunction(found) and found.__module__.endswith(("positions", "relative")):
            yield name
    yield from ("RoPE", "Scores", "ScoreFunction", "gated_delta_rule")
    yield from (
        f"Mask.{name}"
        for name, kind in vars(flax_attn.Mask).items()
        if isinstance(kind, staticmethod)
    )


def test_all_that_is_public_has_a_card():
    assert {"Linear", "KVCache", "YaRNScaling", "t5_bias", "Mask.where"} <= set(public())
    assert set(public()) - {name for card in CARDS.values() for name in card.shows} == set()


@each
def test_a_card_is_whole(card):
    assert card.shown_formula
    assert card.references
    assert all(
        "arXiv:" in reference or card.name == "Causal attention" for reference in card.references
    )
    assert len(card.alt) > 20


@each
def test_a_card_names_what_there_is(card):
    for name in card.shows:
        assert inspect.getdoc(eval(f"flax_attn.{name}"))
    parts = card.dotted.split(".")
    length = max(i for i in range(1, len(parts)) if _imported(".".join(parts[:i])))
    found = importlib.import_module(".".join(parts[:length]))
    for part in parts[length:]:
        found = getattr(found, part)
    assert callable(found) or card.dotted.endswith("ROPE_INIT_FUNCTIONS")


def _imported(name):
    try:
        return importlib.import_module(name)
    except ImportError:
        return None


@each
def test_what_is_proven_of_a_card_is_what_the_recorded_run_found(card):
    if not card.proof:
        return
    (text,) = [
        text
        for name, text in page.facts_of(card, Outcome(np.ones((1, 1)), 0.0), RECORDED)
        if name == "Tested as"
    ]
    rows = [RECORDED[name] for name in card.proof]
    for check in ("forward", "gradients", "training"):
        errors = [float(row[check]) for row in rows if row[check] != "-"]
        assert not errors or f"{check} {max(errors):.1e}" in text
    assert text.endswith(f"margin {min(float(row['margin'][:-1]) for row in rows):g}x")


def test_the_recorded_run_is_that_of_all_variants():
    assert list(RECORDED) == [variant.name for variant in VARIANTS]


def test_names_and_links_of_cards_are_distinct():
    slugs = [card.slug for card in CARDS.values()]
    assert len(set(slugs)) == len(slugs) == sum(map(len, GROUPS.values()))
    text = (DOCS / "gallery.md").read_text()
    assert set(re.findall(r"\(#(gallery-[a-z0-9-]+)\)", text)) <= set(slugs)
    assert re.findall(r'GROUPS\["(.*)"\]', text) == list(GROUPS) == re.findall(r"\n## (.*)\n", text)


@pytest.mark.parametrize("name", ["RMS norm", "Rotary, halves", "YaRN"])
def test_a_card_is_run_and_compared(name):
    outcome = run(CARDS[name])
    assert outcome.error < 1e-15
    assert np.isfinite(outcome.picture).all()


def test_a_card_whose_twin_differs_is_an_error():
    card = CARDS["RMS norm"]
    wrong = replace(card, example=card.example.replace("1e-6", "1e-5"))
    with pytest.raises(
        ValueError, match=r"RMS norm: the output must be within 1e-12 of transformers.*LlamaRMSNorm"
    ):
        run(wrong)


def test_a_card_as_markdown():
    card = CARDS["RMS norm"]
    text = page.item(card, Outcome(np.eye(3), 2e-16), RECORDED)
    assert text.startswith("`````{grid-item-card} RMS norm\n")
    assert f"\n(gallery-rms-norm)=\n{card.take}\n" in text
    assert "```python\nlayer = RMSNorm(8, 1e-6)\noutput = layer(x)\n```" in text
    assert "API\n: {py:obj}`~flax_attn.RMSNorm`\n" in text
    assert "LlamaRMSNorm`: error 2.0e-16, limit 1e-12" in text
    assert "[arXiv:1910.07467](https://arxiv.org/abs/1910.07467)" in text
    assert f'aria-labelledby="{card.slug}-caption"' in text
    assert f'<figcaption id="{card.slug}-caption">{card.alt}</figcaption>' in text


def test_a_matrix_is_drawn_cell_by_cell():
    numbers = np.array([[1.0, 0.0, -0.5], [0.26, 1.0, 1e-9]])
    root = ElementTree.fromstring(picture.svg(numbers, ("query", "key"), "id"))
    shades = [path for path in root.iter("path") if path.get("opacity")]
    drawn = {(path.get("class"), float(path.get("opacity"))): path.get("d") for path in shades}
    assert drawn == {
        ("more", 1.0): "M0 0h1v1h-1zM1 1h1v1h-1z",
        ("less", 0.5): "M2 0h1v1h-1z",
        ("more", 0.375): "M0 1h1v1h-1z",
        ("more", 0.125): "M2 1h1v1h-1z",  # small, but not zero
    }
    assert [text.text for text in root.iter("text")] == ["key", "query"]


def test_panels_stand_side_by_side_and_bars_have_their_numbers():
    panels = ElementTree.fromstring(picture.svg(np.ones((3, 2, 2)), ("a", "b"), "id"))
    assert len({group.get("transform") for group in panels.iter("g")}) == 3
    bars = ElementTree.fromstring(picture.svg(np.array([1.0, 4.0, 2.5]), ("a", "b"), "id"))
    assert [text.text for text in bars.iter("text")] == ["1", "4", "2.5", "b", "a"]
    heights = [float(bar.get("height")) for bar in bars.iter("rect")]
    np.testing.assert_allclose(np.array(heights) / heights[1], [0.25, 1, 0.625])


@pytest.mark.parametrize("numbers", [np.array([[np.nan]]), np.ones((1, 1, 1, 1))])
def test_what_cannot_be_drawn_is_an_error(numbers):
    with pytest.raises(ValueError, match="finite numbers and 1, 2 or 3 axes"):
        picture.svg(numbers, ("a", "b"), "id")


def test_a_file_without_the_table_of_the_proof_is_an_error(tmp_path):
    path = tmp_path / "proof.csv"
    path.write_text("variant,forward\na,1e-16\n")
    with pytest.raises(ValueError, match="must be the table of a run of the proof"):
        proof.recorded(path)


def test_a_run_is_recorded_with_its_worst_margin(tmp_path, monkeypatch):
    path = DOCS.parent / "tools" / "record_proof.py"
    script = runpy.run_path(str(path))
    checks = [
        {"name": "forward", "error": 2e-15, "margin": 500.0},
        {"name": "jit = eager", "error": 0.0, "margin": 0.0},
        {"name": "dropout", "error": None, "margin": 0.0},
    ]
    row = script["row"]({"name": "a", "passed": True, "checks": checks})
    named = {name: row[name] for name in ("forward", "jit = eager", "dropout", "margin", "verdict")}
    assert list(named.values()) == ["2.0e-15", "0.0e+00", "-", "500.0x", "equal"]


def test_rows_in_reports_of_their_own_are_recorded_in_one_table(tmp_path, monkeypatch):
    script = runpy.run_path(str(DOCS.parent / "tools" / "record_proof.py"))
    monkeypatch.setitem(script["main"].__globals__, "DOCS", tmp_path)
    files = []
    for name in ("real_a", "real_b"):
        check = {"name": "bfloat16", "error": 0.5, "margin": 2.0}
        variant = {"name": name, "passed": True, "checks": [check]}
        files.append(tmp_path / f"{name}.json")
        files[-1].write_text(json.dumps({"variants": [variant]}))
    monkeypatch.setattr("sys.argv", ["record_proof", *map(str, files)])
    script["main"]()
    assert (tmp_path / "proof_real.csv").read_text().splitlines() == [
        "variant,bfloat16,margin,verdict",
        "real_a,5.0e-01,2.0x,equal",
        "real_b,5.0e-01,2.0x,equal",
    ]
    # A later report of one of them leaves the other as it was.
    files[1].write_text(files[1].read_text().replace("0.5", "0.25"))
    monkeypatch.setattr("sys.argv", ["record_proof", str(files[1])])
    script["main"]()
    assert (tmp_path / "proof_real.csv").read_text().splitlines()[1:] == [
        "real_a,5.0e-01,2.0x,equal",
        "real_b,2.5e-01,2.0x,equal",
    ]


@pytest.mark.parametrize("name", ["no such row", "b"])
def test_a_variant_that_was_not_found_equal_is_an_error(name):
    with pytest.raises(ValueError, match=f"must find {name} equal"):
        proof.worst([name], {"b": {"verdict": "DIFFERENT"}})


def test_formulas_and_references_are_those_of_docstrings():
    assert (
        formula_of("One.\n\n    a = b\n      + c\n\nMore.\n\nArgs:\n    x: y.\n") == "a = b\n  + c"
    )
    assert formula_of("`x / y` over the last axis.\n\nArgs:\n    x: y.\n") == "x / y"
    assert formula_of("`proj` of `a + b`.\n") == "a + b"
    assert formula_of("`proj` of every `stride`-th window.\n") == ""
    assert formula_of("Nothing.\n\nExample:\n    >>> 1\n") == ""
    text = (
        "One.\n\nReferences:\n    A 2017 (arXiv:1706.03762); B 2020, of\n    C"
        " (arXiv:2002.04745).\n"
    )
    assert references_of(text) == ["A 2017 (arXiv:1706.03762)", "B 2020, of C (arXiv:2002.04745)"]
    assert references_of("One.") == []
    assert (
        code(
            "",
            "a = 1",
            """
        b = 2
            c = 3
    """,
        )
        == "a = 1\nb = 2\n    c = 3"
    )
