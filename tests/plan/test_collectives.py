from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

from flax_attn.plan import cost
from flax_attn.plan.collectives import Collective, collectives
from flax_attn.plan.hlo import read

MESH = {"data": 2, "fsdp": 2, "tensor": 2}
LINE = """
ENTRY %main (x: f32[6]) -> f32[6] {{
  %x = f32[6]{{0}} parameter(0)
  ROOT %y = f32[6]{{0}} {kind}(%x), channel_id=1, {groups}, to_apply=%add
}}
"""


def found(kind, groups):
    return collectives(read(LINE.format(kind=kind, groups=groups)), MESH)


@pytest.mark.parametrize(
    ("groups", "axes"),
    [
        ("replica_groups={{0,1},{2,3},{4,5},{6,7}}", ("tensor",)),
        ("replica_groups={{0,2,4,6},{1,3,5,7}}", ("data", "fsdp")),
        ("replica_groups={}", ("data", "fsdp", "tensor")),
        ("replica_groups=[4,2]<=[8]", ("tensor",)),
        ("replica_groups=[2,4]<=[4,2]T(1,0)", ("data", "fsdp")),
        ("replica_groups=[4,2]<=[2,2,2]T(0,2,1)", ("fsdp",)),
        ("replica_groups=mesh['axis_0'=4,'axis_1'=2] {'axis_0'}", ("data", "fsdp")),
        ("replica_groups=mesh['axis_0'=4,'axis_1'=2] {'axis_0':(2)2}", ("fsdp",)),
        (
            "replica_groups=mesh['axis_0'=4,'axis_1'=2] {'axis_0':(1)2, 'axis_1'}",
            ("data", "tensor"),
        ),
    ],
)
def test_groups_are_read_as_axes(groups, axes):
    (row,) = found("all-reduce", groups)
    size = 2 ** len(axes)
    assert row == Collective("all-reduce", axes, 1, 24 * 2 * (size - 1) // size)


@pytest.mark.parametrize(
    ("kind", "sent"),
    [
        ("all-reduce-start", 2 * 24 * 3 // 4),
        ("all-gather", 24 * 3),
        ("reduce-scatter", 24 * 3 // 4),
        ("all-to-all", 24 * 3 // 4),
    ],
)
def test_each_kind_sends_what_a_ring_does(kind, sent):
    (row,) = found(kind, "replica_groups=[2,4]<=[8]")
    assert (row.kind, row.bytes) == (kind.removesuffix("-start"), sent)


def test_a_permutation_sends_its_operand():
    assert found("collective-permute", "source_target_pairs={{0,1},{1,0},{2,3},{3,2}}") == [
        Collective("collective-permute", ("tensor",), 1, 24)
    ]


def test_a_collective_of_one_device_sends_nothing():
    assert found("all-reduce", "replica_groups=[8,1]<=[8]") == []


def test_what_a_program_of_eight_devices_sends():
    mesh = Mesh(np.array(jax.devices()[:8]).reshape(2, 2, 2), tuple(MESH))

    @jax.jit
    @partial(
        jax.shard_map,
        mesh=mesh,
        in_specs=PartitionSpec("fsdp"),
        out_specs=PartitionSpec(),
        check_vma=False,
    )
    def run(x):
        def layer(y, _):
            y = jax.lax.ppermute(y, "tensor", [(0, 1), (1, 0)])
            return jax.lax.psum(y, ("data", "tensor")), None

        y, _ = jax.lax.scan(layer, x, length=5)
        return jax.lax.all_gather(y, "fsdp", tiled=True)

    text = run.lower(jax.ShapeDtypeStruct((6, 7), jnp.float32)).compile().as_text()
    part = 4 * 3 * 7
    assert sorted(collectives(read(text), MESH), key=lambda row: row.kind) == [
        Collective("all-gather", ("fsdp",), 1, part),
        Collective("all-reduce", ("data", "tensor"), 5, 5 * 2 * part * 3 // 4),
        Collective("collective-permute", ("tensor",), 5, 5 * part),
    ]


SPREAD = """
%start (p: f32[6]) -> f32[12] {
  %p = f32[6]{0} parameter(0)
  ROOT %begun = f32[12]{0} all-gather(%p), channel_id=7, replica_groups=[4,2]<=[8], dimensions={0}
}

%meanwhile (q: f32[6], r: f32[3,3], s: f32[12]) -> (f32[3,3], f32[12]) {
  %q = f32[6]{0} parameter(0)
  %r = f32[3,3]{1,0} parameter(1)
  %s = f32[12]{0} parameter(2)
  %square = f32[3,3]{1,0} dot(%r, %r), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  %sum = f32[12]{0} add(%s, %s)
  %goes_on = f32[12]{0} all-gather(%q), channel_id=7, replica_groups=[4,2]<=[8], dimensions={0}
  ROOT %both = (f32[3,3]{1,0}, f32[12]{0}) tuple(%square, %goes_on)
}

%body (state: (s32[], f32[6])) -> (s32[], f32[6]) {
  %state = (s32[], f32[6]) parameter(0)
  %x.1 = f32[6]{0} get-tuple-element(%state), index=1
  %y.1 = f32[3,3]{1,0} custom-call(), custom_call_target="AllocateBuffer"
  %z.1 = f32[12]{0} custom-call(), custom_call_target="AllocateBuffer"
  %part = (f32[3,3]{1,0}, f32[12]{0}) fusion(%x.1, %y.1, %z.1), kind=kOutput, \
calls=%meanwhile, ALIASES
  ROOT %next = (s32[], f32[6]) tuple(%state, %x.1)
}

%condition (state.1: (s32[], f32[6])) -> pred[] {
  ROOT %state.1 = (s32[], f32[6]) parameter(0)
}

ENTRY %main (x: (s32[], f32[6])) -> (s32[], f32[6]) {
  %x = (s32[], f32[6]) parameter(0)
  %w = f32[6]{0} get-tuple-element(%x), index=1
  %start.1 = f32[12]{0} fusion(%w), kind=kCustom, calls=%start
  ROOT %loop = (s32[], f32[6]) while(%x), condition=%condition, body=%body, \
"known_trip_count":{"n":"9"}
}
"""


def test_a_collective_that_goes_on_during_products_is_counted_once():
    assert collectives(read(SPREAD), MESH) == [Collective("all-gather", ("tensor",), 1, 24)]


@pytest.mark.parametrize("call", ["call", "call-start"])
def test_a_collective_that_another_core_runs_is_counted(call):
    text = """
%called (p: f32[6]) -> f32[12] {
  %p = f32[6]{0} parameter(0)
  ROOT %gathered = f32[12]{0} all-gather(%p), channel_id=7, \
replica_groups=[4,2]<=[8], dimensions={0}
}
ENTRY %main (x: f32[6]) -> f32[12] {
  %x = f32[6]{0} parameter(0)
  %y = ((f32[6]{0}), f32[12]{0}) CALL(%x), async_execution_thread="sparsecore", to_apply=%called
  ROOT %z = f32[12]{0} call-done(%y)
}
"""
    program = read(text.replace("CALL", call))
    assert collectives(program, MESH) == [Collective("all-gather", ("tensor",), 1, 24)]
    assert cost.moved(program) == 24 + 48


def test_products_move_none_of_the_buffers_of_a_collective_that_goes_on_meanwhile():
    moved = [
        cost.moved(read(SPREAD.replace("ALIASES", text)))
        for text in (
            "output_to_operand_aliasing={{0}: (9, {})}",
            "output_to_operand_aliasing={{1}: (2, {}), {0}: (9, {})}",
        )
    ]
    assert moved[0] - moved[1] == 9 * 2 * 48
