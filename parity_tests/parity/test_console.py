"""What a terminal shows of a report."""

from dataclasses import replace

import pytest
from rich.console import Console

from flax_attn.convert import LAYOUTS
from flax_attn.convert.planning import plan
from flax_attn.parity.check import Check
from flax_attn.parity.report import console
from flax_attn.parity.report.report import Report


@pytest.fixture
def show(capsys):
    def shown(report, width=110):
        Console(width=width, highlight=False).print(console.verdict(report))
        return capsys.readouterr().out

    return shown


def row(text, name):
    lines = text.splitlines()
    # The space keeps a name apart from a longer one.
    return next(line for line in lines if line.strip().startswith(f"{name} "))


def test_verdict_comes_first_and_says_what_it_rests_on(show, equal, differing, unrun):
    assert show(equal).startswith(
        "equal: equal\nAll 3 checks hold; the nearest is 2.0x below its rule.\n"
    )
    assert show(differing).splitlines()[0].endswith(": DIFFERENT")
    assert "2 of 3 checks fail; 1 asked for by name could not be run." in show(differing)
    assert show(unrun).startswith("unrun: NOT COMPARED\nNo check was run.\n")


def test_each_check_has_error_rule_margin_and_worst_element(show, differing):
    text = show(differing)
    assert row(text, "shapes").split() == ["shapes", "0", "0", "exact", "holds", "output"]
    forward = row(text, "forward").split(maxsplit=5)
    assert forward == ["forward", "3.0e-04", "1e-12", "3e-09x", "FAILS", forward[-1]]
    assert forward[-1].strip() == "output[1, 2]: flax 0.5, torch 0.25"
    assert row(text, "gradients").split()[:5] == ["gradients", "nan", "1e-11", "-", "FAILS"]


def test_checks_not_run_have_their_reason(show, equal, differing):
    assert "  dropout: nothing is dropped\n" in show(equal)
    assert "and it was asked for by name: FAILS" in show(differing)


def test_what_differs_comes_first_then_checks(show, differing):
    text = show(differing)
    titles = ("what they compute differently", "check ", "not run", "notes", "repeat")
    lines = [f"{line.strip()} " for line in text.splitlines()]
    places = []
    for title in titles:
        begun = next(line for line in lines if line.startswith(title))
        places.append(lines.index(begun))
    assert places == sorted(places)
    assert "torch multiplies by 0.5, flax does not" in text
    assert "torch source.py:5, 7  0.5 * x @ y" in text
    assert text.rstrip().endswith("flax-attn parity x:y")


def test_failing_checks_stand_above_those_that_hold(show, differing):
    text = show(differing)
    places = [text.index(row(text, name)) for name in ("forward", "gradients", "shapes")]
    assert places == sorted(places)


def test_the_pairs_of_the_layout_are_a_table(show, equal, monkeypatch):
    entries = plan({"fc.kernel": (3, 4), "fc.bias": (4,), "norm.scale": (4,)}, LAYOUTS["torch"])
    (pattern,) = [entry.rule.pattern for entry in entries if entry.theirs == "fc.weight"]
    report = replace(equal, entries=entries)
    text = show(report)
    assert "pairs of parameters" in text
    weight = f"fc.weight 4 3 fc.kernel 3 4 {pattern}"
    assert row(text, "fc.weight").split() == weight.split()
    assert row(text, "fc.bias").split() == ["fc.bias", "4", "fc.bias", "4", "unchanged"]
    # A model has hundreds of pairs.
    monkeypatch.setattr(console, "PAIRS", 1)
    assert "and 2 more, in the page and in JSON" in show(report)


@pytest.mark.parametrize("width", [110, 80])
def test_nothing_is_cut(show, width):
    long = "blocks.11.attention.self_attention.W_query.weight"
    where = {"index": [1023, 767], "flax": -0.123456789e-100, "torch": -0.223456789e-100}
    names = ("non-finite padding", "training")
    checks = [Check(name, 1.25e-300, 1e-301, long, "a note", where=where) for name in names]
    text = show(Report("x", checks), width)
    assert max(map(len, text.splitlines())) <= width
    assert "…" not in text
    joined = "".join(text.split())
    worst = f"{long}[1023,767]:flax-1.23456789e-101,torch-2.23456789e-101"
    # In 80 columns a cell takes several lines, between which stand those of other cells.
    assert joined.count(worst) == 2 or width == 80
    for word in ("non-finitepadding1.2e-30", "2.23456789e-101", "anote"):
        assert word in joined


def test_markup_in_a_name_is_shown_as_it_is(show, equal):
    assert "[bold]x[/bold]: equal" in show(Report("[bold]x[/bold]", equal.checks))


def test_table_of_variants_marks_what_differs(capsys, equal, differing):
    Console(width=200).print(console.variants([equal, differing]))
    good, bad = capsys.readouterr().out.splitlines()[3:5]
    assert good.split() == ["equal", "2.0e-16", "-", "0.50", "-", "-", "2.0x", "equal"]
    assert bad.split()[-1] == "DIFFERENT"


def test_a_notebook_gets_the_text_too(differing, monkeypatch):
    monkeypatch.setattr("rich.console._is_jupyter", lambda: True)
    assert str(differing).startswith(f"{differing.name}: DIFFERENT")
