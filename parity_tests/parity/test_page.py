"""The page: read as text, and as a browser draws it."""

import os
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from html.parser import HTMLParser
from itertools import pairwise

import numpy as np
import pytest
from flax import nnx

import flax_attn
import torch_ref
from flax_attn.parity import Recipe, compare
from flax_attn.parity.adapters.torch_adapter import TorchAdapter
from flax_attn.parity.compare import report_on
from flax_attn.parity.report import page as pages
from flax_attn.parity.report.page import page, sections, write_page
from flax_attn.parity.trace.difference import difference

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
ARGUMENTS = {"d_in": 6, "d_out": 8, "context_length": 5, "dropout": 0.0, "num_heads": 2}
CHECKS = ["forward", "training"]


@pytest.fixture(scope="module")
def measured():
    ours = flax_attn.MultiHeadAttention(**ARGUMENTS, rngs=nnx.Rngs(0))
    theirs = torch_ref.MultiHeadAttention(**ARGUMENTS).eval()
    options = {"layout": "torch_ref", "checks": CHECKS, "recipe": Recipe(steps=4)}
    return compare(ours, theirs, [(3, 5, 6)], **options)


@pytest.fixture(scope="module")
def scaled(measured):
    module = torch_ref.MultiHeadAttention(**ARGUMENTS).eval()
    theirs = TorchAdapter(module, lambda module, x: 1.001 * module(x))
    # With the same weights only the factor differs.
    theirs.load(measured.pair.weights)
    return report_on(measured.pair.with_torch(theirs), "scaled", CHECKS, locate=False)


class Reader(HTMLParser):
    """Notes elements, their text, and anything left open."""

    EMPTY = {"meta", "br", "img", "link", "input"}

    def __init__(self, text):
        super().__init__()
        self.open, self.elements, self.text = [], [], ""
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        if tag not in self.EMPTY:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] not in ("script", "style"):
            self.text += data

    def all(self, tag):
        return [attrs for name, attrs in self.elements if name == tag]


def read(*reports):
    reader = Reader(page(reports))
    assert not reader.open
    reader.text = " ".join(reader.text.split())
    return reader


def test_one_report_has_everything(differing):
    text = read(differing).text
    assert "2 of 3 checks fail; 1 asked for by name could not be run." in text
    assert "Repeat it: flax-attn parity x:y" in text
    assert "att (also <b>a</b>" in text
    assert "forward FAILS 3.0e-04 1e-12 3e-09x output[1, 2]: flax 0.5, torch 0.25" in text
    assert "dropout not run nothing is dropped" in text
    assert "cache = full FAILS no call: <b>a</b>" in text
    assert "a note" in text
    assert "All 3 operations that both sides have" in text


def test_names_are_escaped(differing, equal):
    reader = read(differing, equal)
    assert not reader.all("b")
    evil = """<b>a</b> & "b" 'c' </script>"""
    # The title, the table, the heading, a cause, an operation, the environment.
    assert reader.text.count(evil) >= 6


def test_many_reports_begin_with_a_table_that_links_to_each(differing, equal):
    reader = read(equal, differing)
    assert "1 of 2 comparisons equal" in reader.text
    links = [a["href"] for a in reader.all("a")]
    assert links == ["#report-1", "#report-2"]
    details = [attrs for attrs in reader.all("details") if "id" in attrs]
    # Who opens the page looks for what differs.
    opened = {attrs["id"]: "open" in attrs for attrs in details}
    assert opened == {"report-1": False, "report-2": True}


def of_class(reader, tag, name):
    """Return the attributes of the elements of a tag whose class contains a name."""
    return [attrs for attrs in reader.all(tag) if name in attrs.get("class", "")]


def test_bars_tell_what_holds_from_what_does_not(differing):
    divs = of_class(read(differing), "div", "bar")
    bars = [attrs for attrs in divs if attrs["class"].startswith("bar")]
    assert [bar["class"] for bar in bars] == ["bar fails", "bar fails", "bar"]
    # Lengths are logarithms, and NaN is over any rule.
    lengths = [bar["style"].removeprefix("--length: ") for bar in bars]
    assert lengths == ["80.4%", "100.0%", "0.0%"]


def test_tints_tell_what_holds_from_what_does_not(equal):
    tints = [attrs["class"] for attrs in of_class(read(equal), "td", "heat")]
    assert tints
    assert not any("over" in tint for tint in tints)


def test_tables_and_headings_can_be_read_aloud(scaled):
    reader = read(scaled)
    assert all("scope" in attrs for attrs in reader.all("th"))
    levels = [int(tag[1]) for tag, _ in reader.elements if re.fullmatch("h[1-6]", tag)]
    assert levels[0] == 1
    # A level that is left out would read as a missing heading.
    assert all(after - before <= 1 for before, after in pairwise(levels))


