import re
import subprocess
import sys
from contextlib import nullcontext
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest
from jax import ShapeDtypeStruct
from rich.console import Console
from rich.table import Table

from flax_attn import Mask
from flax_attn.aot import gpu
from flax_attn.bench.calls import MODEL_CALLS, ModelCall, forward
from flax_attn.device.kernels import ComparedKernel, kernel
from flax_attn.plan.hlo import read
from tools.aot import gpu as of_gpu
from tools.aot import masks, models, report, rows
from tools.aot.__main__ import main
from tools.aot.assembler import Assembled
from tools.aot.compiled import CompiledCost, collectives, compile_for
from tools.aot.devices import AbsentDevices
from tools.aot.launches import custom_calls, launches
from tools.aot.rows import Row, grown, row

pytestmark = pytest.mark.usefixtures("no_shape_checks")

MIB = 2**20
HERE = AbsentDevices("abacus", jax.devices()[:1], 2**30)


def call(mask=None, t=6, s=8, **arrays):
    query, key = (ShapeDtypeStruct((2, size, 4, 8), jnp.float32) for size in (t, s))
    return ModelCall("small", {"query": query, "key": key, "value": key, "mask": mask} | arrays)


def refuse(*arguments, **options):
    raise ValueError("\nnot today\nnor tomorrow")


