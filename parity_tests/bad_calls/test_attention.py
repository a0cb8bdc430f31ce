"""Bad inputs of the attention call and of masks: the same error in the same words on both sides."""

import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import flax_attn
import torch_ref

pytestmark = pytest.mark.usefixtures("no_shape_checks")
NAN = float("nan")
QUERY, KEY, VALUE = (2, 5, 4, 6), (2, 7, 2, 6), (2, 7, 2, 3)


def attend(query=QUERY, key=KEY, value=VALUE, dtypes=("float64",) * 3, **options):
    """Return an action that calls attention; options are made by functions of the side."""

    def act(side):
        pairs = zip((query, key, value), dtypes, strict=True)
        arrays = [side.array(np.ones(shape), dtype) for shape, dtype in pairs]
        made = {name: make(side) if callable(make) else make for name, make in options.items()}
        return side.dot_product_attention(*arrays, **made)

    return act


def mask(name, *arguments, **keywords):
    """Return an action that attends under a mask; arrays of NumPy become those of the side."""

    def make(side):
        of_side = lambda a: side.array(a) if isinstance(a, np.ndarray) else a  # noqa: E731
        named = {keyword: of_side(a) for keyword, a in keywords.items()}
        return getattr(side.Mask, name)(*map(of_side, arguments), **named)

    return attend(mask=make)


def zeros(*shape, dtype="float64"):
    return lambda side: side.array(np.zeros(shape), dtype)


