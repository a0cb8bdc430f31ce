"""What docs/_extensions make of a page, and what docs/look.py finds on one."""

import inspect
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from flax_attn.parity import compare

pytest.importorskip("sphinx")
ROOT = Path(__file__).parents[2]
EXAMPLES = sorted(path.name for path in (ROOT / "examples").glob("*.py"))

FRONT = """---
file_format: mystnb
kernelspec: {name: python3, display_name: Python 3}
---
# Title

The first sentence. The second.

"""


def cell(tag, code):
    return f"```{{code-cell}}\n:tags: [{tag}]\n{code}\n```\n\n"


@pytest.fixture(autouse=True)
def _found(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "docs" / "_extensions")
    monkeypatch.syspath_prepend(ROOT / "docs")


CONF = f"""
__file__ = {str(ROOT / "docs" / "conf.py")!r}
exec(compile(open(__file__).read(), __file__, "exec"))
nb_execution_mode = "off"
nitpicky = False  # other symbols are on other pages
suppress_warnings = ["myst-nb.lexer"]
html_static_path, html_favicon, html_logo = [], None, None
"""


@pytest.fixture
def build(tmp_path):
    """Build one page with all extensions, without running it; return the output and the site."""

    def run(text):
        (tmp_path / "conf.py").write_text(CONF)
        (tmp_path / "index.md").write_text(text)
        command = [
            sys.executable,
            "-m",
            "sphinx",
            "-q",
            "-W",
            "--keep-going",
            str(tmp_path),
            str(tmp_path / "site"),
        ]
        return (
            subprocess.run(command, capture_output=True, text=True, check=False).stderr,
            tmp_path / "site",
        )

    return run


def test_two_cells_stand_side_by_side(build):
    _, site = build(FRONT + cell("torch", "a = 1") + cell("flax", "b = 2"))
    html = (site / "index.html").read_text()
    assert html.index('class="pair') < html.index("tag_torch") < html.index("tag_flax")


def test_a_cell_for_torch_needs_one_for_flax(build):
    printed, _ = build(FRONT + cell("torch", "a = 1") + "Text between.\n\n" + cell("flax", "b = 2"))
    assert "needs a cell tagged flax directly after it; index has none after" in printed


def test_numbers_and_formulas_and_lists_for_language_models(build):
    printed, site = build(
        FRONT + "Errors of 1e-12 in `1e-13`: $\\sqrt{h}$\n\n```{symbols}\nflax_attn.Mask\n```\n"
    )
    html = (site / "index.html").read_text()
    assert printed == ""
    assert '<span class="unbroken">1e-12</span>' in html
    assert "1e-13</span>" in html
    assert "<msqrt>" in html
    assert 'id="flax_attn.Mask.causal"' in html
    assert "> The first sentence.\n" in (site / "llms.txt").read_text()
    full = (site / "llms-full.txt").read_text()
    assert "### flax_attn.Mask\n" in full
    assert "kernelspec" not in full


def test_code_is_linked_where_it_is_public():
    from docstrings import code

    text = code("`Mask`s, `t`, `Mask.causal` and `compare()`", "flax_attn.Scores")
    links = (
        ":py:obj:`Mask <flax_attn.Mask>`\\ s",
        "``t``",
        ":py:obj:`Mask.causal <flax_attn.Mask.causal>`",
    )
    assert text == f"{', '.join(links)} and :py:obj:`compare() <flax_attn.parity.compare>`"
    assert code("`Mask`", "flax_attn.Mask") == "``Mask``"
    # What only backends call is on no page.
    assert code("`Mask.kv_range`", "flax_attn.Scores") == "``Mask.kv_range``"


def test_formulas_are_told_from_sections():
    from docstrings import formulas

    lines = ["One line.", "", "    a = b", "", "Args:", "    x: text", "", "    more"]
    assert list(formulas(lines)) == [
        *lines[:2],
        ".. code-block:: text",
        "    :class: formula",
        "",
        *lines[2:],
    ]


def test_signatures_are_those_of_the_source():
    from docstrings import sign

    import flax_attn

    arguments, returned = sign("class", flax_attn.RMSNorm)
    assert arguments.startswith("(d_model: int, ")
    assert returned == ""
    assert sign("function", flax_attn.alibi_slopes)[1] == "np.ndarray"
    # The keywords of a TypedDict are written out.
    called, _ = sign("function", flax_attn.attend_one_head)
    assert "scale: float | None=..., soft_cap: float | None=..., " in called
    assert "**options" not in called


