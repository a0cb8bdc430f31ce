"""The targets that are imported, redirected for as long as anybody computes attention here."""

import sys
import warnings
from collections.abc import Sequence
from functools import partial, reduce
from importlib.abc import Loader, MetaPathFinder
from importlib.util import find_spec
from threading import RLock
from types import ModuleType
from typing import Any

from flax_attn.everywhere.dispatch import dispatch
from flax_attn.everywhere.redirect import Redirection, plain_function, redirect
from flax_attn.everywhere.target import Place, Target


class Installation:
    """Which places are redirected now. One serves all blocks of all threads: it counts them.

    A target that is imported while it is in use is redirected as soon as it is there.

    Args:
        targets: targets whose places are redirected.
    """

    def __init__(self, targets: Sequence[Target]):
        # `enter` undoes itself by `leave`, and holds the lock meanwhile.
        self._lock = RLock()
        self._users = 0
        self._redirections: dict[Place, Redirection] = {}
        self._targets = targets
        self._hook = _Hook(self, targets)
        self._warned: set[str] = set()

    def enter(self) -> None:
        """Redirect what is imported, unless that is done."""
        with self._lock:
            self._users += 1
            if self._users == 1:
                sys.meta_path.insert(0, self._hook)
            try:
                for target in self._targets:
                    self._install(target)
            # Also when the user interrupts it: the block is not entered then, nor ever left.
            except BaseException:
                self.leave()
                raise

    def leave(self) -> None:
        """Undo all, unless somebody else is in a block."""
        with self._lock:
            self._users -= 1
            if self._users:
                return
            sys.meta_path.remove(self._hook)
            while self._redirections:
                _, redirection = self._redirections.popitem()
                redirection.undo()

    def imported(self, module: str) -> None:
        """Redirect the places of a module that has just been imported."""
        with self._lock:
            if not self._users:
                return
            for target in self._targets:
                if module in target.modules:
                    self._install(target)

    def _install(self, target: Target) -> None:
        """Redirect the places of a target that are imported, and not redirected before."""
        for place in target.places:
            module = sys.modules.get(place.module)
            if module is None or place in self._redirections:
                continue
            # The version can be read once the target is imported, and not before.
            version = target.unknown_version()
            if version is not None:
                self._warn(target, version)
                return
            function = plain_function(_attribute(module, place.path))
            hook = partial(dispatch, target.name, place)
            self._redirections[place] = redirect(function, hook)

    def _warn(self, target: Target, version: str) -> None:
        """Warn, once, that a version of a target is not known."""
        if target.name in self._warned:
            return
        self._warned.add(target.name)
        warnings.warn(
            f"flax_attn.everywhere knows {target.package} {target.versions}, and leaves"
            f" {target.name} of {target.package} {version} alone. Install a version that it"
            " knows, or pass an adapter of flax_attn.adapters by hand",
            stacklevel=2,
        )


def _attribute(module: ModuleType, path: str) -> Any:
    *owners, name = path.split(".")
    owner = reduce(getattr, owners, module)
    # As it stands in the class: Python and some libraries bind methods where they are asked for.
    return vars(owner)[name]


class _Hook(MetaPathFinder):
    """Finds modules as others find them, and tells an installation when one has been imported."""

    def __init__(self, installation: Installation, targets: Sequence[Target]):
        self._installation = installation
        self._modules = {module for target in targets for module in target.modules}
        self._finding: set[str] = set()

    def find_spec(self, fullname, path=None, target=None):
        # The other finders are asked by a call that comes here once more.
        if fullname not in self._modules or fullname in self._finding:
            return None
        self._finding.add(fullname)
        try:
            spec = find_spec(fullname)
        finally:
            self._finding.remove(fullname)
        if spec is not None and spec.loader is not None:
            spec.loader = _Then(spec.loader, self._installation)
        return spec


class _Then(Loader):
    """A loader that runs a module, and tells an installation that it has."""

    def __init__(self, loader: Loader, installation: Installation):
        self._loader = loader
        self._installation = installation

    def create_module(self, spec):
        return self._loader.create_module(spec)

    def exec_module(self, module):
        assert module.__spec__ is not None, "it is being imported"
        # Whoever asks the module for its loader later, as `inspect` does, finds the one it had.
        module.__spec__.loader = self._loader
        module.__loader__ = self._loader
        self._loader.exec_module(module)
        self._installation.imported(module.__name__)
