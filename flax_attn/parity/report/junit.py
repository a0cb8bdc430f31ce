"""Reports for continuous integration, as JUnit XML."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import chain
from xml.etree import ElementTree as Xml

from flax_attn.convert.replacing import replacing
from flax_attn.parity.check import Check
from flax_attn.parity.report.findings import Findings

# XML 1.0 has no way to write these, and a message of a framework may hold them, such as the colours
# of a terminal.
_FORBIDDEN = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def write_junit(reports: Sequence[Findings], path: str) -> None:
    """Write a suite for each report and a case for each check: passed, failed or skipped."""
    root = Xml.Element("testsuites", {"name": "flax-attn parity", **_counts(reports)})
    root.extend(_suite(report) for report in reports)
    Xml.indent(root)
    with replacing(path) as whole:
        Xml.ElementTree(root).write(whole, encoding="utf-8", xml_declaration=True)


def _suite(report: Findings) -> Xml.Element:
    suite = Xml.Element("testsuite", {"name": _text(report.name), **_counts([report])})
    suite.append(_properties(report))
    suite.extend(_case(report, check) for check in report.checks)
    # As a failing test prints it.
    output = Xml.SubElement(suite, "system-out")
    output.text = _text("\n".join([report.explain(), *report.notes]))
    return suite


def _properties(report: Findings) -> Xml.Element:
    properties = Xml.Element("properties")
    values = {**report.environment, "seed": report.seed, "command": report.command}
    values |= {"state": report.state, "tested": report.coverage.lines}
    for name, value in values.items():
        Xml.SubElement(properties, "property", name=_text(name), value=_text(value))
    return properties


def _case(report: Findings, check: Check) -> Xml.Element:
    case = Xml.Element("testcase", classname=_text(report.name), name=_text(check.name))
    if not check.passed:
        case.append(_failure(report, check))
    elif not check.ran:
        Xml.SubElement(case, "skipped", message=_text(check.skipped))
    return case


def _failure(report: Findings, check: Check) -> Xml.Element:
    message = "; ".join([*report.causes, check.explain()])
    failure = Xml.Element("failure", type="ParityError", message=_text(message))
    failure.text = _text(report.explain())
    return failure


def _counts(reports: Sequence[Findings]) -> dict[str, str]:
    checks = list(chain.from_iterable(report.checks for report in reports))
    failed = sum(not check.passed for check in checks)
    skipped = sum(check.passed and not check.ran for check in checks)
    counts = {"tests": len(checks), "failures": failed, "errors": 0, "skipped": skipped}
    return {name: str(count) for name, count in counts.items()}


def _text(value: object) -> str:
    return _FORBIDDEN.sub("", str(value))