SAME = {
    # Shapes of query, key and value.
    "rank 2": (
        attend((5, 4), (7, 4), (7, 3)),
        r"shape \(b, t, n, h\).*or all three without b; got query \(5, 4\)",
    ),
    "rank 5": (attend((1, *QUERY), (1, *KEY), (1, *VALUE)), r"must have shape \(b, t, n, h\)"),
    # What stands beside a mask.
    "is_causal": (attend(is_causal=1), r"is_causal must be bool; got int\. Pass True or False"),
    "is_causal without an offset": (attend(is_causal=True), r"needs an offset"),
    # Sizes that the three arrays share.
    "mixed ranks": (attend(QUERY, KEY[1:], VALUE[1:]), r"or all three without b"),
    "batch sizes": (
        attend((3, 5, 4, 6)),
        r"one batch size; got query \(3, 5, 4, 6\).*Repeat the smaller",
    ),
    "batch of one": (attend((1, 5, 4, 6)), r"one batch size"),
    "key tokens": (
        attend(value=(2, 8, 2, 3)),
        r"same number of tokens s and of heads k; .*value \(2, 8, 2, 3\)",
    ),
    "value heads": (attend(value=(2, 7, 4, 3)), r"same number of tokens s and of heads k"),
    # Widths and numbers of heads.
    "head widths": (attend((2, 5, 4, 8)), r"one head width h; got query \(2, 5, 4, 8\)"),
    "head counts": (attend((2, 5, 3, 6)), r"must divide the query heads.*i // \(n / k\)"),
    # Dtypes of the three arrays.
    "mixed dtypes": (
        attend(dtypes=("float32", "float64", "float32")),
        r"one dtype; got float32, float64, float32\. C",
    ),
    **{
        dtype: (
            attend(dtypes=(dtype,) * 3),
            rf"be float64, .* or float16; got {dtype}\. Cast to one of them before",
        )
        for dtype in ("bool", "int32", "uint8", "complex64", "float8_e4m3fn", "float8_e5m2")
    },
    # What is added to the scores, and the logits beside them.
    "an integer bias": (
        attend(bias=zeros(7, dtype="int32")),
        r"bias must be float64, .* or float16; got int32\. Cast",
    ),
    "a boolean bias": (
        attend(bias=zeros(7, dtype="bool")),
        r"bias is added .*got dtype bool\. Pass a boolean mask as",
    ),
    # One logit of each query head.
    "sinks": (
        attend(sinks=zeros(2)),
        r"sinks must be one logit a query head, shape \(4,\); got shape \(2,\)",
    ),
    "sinks of rank 2": (attend(sinks=zeros(1, 4)), r"sinks .*shape \(4,\); got shape \(1, 4\)"),
    "integer sinks": (
        attend(sinks=zeros(4, dtype="int32")),
        r"sinks are logits .*floating point; got int32\. Cast",
    ),
    **{
        f"cap {cap!r}": (
            attend(soft_cap=cap),
            rf"soft_cap must be positive.*got soft_cap={re.escape(repr(cap))}\. For",
        )
        for cap in (0.0, -3.0, math.nan, math.inf, 1e31, 1e-31, 1j, "1", [1.0], True, 10**400)
    },
    **{
        f"scale {scale!r}": (
            attend(scale=scale),
            rf"scale is one real number.*got scale={re.escape(repr(scale))}\. For",
        )
        for scale in (math.nan, -math.inf, 1j, "1", [1.0], True, 10**400, np.array(np.inf).item())
    },
    **{
        f"scale of shape {shape}": (
            attend(scale=zeros(*shape)),
            rf"got an array of shape {re.escape(str(shape))}, dtype",
        )
        for shape in ((1,), (7,), (4, 1, 1))
    },
    # A scale that is an array of one number passes, see below.
    "complex scale": (
        attend(scale=zeros(dtype="complex64")),
        r"got an array of shape \(\), dtype complex64\. Pass one",
    ),
    "a scale of NumPy": (attend(scale=np.ones(2)), r"got an array of shape \(2,\), dtype float64"),
    # Complex scores have no largest one.
    "complex bias": (
        attend(bias=zeros(5, 7, dtype="complex64")),
        r"bias must be float64, .*got complex64\. Cast",
    ),
    # Dropout by a key.
    "rate": (
        lambda side: side.KeyedDropout("0.5", side.key()),
        r"dropout must be in \[0, 1\).*got dropout='0\.5'",
    ),
    # Shapes that do not broadcast to the scores; the remedy names where axes are put in.
    "bias": (
        attend(bias=zeros(5, 6)),
        r"bias must broadcast to \(b, n, t, s\) = \(2, 4, 5, 7\); got shape \(5, 6\)",
    ),
    "bias of rank 5": (
        attend(bias=zeros(1, 2, 4, 5, 7)),
        r"bias must broadcast.*got shape \(1, 2, 4, 5, 7\)",
    ),
    "mask": (
        attend(mask=zeros(2, 7, dtype="bool")),
        r"mask must broadcast.*\(2, 7\).*write \[:, None, None, :\]",
    ),
    "mask (b, t, s)": (
        attend(mask=zeros(2, 5, 7, dtype="bool")),
        r"mask must broadcast.*from \(b, t, s\) write \[:, None",
    ),
    # Masks whose offset must be known where t and s differ.
    "causal": (
        mask("causal"),
        r"offset when t != s.*t=5, s=7\. Choose offset=0 \(top-left.*or offset=2 \(bottom-right",
    ),
    "window": (mask("window", 1, 1), r"needs an offset when t != s"),
    "sliding window": (mask("sliding_window", 2), r"needs an offset when t != s"),
    "prefix": (mask("prefix", 2), r"needs an offset when t != s"),
    # Bounds of windows.
    "minus left": (
        mask("window", -1, 0),
        r"window's left is a number of keys, at least 0, known before tracing; got left=-1",
    ),
    "minus right": (
        mask("window", None, -2),
        r"window's right .*got right=-2\. For an unbounded side pass None",
    ),
    "zero sliding": (mask("sliding_window", 0), {"width": 0}),
    "minus sliding": (mask("sliding_window", -3), {"width": -3}),
    # Offsets at which a mask hides all, or nothing.
    "offset beyond s": (
        mask("causal", 8),
        r"offset must lie between -t = -5 and s = 7, beyond.*got offset=8, t=5, s=7",
    ),
    "offset before -t": (
        mask("causal", -6),
        r"offset must lie between -t = -5 and s = 7.*got offset=-6.*offset=2 the",
    ),
    # Windows reach further by their own bounds.
    "window offset": (
        mask("window", 1, 2, 9),
        r"between -t - right = -7 and s \+ left = 8, beyond.*got offset=9",
    ),
    "window before": (
        mask("window", None, 2, -8),
        r"between -t - right = -7 and s = 7, beyond.*got offset=-8",
    ),
    "window open to the right": (
        mask("window", 3, None, -6),
        r"between -t = -5 and s \+ left = 10, beyond.*offset=-6",
    ),
    "prefix offset": (
        mask("prefix", 2, 8),
        r"between -t = -5 and s = 7, beyond which all queries see the same keys",
    ),
    # Beyond 32 bits positions would wrap around.
    "offset of a function": (
        lambda side: side.Mask.where(lambda b, n, i, j: i > j, 2**31).resolve(1, 1, 5, 7),
        (
            r"positions that the function of a mask gets are integers of 32 bits; got"
            r" offset=2147483648\. Count"
        ),
    ),
    # Arrays of one number a row.
    "offsets": (
        mask("causal", np.arange(3)),
        r"offset must be one integer or one a row, shape \(2,\); got shape \(3,\)",
    ),
    # Ids of one number a token.
    "segments": (
        mask("segments", np.zeros((2, 6), int)),
        r"query segments must have one id a token, shape \(2, 5\) or \(5",
    ),
    "one side of segments": (
        mask("segments", np.zeros((2, 5), int)),
        r"key segments .*When t != s pass both",
    ),
    "batch of segments": (
        mask("segments", np.zeros((3, 5), int), np.zeros((3, 7), int)),
        r"query segments .*got \(3, 5\)",
    ),
    "key segments": (
        mask("segments", np.zeros(5, int), np.zeros(6, int)),
        r"key segments must.*\(7,\); got \(6,\)",
    ),
    # Numbers of tokens of each row.
    "lengths": (
        mask("lengths", key=np.zeros(3, int)),
        r"key lengths must be one integer or one a row, shape \(2,\).*\(3,\)",
    ),
    "query lengths": (
        mask("lengths", query=np.zeros((2, 1), int)),
        r"query lengths must be.*got shape \(2, 1\)",
    ),
    "prefixes": (
        mask("prefix", np.zeros(4, int), 0),
        r"length must be one integer or one a row.*got shape \(4,\)",
    ),
    "negative lengths": (
        mask("lengths", key=[-1, 4]),
        r"key lengths must be numbers of tokens, at least 0; got -1\. Where .* pass 0",
    ),
    "negative query lengths": (
        mask("lengths", query=np.int64(-2)),
        r"query lengths must be numbers of tokens, at least 0; got -2",
    ),
    "a negative prefix": (
        mask("prefix", -3, 0),
        r"prefix length must be numbers of tokens, at least 0; got -3",
    ),
}

