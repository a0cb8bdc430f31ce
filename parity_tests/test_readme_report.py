"""The report in the README is what its port prints."""

import subprocess
import sys
from pathlib import Path

README = Path(__file__).parents[1] / "README.md"


def blocks_of(heading):
    """Return the texts of the code blocks under a heading."""
    section = README.read_text().split(f"\n## {heading}\n")[1].split("\n## ")[0]
    # Every other piece is outside of a block, and a block begins with the name of its language.
    return [block.partition("\n")[2] for block in section.split("```")[1::2]]


def test_the_report_is_what_is_printed(tmp_path):
    port, shown = blocks_of("Check your port")[:2]
    (tmp_path / "port.py").write_text(port)
    command = [sys.executable, "port.py"]
    found = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    # What is shown has no number that differs by machine.
    assert shown.startswith("what they compute differently\n")
    assert shown in found.stdout