def test_a_program_says_what_it_takes():
    x = ShapeDtypeStruct((256, 256), jnp.float32)
    found = compile_for(HERE, lambda x: (x @ x) @ x, (x,), 256)
    assert (found.arguments, found.outputs, found.reason) == (MIB // 4, MIB // 4, None)
    assert found.temporaries >= MIB // 4
    assert found.memory == found.arguments + found.outputs + found.temporaries
    assert found.seconds > 0


def test_a_program_that_does_not_compile_says_why_in_one_line():
    assert compile_for(HERE, refuse, (), 1) == CompiledCost(reason="not today")


def test_collectives_in_loops_and_branches_are_told_apart():
    text = """
%body (p: f32[2]) -> f32[2] {
  %a = f32[2] all-reduce(f32[2] %p), to_apply=%add, metadata={op_name="jit(f)/while/body/dot"}
  %f = f32[2] all-gather(f32[2] %p), metadata={op_name="jit(f)/cond/branch_1_fun/while/body/dot"}
}
ENTRY %main (p: f32[2]) -> f32[2] {
  %b = f32[2] all-gather-start(f32[2] %p)
  %c = f32[2] all-gather-done(f32[2] %b)
  %d = f32[2] all-reduce(f32[2] %c)
  %e = f32[2] all-reduce(f32[2] %d)
}
"""
    assert collectives(text) == {
        "all-gather": 1,
        "all-reduce": 2,
        "all-reduce in loops": 1,
        "all-gather in branches": 1,
    }


@pytest.mark.parametrize("one", MODEL_CALLS, ids=lambda one: one.name)
def test_more_batches_are_the_same_call(one):
    before, after = one.arrays, grown(one, 8).arrays
    for name in ("query", "key", "value"):
        assert after[name].shape == (8 * before[name].shape[0], *before[name].shape[1:])
    assert after.get("bias") == before.get("bias")
    assert after.get("sinks") == before.get("sinks")
    assert (
        jax.eval_shape(
            lambda arrays: rows._function(one, kernel("reference").ours)(arrays), after
        ).shape[0]
        % 8
        == 0
    )


def test_a_row_is_compiled_both_ways_beside_the_plain_kernel():
    mask = jax.eval_shape(lambda rows: Mask.lengths(key=rows), ShapeDtypeStruct((2,), jnp.int32))
    reference = kernel("reference")
    found = row(HERE, call(mask), ComparedKernel("x", reference.ours, reference.plain))
    assert found.plain is not None
    assert found.backward is not None
    assert found.spread is not None
    assert found.reason == ""
    assert found.forward.temporaries > found.plain[0].temporaries > 0
    assert found.backward.temporaries >= found.forward.temporaries
    assert found.spread.arguments == found.backward.arguments


@pytest.mark.parametrize(
    ("failing", "reason"),
    [
        ((0, False, 1), "not today"),
        ((0, True, 1), "backward: not today"),
        ((0, True, 8), "several devices: not today"),
        (None, ""),
    ],
)
def test_a_row_says_what_does_not_compile(failing, reason, monkeypatch):
    asked = []

    def compile_for(target, function, arguments, batch, devices=1):
        asked.append((0, len(arguments) == 2, devices))
        return CompiledCost(reason="not today") if asked[-1] == failing else CompiledCost(1, 1, 1)

    monkeypatch.setattr(rows, "compile_for", compile_for)
    compared = ComparedKernel("x", kernel("reference").ours, None)
    found = row(AbsentDevices("x", range(8), 1), call(), compared)
    assert found.reason == reason
    assert asked[-1] == (failing or (0, True, 8))


def test_rows_come_in_order(monkeypatch):
    monkeypatch.setattr(rows, "row", lambda target, call, kernel: (call.name, kernel.name))
    calls, kernels = (
        [ModelCall(name, {}) for name in "ab"],
        [ComparedKernel(name, refuse) for name in "xy"],
    )
    found = list(rows.rows(HERE, calls, kernels, workers=3))
    assert found == [("a", "x"), ("a", "y"), ("b", "x"), ("b", "y")]


def shown(*found):
    console = Console(width=150)
    with console.capture() as capture:
        console.print(report.table(AbsentDevices("H1", range(8), 100 * MIB), found))
    return capture.get()


def test_the_table_shows_temporaries_beside_the_plain_ones():
    both, collected = (
        CompiledCost(MIB, MIB, 8 * MIB, seconds=3),
        CompiledCost(MIB, MIB, 9 * MIB, {"all-reduce": 2, "all-gather": 1}),
    )
    plain = (CompiledCost(0, 0, MIB), CompiledCost(reason="odd"))
    text = shown(
        Row("small", "cudnn", CompiledCost(MIB, MIB, 4 * MIB, seconds=2), both, plain, collected),
        Row("small", "reference", CompiledCost(reason="not today")),
        Row("large", "reference", both, CompiledCost(reason="too large")),
    )
    lines = [
        re.split(r"\s*│\s*", line.strip("│ ")) for line in text.splitlines() if line.startswith("│")
    ]
    assert lines[0][:7] == ["small", "cudnn", "4.0", "1.0", "8.0", "-", "10.0%"]
    assert " ".join(" ".join(line) for line in lines).count("2 all-reduce") == 1
    assert lines[0][9] == "5"
    assert "not today" in text
    assert "backward: too" in text
    assert text.count("small") == 1
    assert "8 devices: forward+backward" in text


MASKS = {
    "none": (None, 6, {"is_causal": False}),
    "causal": (Mask.causal(), 8, {"is_causal": True}),
    "window": (Mask.sliding_window(3), 8, {"is_causal": True, "local_window_size": (2, 0)}),
    "lengths": (
        Mask.causal() & Mask.lengths(key=5),
        8,
        {"is_causal": True, "key_value_seq_lengths": 5},
    ),
}


@pytest.mark.parametrize("name", MASKS)
def test_the_plain_kernel_is_called_as_a_user_would(name, monkeypatch):
    mask, t, expected = MASKS[name]
    taken = []
    monkeypatch.setattr(
        jax.nn, "dot_product_attention", lambda q, k, v, **options: taken.append(options) or q
    )
    one = call(mask, t)
    jax.eval_shape(lambda arrays: kernel("cudnn").plain(**arrays), one.arrays)
    options = {
        key: value
        for key, value in taken[0].items()
        if key not in ("scale", "bias", "implementation")
    }
    assert options.pop("key_value_seq_lengths", 5) == 5
    assert options == {
        key: value for key, value in expected.items() if key != "key_value_seq_lengths"
    }
    assert taken[0]["implementation"] == "cudnn"


@pytest.mark.parametrize(
    "mask", [Mask.causal(2), Mask.causal() & Mask.segments(jnp.arange(8) // 3)]
)
def test_a_mask_without_a_name_is_one_array(mask, monkeypatch):
    taken = []
    monkeypatch.setattr(
        jax.nn, "dot_product_attention", lambda q, k, v, **options: taken.append(options) or q
    )
    jax.eval_shape(
        lambda arrays: kernel("reference").plain(**arrays),
        call(mask, 6 if mask == Mask.causal(2) else 8).arrays,
    )
    assert taken[0]["mask"].shape[2:] in ((6, 8), (8, 8))


def test_the_description_is_of_an_h200_and_the_quick_calls_are_of_the_list(monkeypatch):
    devices = SimpleNamespace(devices=list(range(8)))
    monkeypatch.setattr(gpu, "_installed", lambda name: True)
    monkeypatch.setattr(gpu, "load_driver", lambda: None)
    monkeypatch.setattr(gpu.topologies, "get_topology_desc", lambda **options: devices)
    monkeypatch.setattr(jax.config, "update", lambda name, value: None)
    monkeypatch.setenv("XLA_FLAGS", "--xla_one=1")
    (target,) = of_gpu.targets()
    assert (target.name, len(target.devices), target.memory) == ("H200", 8, 151_397_597_184)
    assert gpu.os.environ["XLA_FLAGS"].startswith("--xla_one=1 --xla_gpu_cudnn_deviceless")
    assert 0 < len(of_gpu.QUICK_CALLS) < len(of_gpu.CALLS)


def test_what_is_missing_is_named(monkeypatch):
    monkeypatch.setattr(gpu, "_installed", lambda name: name != "tokamax")
    with pytest.raises(ImportError, match=r"needs tokamax, not a GPU, .* pip install 'flax-attn"):
        next(of_gpu.targets())


def missing(name, mode):
    raise OSError(name)


def test_without_a_driver_a_compiler_is_needed(monkeypatch):
    monkeypatch.setattr(gpu.ctypes, "CDLL", missing)
    monkeypatch.setattr(gpu.shutil, "which", lambda name: None)
    with pytest.raises(ImportError, match=r"needs a C compiler \(cc, gcc or clang"):
        gpu.load_driver()


@pytest.mark.skipif(gpu.shutil.which("cc") is None, reason="needs a C compiler")
def test_the_library_in_the_place_of_the_driver_has_no_gpu():
    """In a process of its own: what is loaded stays."""
    code = """
import ctypes
from flax_attn.aot import gpu
real, loaded = ctypes.CDLL, []
def load(name, mode):
    if name == "libcuda.so.1":
        raise OSError(name)
    loaded.append(real(name, mode))
gpu.ctypes.CDLL = load
gpu.load_driver()
print(loaded[0].cuLibraryLoadData(), loaded[0].cuLaunchKernelEx())
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.split() == ["3", "3"]


@pytest.mark.parametrize(
    ("platform", "module", "message"),
    [
        ("tpu", "flax_attn.aot.tpu", r"pip install 'jax\[tpu\]'"),
        ("gpu", "flax_attn.aot.gpu", "needs jax_cuda13_plugin, tokamax, nvidia.cudnn, nvidia.cu13"),
    ],
)
def test_the_command_says_what_to_install_in_one_line(platform, module, message, monkeypatch):
    monkeypatch.setattr(f"{module}.find_spec", lambda name: None)
    with pytest.raises(SystemExit, match=message):
        main([platform])


def test_the_command_prints_a_table_for_each_device(monkeypatch, capsys):
    monkeypatch.setattr(
        "tools.aot.__main__.tables",
        lambda platform, quick: [Table("a table", title=f"{platform} {quick}")],
    )
    main(["gpu", "--quick"])
    assert "gpu True" in capsys.readouterr().out


def test_launches_of_a_loop_count_as_often_as_it_turns():
    text = """
%body (p: (s32[], f32[2])) -> (s32[], f32[2]) {
  %p = (s32[], f32[2]) parameter(0)
  %x = f32[2] get-tuple-element(%p), index=1
  %y = f32[2] custom-call(%x), custom_call_target="__gpu$xla.gpu.triton"
}
%condition (p: (s32[], f32[2])) -> pred[] {
  %q = (s32[], f32[2]) parameter(0)
}
ENTRY %main (p: f32[2]) -> f32[2] {
  %a = f32[2] parameter(0)
  %b = f32[2] copy-start(%a)
  %c = f32[2] copy-done(%b)
  %t = (s32[], f32[2]) tuple(%c)
  %w = (s32[], f32[2]) while(%t), condition=%condition, body=%body, \
backend_config={"known_trip_count":{"n":"5"}}
}
"""
    program = read(text)
    assert launches(program) == 6
    assert custom_calls(program, "triton") == 5


def test_the_table_of_models_has_a_column_for_each_chip():
    kernel = Assembled("attention_forward", 168, 8, 40 * 1024, 64)
    one = models.CompiledCall("a100", "small", 1, 4, MIB)
    both = models.CompiledCall("a100", "small", 3, 9, 2 * MIB, (kernel,))
    wrong = models.CompiledCall("h200", "small", reason="not today")
    text = models.markdown([(one, both), (wrong, wrong)])
    cell = "1 of 4, 3 of 9<br>1.0, 2.0<br>168<br>8<br>40<br>64"
    assert text.splitlines()[0] == "| call | a100 | h200 |"
    assert text.splitlines()[2] == f"| small | {cell} | not today |"


def test_the_table_of_masks_has_the_figures_of_each_call(monkeypatch):
    monkeypatch.setattr("tools.aot.masks.gpu.described", lambda count: nullcontext(HERE.devices))
    calls = [call(Mask.causal(0))]
    heading, _, line = masks.table(calls, "reference")
    assert heading == "| mask | forward | forward+backward |"
    assert re.fullmatch(r"\| small \| \d+ in \d+ MiB \| \d+ in \d+ MiB \|", line)
    one = masks.figures(HERE, forward(calls[0], "reference"), (calls[0].arrays,))
    assert f"| small | {one.launches} in 0 MiB |" in line


def test_masks_are_compiled_for_a_gpu_alone(capsys):
    with pytest.raises(SystemExit):
        main(["tpu", "--masks"])
    assert "--masks compiles for an H200; got platform 'tpu'" in capsys.readouterr().err
