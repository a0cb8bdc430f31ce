"""Reports for continuous integration: XML that reads back as what was found."""

from xml.etree import ElementTree as Xml

import pytest

from flax_attn.parity.check import Check
from flax_attn.parity.report.junit import write_junit
from flax_attn.parity.report.report import Report


@pytest.fixture
def written(tmp_path):
    def read(*reports):
        write_junit(reports, str(tmp_path / "junit.xml"))
        return Xml.parse(tmp_path / "junit.xml").getroot()

    return read


def test_every_check_is_a_case(written, equal, differing):
    root = written(equal, differing)
    suites = root.findall("testsuite")
    assert [suite.get("name") for suite in suites] == ["equal", differing.name]
    for suite, report in zip(suites, (equal, differing), strict=True):
        cases = suite.findall("testcase")
        # Services for continuous integration tell cases apart by both.
        names = [(case.get("classname"), case.get("name")) for case in cases]
        assert names == [(report.name, check.name) for check in report.checks]


def test_counts_are_those_of_the_cases(written, equal, differing):
    root = written(equal, differing)
    counts = ("tests", "failures", "errors", "skipped")
    assert [root.get(name) for name in counts] == ["9", "3", "0", "2"]
    assert [root.findall("testsuite")[1].get(name) for name in counts] == ["5", "3", "0", "1"]
    assert len(root.findall(".//failure")) == 3
    assert len(root.findall(".//skipped")) == 2


def test_a_failure_says_where_and_how_far(written, differing):
    failure = written(differing).find(".//testcase[@name='forward']/failure")
    cause, explained = differing.causes[0], differing.check("forward").explain()
    assert failure.get("message") == f"{cause}; {explained}"
    assert failure.text == differing.explain()


def test_what_was_not_run_is_skipped_with_the_reason_or_fails_if_it_was_asked_for(
    written, differing
):
    root = written(differing)
    assert root.find(".//testcase[@name='dropout']/skipped").get("message") == "nothing is dropped"
    variant = root.find(".//testcase[@name='cache = full']")
    assert variant.find("skipped") is None
    assert "not run: no call: <b>a</b>" in variant.find("failure").get("message")


def test_environment_seed_and_command_are_properties(written, differing, equal):
    properties = {p.get("name"): p.get("value") for p in written(differing).iter("property")}
    assert properties.pop("command") == "flax-attn parity x:y"
    assert properties == {"seed": "7", "state": "different", "tested": ""}
    assert "0.10.2" in {p.get("value") for p in written(equal).iter("property")}


def test_what_xml_cannot_hold_is_left_out(written):
    # A control character, a null, half a surrogate pair; and what it can hold.
    report = Report("x\x1b[1m", [Check("forward", 1.0, 0.5, "a\x00b", "\ud800 \U0001f600")])
    variant = written(report).find(".//testcase")
    assert variant.get("classname") == "x[1m"
    assert "at 'a\\x00b'" in variant.find("failure").get("message")
    assert "\U0001f600" in variant.find("failure").text
