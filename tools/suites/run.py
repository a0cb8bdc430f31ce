"""Runs a suite twice, and compares what passes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tarfile
import xml.etree.ElementTree as ET
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import distribution
from pathlib import Path

from tools.suites.table import Suite

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Result:
    """What a suite found.

    Args:
        suite: suite.
        without: outcome of each test by its name, without `everywhere`.
        under: outcome of each test under it.
        taken: how many calls were computed here.
        left_alone: how many calls were left alone, by place and reason.
    """

    suite: Suite
    without: dict[str, str]
    under: dict[str, str]
    taken: int
    left_alone: dict[str, int]

    @property
    def passed(self) -> list[str]:
        """The tests that pass without."""
        return [test for test, outcome in self.without.items() if outcome == "passed"]

    @property
    def lost(self) -> list[str]:
        """The tests that pass without, and not under it."""
        return [test for test in self.passed if self.under.get(test) != "passed"]

    @property
    def problems(self) -> list[str]:
        """What speaks against it, a sentence each."""
        return sorted(f"{self.suite.target}: {problem}" for problem in self._problems())

    def _problems(self) -> Iterator[str]:
        lost = set(self.lost)
        expected = set(self.suite.expected)
        for test in lost - expected:
            yield f"{test} passes without, and not under everywhere"
        for test in expected - lost:
            yield f"{test} passes; take it off the expected differences"
        if not self.passed:
            yield "no test passes without everywhere"
        if not self.taken:
            yield "no call was computed by flax_attn"


def run(suite: Suite, folder: Path, build: Path) -> Result:
    """Run the tests of a suite, which lie in `folder`, without `everywhere` and under it."""
    # The tests run in another folder.
    build = build.resolve()
    build.mkdir(parents=True, exist_ok=True)
    report = build / f"{suite.target}.json"
    # Else that of an earlier run would be read where this one writes none.
    report.unlink(missing_ok=True)
    marked = {"EVERYWHERE_REPORT": str(report)}
    xml = build / f"{suite.target}.xml"
    without = _outcomes(suite, folder, xml, {})
    under = _outcomes(suite, folder, xml.with_suffix(".under.xml"), marked)
    found = json.loads(report.read_text())
    return Result(suite, without, under, found["taken"], found["left alone"])


def _outcomes(suite: Suite, folder: Path, xml: Path, marked: dict[str, str]) -> dict[str, str]:
    xml.unlink(missing_ok=True)
    command = _command(suite, folder, xml)
    finished = subprocess.run(
        command,
        cwd=xml.parent,
        env=_environment() | marked,
        capture_output=True,
        text=True,
    )
    printed = finished.stdout + finished.stderr
    log = xml.with_suffix(".log")
    log.write_text(printed)
    # Tests that fail are a result, tests that were not run are none.
    if not xml.exists():
        raise RuntimeError(f"the tests of {suite.target} were not run:\n{printed[-2000:]}")
    return _read(xml)


def _environment() -> dict[str, str]:
    own = {"KERAS_BACKEND": "jax", "JAX_PLATFORMS": "cpu"}
    paths = [os.environ.get("PYTHONPATH", ""), str(ROOT)]
    # An empty part would be the current folder.
    own["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    return {**os.environ, **own}


def _command(suite: Suite, folder: Path, xml: Path) -> list[str]:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    command += ["-p", "tools.suites.plugin", "-W", "default", f"--junitxml={xml}"]
    # The environment lies in this repository, whose options of pytest, and what conftest.py sets
    # in JAX, are not those of a target.
    command += ["-c", os.devnull, "--rootdir", str(folder), "--confcutdir", str(folder)]
    if suite.keyword:
        command += ["-k", suite.keyword]
    return [*command, *(str(folder / name) for name in suite.files)]


def _read(xml: Path) -> dict[str, str]:
    found = {}
    for case in ET.parse(xml).iter("testcase"):
        name = f"{case.get('classname')}.{case.get('name')}"
        found[name] = _outcome(case)
    return found


def _outcome(case: ET.Element) -> str:
    tags = {child.tag for child in case}
    # A test may be skipped and fail at its end.
    if tags & {"failure", "error"}:
        return "failed"
    return "skipped" if "skipped" in tags else "passed"


def folder_of(suite: Suite, checkouts: dict[str, Path], build: Path) -> Path | None:
    """Return the folder that holds a suite, or None for one of a checkout that is not given."""
    if suite.package in checkouts:
        return checkouts[suite.package].resolve()
    if suite.origin == "checkout":
        return None
    installed = distribution(suite.package)
    if suite.origin == "wheel":
        return Path(str(installed.locate_file("")))
    name = f"{suite.package}-{installed.version}"
    folder = build / "sources" / name
    if not folder.exists():
        sources = folder.parent
        # The tests of the version that is installed.
        _download(f"{suite.package}=={installed.version}", sources)
        with tarfile.open(sources / f"{name}.tar.gz") as archive:
            archive.extractall(sources, filter="data")
    return folder.resolve()


def _download(requirement: str, folder: Path) -> None:
    options = ["--quiet", "--no-deps", "--no-binary", ":all:", "--dest", str(folder)]
    subprocess.run([sys.executable, "-m", "pip", "download", *options, requirement], check=True)
