"""The report of a comparison: printed, shown in a notebook, saved."""

from __future__ import annotations

import html
import importlib.metadata
import os
import platform
import sys
from os import PathLike
from pathlib import Path

import jax

from flax_attn.parity import known_faults
from flax_attn.parity.adapters import recording
from flax_attn.parity.report import console, document, page, wording
from flax_attn.parity.report.findings import Findings
from flax_attn.parity.report.junit import write_junit

PACKAGES = ("jax", "jaxlib", "flax", "torch", "numpy", "optax", "flax-attn")


class Report(Findings):
    """All results of a comparison: `print(report)` for text; a notebook shows a page.

    Example:
        >>> from flax_attn.parity import Check
        >>> report = Report("layer norm", [Check("forward", 2e-16, 1e-12, "output")])
        >>> report
        Report('layer norm': equal, 1 check)
        >>> print(report.explain())
        layer norm: both sides are the same function, 5e+03x below the rules
    """

    def __repr__(self) -> str:
        """Return the verdict in short."""
        ran = len(self.ran)
        count = "1 check" if ran == 1 else f"{ran} checks"
        return f"Report({self.name!r}: {wording.verdict(self)}, {count})"

    def __str__(self) -> str:
        """Return everything that a terminal shows, without colours."""
        return console.text(self)

    def _repr_html_(self) -> str:
        """Return the page for a notebook, without the pictures, which take 5 MB of script."""
        try:
            content = page.page([self], pictures=False)
        except ImportError:
            return f"<pre>{html.escape(str(self))}</pre>"
        # A frame of its own keeps the styles of page and notebook apart.
        frame = (
            'sandbox="allow-scripts" style="width: 100%; height: 40rem; border: 0; resize:'
            ' vertical"'
        )
        return f'<iframe title="Report" {frame} srcdoc="{html.escape(content)}"></iframe>'

    def save(self, path: str | PathLike[str]) -> None:
        """Write the report as a page (`x.html`), as JSON of `document.SCHEMA`, or JUnit (`x.xml`).

        Raises:
            ValueError: if the path ends in anything else.
            ImportError: if a page is asked for and jinja2 or plotly is not installed.
        """
        writers = {".html": page.write_page, ".json": document.write_one, ".xml": write_junit}
        file = Path(path)
        write = writers.get(file.suffix)
        given = str(path)
        if write is None:
            page_of_it = file.with_suffix(".html")
            good = str(page_of_it)
            raise ValueError(
                f"the suffix must be .html, .json or .xml; got {given!r}. Use report.save({good!r})"
            )
        write([self], given)

    def export(self, folder: str | PathLike[str]) -> Path:
        """Write the PyTorch results to `folder/NAME.safetensors`, and return the path.

        They can be compared with where torch is not installed.

        Raises:
            ExportError: if they were not kept: `compare(..., record=True)` does.
        """
        return recording.save(self, folder)


def environment() -> dict[str, str]:
    """Return what results depend on: versions, devices, precision."""
    found = {
        "python": platform.python_version(),
        "machine": platform.machine(),
        "platform": platform.platform(),
    }
    found |= {package: _version(package) for package in PACKAGES}
    # Where it is not imported, no result depends on it.
    if "transformers" in sys.modules:
        found["transformers"] = _version("transformers")
    found["jax devices"] = ", ".join(map(str, jax.devices()))
    found["known wrong results"] = known_faults.summary()
    for setting in ("jax_enable_x64", "jax_default_matmul_precision"):
        found[setting] = str(getattr(jax.config, setting))
    # A report of JAX alone does not import torch.
    if "torch" in sys.modules:
        torch = sys.modules["torch"]
        found["torch threads"] = str(torch.get_num_threads())
        found["torch float32 matmul precision"] = torch.get_float32_matmul_precision()
        matmul = torch.backends.cuda.matmul.allow_tf32
        found["torch TF32 (matmul, cuDNN)"] = f"{matmul}, {torch.backends.cudnn.allow_tf32}"
    for variable in ("XLA_FLAGS", "JAX_PLATFORMS"):
        if variable in os.environ:
            found[variable] = os.environ[variable]
    return found


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"
