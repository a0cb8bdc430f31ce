import re
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from attn_spec.checks import DTYPES
from flax_attn import (
    CausalAttention,
    KeyedDropout,
    Mask,
    MultiHeadAttention,
    attend,
    dot_product_attention,
    native,
    single_head_attention,
)
from flax_attn.backends import cudnn
from flax_attn.backends.backend import Backend
from flax_attn.backends.call import OPTIONS, Unsupported, prepare
from flax_attn.backends.chips import CHIPS
from flax_attn.backends.choose import EQUAL, choose, few_queries, for_parts, refusal
from flax_attn.backends.platform import PLATFORMS, compute_capability, platform_of
from flax_attn.backends.reference import SHARE, SHORT
from flax_attn.backends.registry import BACKENDS, load, markdown_table
from flax_attn.bench.calls import MODEL_CALLS
from flax_attn.sharding.explain import explain


def shape(*sizes, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(sizes, dtype)


def ask(t=2048, s=None, h=64, dtype=jnp.float32, mask=None, **options):
    key = shape(2, t if s is None else s, 4, h, dtype=dtype)
    return explain(shape(2, t, 8, h, dtype=dtype), key, key, None, mask, **options)


def test_short_inputs_run_the_formula_on_a_cpu(monkeypatch):
    monkeypatch.setattr("flax_attn.backends.native.library", lambda: None)
    assert ask(32, SHORT // 32, platform="cpu").backend == "reference"
    assert ask(SHORT, 1, platform="cpu").backend == "reference"
    assert ask(32, SHORT // 32 + 1, platform="cpu").backend == "blocked"
    assert ask(SHORT + 1, 1, platform="cpu").backend == "blocked"


@pytest.mark.parametrize("chip", ["a100", "h100", "v5e"])
@pytest.mark.usefixtures("no_shape_checks")
def test_the_formula_runs_while_its_scores_fit_in_a_share_of_memory(chip):
    dropout = KeyedDropout(0.1, jnp.zeros(2, jnp.uint32))
    found = ask(16, platform=chip, dropout=dropout)
    assert found.backend == "reference"
    assert found.memory["reference"] <= SHARE * CHIPS[chip].memory
    found = ask(8192, platform=chip, dropout=dropout)
    assert found.memory["reference"] > SHARE * CHIPS[chip].memory
    assert found.backend == "fused"


GPUS = [name for name, chip in CHIPS.items() if chip.kind == "gpu"]
TPUS = [name for name, chip in CHIPS.items() if chip.kind == "tpu"]


@pytest.mark.parametrize("chip", GPUS + TPUS)
@pytest.mark.usefixtures("no_shape_checks")
def test_auto_takes_the_first_of_about_the_least_predicted_time(chip):
    for call in MODEL_CALLS:
        found = explain(**call.arguments, platform=chip)
        able = {"cudnn", "splash", "fused", "blocked"} & set(found.memory)
        least = min(found.seconds[name] for name in able)
        assert found.seconds[found.backend] <= EQUAL * least
        before = {name for name in able if BACKENDS.index(name) < BACKENDS.index(found.backend)}
        assert all(found.seconds[name] > EQUAL * least for name in before)
        assert found.chip == chip
        assert found.platform == CHIPS[chip].kind


# Calls of models, by their place in the table of these.
# Long and causal: for short calls cuDNN's test of finite numbers takes longer than all of fused.
# Widths of 192 and 128 are padded to one by cuDNN, which takes them on Hopper.
CUDNN_TAKES = {"a100": {1, 3, 4, 6}, "h100": {1, 4, 6, 14}, "h200": {1, 4, 6, 14}, "b200": {1, 6}}
SPLASH_REFUSES = {0, 9, 10}  # dropout and biases
DECODING = 5


@pytest.mark.parametrize("chip", GPUS)
@pytest.mark.usefixtures("no_shape_checks")
def test_every_call_of_a_model_runs_in_a_fused_kernel_on_a_gpu(chip):
    for at, call in enumerate(MODEL_CALLS):
        found = explain(**call.arguments, platform=chip)
        expected = "cudnn" if at in CUDNN_TAKES[chip] else "fused"
        assert found.backend == expected, call.name


@pytest.mark.parametrize("chip", TPUS)
@pytest.mark.usefixtures("no_shape_checks")
def test_every_call_of_a_model_runs_in_a_fused_kernel_on_a_tpu_but_a_step_of_decoding(chip):
    for at, call in enumerate(MODEL_CALLS):
        found = explain(**call.arguments, platform=chip)
        expected = "decode" if at == DECODING else "fused" if at in SPLASH_REFUSES else "splash"
        assert found.backend == expected, call.name


def test_the_order_alone_would_take_the_first_that_prefers_the_call():
    x = shape(8, 512, 12, 64, dtype=jnp.bfloat16)
    found = explain(x, x, x, shape(1, 12, 512, 512, dtype=jnp.bfloat16), platform="h200")
    assert (found.backend, found.in_order) == ("fused", "reference")
    assert explain(x, x, x, platform="cpu").in_order == explain(x, x, x, platform="cpu").backend


def test_a_machine_with_a_chip_is_answered_for_as_it_would_be_installed():
    found = ask(8192, dtype=jnp.bfloat16, platform="h100")
    assert (found.backend, found.refusals["cudnn"]) == ("cudnn", None)
    wide = {"dtype": jnp.bfloat16, "h": 256}
    assert ask(8192, **wide, platform="h100").backend == "cudnn"
    assert "compute capability 8.0" in ask(**wide, platform="a100").refusals["cudnn"]
    text = str(ask(8192, platform="a100"))
    assert text.startswith("fused runs on gpu (a100)")
    assert "ms forward" in text
    advice = (
        r"\ntokamax would be the fastest, in about .*: tokamax takes bfloat16, float16; got dtype"
    )
    assert re.search(advice + r" float32\. Cast query, key and value$", text)


def test_a_reason_ends_with_no_advice_to_choose_automatically_where_that_was_done():
    text = str(ask(platform="gpu"))
    assert "-> fused" in text
    assert 'splash runs on TPU; got platform "gpu"\n' in text
    assert "auto" not in text


@pytest.mark.parametrize(
    ("platform", "chip"),
    [("gpu", "h100"), ("H100", "h100"), ("tpu", "v5e"), ("cpu", None), ("b200", "b200")],
)
def test_a_platform_that_is_not_attached_is_a_usual_chip(platform, chip):
    assert ask(platform=platform).chip == chip


def test_a_chip_without_figures_has_no_predicted_time():
    call = prepare(*[jnp.ones((2, 3, 4, 5))] * 3)
    with pytest.raises(ValueError, match="predicted times need the published rates of a chip"):
        load("blocked").work(call).seconds(CHIPS["cpu"])
    assert ask(platform="cpu").seconds == {}


def test_a_wider_chip_is_predicted_to_be_faster():
    slow, fast = (ask(8192, platform=chip).seconds["blocked"] for chip in ("a100", "b200"))
    assert fast < slow / 2


@pytest.fixture
def plugin(monkeypatch):
    monkeypatch.setattr(cudnn, "find_spec", lambda name: name)


BUILT = native.library() is not None


@pytest.mark.parametrize(
    ("platform", "options", "backend"),
    [
        ("cpu", {}, "native" if BUILT else "blocked"),
        ("cpu", {"dtype": jnp.bfloat16}, "native" if BUILT else "blocked"),
        ("cpu", {"dropout": KeyedDropout(0.1, jnp.zeros(2, jnp.uint32))}, "blocked"),
        ("gpu", {"t": 8192, "dtype": jnp.bfloat16}, "cudnn"),
        ("gpu", {"dtype": jnp.bfloat16}, "fused"),
        ("gpu", {"dtype": jnp.bfloat16, "soft_cap": 2.0}, "fused"),
        ("gpu", {}, "fused"),
        ("tpu", {"mask": Mask.causal()}, "splash"),
        ("tpu", {"dropout": KeyedDropout(0.1, jnp.zeros(2, jnp.uint32))}, "fused"),
    ],
)
@pytest.mark.usefixtures("plugin", "no_shape_checks")
def test_the_first_that_honours_the_call_is_chosen(platform, options, backend):
    found = ask(platform=platform, **options)
    assert found.backend == backend
    assert found.platform == platform
    assert found.refusals[backend] is None
    assert f"-> {backend:9}  can run, in about" in str(found)


DECODES = {  # platform: a step of decoding, one that drops, a single token
    "cpu": ("native" if BUILT else "decode", "reference", "native" if BUILT else "reference"),
    "gpu": ("fused", "fused", "reference"),
    # Its kernel would draw for a whole tile of queries.
    "tpu": ("splash", "reference", "reference"),
}


@pytest.mark.parametrize("platform", DECODES)
@pytest.mark.usefixtures("no_shape_checks")
def test_a_step_of_decoding_is_decoded(platform):
    one, many = jnp.ones((2, 1, 4, 8)), jnp.ones((2, 300, 4, 8))
    dropout = KeyedDropout(0.1, jnp.zeros(2, jnp.uint32))
    chosen = (
        explain(one, many, many, platform=platform).backend,
        explain(one, many, many, platform=platform, dropout=dropout).backend,
        explain(one, one, one, platform=platform).backend,
    )
    assert chosen == DECODES[platform]


@pytest.mark.parametrize(
    ("platform", "options", "passed_over"),
    [
        ("gpu", {"dtype": jnp.bfloat16}, ()),
        ("gpu", {}, ("cudnn",)),
        ("gpu", {"backend": "reference"}, ("cudnn",)),
        ("gpu", {"backend": "blocked"}, ("cudnn",)),
        ("tpu", {"dropout": KeyedDropout(0.1, jnp.zeros(2, jnp.uint32))}, ("splash",)),
        (
            "tpu",
            {"t": 3, "dropout": KeyedDropout(0.1, jnp.zeros(2, jnp.uint32)), "s": 400},
            ("decode", "splash"),
        ),
    ],
)
@pytest.mark.usefixtures("plugin", "no_shape_checks")
def test_those_that_auto_would_rather_take_are_named(platform, options, passed_over):
    found = ask(platform=platform, **options)
    assert found.passed_over == passed_over
    assert all(found.refusals[name] for name in passed_over)


def test_explained_is_what_runs(monkeypatch):
    ran = []
    for name in ("native", "blocked", "decode"):
        monkeypatch.setattr(
            load(name), "attend", lambda call, name=name: ran.append(name) or call.query
        )
    x = jnp.ones((1, 160, 2, 4))
    for backend in ("auto", "blocked", "decode"):
        dot_product_attention(x, x, x, backend=backend)
        assert ran.pop() == explain(x, x, x, backend=backend, platform="cpu").backend
    dot_product_attention(x[:, :9], x, x)
    assert ran == (["native"] if BUILT else [])  # or the formula


def test_one_that_refuses_by_name():
    dropout = KeyedDropout(0.1, jnp.zeros(2, jnp.uint32))
    found = ask(backend="decode", dropout=dropout, platform="cpu")
    assert found.backend is None
    assert str(found).startswith("nothing runs on cpu")
    assert "takes no dropout" in str(found)
    assert "decode" not in found.memory
    x = jnp.ones((2, 3, 4, 5))
    with pytest.raises(
        Unsupported,
        match=r"^backend 'decode' does not support this call: decode takes no dropout; got rate"
        r" 0\.1\. With backend=\"auto\" reference runs it$",
    ):
        dot_product_attention(x, x, x, dropout=dropout, backend="decode")
    with pytest.raises(
        ValueError, match="does not support"
    ):  # for callers that know of no backends
        attend(x, x, x, dropout=dropout, backend="decode", return_weights=True)


@pytest.mark.parametrize("backend", ["splash", "cudnn"])
def test_kernels_of_other_platforms_refuse_here(backend):
    with pytest.raises(
        Unsupported, match=rf"^backend '{backend}' does not support this call: {backend} runs on"
    ):
        choose(prepare(*[jnp.ones((2, 3, 4, 5))] * 3, platform="cpu"), backend)


TAKES = {
    **dict.fromkeys(
        ("decode", "reference", "blocked"), ("float64", "float32", "bfloat16", "float16")
    ),
    **dict.fromkeys(("native", "fused"), ("float32", "bfloat16", "float16")),
    **dict.fromkeys(("cudnn", "tokamax"), ("bfloat16", "float16")),
    "splash": ("float32", "bfloat16"),
}


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_backend_refuses_a_dtype_that_it_does_not_declare(name, dtype):
    backend = load(name)
    assert backend.dtypes == TAKES[name]
    with jax.enable_x64(True):
        x = jnp.ones((2, 3, 4, 8), dtype)
    call = prepare(x, x, x, platform=(backend.platforms or ("cpu",))[0])
    takes = ", ".join(TAKES[name])
    rule = f"{name} takes {takes}; got dtype {dtype}. Cast query, key and value"
    assert (refusal(backend, call) == rule) == (dtype not in TAKES[name])


def test_a_backend_that_declares_no_dtype_takes_none():
    class Silent(Backend):
        name = "silent"

    call = prepare(*[jnp.ones((2, 3, 4, 5))] * 3, platform="cpu")
    assert "silent takes no dtype; got dtype float32" in (refusal(Silent(), call) or "")


GIVEN = {
    "bias": {"bias": jnp.ones((3, 3))},
    "soft_cap": {"soft_cap": 2.0},
    "sinks": {"sinks": jnp.ones(4)},
    "dropout": {"dropout": KeyedDropout(0.5, jnp.zeros(2, jnp.uint32))},
    "precision": {"precision": "highest"},
    "score": {"score": lambda score, b, n, i, j: 2 * score},
    "array scale": {"scale": jnp.float32(2)},
}


@pytest.mark.usefixtures("no_shape_checks")
@pytest.mark.parametrize("option", OPTIONS)
def test_a_backend_refuses_an_option_that_it_does_not_name(option):
    class Silent(Backend):
        name = "silent"
        dtypes = DTYPES

    call = prepare(*[jnp.ones((2, 3, 4, 5))] * 3, platform="cpu", **GIVEN[option])
    assert f"silent takes no {option}; got " in (refusal(Silent(), call) or "")
    Silent.honours = (option,)
    assert refusal(Silent(), call) is None


@pytest.mark.parametrize("name", BACKENDS)
def test_the_options_that_a_backend_names_are_options_of_a_call(name):
    assert set(load(name).honours) <= set(OPTIONS)


def test_a_call_in_parts_that_no_backend_takes_is_refused(monkeypatch):
    call = prepare(*[jnp.ones((2, 3, 4, 5))] * 3, soft_cap=2.0)
    assert for_parts(call).name == "blocked"
    monkeypatch.setattr(load("blocked"), "honours", ())
    with pytest.raises(
        Unsupported,
        match=r"no backend attends to parts of the keys of this call: fused .*; blocked takes no",
    ):
        for_parts(call)


@pytest.mark.parametrize(("t", "s", "few"), [(16, 17, True), (17, 18, False), (16, 16, False)])
def test_backends_say_how_many_queries_are_few(t, s, few, monkeypatch):
    query, key = jnp.ones((1, t, 2, 4)), jnp.ones((1, s, 2, 4))
    call = prepare(query, key, key, platform="gpu")
    assert few_queries(call) == few
    monkeypatch.setattr(load("decode"), "few", 3)
    assert not few_queries(call)


OTHER_DTYPES = [
    *(
        "bool",
        "int4",
        "int8",
        "int32",
        "uint8",
        "complex64",
        "float8_e4m3fn",
        "float8_e4m3b11fnuz",
        "float8_e4m3fnuz",
    ),
    *(
        "float8_e5m2",
        "float8_e5m2fnuz",
        "float8_e3m4",
        "float8_e4m3",
        "float8_e8m0fnu",
        "float4_e2m1fn",
    ),
]


@pytest.mark.parametrize("dtype", OTHER_DTYPES)
@pytest.mark.usefixtures("no_shape_checks")
def test_a_dtype_that_no_call_may_have(dtype):
    x = jnp.ones((1, 64, 2, 16)).astype(dtype)
    rule = (
        rf"must be float64, float32, bfloat16 or float16; got {dtype}\. Cast to one of them before"
        r" the call"
    )
    layer = CausalAttention(16, 8, 64, 0.0, rngs=nnx.Rngs(0))
    for backend in ("auto", *BACKENDS):
        with pytest.raises(ValueError, match=f"^query, key and value {rule}"):
            dot_product_attention(x, x, x, backend=backend)
    with pytest.raises(ValueError, match=f"^query, key and value {rule}"):
        single_head_attention(*[x[:, :, 0]] * 3)
    with pytest.raises(ValueError, match=f"^x {rule}"):
        layer(x[:, :, 0])
    with pytest.raises(
        ValueError, match=f"^bias {rule}" if dtype != "bool" else "Pass a boolean mask as mask="
    ):
        dot_product_attention(*[jnp.ones((1, 64, 2, 16))] * 3, jnp.ones((64, 64)).astype(dtype))


@pytest.mark.parametrize("act", [dot_product_attention, explain])
def test_an_unknown_backend_lists_the_names(act):
    x = jnp.ones((2, 3, 4, 5))
    names = ", ".join(map(repr, ("auto", *BACKENDS)))
    with pytest.raises(
        ValueError, match=rf"^backend must be one of {re.escape(names)}; got 'flash'"
    ):
        act(x, x, x, backend="flash")


def test_an_unknown_platform_lists_the_names():
    with pytest.raises(
        ValueError, match=r"^platform must be one of 'cpu', 'gpu', 'tpu', .*'h100'.*; got 'abacus'$"
    ):
        ask(platform="abacus")


@pytest.mark.parametrize("text", ["v5e-8", "V5E:2x4"])
def test_a_slice_is_no_platform(text):
    with pytest.raises(ValueError, match=r"^a platform is one chip.*got '.*'\. Pass 'v5e', under"):
        ask(platform=text)


@pytest.mark.parametrize("kind", ["layer", "function"])
def test_what_is_no_array_is_not_explained(kind):
    layer = MultiHeadAttention(8, 8, num_heads=2, rngs=nnx.Rngs(0))
    thing = layer if kind == "layer" else jnp.sin
    x = jnp.ones((2, 3, 8))
    with pytest.raises(
        ValueError, match=r"explain takes the arrays of a call, query .*; got \w+ as query\. Pass"
    ):
        explain(thing, x, x)


@pytest.mark.parametrize(
    "mask",
    [Mask.lengths(key=shape(2, dtype=jnp.int32)), Mask.dense(shape(3, 3, dtype=bool))],
    ids=["lengths", "dense"],
)
def test_a_mask_of_shapes_is_for_a_question_alone(mask):
    x = jnp.ones((2, 3, 4, 8))
    assert explain(x, x, x, mask=mask).backend
    with pytest.raises(
        ValueError, match=r"got a mask of a shape alone, ShapeDtypeStruct\(.*explain"
    ):
        dot_product_attention(x, x, x, mask=mask)


@pytest.mark.usefixtures("no_shape_checks")
def test_what_no_call_may_be_is_an_error_in_every_backend():
    x, other = jnp.ones((2, 3, 4, 5)), jnp.ones((2, 3, 4, 6))
    for backend in ("auto", *BACKENDS):
        with pytest.raises(ValueError, match="one head width h"):
            dot_product_attention(x, other, x, backend=backend)
        with pytest.raises(ValueError, match="must broadcast to"):
            dot_product_attention(x, x, x, mask=jnp.ones((7, 3), bool), backend=backend)
        with pytest.raises(ValueError, match="soft_cap must be positive"):
            dot_product_attention(x, x, x, soft_cap=0.0, backend=backend)


def test_explain_takes_what_the_call_takes():
    x = jnp.ones((9, 4, 8))
    options = {"scale": 0.5, "soft_cap": 3.0, "sinks": jnp.ones(4), "return_weights": True}
    dropout = KeyedDropout(0.5, jax.random.key(0))
    found = explain(x, x, x, jnp.ones((9, 9)), jnp.ones((9, 9), bool), dropout=dropout, **options)
    assert found.backend == "reference"
    assert found.refusals["blocked"] is None
    assert "dropout" in found.refusals["decode"]
    everywhere = {name for name in BACKENDS if load(name).platforms is None} | (
        {"native"} if BUILT else set()
    )
    assert "bias" in found.refusals["native"] or not BUILT
    assert explain(x, x, x).memory.keys() == everywhere or jax.default_backend() != "cpu"


def test_platform_of_tracers_is_that_of_the_default_device():
    seen = []
    with jax.default_device(jax.local_devices(backend="cpu")[0]):
        jax.jit(lambda x: seen.append(platform_of(x)) or x)(1.0)
    assert seen == ["cpu"]
    assert platform_of(jnp.zeros(1)) == jax.default_backend()


@pytest.mark.parametrize(
    ("backend", "mask", "dtype"),
    [
        ("reference", Mask.causal(), "float32"),
        ("blocked", Mask.causal(), "float32"),
        ("blocked", Mask(), "bfloat16"),
        ("blocked", Mask.sliding_window(100), "float32"),
    ],
)
def test_memory_is_about_what_is_compiled(backend, mask, dtype):
    x = shape(1, 2500, 3, 64, dtype=jnp.dtype(dtype))
    call = jax.jit(lambda x: dot_product_attention(x, x, x, mask=mask, backend=backend))
    needed = (
        call.lower(x)
        .compile({"xla_backend_optimization_level": 0})
        .memory_analysis()
        .temp_size_in_bytes
    )
    estimate = explain(x, x, x, mask=mask, platform="cpu").memory[backend]
    assert needed / 2 < estimate < 2 * needed


def test_the_documented_table_has_a_column_for_every_backend():
    table, described = markdown_table().split("\n\n")
    head, _, *rows = (line.strip("| ").split(" | ") for line in table.splitlines())
    assert head == [f"`{name}`" for name in BACKENDS]
    marks = {name: dict(zip(head, cells, strict=True)) for name, *cells in rows}
    for name in BACKENDS:
        backend = load(name)
        assert (marks["float64"][f"`{name}`"] == "yes") == ("float64" in backend.dtypes)
        assert (marks["`dropout`"][f"`{name}`"] == "yes") == ("dropout" in backend.honours)
        assert (backend.limits == "") or f"also refused: {backend.limits}" in described
    documented = (Path(__file__).parents[2] / "docs" / "backends.md").read_text()
    assert markdown_table() in documented


@pytest.mark.parametrize("name", BACKENDS)
def test_a_backend_is_named_as_its_module_and_says_where_it_runs(name):
    backend = load(name)
    assert backend.name == name
    assert set(backend.platforms or ()) <= set(PLATFORMS)


@pytest.mark.parametrize(
    ("kind", "capability"),
    [
        ("NVIDIA A100-SXM4-80GB", 8.0),
        ("NVIDIA H200", 9.0),
        ("NVIDIA GB200", 10.0),
        ("an abacus", 0.0),
    ],
)
def test_the_capability_is_that_of_the_gpu_compiled_for(kind, capability, monkeypatch):
    mesh = SimpleNamespace(abstract_device=SimpleNamespace(device_kind=kind))
    monkeypatch.setattr(jax.sharding, "get_abstract_mesh", lambda: mesh)
    monkeypatch.setattr(jax, "local_devices", lambda: [SimpleNamespace(device_kind="cpu")])
    assert compute_capability() == capability


def test_the_capability_is_that_of_the_gpu_at_hand(monkeypatch):
    device = SimpleNamespace(device_kind="NVIDIA H200", compute_capability="9.1")
    monkeypatch.setattr(jax, "local_devices", lambda: [device])
    assert compute_capability() == 9.1
    monkeypatch.setattr(
        jax.sharding, "get_abstract_mesh", lambda: SimpleNamespace(abstract_device=device)
    )
    assert compute_capability() == 9.1
