"""Runs a suite twice, and compares what passes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tarfile
import xml.etree.ElementTree as ET
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
        name = self.suite.target
        unexpected = set(self.lost) - set(self.suite.expected)
        found = [f"{name}: {test} passes without, and not under everywhere" for test in unexpected]
        for test in set(self.suite.expected) - set(self.lost):
            found.append(f"{name}: {test} passes; take it off the expected differences")
        if not self.passed:
            found.append(f"{name}: no test passes without everywhere")
        if not self.taken:
            found.append(f"{name}: no call was computed by flax_attn")
        return sorted(found)


def run(suite: Suite, folder: Path, build: Path) -> Result:
    """Run the tests of a suite, which lie in `folder`, without `everywhere` and under it."""
    build = build.resolve()
    build.mkdir(parents=True, exist_ok=True)
    report = build / f"{suite.target}.json"
    report.unlink(missing_ok=True)
    without = _outcomes(suite, folder, build / f"{suite.target}.xml", {})
    marked = {"EVERYWHERE_REPORT": str(report)}
    under = _outcomes(suite, folder, build / f"{suite.target}.under.xml", marked)
    found = json.loads(report.read_text())
    return Result(suite, without, under, found["taken"], found["left alone"])


def _outcomes(suite: Suite, folder: Path, xml: Path, marked: dict[str, str]) -> dict[str, str]:
    paths = [os.environ.get("PYTHONPATH", ""), str(ROOT)]
    environment = os.environ | marked | {"KERAS_BACKEND": "jax", "JAX_PLATFORMS": "cpu"}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    xml.unlink(missing_ok=True)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    command += ["-p", "tools.suites.plugin", "-W", "default", f"--junitxml={xml}"]
    # The environment lies in this repository, whose options of pytest, and what conftest.py sets
    # in JAX, are not those of a target.
    command += ["-c", os.devnull, "--rootdir", str(folder), "--confcutdir", str(folder)]
    command += ["-k", suite.keyword] if suite.keyword else []
    files = [str(folder / name) for name in suite.files]
    finished = subprocess.run(
        [*command, *files], cwd=xml.parent, env=environment, capture_output=True, text=True
    )
    xml.with_suffix(".log").write_text(finished.stdout + finished.stderr)
    if not xml.exists():
        tail = (finished.stdout + finished.stderr)[-2000:]
        raise RuntimeError(f"the tests of {suite.target} were not run:\n{tail}")
    return _read(xml)


def _read(xml: Path) -> dict[str, str]:
    found = {}
    for case in ET.parse(xml).iter("testcase"):
        tags = {child.tag for child in case}
        outcome = "skipped" if "skipped" in tags else "passed"
        outcome = "failed" if tags & {"failure", "error"} else outcome
        found[f"{case.get('classname')}.{case.get('name')}"] = outcome
    return found


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
        _download(f"{suite.package}=={installed.version}", folder.parent)
        with tarfile.open(folder.parent / f"{name}.tar.gz") as archive:
            archive.extractall(folder.parent, filter="data")
    return folder.resolve()


def _download(requirement: str, folder: Path) -> None:
    options = ["--quiet", "--no-deps", "--no-binary", ":all:", "--dest", str(folder)]
    subprocess.run([sys.executable, "-m", "pip", "download", *options, requirement], check=True)