ALIKE = {
    # The names of backends differ between the packages.
    "backend": (
        attend(backend="flash"),
        r"backend must be one of 'auto', .*'reference'.*; got 'flash'",
    ),
    # Numbers for a mask: the name of the dtype and the cast are of the framework.
    "float mask": (
        attend(mask=zeros(5, 7)),
        r"must be boolean, True = attend.*got other values, dtype (torch\.)?float64.*as bias",
    ),
    "int mask": (
        attend(mask=zeros(5, 7, dtype="int32")),
        r"must be boolean.*int32.*mask\.(astype\(bool\)|bool\(\))",
    ),
    "dense float": (mask("dense", 2 * np.ones((5, 7))), r"must be boolean.*pass them as bias"),
    # Ids and lengths that are not whole.
    "float segments": (
        mask("segments", np.ones(5)),
        r"query segments must be integers; got dtype .*float64",
    ),
    "float key segments": (
        mask("segments", np.ones(5, int), np.ones(7)),
        r"key segments must be integers",
    ),
    "bool segments": (
        mask("segments", np.ones(5, bool)),
        r"query segments must be integers; got dtype .*bool",
    ),
    "float lengths": (
        mask("lengths", key=np.ones(2)),
        r"key lengths must be integers; got dtype .*float64",
    ),
    "float query lengths": (mask("lengths", query=np.ones(2)), r"query lengths must be integers"),
    "float prefix": (
        mask("prefix", np.ones(2), 0),
        r"prefix length must be integers; got dtype .*float64",
    ),
    # What is no array.
    "a string for a mask": (
        attend(mask="causal"),
        r"mask must be an array, a number or a list; got str\. Pass an array",
    ),
    "a string for ids": (
        mask("segments", "ab"),
        r"query segments must be an array, a number or a list; got str",
    ),
    # Functions need a name that says what they are.
    "a function for a mask": (
        attend(mask=lambda side: lambda b, n, i, j: i >= j),
        r"mask must be an array.*; got function\. For a function of indices, .* Mask\.where\(fn\)$",
    ),
    "a function beside a mask": (
        lambda side: side.Mask.causal() & (lambda b, n, i, j: i >= j),
        r"got function\. For a function of indices, fn\(b, n, i, j\), pass Mask\.where\(fn\)$",
    ),
    "a mask for an offset": (
        lambda side: side.Mask.causal(side.Mask()),
        r"offset must be an array, a number or a list; got Mask\. Pass an array of",
    ),
    # Rows of different lengths make no array.
    "ragged ids": (
        mask("segments", [[1, 2], [3]]),
        r"query segments must be one array; got .*Pass rows of one length",
    ),
    # One argument in place of another.
    "a mask for the bias": (
        attend(bias=lambda side: side.Mask()),
        r"bias must be .*; got Mask\. Pass a mask as mask=",
    ),
    "a bias for the mask": (
        attend(mask=zeros(2, 4, 5, 7)),
        r"mask must be boolean.*pass them as bias",
    ),
    # What is differentiated has to be an array.
    "a list for the bias": (
        attend(bias=[0.0]),
        r"bias must be .*; got list\. Pass \w+\.as_?(array|tensor)\(bias\)",
    ),
    "numbers for sinks": (
        attend(sinks=1.5),
        r"sinks must be .*; got float\. Pass \w+\.as_?(array|tensor)\(sinks\)",
    ),
    "a number for the backend": (attend(backend=3), r"backend must be one of 'auto', .*; got 3"),
    **{
        f"{value!r} for the {name}": (
            lambda side, name=name, value=value: side.dot_product_attention(
                **dict.fromkeys(("query", "key", "value"), side.array(np.ones((1, 2, 3))))
                | {name: value}
            ),
            (
                rf"{name} must be .*; got {type(value).__name__}\. Pass"
                rf" \w+\.as_?(array|tensor)\({name}\)"
            ),
        )
        for name, value in (("query", None), ("key", [1.0]), ("value", 2.0), ("query", "x"))
    },
}


