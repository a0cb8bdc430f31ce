"""Bad arguments of constructors and bad inputs of modules: the same error message on both sides."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx

import flax_attn
import torch_ref

pytestmark = pytest.mark.usefixtures("no_shape_checks")
NAN = float("nan")


def multi_head(side, *, d_in=6, d_out=8, context_length=9, dropout=0.0, num_heads=4, **keywords):
    return side.build(
        "MultiHeadAttention", d_in, d_out, context_length, dropout, num_heads, **keywords
    )


def block(side, **keywords):
    return side.build(
        "TransformerBlock",
        **{"d_model": 6, "context_length": 9, "dropout": 0.0, "num_heads": 2} | keywords,
    )


CONSTRUCTORS = {
    # Numbers of heads.
    "num_heads does not divide": (
        lambda side: multi_head(side, num_heads=3),
        (
            r"num_heads must divide d_out.*d_out=8, num_heads=3\. .*may be 1, 2, 4, 8, or give the"
            r" width as head_dim$"
        ),
    ),
    "num_kv_heads does not divide": (
        lambda side: multi_head(side, num_kv_heads=3),
        (
            r"num_kv_heads must divide num_heads.*num_heads=4, num_kv_heads=3\. num_kv_heads may be"
            r" 1, 2, 4$"
        ),
    ),
    "more kv heads than heads": (
        lambda side: multi_head(side, num_kv_heads=8),
        r"num_kv_heads must divide num_heads",
    ),
    "no heads": (lambda side: multi_head(side, num_heads=0), {"num_heads": 0}),
    "no kv heads": (lambda side: multi_head(side, num_kv_heads=0), r"got num_kv_heads=0"),
    "minus heads": (lambda side: multi_head(side, num_heads=-4), r"got num_heads=-4"),
    "float heads": (lambda side: multi_head(side, num_heads=4.0), r"got num_heads=4\.0"),
    "bool heads": (lambda side: multi_head(side, num_heads=True), r"got num_heads=True"),
    # Widths of heads.
    "no head_dim": (lambda side: multi_head(side, head_dim=0), {"head_dim": 0}),
    "kv heads with head_dim": (
        lambda side: multi_head(side, num_heads=3, num_kv_heads=2, head_dim=5),
        (
            r"num_kv_heads must divide num_heads.*num_heads=3, num_kv_heads=2\. num_kv_heads may be"
            r" 1, 3$"
        ),
    ),
    # Norms of queries and keys: of each head, or of all of them.
    "query norm width": (
        lambda side: multi_head(side, q_norm=side.build("RMSNorm", 4)),
        (
            r"q_norm is .* head_dim=2 wide, or .*, 4 \* head_dim = 8 wide; got one of d_model=4\."
            r" Pass q_norm=RMSNorm\(2\)"
        ),
    ),
    "key norm width": (
        lambda side: multi_head(side, num_kv_heads=2, k_norm=side.build("LayerNorm", 8)),
        (
            r"k_norm is .* head_dim=2 wide, or .*, 2 \* head_dim = 4 wide; got one of d_model=8\."
            r" Pass k_norm=RMSNorm\(2\)"
        ),
    ),
    "norm without a width": (
        lambda side: multi_head(side, q_norm=abs),
        r"q_norm is .* head_dim=2 wide, .*; got one of d_model=None\. Pass q_norm=RMSNorm\(2\)",
    ),
    # Differential attention.
    "heads without a partner": (
        lambda side: side.build(
            "DifferentialAttention", 6, 8, 9, 0.0, 6, num_kv_heads=3, head_dim=4
        ),
        (
            r"pairs the heads .* num_kv_heads must be even; got num_kv_heads=3\. Pass 4, or another"
            r" even number"
        ),
    ),
    "no pairs of heads": (
        lambda side: side.build("DifferentialAttention", 6, 8, 9, 0.0, 4, num_kv_heads=0),
        {"num_kv_heads": 0},
    ),
    # Options of the layer.
    "gate": (
        lambda side: multi_head(side, output_gate="head"),
        r"output_gate must be one of 'features', 'heads'; got 'head'",
    ),
    "no window": (lambda side: multi_head(side, window=0), {"window": 0}),
    "window in both directions": (
        lambda side: multi_head(side, window=3, causal=False),
        (
            r"window is how many keys a token .*got window=3, causal=False\."
            r" .*mask=Mask\.window\(left, right\)"
        ),
    ),
    # Sizes.
    "no d_out": (lambda side: multi_head(side, d_out=0), {"d_out": 0}),
    "no d_in": (lambda side: multi_head(side, d_in=0), {"d_in": 0}),
    "no context": (lambda side: multi_head(side, context_length=0), {"context_length": 0}),
    "no kdim": (lambda side: multi_head(side, kdim=0), {"kdim": 0}),
    "no vdim": (lambda side: multi_head(side, vdim=-1), {"vdim": -1}),
    # The same rules in other classes.
    "causal context": (
        lambda side: side.build("CausalAttention", 4, 6, -1, 0.0),
        r"context_length must.*=-1",
    ),
    "wrapper heads": (
        lambda side: side.build("MultiHeadAttentionWrapper", 4, 6, 9, 0.0, 0),
        r"got num_heads=0",
    ),
    "no d_key": (lambda side: side.build("SelfAttention", 4, 6, d_key=0), {"d_key": 0}),
    "linear in": (lambda side: side.build("Linear", 0, 3), {"d_in": 0}),
    "linear out": (lambda side: side.build("Linear", 3, -2), {"d_out": -2}),
    "norm width": (lambda side: side.build("LayerNorm", 0), {"d_model": 0}),
    "rms width": (lambda side: side.build("RMSNorm", 2.5), {"d_model": 2.5}),
    "feed forward": (lambda side: side.build("FeedForward", 0), {"d_model": 0}),
    "hidden": (lambda side: side.build("FeedForward", 4, 0), {"d_hidden": 0}),
    "gated": (lambda side: side.build("GatedFeedForward", 0), {"d_model": 0}),
    "gated hidden": (lambda side: side.build("GatedFeedForward", 4, -1), {"d_hidden": -1}),
    # Activations, and options that a class lacks.
    "sinks of cross-attention": (
        lambda side: side.build("CrossAttention", 4, 4, 0.0, 2, scores=side.Scores(sinks=True)),
        (
            r"cross-attention have a scale and a soft cap alone; got sinks=True, function=None\."
            r" Leave out sinks"
        ),
    ),
    "gated activation": (
        lambda side: side.build("GatedFeedForward", 4, activation="swish"),
        r"activation must be one of 'gelu_tanh', 'gelu_exact', 'silu', 'relu'; got 'swish'",
    ),
    "no ids": (lambda side: side.build("Embedding", 0, 3), {"size": 0}),
    "embedding width": (lambda side: side.build("Embedding", 3, 0), {"d_model": 0}),
    # Caches.
    "capacity": (
        lambda side: multi_head(side).init_cache(2, 10),
        (
            r"capacity must not exceed context_length; got capacity=10, context_length=9\. Make the"
            r" cache smaller"
        ),
    ),
    "block capacity": (
        lambda side: block(side).init_cache(2, 10),
        r"got capacity=10, context_length=9",
    ),
    "capacity of a window": (
        lambda side: multi_head(side, window=5).init_cache(2, 4),
        r"a ring buffer must keep at least the window.*got window=5, capacity=4",
    ),
    # Numbers.
    "no eps": (
        lambda side: side.build("RMSNorm", 4, eps=None),
        r"^eps must be one real number; got eps=None\. Pass a float of Python",
    ),
    "dropout of features without tokens": (
        lambda side: side.build("Dropout", 0.5)(side.array(np.ones(4))),
        r"^x must have shape \(t, d\) or \(b, t, d\); got rank 1, shape \(4,\)\.",
    ),
    "layer norm eps": (
        lambda side: side.build("LayerNorm", 4, -1e-5),
        r"eps .*must be at least 0; got eps=-1e-05",
    ),
    "rms norm eps": (
        lambda side: side.build("RMSNorm", 4, NAN),
        r"eps .*must be at least 0; got eps=nan",
    ),
    "soft cap": (
        lambda side: side.Scores(soft_cap=0.0),
        r"soft_cap must be positive.*got soft_cap=0\.0",
    ),
    "scale": (
        lambda side: side.Scores(scale=NAN),
        r"scale is one real number for all scores.*got scale=nan",
    ),
    # Parts of another kind.
    "no scores": (
        lambda side: multi_head(side, scores=0.5),
        r"scores must be .*Scores.*; got float\. Pass scores=Scores\(soft_cap=50\.0\)",
    ),
    "att": (
        lambda side: side.TransformerBlock(
            side.build("FeedForward", 6), side.build("FeedForward", 6), None, None
        ),
        r"att must be Attention; got FeedForward\. Pass att=MultiHeadAttention",
    ),
    "drop_shortcut": (
        lambda side: side.TransformerBlock(
            multi_head(side, d_out=6, num_heads=2), None, None, None, drop_shortcut=0.1
        ),
        (
            r"drop_shortcut must be .*Dropout.*; got float\. Pass drop_shortcut=Dropout\(\.\.\.\),"
            r" or None"
        ),
    ),
    # Widths of the parts of a block.
    "att widths": (
        lambda side: side.TransformerBlock(
            multi_head(side, kdim=5), side.build("FeedForward", 6), None, None
        ),
        (
            r"all parts of a block have one width; got att\.d_in=6, att\.d_out=8, att\.kdim=5\."
            r" Construct"
        ),
    ),
    "ff and norm widths": (
        lambda side: side.TransformerBlock(
            multi_head(side, d_out=6, num_heads=2),
            side.build("FeedForward", 8),
            side.build("RMSNorm", 4),
            None,
        ),
        r"got att\.d_in=6, ff\.d_model=8, norm1\.d_model=4\.",
    ),
    "post norm width": (
        lambda side: side.TransformerBlock(
            multi_head(side, d_out=6, num_heads=2),
            side.build("GatedFeedForward", 6),
            None,
            None,
            post_norm2=side.build("LayerNorm", 5),
        ),
        r"got att\.d_in=6, post_norm2\.d_model=5\.",
    ),
    # Classes in place of modules.
    "class of an attention": (
        lambda side: side.TransformerBlock(side.MultiHeadAttention, None, None, None),
        (
            r"att must be Attention; got the class MultiHeadAttention, not an instance\. Pass"
            r" att=MultiHeadAttention\(\.\.\.\)$"
        ),
    ),
    "class of a feed-forward layer": (
        lambda side: side.TransformerBlock(
            multi_head(side, d_out=6, num_heads=2), side.FeedForward, None, None
        ),
        (
            r"^ff must be a module or a function of tokens; got the class FeedForward, not an"
            r" instance\. Pass an instance, such as ff=FeedForward\(d_model\)$"
        ),
    ),
    "no feed-forward layer": (
        lambda side: side.TransformerBlock(
            multi_head(side, d_out=6, num_heads=2), None, None, None
        ),
        (
            r"^ff must be a module or a function of tokens; got NoneType\. Pass an instance, such"
            r" as ff=FeedForward\(d_model\)$"
        ),
    ),
    "class of a norm": (
        lambda side: side.TransformerBlock(
            multi_head(side, d_out=6, num_heads=2), abs, None, side.RMSNorm
        ),
        (
            r"^norm2 must be a module or a function of tokens; got the class RMSNorm, not an"
            r" instance\. Pass an instance, such as norm2=LayerNorm\(d_model\)$"
        ),
    ),
    "name of a norm": (
        lambda side: side.TransformerBlock(
            multi_head(side, d_out=6, num_heads=2), abs, None, None, post_norm1="rms"
        ),
        r"^post_norm1 must be a module or a function of tokens; got str\.",
    ),
    # Norms behind the sum, which leave no place for others.
    "sums and post norms": (
        lambda side: block(side, norm_first=False, norms=("norm1", "norm2", "post_norm1")),
        (
            r"norm_first=False normalises the two sums, .*got norm1, norm2, post_norm1\. .*pass"
            r" norm_first=True"
        ),
    ),
    "sums without norms": (
        lambda side: block(side, norm_first=False, norms=()),
        r"norm_first=False.*got no norm\.",
    ),
    "one sum": (
        lambda side: block(side, norm_first=False, norms=("norm2",)),
        r"norm_first=False.*got norm2\.",
    ),
    # Names.
    "activation": (
        lambda side: side.build("FeedForward", 4, activation="gelu"),
        r"activation must be one of 'gelu_tanh', 'gelu_exact', 'silu', 'relu'; got 'gelu'",
    ),
    "size": (
        lambda side: side.build("create_gpt2_attention", "huge"),
        r"size must be one of 'gpt2-small', .*'gpt2-xl'; got 'huge'",
    ),
    "size with prefix": (
        lambda side: side.build("create_gpt2_attention", "gpt2-tiny"),
        r"got 'gpt2-tiny'",
    ),
    "gpt2 dropout": (
        lambda side: side.build("create_gpt2_attention", "small", 1.5),
        r"got dropout=1\.5",
    ),
}


@pytest.mark.parametrize(("act", "match"), CONSTRUCTORS.values(), ids=CONSTRUCTORS)
def test_bad_arguments(assert_same_error, act, match):
    assert_same_error(act, match)


ATTENDING = {
    "SimplifiedSelfAttention": (),
    "SelfAttention": (4, 6),
    "CausalAttention": (4, 6, 9, 0.0),
    "MultiHeadAttentionWrapper": (4, 6, 9, 0.0, 2),
    "MultiHeadAttention": (6, 8, 9, 0.0, 4),
    "create_gpt2_attention": ("small",),
}


@pytest.mark.parametrize(("name", "arguments"), ATTENDING.items(), ids=ATTENDING)
def test_unknown_backend(side, name, arguments):
    with pytest.raises(
        ValueError, match=r"backend must be one of 'auto', .*'reference'.*; got 'nope'"
    ):
        side.build(name, *arguments, backend="nope")


WITH_DROPOUT = {
    "MultiHeadAttention": lambda side, rate: multi_head(side, dropout=rate),
    "CausalAttention": lambda side, rate: side.build("CausalAttention", 4, 6, 9, rate),
    "MultiHeadAttentionWrapper": lambda side, rate: side.build(
        "MultiHeadAttentionWrapper", 4, 6, 9, rate, 2
    ),
    "Dropout": lambda side, rate: side.build("Dropout", rate),
    "KeyedDropout": lambda side, rate: side.KeyedDropout(rate, side.key()),
}


@pytest.mark.parametrize("build", WITH_DROPOUT.values(), ids=WITH_DROPOUT)
@pytest.mark.parametrize("rate", [-0.1, 1.0, 1.5, NAN])
def test_dropout_outside_its_range(assert_same_error, build, rate):
    match = rf"dropout must be in \[0, 1\).*got dropout={rate}.*For no dropout pass 0\.0"
    assert_same_error(lambda side: build(side, rate), match)


MODULES = {
    "SimplifiedSelfAttention": (lambda side: side.build("SimplifiedSelfAttention"), 4, None),
    "SelfAttention": (lambda side: side.build("SelfAttention", 4, 6), 4, "d_in"),
    "CausalAttention": (lambda side: side.build("CausalAttention", 4, 6, 5, 0.0), 4, "d_in"),
    "MultiHeadAttentionWrapper": (
        lambda side: side.build("MultiHeadAttentionWrapper", 4, 6, 5, 0.0, 2),
        4,
        "d_in",
    ),
    "MultiHeadAttention": (lambda side: multi_head(side, context_length=5), 6, "d_in"),
    "TransformerBlock": (lambda side: block(side, context_length=5), 6, "d_model"),
}


@pytest.mark.parametrize(("build", "width", "name"), MODULES.values(), ids=MODULES)
@pytest.mark.parametrize("rank", [1, 4])
def test_wrong_rank(assert_same_error, build, width, name, rank):
    shape = (3, 2, 5, width)[-rank:]
    match = (
        rf"must have shape \(t, \w+\) or \(b, t, \w+\); got rank {rank}, shape"
        rf" {re.escape(str(shape))}.*vmap"
    )
    assert_same_error(lambda side: build(side)(side.array(np.ones(shape))), match)


@pytest.mark.parametrize(
    ("build", "width", "name"), list(MODULES.values())[1:], ids=list(MODULES)[1:]
)
def test_wrong_width(assert_same_error, build, width, name):
    match = rf"last axis of \w+ must be {name}={width}; got shape \(2, 5, {width + 1}\)"
    assert_same_error(lambda side: build(side)(side.array(np.ones((2, 5, width + 1)))), match)


@pytest.mark.parametrize(
    ("build", "width", "name"), list(MODULES.values())[2:], ids=list(MODULES)[2:]
)
def test_longer_than_context_length(assert_same_error, build, width, name):
    match = (
        rf"longer than context_length=5 tokens; got 7 tokens, shape \(2, 7, {width}\)\. Cut the"
        r" input"
    )
    assert_same_error(lambda side: build(side)(side.array(np.ones((2, 7, width)))), match)


@pytest.mark.parametrize("lengths", [[2, 6], np.array([6, 2]), 6, -1])
def test_known_lengths_that_cannot_be(assert_same_error, lengths):
    match = (
        r"lengths counts the real tokens of a call of t=5 tokens; got lengths=(6|-1)\. Use 0 to 5"
    )
    x = np.ones((2, 5, 6))
    assert_same_error(lambda side: multi_head(side)(side.array(x), lengths=lengths), match)


@pytest.mark.parametrize(
    ("build", "width", "name"), list(MODULES.values())[1:], ids=list(MODULES)[1:]
)
@pytest.mark.parametrize("given", [None, [[1.0, 2.0]], 3.0, "tokens"])
def test_what_is_no_array(assert_same_error, build, width, name, given):
    match = rf"^\w+ must be an array; got {type(given).__name__}\. Make it one before the call$"
    assert_same_error(lambda side: build(side)(given), match)


INPUTS = {
    # Shapes of query, key and value, and what is said of them.
    "key width": (
        (2, 5, 6),
        (2, 5, 5),
        (2, 5, 3),
        r"last axis of key must be kdim=4; got shape \(2, 5, 5\)",
    ),
    "value width": (
        (2, 5, 6),
        (2, 5, 4),
        (2, 5, 6),
        r"last axis of value must be vdim=3; got shape \(2, 5, 6\)",
    ),
    "long key": (
        (2, 5, 6),
        (2, 10, 4),
        (2, 10, 3),
        r"key must not be longer than context_length=9 tokens; got 10",
    ),
    "token counts": ((2, 5, 6), (2, 7, 4), (2, 8, 3), r"same number of tokens s and of heads k"),
    "batch sizes": ((2, 5, 6), (3, 7, 4), (3, 7, 3), r"one batch size; got query \(2, 5, 4, 2\)"),
    "mixed ranks": ((2, 5, 6), (7, 4), (7, 3), r"or all three without b"),
}


@pytest.mark.parametrize("row", INPUTS.values(), ids=INPUTS)
def test_bad_cross_attention(assert_same_error, row):
    *shapes, match = row

    def act(side):
        multi_head(side, kdim=4, vdim=3, causal=False)(
            *(side.array(np.ones(shape)) for shape in shapes)
        )

    assert_same_error(act, match)


def test_a_cache_is_for_self_attention(assert_same_error):
    def act(side):
        module, x = multi_head(side), side.array(np.ones((2, 5, 6)))
        module.attend(x, x, cache=module.init_cache(2, 5))

    assert_same_error(
        act,
        r"a cache holds .*in self-attention; got a key of shape \(2, 5, 6\)\. Leave out the key",
    )


def test_ids_are_integers(assert_same_error):
    match = r"ids must be integers; got dtype float64\. Cast them before the call"
    assert_same_error(
        lambda side: side.build("Embedding", 7, 3)(side.array(np.array([0.0, 1.0]))), match
    )


@pytest.mark.parametrize("bad", [7, -1, 2**31 - 1])
def test_ids_outside_the_table_are_nan(side, bad):
    table, ids = side.build("Embedding", 7, 3), side.array(np.array([[2, bad], [6, 0]]))
    for found in (table(ids), side.jit(table)(ids)):
        assert np.isnan(side.numpy(found)).all(axis=-1).tolist() == [[False, True], [False, False]]


def test_positions_beyond_the_context_of_gpt2_are_nan(side):
    model = side.build("GPT2", side.GPT2Config(6, 2, 1, context_length=4, vocab_size=11))
    model.eval()
    logits = model(side.array(np.ones((2, 3), int)), positions=side.array(np.array([0, 1, 4])))
    assert np.isnan(side.numpy(logits)).all(axis=-1).tolist() == [[False, False, True]] * 2


def test_a_full_cache_of_a_model(assert_same_error):
    def act(side):
        model = side.build("GPT2", side.GPT2Config(6, 2, 1, context_length=9, vocab_size=11))
        model.attend(side.array(np.ones((2, 6), int)), cache=model.init_cache(2, 5))

    assert_same_error(act, r"capacity of 5 tokens; got 6 new tokens, 0 cached\. Make it larger")


def test_causal_cross_attention_needs_an_offset(assert_same_error):
    def act(side):
        multi_head(side)(side.array(np.ones((2, 5, 6))), side.array(np.ones((2, 7, 6))))

    assert_same_error(
        act, r"offset when t != s.*t=5, s=7\. Choose offset=0 .*or offset=2 .*causal=False"
    )


@pytest.mark.parametrize("name", ["LayerNorm", "RMSNorm", "FeedForward", "GatedFeedForward"])
def test_wrong_width_of_a_layer(assert_same_error, name):
    match = r"last axis of x must be d_model=4; got shape \(3, 5\)"
    assert_same_error(lambda side: side.build(name, 4)(side.array(np.ones((3, 5)))), match)


NEEDS_PARAMETERS = {
    "Linear": (3, 2),
    "SelfAttention": (3, 2),
    "CausalAttention": (3, 2, 6, 0.0),
    "MultiHeadAttention": (6, 8, 9, 0.0, 4),
    "MultiHeadAttentionWrapper": (3, 2, 6, 0.0, 2),
    "FeedForward": (3,),
    "GatedFeedForward": (3,),
}


@pytest.mark.parametrize(("name", "arguments"), NEEDS_PARAMETERS.items(), ids=NEEDS_PARAMETERS)
def test_missing_rngs(name, arguments):
    with pytest.raises(ValueError, match=r"rngs is missing.*Pass rngs=nnx\.Rngs\(0\)"):
        getattr(flax_attn, name)(*arguments)


STREAMLESS = [
    ("Dropout", (), None),
    ("Dropout", (), {"params": 0}),
    ("CausalAttention", (3, 2, 6), {"params": 0}),
]


@pytest.mark.parametrize(("name", "arguments", "seeds"), STREAMLESS)
def test_missing_dropout_stream(name, arguments, seeds):
    rngs = nnx.Rngs(**seeds) if seeds else None
    with pytest.raises(
        ValueError, match=r"dropout=0\.5 needs a random stream.*nnx\.Rngs\(params=0, dropout=1\)"
    ):
        getattr(flax_attn, name)(*arguments, 0.5, rngs=rngs)


def test_no_stream_is_needed_without_dropout():
    assert flax_attn.CausalAttention(3, 2, 6, 0.0, rngs=nnx.Rngs(params=0))(
        jnp.ones((4, 3), jnp.float32)
    ).shape == (4, 2)


@pytest.mark.parametrize(
    ("shape", "match"), [((2, 5, 7), "d_in=6"), ((2, 10, 6), "longer"), ((6,), "rank 1")]
)
def test_errors_come_while_tracing(shape, match):
    layer = flax_attn.MultiHeadAttention(6, 8, 9, 0.0, 4, rngs=nnx.Rngs(0))
    for trace in (jax.jit, lambda function: lambda x: jax.eval_shape(function, x)):
        with pytest.raises(ValueError, match=match):
            trace(lambda x: layer(x))(jnp.ones(shape))
    with torch.device("meta"), pytest.raises(ValueError, match=match):
        torch_ref.MultiHeadAttention(6, 8, 9, 0.0, 4)(torch.ones(shape))


ELSEWHERE = {
    # Arguments of other libraries.
    "attn_mask": "pass mask=, where True means attend",
    "is_causal": "pass causal= when you construct the layer",
    "deterministic": r"layer\.eval\(\) switches dropout off",
    "return_weights": "pass return_weights=True to attend",
    "key_padding_mask": "pass lengths=",
    # A misspelt one lists them all.
    "maskk": "the arguments are query, key, value, mask, bias, positions, lengths, dropout_key",
}


@pytest.mark.parametrize(("name", "remedy"), ELSEWHERE.items(), ids=ELSEWHERE)
def test_a_layer_names_what_to_pass_for_the_argument_of_another_library(side, name, remedy):
    layer = multi_head(side)
    with pytest.raises(TypeError, match=f"MultiHeadAttention has no argument '{name}': .*{remedy}"):
        layer(side.array(np.ones((2, 3, 6)), "float32"), **{name: None})


@pytest.mark.parametrize(
    ("name", "remedy"),
    [("dropout_rate", "pass dropout="), ("embed_dim", "pass d_in= and d_out="), ("heads", "are")],
)
def test_so_does_its_constructor(side, name, remedy):
    with pytest.raises(TypeError, match=f"MultiHeadAttention has no argument '{name}': .*{remedy}"):
        multi_head(side, **{name: 1})


HEADED = {
    "MultiHeadAttention": {},
    "MultiHeadAttentionWrapper": {},
    "DifferentialAttention": {},
    "CrossAttention": {},
    "MultiHeadLatentAttention": {
        "kv_lora_rank": 3,
        "qk_nope_head_dim": 4,
        "qk_rope_head_dim": 2,
        "v_head_dim": 5,
    },
}


@pytest.mark.parametrize(("name", "options"), HEADED.items(), ids=HEADED)
def test_only_the_number_of_heads_has_to_be_given(side, name, options):
    layer = side.build(name, 6, 8, num_heads=2, **options)
    layer = layer.heads[0] if name.endswith("Wrapper") else layer
    assert layer.dropout.rate == 0
    with pytest.raises(TypeError, match=rf"{name} needs num_heads.*{name}\(768, 768, num_heads=12"):
        side.build(name, 6, 8, **options)


def test_a_single_head_needs_its_widths_only(side):
    assert side.build("CausalAttention", 6, 8).context_length is None