def test_pictures_say_what_they_show(scaled):
    divs = of_class(read(scaled), "div", "plot")
    plots = [attrs for attrs in divs if attrs["class"] == "plot"]
    assert len(plots) == 3
    for plot in plots:
        label = plot["aria-label"]
        of_a_difference = plot["role"] == "img" and "ifference" in label
        assert of_a_difference or "apart" in label


def test_the_weight_map_has_both_names_both_shapes_and_the_pattern(measured):
    text = read(measured).text
    assert "W_query.weight 8 6 W_query.kernel 6 8" in text
    assert "unchanged" in text


def test_attention_maps_are_those_of_both_sides(measured):
    section = sections([measured])[0]
    assert [head.title for head in section.heads] == ["attention, head 0", "attention, head 1"]
    assert not section.missing


def test_among_several_only_those_that_differ_have_attention_maps(measured, scaled):
    equal, differing = sections([measured, scaled])
    assert (len(equal.heads), len(differing.heads)) == (0, 2)
    assert equal.losses
    assert differing.losses


def test_what_has_no_room_is_left_out_and_said(measured, monkeypatch):
    monkeypatch.setattr(pages, "MAP_BYTES", 10)
    section = sections([measured])[0]
    assert not section.heads
    assert section.missing.startswith("1 of 1 layers, those that differ least, are left out")


def test_a_module_that_cannot_be_observed_costs_only_its_maps(measured, monkeypatch):
    def refuse(report):
        raise RuntimeError("not traced <b>")

    monkeypatch.setattr(pages, "_layers", refuse)
    assert "There are none: not traced <b>" in read(measured).text


def test_nothing_is_trained_for_a_page(measured):
    untrained = replace(measured, checks=[measured.check("forward")])
    assert sections([untrained])[0].losses is None


def test_the_page_stays_below_6_megabytes(measured, monkeypatch):
    # As large as a model of 48 blocks, which would take minutes.
    weights = np.random.default_rng(0).random((1, 9, 40, 41))
    layers = {f"blocks.{i}.att": (weights, weights + 1e-9 * i) for i in range(48)}
    monkeypatch.setattr(pages, "_layers", lambda report: layers)
    text = page([measured])
    assert "head 7" in text
    # The one that differs most.
    assert "blocks.47.att" in text
    assert 4e6 < len(text.encode()) < 6e6


@pytest.mark.parametrize("package", ["jinja2", "plotly"])
def test_without_the_extra_an_error_says_what_to_install(package, monkeypatch, equal, tmp_path):
    monkeypatch.setitem(sys.modules, package, None)
    match = r"a page needs jinja2 and plotly: pip install jinja2 plotly"
    with pytest.raises(ImportError, match=match):
        write_page([equal], str(tmp_path / "page.html"))


# In a browser.


@pytest.fixture
def browse(tmp_path):
    """Return a function that opens a page and returns its state and the errors of the browser."""
    browser = installed_browser()
    file = tmp_path / "page.html"
    where = [f"--user-data-dir={tmp_path / 'profile'}", "--window-size=1400,8000"]
    # A part of the pictures is drawn some time after the page is there.
    what = ["--virtual-time-budget=20000", "--dump-dom", f"file://{file}"]

    def opened(text):
        file.write_text(text, encoding="utf-8")
        command = [browser, *QUIET, *where, *what]
        done = subprocess.run(command, capture_output=True, text=True, timeout=240)
        complaints = [line for line in done.stderr.splitlines() if "CONSOLE" in line]
        return done.stdout, complaints

    return opened


QUIET = [
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--enable-logging=stderr",
    "--no-first-run",
]


def installed_browser():
    """Return the first browser that is installed; skip without one, and fail in CI."""
    found = filter(None, map(shutil.which, BROWSERS))
    browser = next(found, None)
    if browser is None:
        message = f"the page cannot be tried: none of {', '.join(BROWSERS)} is installed"
        refuse = pytest.fail if os.environ.get("CI") == "true" else pytest.skip
        refuse(message)
    return browser


def test_a_browser_draws_every_picture_without_an_error_or_a_request(browse, scaled, differing):
    found = replace(differing.difference, attention=difference(scaled.pair).attention)
    dom, complaints = browse(page([replace(scaled, difference=found)]))
    assert complaints == []
    assert dom.count('<div class="plot js-plotly-plot"') == 4
    # The operations, and three maps for each head.
    images = re.findall("<image[^>]*data:image/png", dom)
    assert len(images) == 1 + 2 * 3
    # Both losses and the rule, each once more in the legend.
    assert dom.count('<path class="js-line"') == 6
    # A name is no markup to plotly either.
    assert re.search('class="xtick".*?>att.&lt;b&gt;a&lt;/b&gt; &amp; ', dom)


def test_a_request_or_an_error_would_be_seen(browse, equal):
    wrong = '</main><script>fetch("https://example.com/x"); nothing.at.all</script>'
    _, complaints = browse(page([equal]).replace("</main>", wrong))
    assert any("Content Security Policy" in line for line in complaints)
    assert any("nothing is not defined" in line for line in complaints)