@pytest.mark.parametrize(("act", "match"), SAME.values(), ids=SAME)
def test_the_same_words(assert_same_error, act, match):
    assert_same_error(act, match)


@pytest.mark.parametrize(("act", "match"), ALIKE.values(), ids=ALIKE)
def test_the_same_rule_with_the_remedy_of_the_framework(side, error_of, act, match):
    assert re.search(match, error_of(side, act))


def test_good_inputs_pass(side):
    assert tuple(attend(mask=lambda side: side.Mask.causal(2))(side).shape) == (2, 5, 4, 3)


@pytest.mark.parametrize(
    ("operator", "act"),
    [
        ("|", lambda mask, array: mask | mask),
        ("|", lambda mask, array: array | mask),
        ("~", lambda mask, array: ~mask),
    ],
)
def test_an_operator_that_a_conjunction_lacks_says_what_to_write(side, operator, act):
    rule = rf"a Mask is a conjunction: .* no {re.escape(operator)}\. .* Mask\.where\(lambda"
    with pytest.raises(TypeError, match=rule):
        act(side.Mask.causal(), side.array(np.ones((5, 5), bool)))


@pytest.mark.parametrize(
    "act",
    [
        lambda mask, other: mask and other,
        lambda mask, other: mask or other,
        lambda mask, other: not mask,
        lambda mask, other: mask if mask else other,
    ],
)
def test_a_mask_has_no_truth_value(side, act):
    rule = r"a Mask has no truth value: .* drop one of two masks\. .* write mask & other"
    with pytest.raises(TypeError, match=rule):
        act(side.Mask.causal(), side.Mask.lengths(key=3))


@pytest.mark.parametrize("name", ["query", "key", "value", "bias", "sinks"])
@pytest.mark.parametrize("dtype", [object, "U1"])
def test_arrays_of_objects_and_text_are_refused(name, dtype):
    held = np.ones((5, 4, 6), np.float32)
    given = {"query": held, "key": held, "value": held, name: held.astype(dtype)}
    rule = rf"{name} must be an array of numbers; got dtype .*\. Pass {name}\.astype"
    with pytest.raises(ValueError, match=rule):
        flax_attn.dot_product_attention(**given)


