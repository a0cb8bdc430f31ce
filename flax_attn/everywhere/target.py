"""What a target is: the places of a library where attention is computed, and what replaces them."""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib import metadata
from importlib.util import find_spec
from typing import Any

from packaging.specifiers import SpecifierSet


class LeftAlone(Exception):  # noqa: N818 (a decision, not an error)
    """Raised by a replacement, before any work, for a call that the original is to compute.

    Its message is the reason, as the report has it.
    """


@dataclass(frozen=True)
class Place:
    """A function or a method of a library.

    Args:
        module: name of the module that defines it.
        path: its name there, `"function"` or `"Class.method"`.
        replacement: function that is called as `replacement(original, *args, **kwargs)` while the
            target is on. It returns the result, or raises `LeftAlone`.
        public: public name of the module, for reports; empty where it is `module`.
    """

    module: str
    path: str
    replacement: Callable[..., Any]
    public: str = ""

    @property
    def name(self) -> str:
        """The name in reports."""
        return f"{self.public or self.module}.{self.path}"


@dataclass(frozen=True)
class Target:
    """A library, or a part of one, whose attention can be computed here.

    Args:
        name: name in `everywhere(targets=[...])`.
        package: name by which it is imported.
        versions: versions whose places are known, as in a requirement: `">=0.11,<0.14"`.
        places: where it computes attention.
        distribution: its name on PyPI; empty where it is `package`.
    """

    name: str
    package: str
    versions: str
    places: tuple[Place, ...]
    distribution: str = ""

    @property
    def modules(self) -> set[str]:
        """The names of the modules that its places are in."""
        return {place.module for place in self.places}

    @property
    def installed(self) -> bool:
        """Whether it can be imported; it is not imported to find out."""
        return self.package in sys.modules or find_spec(self.package) is not None

    def unknown_version(self) -> str | None:
        """Return the version of the imported package if its places are not known, else None."""
        # A package that is being imported may have said no version yet.
        version = getattr(sys.modules[self.package], "__version__", None)
        if version is None:
            version = metadata.version(self.distribution or self.package)
        known = SpecifierSet(self.versions).contains(version, prereleases=True)
        return None if known else version
