import jax
import jax.numpy as jnp
import pytest

from flax_attn.plan import cost
from flax_attn.plan.hlo import read


def compiled(function, *shapes):
    arguments = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    program = jax.jit(function).lower(*arguments).compile()
    return read(program.as_text()), program.cost_analysis()


def convolved(**options):
    # As TPUs write products: XLA itself is asked for the same on a CPU.
    return lambda x, w: jax.lax.conv_general_dilated(x, w, **options)


NAMES = ("NHC", "HIO", "NHC")


@pytest.mark.parametrize(
    ("function", "shapes"),
    [
        (lambda x, w: x @ w, [(6, 5), (5, 7)]),
        (lambda x, w: jnp.einsum("btnh,bsnh->bnts", x, w), [(2, 3, 4, 5), (2, 7, 4, 5)]),
        (
            convolved(window_strides=(2,), padding=[(2, 1)], dimension_numbers=NAMES),
            [(2, 9, 3), (4, 3, 5)],
        ),
        (
            convolved(window_strides=(1,), padding=[(7, 7)], dimension_numbers=NAMES),
            [(2, 1, 3), (8, 3, 5)],
        ),
        (
            convolved(
                window_strides=(3,), padding=[(0, 0)], lhs_dilation=(4,), dimension_numbers=NAMES
            ),
            [(2, 4, 3), (4, 3, 5)],
        ),
        (
            convolved(
                window_strides=(1,), padding=[(1, 2)], rhs_dilation=(2,), dimension_numbers=NAMES
            ),
            [(2, 9, 3), (4, 3, 5)],
        ),
    ],
    ids=["product", "batches", "strides", "heads as a window", "batches as a window", "gaps"],
)
def test_operations_are_those_that_xla_counts(function, shapes):
    program, known = compiled(function, *shapes)
    assert cost.flops(program) == known["flops"] > 0


def test_the_operations_of_loops_are_those_of_all_turns():
    program, known = compiled(
        lambda x, w: jax.lax.fori_loop(0, 9, lambda _, x: x @ w, x), (6, 5), (5, 5)
    )
    assert cost.flops(program) == 9 * 2 * 6 * 5 * 5
    assert known["flops"] < cost.flops(program)  # XLA counts one turn


def test_bytes_moved_are_those_that_xla_counts():
    program, known = compiled(lambda x, w: jnp.tanh(x @ w), (64, 50), (50, 70))
    assert cost.moved(program) == known["bytes accessed"]


def test_of_stacked_parameters_a_turn_reads_one_layer():
    layers = jax.ShapeDtypeStruct((20, 64, 64), jnp.float32)
    x = jax.ShapeDtypeStruct((8, 64), jnp.float32)
    run = jax.jit(lambda x, layers: jax.lax.scan(lambda y, w: (y @ w, None), x, layers)[0])
    program = read(run.lower(x, layers).compile().as_text())
    assert 1 <= cost.moved(program) / (4 * 20 * 64 * 64) < 4


CUBLAS = """
ENTRY %main (x: bf16[6,5], y: bf16[5,7]) -> (bf16[6,7], s8[1024]) {
  %x = bf16[6,5]{1,0} parameter(0)
  %y = bf16[5,7]{1,0} parameter(1)
  ROOT %z = (bf16[6,7]{1,0}, s8[1024]{0}) custom-call(%x, %y), \
custom_call_target="__cublas$gemm", CONFIG
}
"""
CONFIG = (
    'backend_config={"gemm_backend_config":{"dot_dimension_numbers":'
    '{"lhs_contracting_dimensions":["1"]}}}'
)


def test_products_of_cublas_are_counted():
    assert cost.flops(read(CUBLAS.replace("CONFIG", CONFIG))) == 2 * 6 * 5 * 7


@pytest.mark.parametrize(
    ("target", "found"),
    [
        ("tpu_custom_call", True),
        ("__cudnn$fmhaSoftmax", True),
        ("__cublas$gemm", False),
        ("AllocateBuffer", False),
    ],
)
def test_kernels_that_do_not_say_what_they_compute_are_seen(target, found):
    text = CUBLAS.replace("CONFIG", CONFIG).replace("__cublas$gemm", target)
    assert cost.has_kernels(read(text)) is found


TPU = """
%part (param_0: bf16[32,256,4096], param_1: s32[]) -> bf16[256,4096] {
  %param_0 = bf16[32,256,4096]{2,1,0} parameter(0)
  %param_1 = s32[] parameter(1)
  ROOT %slice = bf16[1,256,4096]{2,1,0} dynamic-slice(%param_0, %param_1), \
dynamic_slice_sizes={1,256,4096}
}

%product (param_5: bf16[32,256,4096], param_6: s32[]) -> bf16[256,4096] {
  %param_5 = bf16[32,256,4096]{2,1,0} parameter(0)
  %param_6 = s32[] parameter(1)
  %inner = bf16[1,256,4096]{2,1,0} fusion(%param_5, %param_6), kind=kLoop, calls=%part
  ROOT %twice = bf16[1,256,4096]{2,1,0} add(%inner, %inner)
}

%stored (param_2: f32[4,8], param_3: f32[1,8], param_4: s32[]) -> f32[4,8] {
  %param_2 = f32[4,8]{1,0} parameter(0)
  %param_3 = f32[1,8]{1,0} parameter(1)
  %param_4 = s32[] parameter(2)
  ROOT %update = f32[4,8]{1,0} dynamic-update-slice(%param_2, %param_3, %param_4, %param_4)
}

ENTRY %main (x: bf16[32,256,4096], i: s32[], y: f32[4,8], z: f32[1,8]) -> f32[4,8] {
  %x = bf16[32,256,4096]{2,1,0} parameter(0)
  %i = s32[] parameter(1)
  %y = f32[4,8]{1,0} parameter(2)
  %z = f32[1,8]{1,0} parameter(3)
  LINE
}
"""


@pytest.mark.parametrize(
    ("line", "moved"),
    [
        (
            "%a = bf16[1,256,4096]{2,1,0:S(1)} fusion(%x, %i), kind=kLoop, calls=%part",
            2 * 256 * 4096 + 4,
        ),
        (
            "%a = bf16[1,256,4096]{2,1,0:S(1)} fusion(%x, %i), kind=kOutput, calls=%product",
            2 * 256 * 4096 + 4,
        ),
        ("%a = f32[4,8]{1,0} fusion(%y, %z, %i), kind=kLoop, calls=%stored", 2 * 32 + 4),
        ("%a = f32[4,8]{1,0} dynamic-update-slice(%y, %z, %i, %i)", 2 * 32),
        ("%a = f32[4,8]{1,0} add(%y, %y)", 3 * 128),
        ("%a = (f32[4,8]{1,0:S(1)}, f32[4,8]{1,0}, u32[]{:S(2)}) copy-start(%y)", 128),
        (
            (
                "%a = ((f32[4,8]{1,0}), f32[2,8]{1,0:S(1)}, s32[]{:S(2)}) slice-start(%y),"
                " slice={[0:2], [0:8]}"
            ),
            64,
        ),
        ('%a = f32[4,8]{1,0} custom-call(), custom_call_target="AllocateBuffer"', 0),
        ("%a = f32[4,8]{1,0} bitcast(%y)", 0),
    ],
)
def test_bytes_moved_by_what_tpus_run(line, moved):
    assert cost.moved(read(TPU.replace("LINE", line))) == moved