@pytest.mark.usefixtures("no_shape_checks")
@pytest.mark.parametrize("kind", [list, tuple])
def test_masks_are_combined_and_not_listed(assert_same_error, kind):
    def act(side):
        x = side.array(np.ones((1, 3, 2, 4)))
        masks = side.array(np.ones((3, 3), bool)), side.Mask.causal()
        return side.dot_product_attention(x, x, x, mask=kind(masks))

    assert_same_error(act, rf"got a {kind.__name__} that holds Mask\. Combine masks with &: ")


def test_a_mask_of_objects_is_refused():
    with pytest.raises(ValueError, match=r"mask must be boolean.*; got other values, dtype object"):
        flax_attn.Mask.dense(np.ones((5, 5), object))


UNKNOWN = {
    # Arguments of jax.nn.
    "local_window_size": r"pass mask=Mask\.window\(left, right\)",
    "query_seq_lengths": r"pass mask=Mask\.lengths\(query=lengths\)",
    "key_value_seq_lengths": r"pass mask=Mask\.lengths\(key=lengths\)",
    "implementation": r'pass backend="auto"',
    "return_residual": "pass return_weights=True to attend for the weights",
    # Arguments of PyTorch, Flax and others.
    "attn_mask": r"pass mask=, where True means attend; arrays are \(b, t, n, h\)",
    "causal": "pass is_causal=True",
    "sm_scale": "pass scale=",
    "window": r"pass mask=Mask\.sliding_window\(width\)",
    "deterministic": "pass nothing for no dropout",
    "dropout_p": r"pass dropout=KeyedDropout\(rate, key\)",
    "enable_gqa": "pass keys and values with fewer heads as they are",
    "softcap": "pass soft_cap=",
    # A misspelt one lists them all.
    "soft_capp": "the arguments are query, key, value, bias, mask, is_causal, scale, soft_cap",
}


@pytest.mark.parametrize(("name", "remedy"), UNKNOWN.items(), ids=UNKNOWN)
@pytest.mark.parametrize("function", ["dot_product_attention", "attend"])
def test_an_argument_of_another_library_is_named_with_what_to_pass(side, function, name, remedy):
    call = getattr(side, function)
    x = side.array(np.ones(QUERY))
    with pytest.raises(TypeError, match=rf"{function} has no argument '{name}': {remedy}"):
        call(x, x, x, **{name: 1})


@pytest.fixture
def x(side):
    return side.array(np.random.default_rng(0).normal(size=QUERY))


def test_what_jax_nn_is_told_where_nothing_is_asked_for_changes_nothing(side, x):
    nothing = dict.fromkeys(("query_seq_lengths", "key_value_seq_lengths", "local_window_size"))
    nothing |= {"implementation": None, "return_residual": False}
    got = side.dot_product_attention(x, x, x, **nothing)
    np.testing.assert_array_equal(got, side.dot_product_attention(x, x, x))


def test_nothing_for_an_argument_of_another_library_is_refused(side, x):
    with pytest.raises(TypeError, match="no argument 'attn_mask'"):
        side.dot_product_attention(x, x, x, attn_mask=None)


@pytest.mark.parametrize("dtype", ["float32", "float64", "int32"])
def test_a_mask_of_known_zeros_and_ones_is_that_of_booleans(side, x, dtype):
    causal = np.tril(np.ones((5, 5)))
    got = side.dot_product_attention(x, x, x, mask=side.array(causal, dtype))
    np.testing.assert_array_equal(got, side.dot_product_attention(x, x, x, is_causal=True))


@pytest.mark.parametrize(
    "numbers", [[0.0, 0.0], [0.0, -1e9], [0.0, 2.0], [1.0, NAN], [1j, 1.0], [0j, 1]]
)
def test_other_numbers_are_no_mask(side, numbers):
    with pytest.raises(ValueError, match=r"of 0 and 1 with at least one 1; got other values"):
        side.Mask.dense(side.array(np.array(numbers)))


def test_is_causal_is_a_causal_mask(side, x):
    got = side.dot_product_attention(x, x, x, is_causal=True)
    expected = side.dot_product_attention(x, x, x, mask=side.Mask.causal())
    np.testing.assert_array_equal(got, expected)