def test_inherited_arguments_are_described_before_those_of_the_class():
    from symbols import docstring

    import flax_attn
    from flax_attn.parity import Report

    text = docstring("flax_attn.LlamaConfig")
    assert text.index("    d_model: width of the tokens.") < text.index("    attention_bias: ")
    assert text.count("    num_kv_heads: ") == 1
    assert "    checks: checks in the order" in docstring("flax_attn.parity.Report")
    assert "checks" not in (Report.__doc__ or "").split("Example:")[0]
    assert docstring("flax_attn.RMSNorm") == inspect.getdoc(flax_attn.RMSNorm)


def test_a_long_table_is_shortened_for_language_models():
    from llms import shortened

    table = "| a |\n| --- |\n" + "| 1 |\n" * 50
    assert shortened("field", f"Before.\n\n{table}\nAfter.\n") == (
        "Before.\n\n| a |\n| --- |\n| 1 |\n49 more rows are in field.md.\n\nAfter.\n"
    )
    short = "| a |\n| --- |\n| 1 |\n"
    assert shortened("field", short) == short


def test_every_example_is_shown():
    shown = "".join(path.read_text() for path in (ROOT / "docs").glob("*.md"))
    assert [name for name in EXAMPLES if f"../examples/{name}" not in shown] == []


GOOD = (
    '<html lang="en"><title>T</title><body style="background: #fff"><main><p style="color:'
    ' #000">text</p>{}</main>'
)
BAD = {
    '<p style="color: #bbb">pale</p>': "color-contrast",
    '<img src="data:image/gif;base64,R0lGODlhAQABAAAAACw=">': "image-alt",
    '<p style="width: 2000px">wide</p>': "too wide",
    "<script>console.error('broken')</script>": "broken",
}


@pytest.fixture
def look(tmp_path, monkeypatch):
    """Look at the site in `site`, which has no page yet, and return the exit status."""
    look = pytest.importorskip("look")
    if not look.browser():
        pytest.skip("no browser")
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "favicon.ico").touch()
    folders = ["--site", str(tmp_path / "site"), "--pictures", str(tmp_path / "pictures")]
    monkeypatch.setattr(sys, "argv", ["look", *folders])
    return look.main


@pytest.mark.parametrize(("html", "found"), [("", ""), *BAD.items()])
def test_a_look_finds_what_is_wrong(html, found, look, tmp_path, capsys):
    (tmp_path / "site" / "page.html").write_text(GOOD.format(html))
    assert look() == bool(found)
    assert found in capsys.readouterr().out
    assert len(list((tmp_path / "pictures").iterdir())) == 4


FIELD = """<input type="search" id="field-search"> <span id="field-count"></span>
<section id="every-port"><h2>Every port</h2>
<section><h3>lib 1.0</h3><table><tbody><tr><td>A</td><td>equal</td></tr>
<tr><td>B</td><td>different</td></tr></tbody></table></section>
<section><h3>other 2.0</h3><table><tbody><tr><td>C</td><td>equal</td></tr></tbody></table></section>
</section><script src="site.js"></script>"""


@pytest.mark.parametrize(("words", "seen", "count"), [
    ("equal", ["A", "C"], "2 of 3"), ("lib EQUAL", ["A"], "1 of 3"), ("nothing", [], "0 of 3"),
    ("", ["A", "B", "C"], "3 of 3"),
])  # fmt: skip
def test_the_table_of_ports_can_be_searched(words, seen, count, tmp_path):
    look = pytest.importorskip("look")
    if not look.browser():
        pytest.skip("no browser")
    (tmp_path / "field.html").write_text(GOOD.format(FIELD))
    (tmp_path / "site.js").write_text((ROOT / "docs" / "_static" / "site.js").read_text())
    with look.served(tmp_path) as address, look.sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=look.browser(), args=["--no-sandbox"])
        page = chromium.new_page()
        page.goto(f"{address}/field.html")
        page.fill("#field-search", "changed")
        page.fill("#field-search", words)
        cells = page.locator("#every-port tr td:first-child")
        shown = [cell.inner_text() for cell in cells.all() if cell.is_visible()]
        assert shown == seen
        assert page.locator("#field-count").inner_text() == count
        headings = page.locator("#every-port h3")
        libraries = [heading.inner_text() for heading in headings.all() if heading.is_visible()]
        assert ("lib 1.0" in libraries) == ("A" in seen or "B" in seen)
        chromium.close()


def test_the_page_of_a_comparison_passes(look, tmp_path, capsys):
    x = np.ones((2, 3))
    report = compare(
        lambda x: x, lambda x: 1e9 * x, [x], layout=None, checks=["forward", "gradients"]
    )
    report.save(tmp_path / "site" / "report.html")
    assert look() == 0, capsys.readouterr().out


def test_data_has_the_comment_above_its_definition():
    from symbols import docstring

    assert docstring("flax_attn.GPT2_CONFIGS") == "The configs of the published GPT-2, by name."
    assert docstring("flax_attn.parity.CHECKS").startswith("The checks of a comparison")
