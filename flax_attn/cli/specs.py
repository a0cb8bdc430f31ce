"""Modules named on the command line: `FILE.py:NAME`, `pkg.mod:NAME` or `hf:TYPE`."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import inspect
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from flax_attn.cli.guard import UsageError

# What a factory or a class may ask for by name.
_DRAWN = ("rngs", "key")
# These have a version, which a report holds.
_OWN = ("flax_attn", "attn_spec", "torch_ref")


class CannotCompareError(Exception):
    """What stops a comparison that was asked for correctly; the message says why."""


class Loader:
    """Loads what the specs of one command name, each file once.

    What is loaded finds its neighbours until the loader is left; then `sys.path` is as it was.
    """

    def __init__(self):
        self._modules: dict[str, ModuleType] = {}
        self._path: list[str] = []

    def __enter__(self) -> Loader:
        """Return the loader itself."""
        self._path = list(sys.path)
        return self

    def __exit__(self, *_: object) -> None:
        """Search where was searched before."""
        sys.path[:] = self._path

    def load(self, spec: str) -> Any:
        """Return the object that a spec names.

        Raises:
            UsageError: if there is no such file, module or name.
            CannotCompareError: if its file raises an error.
        """
        home, colon, name = spec.rpartition(":")
        if not (colon and home and name.isidentifier()):
            raise UsageError(f"a spec is FILE.py:NAME or pkg.mod:NAME; got {spec!r}")
        # A file that is run twice would define its classes twice.
        if home not in self._modules:
            self._modules[home] = _in_file(home) if home.endswith(".py") else _imported(home)
        module = self._modules[home]
        if not hasattr(module, name):
            raise UsageError(f"{home} has no {name}")
        return getattr(module, name)

    def build(self, spec: str) -> Any:
        """Return the module that a spec names: an instance, or made by a class or factory.

        A function that needs arguments is no factory, but the function that is compared.

        Raises:
            UsageError: as `load` does, or if a class needs arguments.
            CannotCompareError: if the class or factory raises an error.
        """
        found = self.load(spec)
        makes = inspect.isfunction(found) and _drawn(found) is not None
        # Anything else is what is compared: an instance, or a function that is compiled.
        return self.factory(spec)() if makes or isinstance(found, type) else found

    def factory(self, spec: str) -> Callable[[], Any]:
        """Return the class or function that a spec names, as a function without arguments.

        Raises:
            UsageError: as `load` does, if it is neither, or needs arguments.
        """
        found = self.load(spec)
        if not isinstance(found, type) and not inspect.isfunction(found):
            raise UsageError(
                f"{spec} is of type {type(found).__name__}: name a class or a function that makes"
                " a module, def make(): return ..."
            )
        drawn = _drawn(found)
        if drawn is None:
            raise UsageError(
                f"{spec} needs arguments that the command line cannot give: name a function"
                " that returns a module, def make(): return ..."
            )
        # Each call draws anew, so that it can be traced.
        return lambda: _called(spec, lambda: found(**_streams(drawn)))

    def files(self) -> dict[str, str]:
        """Return the SHA-256 of what was loaded, and of what it imported from here or beside it."""
        found = set()
        folders = {Path.cwd().resolve()}
        for module in self._modules.values():
            own = Path(inspect.getfile(module)).resolve()
            found.add(own)
            folders.add(_folder(module, own))
        found |= set(_loaded_from(folders))
        return {_display_name(file): sha256(file) for file in sorted(found)}


def sha256(file: Path) -> str:
    """Return the SHA-256 of a file, in hexadecimal digits."""
    return hashlib.sha256(file.read_bytes()).hexdigest()


def _in_file(path: str) -> ModuleType:
    file = Path(path).resolve()
    if not file.is_file():
        raise UsageError(f"there is no file {path}")
    _search(Path.cwd())
    # As in `python FILE.py`, which finds what lies beside it.
    _search(file.parent)
    # It may have the name of a module that others need, such as `torch.py`.
    name = file.stem
    known = sys.modules.get(name)
    if known is not None and getattr(known, "__file__", None) != str(file):
        name = f"{file.stem}_{hashlib.sha256(str(file).encode()).hexdigest()[:8]}"
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    loader = spec.loader
    _called(path, lambda: loader.exec_module(module))
    return module


def _imported(name: str) -> ModuleType:
    _search(Path.cwd())  # as `python -m` does
    try:
        found = importlib.util.find_spec(name)
    except (ImportError, ValueError):  # of a package around it
        found = None
    if found is None:
        raise UsageError(f"cannot import {name}: there is no such module")
    return _called(name, lambda: importlib.import_module(name))


def _search(folder: Path) -> None:
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))


def _called(what: str, call: Callable[[], Any]) -> Any:
    """Return what a call of the user's code returns; raise where it raises, with its place."""
    from flax_attn.parity.adapters.users_code import ended, without_exit

    try:
        with without_exit():
            return call()
    except SystemExit as error:
        raise CannotCompareError(ended(error)) from error
    except Exception as error:
        # The frames above it are ours.
        last = traceback.extract_tb(error.__traceback__)[-1]
        place = f"{last.filename}:{last.lineno}"
        reason = f"{what} raised {type(error).__name__}: {error} ({place})"
        raise CannotCompareError(reason) from error


def _drawn(factory: Callable) -> list[str] | None:
    """Return the names of random streams that a class or function takes; None if it needs more."""
    from flax import nnx

    # The metaclass of Flax takes anything, and hands it on.
    own = isinstance(factory, type) and issubclass(factory, nnx.Module)
    signature = inspect.signature(factory.__init__ if own else factory)  # type: ignore[misc]
    parameters = dict(signature.parameters)
    if own:
        parameters.pop(next(iter(parameters)))
    variable = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    needed = set()
    for name, parameter in parameters.items():
        if parameter.default is inspect.Parameter.empty and parameter.kind not in variable:
            needed.add(name)
    if not needed <= set(_DRAWN):
        return None
    # Streams are given wherever they are taken; a key that has a default is left at it.
    taken = needed | ({"rngs"} & set(parameters))
    return sorted(taken)


def _streams(names: Sequence[str]) -> dict[str, Any]:
    """Return new random streams by the names that a class or function has for them."""
    import jax
    from flax import nnx

    made = {"rngs": lambda: nnx.Rngs(0), "key": lambda: jax.random.key(0)}
    return {name: made[name]() for name in names}


def _folder(module: ModuleType, own: Path) -> Path:
    # Of a package, all of it.
    depth = module.__name__.count(".")
    return own.parents[depth] if depth < len(own.parents) else own.parent


def _loaded_from(folders: set[Path]) -> Iterator[Path]:
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] in _OWN:
            continue
        path = Path(getattr(module, "__file__", None) or "")
        # Some are made in memory, and say the name of a file.
        if not (path.is_absolute() and path.suffix == ".py" and path.is_file()):
            continue
        path = path.resolve()
        inside = any(path.is_relative_to(folder) for folder in folders)
        if inside and "site-packages" not in path.parts:
            yield path


def _display_name(file: Path) -> str:
    here = Path.cwd().resolve()
    return str(file.relative_to(here)) if file.is_relative_to(here) else str(file)