def test_is_causal_stands_beside_the_other_mask(side, x):
    padding = side.Mask.lengths(key=side.array(np.array([3, 5])))
    got = side.dot_product_attention(x, x, x, mask=padding, is_causal=True)
    expected = side.dot_product_attention(x, x, x, mask=padding & side.Mask.causal())
    np.testing.assert_array_equal(got, expected)
    assert not np.array_equal(got, side.dot_product_attention(x, x, x, is_causal=True))


@pytest.mark.parametrize("offset", [-5, 7])
def test_the_outermost_offsets_pass(side, offset):
    mask("causal", offset)(side)


@pytest.mark.parametrize(
    ("left", "right", "offset"), [(2, 1, 9), (2, 1, -6), (None, 1, -6), (2, None, 9)]
)
def test_at_the_outermost_offsets_of_a_window_all_queries_see_the_same(side, left, right, offset):
    found = side.numpy(side.Mask.window(left, right, offset).materialise(1, 1, 5, 7)[0, 0])
    assert (found == found[0]).all()
    inside = offset - 1 if offset > 0 else offset + 1
    found = side.numpy(side.Mask.window(left, right, inside).materialise(1, 1, 5, 7)[0, 0])
    assert (found != found[0]).any()


@pytest.mark.parametrize("scale", [0, -2.5, np.float32(0.5), np.array(0.5), "array"])
def test_scales_that_are_one_number(side, scale):
    given = side.array(0.5) if isinstance(scale, str) else scale
    expected = attend(scale=0.5 if isinstance(scale, str) else float(scale))(side)
    np.testing.assert_array_equal(side.numpy(attend(scale=given)(side)), side.numpy(expected))


def test_create_causal_mask_needs_an_offset(assert_same_error):
    assert_same_error(lambda side: side.create_causal_mask(3, 5), r"t=3, s=5\. .*offset=2")


def test_single_head_attention_takes_a_mask_per_batch_row_only(assert_same_error):
    def act(side):
        x = side.array(np.ones((2, 5, 3)))
        side.single_head_attention(x, x, x, mask=side.array(np.ones((3, 5, 5), bool)))

    assert_same_error(act, r"mask must broadcast")


TRACED = {
    # One rule of each kind: of a mask, of a name, of a number.
    "no offset": (lambda package: {"mask": package.Mask.causal()}, "needs an offset"),
    "backend": (lambda package: {"backend": "flash"}, "backend must be one of"),
    "soft cap": (lambda package: {"soft_cap": -1.0}, "soft_cap must be positive"),
    "scale": (lambda package: {"scale": float("nan")}, "scale is one real number"),
}


@pytest.mark.parametrize(("options", "match"), TRACED.values(), ids=TRACED)
def test_errors_come_while_tracing(options, match):
    arrays = [jnp.ones(shape) for shape in (QUERY, KEY, VALUE)]
    attend = jax.jit(lambda *x: flax_attn.dot_product_attention(*x, **options(flax_attn)))
    with pytest.raises(ValueError, match=match):
        attend(*arrays)


@pytest.mark.parametrize(("options", "match"), TRACED.values(), ids=TRACED)
def test_errors_come_without_numbers(options, match):
    tensors = [torch.ones(shape, device="meta") for shape in (QUERY, KEY, VALUE)]
    with pytest.raises(ValueError, match=match):
        torch_ref.dot_product_attention(*tensors, **options(torch_ref))


def test_a_mask_of_numbers_without_values_is_refused_in_pytorch():
    with pytest.raises(ValueError, match=r"values are not known .* write mask\.bool\(\)"):
        torch_ref.Mask.dense(torch.ones(5, 5, device="meta"))
    with pytest.raises(ValueError, match=r"values are not known"):
        torch.func.vmap(lambda mask: torch_ref.Mask.dense(mask).parts[0].array)(torch.ones(3, 5, 5))


def attend_under(mask):
    x = jnp.ones((2, 5, 1, 3))
    return flax_attn.dot_product_attention(x, x, x, mask=mask)


def test_a_traced_mask_is_checked_while_tracing():
    with pytest.raises(ValueError, match=r"values are not known .* write mask\.astype\(bool\)"):
        jax.jit(attend_under)(jnp.ones((5, 5)))
    with pytest.raises(ValueError, match="key lengths must be one integer or one a row"):
        jax.jit(lambda n: attend_under(flax_attn.Mask.lengths(key=n)))(jnp.ones(3, int))
