"""What a comparison on the command line was asked for: enough to make it again."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from flax_attn.cli import common, hugging_face, inputs
from flax_attn.cli.specs import Loader

if TYPE_CHECKING:
    from flax_attn.parity.pair import Pair

RECORDED = "recorded:"


@dataclass(frozen=True)
class Request:
    """The specs and options of a comparison, as they were written.

    Args:
        flax: spec of the JAX side.
        torch: spec of the PyTorch side, `hf:TYPE`, or `recorded:DIR` for an export.
        inputs: texts of the inputs.
        constants: texts of the constants.
        layout: name or spec of the layout.
        rules: spec of rules for parameters that `auto` cannot pair.
        flax_call: spec of the function that calls the JAX side.
        torch_call: spec of the function that calls the PyTorch side.
        checks: names of the checks; None is all.
        seed: seed of everything that is drawn.
        files: SHA-256 of the source files of the caller's that were loaded.
    """

    flax: str
    torch: str
    inputs: list[str] = field(default_factory=list)
    constants: list[str] = field(default_factory=list)
    layout: str = "auto"
    rules: str | None = None
    flax_call: str | None = None
    torch_call: str | None = None
    checks: list[str] | None = None
    seed: int = 0
    files: dict[str, str] = field(default_factory=dict)

    def drawn(self, seed: int) -> Any:
        """Return the inputs, drawn from a seed."""
        return inputs.draw([inputs.parse(text) for text in self.inputs], seed)

    def pair(self, loader: Loader, seed: int, name: str = "", **options: Any) -> Pair:
        """Return both sides, built and paired, on inputs drawn from a seed.

        Args:
            loader: loader of what the specs name.
            seed: seed of the weights and inputs.
            name: name of the recording, where the PyTorch side is an export of several.
            options: further arguments of `pair_modules`.
        """
        from flax_attn.parity.compare import pair_modules

        flax_module = loader.build(self.flax)
        call = self.torch_call and loader.load(self.torch_call)
        # It was recorded on the inputs that it holds.
        if self.torch.startswith(RECORDED):
            torch_module = _recorded(self.torch.removeprefix(RECORDED), name)
            values = torch_module.inputs
        else:
            torch_module, default = self._torch(loader)
            call, values = call or default, self.drawn(seed)
        constants = inputs.constants(self.constants)
        flax_call = self.flax_call and loader.load(self.flax_call)
        calls = {
            "flax": (_with(flax_call or None, constants), None),
            "torch": (_with(call or None, constants), None),
        }
        layout = self._layout(loader, flax_module, torch_module)
        sides = flax_module, torch_module, values
        return pair_modules(*sides, layout=layout, calls=calls, seed=seed, **options)

    def _torch(self, loader: Loader) -> tuple[Any, Callable | None]:
        """Return the PyTorch side in eval mode, and the call that it needs."""
        if self.torch.startswith(hugging_face.PREFIX):
            module = hugging_face.build(self.torch.removeprefix(hugging_face.PREFIX))
            return module, hugging_face.call
        module = loader.build(self.torch)
        if hasattr(module, "eval"):
            module.eval()  # a module is built in train mode
        return module, None

    def _layout(self, loader: Loader, flax_module: Any, torch_module: Any) -> Any:
        from flax_attn import convert

        if self.rules:
            return convert.auto(flax_module, torch_module, rules=loader.load(self.rules))
        if ":" in self.layout:
            return loader.load(self.layout)
        return None if self.layout == "none" else self.layout


def read(options: argparse.Namespace) -> Request:
    """Return what the options ask for.

    Raises:
        UsageError: if they contradict each other, or one of them cannot be read.
    """
    if bool(options.torch) == bool(options.against):
        raise common.UsageError(
            "give both sides, FLAX TORCH, or FLAX --against DIR; got"
            f" {options.flax} {options.torch or ''}"
        )
    if options.against and (options.input or options.rules):
        raise common.UsageError("an export holds its inputs and its layout; got --input or --rules")
    if not options.against and not options.input:
        raise common.UsageError("give the inputs: --input 2,3,12,12 or --input ids:int:2,7:0..99")
    if options.rules and options.layout != "auto":
        raise common.UsageError(
            "--rules is for what auto cannot pair, beside --layout auto; got"
            f" --rules {options.rules} and --layout {options.layout}"
        )
    _check_layout(options.layout)
    request = Request(
        flax=options.flax,
        torch=options.torch or f"{RECORDED}{options.against}",
        inputs=options.input,
        constants=options.constant,
        layout=options.layout,
        rules=options.rules,
        flax_call=options.flax_call,
        torch_call=options.torch_call,
        checks=common.known_checks(options.check),
        seed=options.seed,
    )
    # What is wrong with an input is said before anything is built.
    request.drawn(request.seed)
    inputs.constants(request.constants)
    return request


def _check_layout(text: str) -> None:
    from attn_spec.checks import nearest
    from flax_attn.convert import LAYOUTS

    names = ("auto", "none", *LAYOUTS)
    if ":" not in text and text not in names:
        raise common.UsageError(
            f"layout must be one of {', '.join(map(repr, names))}, or a spec of a table; got"
            f" {text!r}{nearest(text, names)}"
        )


def _recorded(folder: str, name: str) -> Any:
    from flax_attn.parity.adapters import recording

    # Where it holds one alone, the name may be another one than it was exported with.
    found = recording.load(folder)
    if len(found) > 1:
        found = recording.load(folder, [name])
    return next(iter(found.values()))


def _with(call: Callable | None, constants: dict[str, Any]) -> Callable | None:
    # Without them the module is called by itself, so that its own signature is seen.
    if not constants:
        return call
    return partial(call or _plain, **constants)


def _plain(module: Any, *arguments: Any, **keywords: Any) -> Any:
    return module(*arguments, **keywords)
