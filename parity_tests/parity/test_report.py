"""A report as text, in a notebook, and in files."""

import html
import json
import re
import sys
from dataclasses import replace
from xml.etree import ElementTree as Xml

import pytest

from flax_attn.parity.report import console


def test_print_shows_the_whole_report_without_colours(differing):
    assert str(differing) == console.text(differing)
    assert "\x1b" not in str(differing)
    assert "2 of 3 checks fail" in str(differing)
    assert "torch multiplies by 0.5, flax does not" in str(differing)


def test_repr_is_one_line(equal, differing, unrun):
    assert repr(equal) == "Report('equal': equal, 3 checks)"
    assert repr(replace(differing, name="x")) == "Report('x': DIFFERENT, 3 checks)"
    assert repr(unrun) == "Report('unrun': NOT COMPARED, 0 checks)"
    # Of one there is no plural.
    single = replace(equal, checks=equal.checks[:1])
    assert repr(single) == "Report('equal': equal, 1 check)"


def test_a_notebook_shows_the_page_in_a_small_frame(differing):
    shown = differing._repr_html_()
    assert len(shown) < 100_000
    frame = re.fullmatch(r'<iframe [^>]*srcdoc="([^"]*)"></iframe>', shown)
    content = html.unescape(frame.group(1))
    assert content.lstrip().startswith("<!doctype html>")
    assert "2 of 3 checks fail" in content
    # The library that draws is megabytes, for each report of a notebook.
    assert "Plotly.newPlot" not in content


def test_a_notebook_without_the_extra_shows_the_text(differing, monkeypatch):
    monkeypatch.setitem(sys.modules, "jinja2", None)
    assert differing._repr_html_() == f"<pre>{html.escape(str(differing))}</pre>"


def test_explain_tells_what_differs_then_checks(differing):
    lines = differing.explain().splitlines()
    starts = [
        "<b>a</b> & ",
        "  att (also <b>a</b>",
        "    a remark",
        "    flax  port.py:2  x @ y",
        "    torch source.py:5, 7  0.5 * x @ y",
        "  proof: with the values of PyTorch at this place all outputs are equal",
        "  forward: error",
    ]
    # Behind these come the other checks.
    for line, start in zip(lines, starts, strict=False):
        assert line.startswith(start)


def saved(report, path):
    report.save(path)
    return path.read_text()


def test_the_suffix_chooses_the_format(differing, tmp_path):
    assert "<!doctype html>" in saved(differing, tmp_path / "x.html")
    suites = Xml.fromstring(saved(differing, tmp_path / "x.xml"))
    # What could not be run though it was asked for fails as well.
    assert suites.get("failures") == "3"
    data = json.loads(saved(differing, tmp_path / "x.json"))
    assert list(data)[:5] == ["kind", "version", "name", "state", "loosened"]
    sentences = [one["sentence"] for one in data["hypotheses"]]
    assert sentences == differing.causes


@pytest.mark.parametrize("name", ["x.pdf", "x"])
def test_another_suffix_is_an_error(differing, tmp_path, name):
    rule = rf"the suffix must be .html, .json or .xml; got '.*{name}'"
    with pytest.raises(ValueError, match=rf"{rule}. Use report.save\('.*x.html'\)"):
        differing.save(tmp_path / name)
