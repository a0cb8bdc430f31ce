import jax
import jax.numpy as jnp
import pytest

from flax_attn.plan.hlo import Shape, read

TEXT = """
HloModule jit_f, is_scheduled=true

%below_seven (state: (s32[], f32[4])) -> pred[] {
  %limit = s32[]{:T(128)} constant(7)
  %state = (s32[]{:T(128)}, f32[4]{0:T(128)S(1)}) parameter(0)
  %count = s32[]{:T(128)} get-tuple-element(%state), index=0
  ROOT %less = pred[]{:T(512)} compare(%count, %limit), direction=LT
}

%unknown (state.1: (s32[], f32[4])) -> pred[] {
  %state.1 = (s32[], f32[4]) parameter(0)
  %count.1 = s32[] get-tuple-element(%state.1), index=0
  ROOT %less.1 = pred[] compare(%count.1, %count.1), direction=LT
}

%turn (state.2: (s32[], f32[4])) -> (s32[], f32[4]) {
  %state.2 = (s32[], f32[4]) parameter(0)
  %count.2 = s32[] get-tuple-element(%state.2), index=0
  %two = s32[] constant(2)
  %next = s32[] add(%count.2, %two)
  %value = f32[4] custom-call(%state.2), custom_call_target="turn"
  ROOT %again = (s32[], f32[4]) tuple(%next, %value)
}

%outer (state.3: (s32[], f32[4])) -> (s32[], f32[4]) {
  %state.3 = (s32[], f32[4]) parameter(0)
  ROOT %inner = (s32[], f32[4]) while(%state.3), condition=%below_seven, body=%turn
}

ENTRY %main (x: (s32[], f32[4])) -> (s32[], f32[4]) {
  %x = (s32[], f32[4]) parameter(0)
  %known = (s32[], f32[4]) while(%x), condition=%unknown, body=%outer, \
backend_config={"known_trip_count":{"n":"3"}}
  ROOT %end = (s32[], f32[4]) while(%known), condition=%unknown, body=%turn
}
"""


def times(program, opcode):
    return [run.times for run in program.runs() if run.instruction.opcode == opcode]


def test_loops_run_as_often_as_xla_says_or_their_condition():
    program = read(TEXT)
    assert times(program, "custom-call") == [3 * 4, 1]  # 0, 2, 4 and 6 are below 7
    assert program.endless == 1


@pytest.mark.parametrize(
    "change",
    [
        ("direction=LT", "direction=NE"),
        ("add(%count.2, %two)", "multiply(%count.2, %two)"),
        ("add(%count.2, %two)", "add(%count.2, %count.2)"),
        ("constant(7)", "parameter(1)"),
        ("tuple(%next, %value)", "custom-call(%next, %value)"),
    ],
)
def test_loops_that_count_otherwise_are_not_known(change):
    assert read(TEXT.replace(*change)).endless > read(TEXT).endless


def test_shapes_have_their_dtype_sizes_and_memory():
    state = read(TEXT).computations["below_seven"]["state"]
    assert state.shapes == (Shape("s32", ()), Shape("f32", (4,), 1))
    assert [
        Shape(dtype, (3, 5)).bytes for dtype in ("f32", "bf16", "f8e4m3fn", "s4", "pred", "token")
    ] == [*(60, 30, 15, 8, 15, 0)]


def test_layers_of_a_scan_are_counted_one_by_one():
    def twice(x, w):
        return jax.lax.scan(lambda y, w: (jnp.tanh(y @ w), None), x, w)[0]

    x, w = jax.ShapeDtypeStruct((3, 5), "float32"), jax.ShapeDtypeStruct((11, 5, 5), "float32")
    text = jax.jit(twice).lower(x, w).compile().as_text()
    assert sum(times(read(text), "dot")) == 11
    assert read(text).endless == 0


def test_a_text_that_ends_too_early_is_refused():
    with pytest.raises(
        ValueError, match=r"a parenthesis that is not closed; got '\(f32.*Pass a whole program"
    ):
        read("ENTRY %main (x: f32[]) -> (f32[]) {\n  ROOT %y = (f32[]")
