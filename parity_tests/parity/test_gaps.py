"""The smallest parts in which two expressions differ, and how they are written."""

import numpy as np
import pytest

from flax_attn.parity.trace.expression import Expression, number, product, scaled, total
from flax_attn.parity.trace.gaps import gaps
from flax_attn.parity.trace.notation import Names, plain, text


def leaf(name):
    return Expression("leaf", (), (name,))


def call(name, *operands, **settings):
    return Expression(name, operands, tuple(sorted(settings.items())))


class Letters(Names):
    """Names of leaves, which are letters here."""

    def __init__(self):
        self.level, self.wholes = 0, {}

    def of(self, part):
        return part.settings[0], 3

    def local(self, part):
        return ""


# Inputs, or what agrees on both sides.
A, B, C = map(leaf, "abc")
CONV = {"stride": (1, 1), "padding": ((0, 0), (0, 0))}
ROWS = {
    "nothing": (total([(1.0, A), (2.0, B)]), total([(2.0, B), (1.0, A)]), []),
    "factor": (scaled(0.5, A), scaled(0.25, A), ["product factor: 0.5 | 0.25"]),
    "factor of one": (scaled(2.0, A), A, ["product factor: 2 | 1"]),
    "constant": (
        total([(1.0, A), (1.0, number(1e-5))]),
        total([(1.0, A), (1.0, number(1e-6))]),
        ["sum constant: 1e-05 | 1e-06"],
    ),
    "missing term": (A, total([(1.0, A), (1.0, B)]), ["sum term: - | b"]),
    "extra term": (total([(1.0, A), (-2.0, B)]), A, ["sum term: b * -2 | -"]),
    "other term": (
        total([(1.0, A), (1.0, call("sin", B))]),
        total([(1.0, A), (1.0, call("cos", B))]),
        ["sin operation: sin(b) | cos(b)"],
    ),
    "missing factor": (
        product([(A, 1.0), (B, 1.0)]),
        A,
        ["product base: b | -"],
    ),
    "exponent": (
        product([(A, 1.0), (B, -1.0)]),
        product([(A, 1.0), (B, -0.5)]),
        ["product exponent: -1 | -0.5"],
    ),
    "quotient of another base": (
        product([(A, 1.0), (call("pow", number(10.0), B), -1.0)]),
        product([(A, 1.0), (C, 1.0)]),
        ["product base: 1 / pow(10, b) | c"],
    ),
    "setting": (
        call("conv", A, B, **CONV),
        call("conv", A, B, **{**CONV, "padding": ((1, 1), (1, 1))}),
        ["conv padding: ((0, 0), (0, 0)) | ((1, 1), (1, 1))"],
    ),
    "operand": (call("dot", A, B), call("dot", A, C), ["leaf operation: b | c"]),
    "order": (
        call("concat", A, B),
        call("concat", B, A),
        ["concat order: concat(a, b) | concat(b, a)"],
    ),
    "inside": (
        call("tanh", call("dot", scaled(2.0, A), B)),
        call("tanh", call("dot", scaled(3.0, A), B)),
        ["product factor: 2 | 3"],
    ),
    "two": (
        call("where", A, scaled(2.0, B), number(0.0)),
        call("where", A, scaled(3.0, B), number(-1.0)),
        ["product factor: 2 | 3", "number value: 0 | -1"],
    ),
    "polarity": (
        call("where", A, B, C),
        call("where", A, C, B),
        ["leaf operation: a | not(a)"],
    ),
    "kind": (call("relu", A), call("silu", A), ["relu operation: relu(a) | silu(a)"]),
}


def shown(part):
    return "-" if part is None else text(part, Letters())


@pytest.mark.parametrize("case", ROWS)
def test_gaps_are_the_smallest_parts_that_differ(case):
    flax, theirs, expected = ROWS[case]
    found = list(gaps(flax, theirs))
    written = [f"{g.operation} {g.parameter}: {shown(g.flax)} | {shown(g.torch)}" for g in found]
    assert written == expected


@pytest.mark.parametrize("case", ROWS)
def test_gaps_are_alike_from_the_other_side(case):
    flax, theirs, expected = ROWS[case]
    # Neither side is taken for the right one.
    assert len(list(gaps(theirs, flax))) == len(expected)
    assert list(gaps(flax, flax)) == list(gaps(theirs, theirs)) == []


# A mean and a variance, as both sides have them: sums and products of no name of their own.
SUMMED = Expression("sum_over", (A,), ((4,),))
CENTRED = total([(1.0, A), (-0.25, SUMMED)])
SQUARES = Expression("sum_over", (product([(CENTRED, 2.0)]),), ((4,),))
WRITTEN = {
    "a + b * 2": total([(2.0, B), (1.0, A)]),
    "a - b": total([(-1.0, B), (1.0, A)]),
    "1 - a": total([(-1.0, A), (1.0, number(1.0))]),
    "a / sqrt(b)": product([(A, 1.0), (B, -0.5)]),
    "a / (c * b)": product([(A, 1.0), (B, -1.0), (C, -1.0)]),
    "1 / a": product([(A, -1.0)]),
    "a**2 * 0.5": scaled(0.5, product([(A, 2.0)])),
    "(a + b) @ c": call("dot", total([(1.0, A), (1.0, B)]), C),
    "sin(a + b)": call("sin", total([(1.0, A), (1.0, B)])),
    "mean(a, over 4)": scaled(0.25, SUMMED),
    "sum(a, over 4)": SUMMED,
    "var(a, over 4)": scaled(0.25, SQUARES),
    "softmax(a, over 5)": Expression("softmax", (A,), ((5,),)),
    "a < b": call("lt", A, B),
    "a[0:2 of 4]": Expression("slice", (A,), ((4, 0, 2, 1),)),
    "a[0:4:2 of 4, 1:3 of 5]": Expression("slice", (A,), ((4, 0, 4, 2), (5, 1, 3, 1))),
    "float32(a)": Expression("cast", (A,), ("float32",)),
    "conv(a, b, stride=2)": call("conv", A, B, stride=(2,)),
}


@pytest.mark.parametrize("expected", WRITTEN)
def test_expressions_are_written_in_plain_notation(expected):
    # The order of terms and factors is not part of the notation.
    flat = sorted(text(WRITTEN[expected], Letters()).replace("(", " ").split())
    assert flat == sorted(expected.replace("(", " ").split())


def test_deep_expressions_are_cut():
    deep = A
    for _ in range(40):
        deep = call("sin", deep)
    # A headline must be read at sight.
    assert "..." in text(deep, Letters())
    assert len(text(deep, Letters())) < 100


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (1.0, "1"),
        (1e-6, "1e-06"),
        (True, "True"),
        (None, "None"),
        ((3,), "3"),
        ((2, (1, 0)), "(2, (1, 0))"),
        ("same", "same"),
        (float(np.pi), "3.14159"),
    ],
)
def test_numbers_are_written_short(value, expected):
    assert plain(value) == expected
