"""The study of other people's ports: the page follows from the verdicts.

Each fault can be reproduced.
"""

import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest

ROOT = Path(__file__).parents[1]
sys.path.append(str(ROOT))  # the study is not installed

from field import judge as JUDGE  # noqa: E402, found there
from field import judging  # noqa: E402
from field import page as PAGE  # noqa: E402
from field.by_hand import lines  # noqa: E402
from flax_attn.parity import Check  # noqa: E402

ROWS, FINDINGS = PAGE.load()
JUDGED = [row for row in ROWS if row["verdict"] != PAGE.UNJUDGED]


def test_the_page_follows_from_the_verdicts():
    assert PAGE.text() == PAGE.PAGE.read_text()


def test_enough_ports_were_judged():
    assert len(JUDGED) >= 40


def test_the_readme_has_the_figures_of_the_study():
    verdicts = Counter(row["verdict"] for row in JUDGED)
    text = " ".join((ROOT / "README.md").read_text().split())
    assert f"judged {len(JUDGED)} ports" in text
    assert (
        f"{verdicts['equal']} equal PyTorch and {verdicts['equal up to float32']} do except for"
        " casts" in text
    )
    assert f"{sum(finding['kind'] == 'fault' for finding in FINDINGS)} faults" in text
    assert len({row["port"] for row in ROWS}) == len(ROWS)
    assert {row["verdict"] for row in ROWS} <= set(PAGE.MEANING)


# Of what kind a finding has to be that explains a verdict.
EXPLAINED_BY = {
    "equal up to float32": {"float32"},
    "differs in empty rows": {"undefined"},
    "different": {"fault", "documented", "undefined"},
    "other parameters": {"fault", "documented"},
    "Flax raises": {"fault", "documented"},
}


@pytest.mark.parametrize(
    "row", [row for row in JUDGED if row["verdict"] != "equal"], ids=lambda row: row["port"]
)
def test_what_is_not_equal_is_explained(row):
    kinds = {finding["kind"] for finding in PAGE.findings_of(row, FINDINGS)}
    assert kinds & EXPLAINED_BY[row["verdict"]], (
        f"{row['port']}: say in field/findings what was found by hand"
    )


def test_each_finding_has_a_name_of_its_own():
    assert len({finding["id"] for finding in FINDINGS}) == len(FINDINGS)


@pytest.mark.parametrize("finding", FINDINGS, ids=lambda finding: finding["id"])
def test_findings_are_whole(finding):
    assert finding["kind"] in PAGE.KINDS
    assert all(finding[key].strip() for key in ("title", "cause", "upstream", "documented"))
    assert any(finding in PAGE.findings_of(row, [finding]) for row in ROWS), "it is of no port"
    if finding["kind"] == "fault":
        source = (ROOT / "field" / "reproductions" / finding["reproduction"]).read_text()
        assert finding["printed"].strip()
        assert "flax_attn" not in source


def test_the_page_says_what_it_was_not_told_otherwise(monkeypatch, tmp_path):
    (tmp_path / "results").mkdir()
    row = {
        "port": "lib/a|b",
        "package": "lib",
        "version": "1.0",
        "configuration": "one",
        "twin": "its class",
    }
    row |= {"verdict": "does not run", "reason": "ValueError: of\ntwo lines"}
    lines.write(tmp_path / "results", "lib", [row])
    assert (tmp_path / "results" / "lib.jsonl").read_text().count("\n") == 1
    (tmp_path / "findings").mkdir()
    monkeypatch.setattr(PAGE, "HERE", tmp_path)
    assert "| a\\|b | one | does not run |  |  |  |  | ValueError: of two lines |  |" in PAGE.text()
    assert "equals its PyTorch original: 0 ports that other people wrote" in PAGE.text()


def test_a_cause_of_several_places_is_shown_once_and_casts_come_last():
    causes = [
        "a.0: flax has x in float32",
        "b.0: flax has y (also b.1)",
        "c.0: flax has y",
        "d: flax has z",
    ]
    assert (
        PAGE._causes({"causes": causes})
        == "b.0: flax has y (also b.1); d: flax has z; a.0: flax has x in float32"
    )


def test_what_a_side_raised_in_a_check_is_shown_where_no_cause_is_known():
    row = {"port": "lib/a", "configuration": "one", "verdict": "different", "twin": "its class"}
    row["checks"] = [
        {"name": "forward", "limit": 1e-12, "error": 0.0},
        {
            "name": "padded rows",
            "limit": 0.0,
            "error": None,
            "note": "flax raised ValueError: no mask",
        },
    ]
    assert "| padded rows: flax raised ValueError: no mask |" in PAGE._line(row, [], {})
    assert "raised" not in PAGE._line({**row, "causes": ["fc: flax has y"]}, [], {})


def test_ports_are_chosen_by_a_part_of_their_names():
    assert JUDGE.chosen(["a/bert", "a/gpt2"], ["gpt"]) == ["a/gpt2"]
    assert JUDGE.chosen(["a/bert", "a/gpt2"], []) == ["a/bert", "a/gpt2"]
    with pytest.raises(ValueError, match=r"no port has llama in its name; there are a/bert"):
        JUDGE.chosen(["a/bert"], ["llama"])


def test_two_ports_of_one_name_are_refused(monkeypatch):
    port = SimpleNamespace(name="a/b")
    monkeypatch.setattr(JUDGE, "_modules", lambda: [SimpleNamespace(ports=lambda: [port, port])])
    with pytest.raises(ValueError, match="two ports are named a/b: rename one"):
        JUDGE.all_ports()


CHECKS = [Check("forward", error, 1e-12) for error in (0.0, 1e-12, 1.0004e-12, 2e-12)]
CHECKS += [Check("forward", float(error), 1e-12) for error in ("nan", "inf")]
CHECKS += [Check("padded rows", float("inf"), 0.0, skipped="no mask", wanted=True)]  # all are, here


@pytest.mark.parametrize("check", CHECKS, ids=repr)
def test_what_is_kept_of_a_check_tells_whether_it_passed(check):
    kept = judging._record(check)
    passed = kept["error"] is not None and kept["error"] <= kept["limit"]
    assert passed == check.passed
    assert kept.get("note", "") == check.skipped
