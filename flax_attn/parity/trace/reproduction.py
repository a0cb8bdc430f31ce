"""Equations as a script that needs JAX alone."""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import count
from typing import Any

import jax
import numpy as np
from jax.extend.core import primitives

from flax_attn.parity.trace.equations import Equation, Variable, inputs_of

# Seeds of the inputs that are tried.
SEEDS = range(5)
# The most numbers of a constant that are written out.
WRITTEN = 64

# What the equations use, by the name that is imported.
IMPORTS = {
    "lax": "from jax import lax\n",
    "primitives": "from jax.extend.core import primitives\n",
}

SCRIPT = '''\
"""XLA returns other numbers for a compiled function than for its operations one by one.

Found with jax {version}. Exits with 1 where the two differ.
"""

import sys

import jax
import numpy as np
{imports}
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_enable_x64", True)

random = np.random.default_rng({seed})
{inputs}


def function({arguments}):
{body}
    return {result}


expected = np.asarray(function({arguments}))
found = np.asarray(jax.jit(function{options})({arguments}))
size = max(np.max(np.abs(expected)), np.finfo(float).tiny)
error = np.max(np.abs(found - expected)) / size
print(f"jax {{jax.__version__}}: the compiled function errs by {{error:.3g}}")
sys.exit(int(not error <= 1e-6))
'''


class UnwritableError(Exception):
    """There is no script of these equations; the message says why."""


def script(
    equations: Sequence[Equation],
    wanted: Variable,
    given: Mapping[Variable, Any],
    options: Mapping[str, Any],
    shows: Callable[[Mapping[Variable, Any]], bool],
) -> str:
    """Return a script that compares equations, compiled and one by one, on random inputs.

    Args:
        equations: operations in order.
        wanted: variable that is compared.
        given: values of the inputs, whose shapes, dtypes and ranges the random ones have.
        options: options of the compiler.
        shows: function that takes other values of the inputs, and returns whether the results
            differ for them.

    Raises:
        UnwritableError: if an operation holds a program of its own, such as a loop, or if no random
            inputs show the difference.
    """
    variables = inputs_of(equations)
    names = {variable: f"x{i}" for i, variable in enumerate(variables)}
    arguments = ", ".join(names.values())
    fresh = (f"y{i}" for i in count())
    lines = [_line(equation, names, fresh) for equation in equations]
    body = "\n".join(f"    {line}" for line in lines)
    imports = [line for name, line in IMPORTS.items() if f"{name}." in body]
    drawn = {variable: _drawn(np.asarray(given[variable])) for variable in variables}
    inputs = [f"{names[variable]} = {text}" for variable, text in drawn.items()]
    return SCRIPT.format(
        version=jax.__version__,
        imports="".join(imports),
        seed=_seed(drawn, shows),
        inputs="\n".join(inputs),
        arguments=arguments,
        body=body,
        result=names[wanted],
        options=f", compiler_options={dict(options)!r}" if options else "",
    )


def _drawn(value: np.ndarray) -> str:
    """Return an expression that draws an array like another."""
    shape, dtype = value.shape, value.dtype
    if dtype.kind == "b":
        return f"random.integers(0, 2, {shape}).astype(bool)"
    if dtype.kind in "iu" and value.size:
        ends = f"{value.min()}, {int(value.max()) + 1}"
        return f"random.integers({ends}, {shape}, dtype=np.{dtype.name})"
    if dtype.kind != "f":
        raise UnwritableError(f"an input has the dtype {dtype}")
    text = f"random.normal(size={shape})"
    # A square root or a logarithm takes no negative number.
    if value.size and value.min() >= 0:
        text = f"np.abs({text})"
    if dtype == np.float64:
        return text
    return f"np.asarray({text}, np.{dtype.name})"


def _seed(drawn: Mapping[Variable, str], shows: Callable[[Mapping[Variable, Any]], bool]) -> int:
    for seed in SEEDS:
        known = {"np": np, "random": np.random.default_rng(seed)}
        # The text of the script itself, so that it draws what was tried.
        given = {variable: eval(text, known) for variable, text in drawn.items()}
        if shows(given):
            return seed
    raise UnwritableError("random inputs do not show the difference")


def _line(equation: Equation, names: dict[Variable, str], fresh: Iterator[str]) -> str:
    operands = [_operand(operand, names) for operand in equation.operands]
    settings = [f"{name}={_text(value)}" for name, value in equation.parameters.items()]
    results = [next(fresh) for _ in equation.results]
    names.update(zip(equation.results, results, strict=True))
    # A list of one result is unpacked as well.
    several = equation.source.primitive.multiple_results
    comma = "," if several else ""
    arguments = ", ".join(operands + settings)
    return f"{', '.join(results)}{comma} = {_primitive(equation)}.bind({arguments})"


def _operand(operand: Variable | np.ndarray, names: Mapping[Variable, str]) -> str:
    if not isinstance(operand, np.ndarray):
        return names[operand]
    if operand.size > WRITTEN:
        raise UnwritableError(f"a constant has {operand.size} numbers")
    return f"np.asarray({_text(operand.tolist())}, {operand.dtype.name!r})"


def _primitive(equation: Equation) -> str:
    primitive = equation.source.primitive
    for text, module in (("lax", jax.lax), ("primitives", primitives)):
        for name, value in vars(module).items():
            if value is primitive:
                return f"{text}.{name}"
    raise UnwritableError(f"the operation {primitive.name} is not public in JAX")


def _text(value: Any) -> str:
    """Return an argument as source."""
    kind = type(value).__name__
    public = getattr(jax.lax, kind, None) is type(value)
    if isinstance(value, np.generic):
        return _text(value.item())
    if isinstance(value, enum.Enum) and public:
        return f"lax.{kind}.{value.name}"
    if isinstance(value, float) and not np.isfinite(value):
        return f"float({str(value)!r})"
    if value is None or isinstance(value, bool | int | float | str):
        return repr(value)
    if isinstance(value, np.dtype):
        return f"jax.numpy.dtype({value.name!r})"
    if isinstance(value, list):
        return f"[{', '.join(map(_text, value))}]"
    if isinstance(value, tuple) and (public or type(value) is tuple):
        inner = "".join(f"{_text(item)}, " for item in value).removesuffix(" ")
        return f"lax.{kind}({inner})" if public else f"({inner})"
    raise UnwritableError(
        f"an operation has an argument of the type {kind}, as a loop has its body"
    )
