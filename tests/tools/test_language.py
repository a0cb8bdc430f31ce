"""The language of pages, docstrings and messages: what is counted, and where a phrase is found."""

from pathlib import Path

import pytest

from tools import language

PAGE = """---
kernelspec: {name: python3}
---
# Title

You read this; it is `code; that of`, and [a link; of it](page.md#that-of).

```python
alone = "that of"  # but for
```

It speaks of those of
the others. Who reads this must mend it. Who asks?
"""


def found(text, tmp_path, name="page.md"):
    """The phrases of a file, as lines and what was found."""
    file = tmp_path / name
    file.write_text(text)
    prose = language.read([file])
    return [
        (place.line, place.phrase)
        for texts in prose.values()
        for one in texts
        for place in language.places(one)
    ]


def test_phrases_are_found_at_their_lines_and_not_in_code(tmp_path):
    assert sorted(found(PAGE, tmp_path)) == [(12, "speaks of"), (13, ". Who"), (13, "mend")]


@pytest.mark.parametrize("phrase", [
    "honours", "insists", "and no others", "but for", "of one's own", "mend", "quicker",
    "speaks of", "stands in", "This. Who reads this",
])  # fmt: skip
def test_each_phrase_is_found_also_across_lines(phrase, tmp_path):
    assert len(found(f"Text {phrase} text.", tmp_path)) == 1
    assert len(found(f"Text {phrase.replace(' ', chr(10))} text.", tmp_path)) == 1


@pytest.mark.parametrize(
    "text", ["honourable", "mended_name", "understands in", "Whoever", "`mend`"]
)
def test_other_words_are_left_alone(text, tmp_path):
    assert found(f"Text {text} text.", tmp_path) == []


CODE = '''"""A module that stands in for another; it is quick.

>>> mend(1)
"""

import warnings


def function(mend):
    """Return `mend`.

    It speaks of the others.
    """
    warnings.warn("insists on it")
    raise ValueError(f"{mend} stands there")


NAME = "but for"
'''


def test_docstrings_and_messages_are_read_and_other_texts_are_not(tmp_path):
    places = [(1, "stands in"), (12, "speaks of"), (14, "insists"), (15, "stands there")]
    assert sorted(found(CODE, tmp_path, "module.py")) == places


def test_rates_are_in_a_thousand_words():
    text = "You; your. " + "word " * 995 + "that\nof it alone, left alone."
    rates = language.rates([text])
    words = 1003
    assert rates["you"] == pytest.approx(2000 / words)
    assert rates["that of"] == pytest.approx(1000 / words)
    assert rates["semicolons"] == pytest.approx(1000 / words)
    assert rates["alone"] == pytest.approx(1000 / words)


def test_a_page_that_misses_a_goal_fails_the_check(tmp_path, capsys):
    page = tmp_path / "page.md"
    page.write_text("You write to you. " * 9)
    assert language.main(["--check", str(page)]) == 0
    page.write_text("The page; that of others; it stands in nobody's way.")
    assert language.main([str(page)]) == 0  # only printed
    assert language.main(["--check", str(page)]) == 1
    printed = capsys.readouterr().err
    assert "page.md:1: write 'is in' for 'stands in'" in printed
    assert "pages say 'you' 0.00 times in 1,000 words: at least 9.0" in printed
    assert "pages have 'that of'" in printed
    assert "pages have 'semicolons'" in printed


def test_the_project_is_read_without_what_programs_write():
    files = set(language.written())
    assert language.ROOT / "docs" / "use.md" in files
    assert language.ROOT / "flax_attn" / "attention.py" in files
    assert language.ROOT / "flax_attn" / "parity" / "SKILL.md" in files
    assert language.ROOT / "docs" / "field.md" not in files
    assert all(Path(file).is_file() for file in files)
