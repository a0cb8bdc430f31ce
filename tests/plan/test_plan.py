import json
from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from flax_attn.backends.chips import CHIPS
from flax_attn.models import GPT2, GPT2Config
from flax_attn.modules.work import Work
from flax_attn.plan import phases, report
from flax_attn.plan.collectives import Collective
from flax_attn.plan.estimate import changes
from flax_attn.plan.models import LibraryModel
from flax_attn.plan.phases import Phase
from flax_attn.plan.placement import Held, held_bytes, model_on
from flax_attn.plan.plan import Plan, plan
from flax_attn.plan.topology import topology

KERNELS = 3 * (32 * 32 * 2 + 32 * 16 * 2 + 3 * 32 * 48)  # of the layers
HEAD, NORMS = 32 * 56, 7 * 32
ONE = {"data": 1}

pytestmark = pytest.mark.usefixtures("dtype_promotion")


def test_parameters_and_state_are_divided_as_the_mesh_says(job):
    kernels = (KERNELS + 2 * HEAD) // 4  # fsdp * tensor
    found = held_bytes(job())
    assert found.gradients == 2 * (kernels + NORMS)  # norms are on every device
    # Copies and two moments in float32, and two counts.
    assert found.optimizer == 3 * 2 * found.gradients + 4 + 4
    assert found.cache == 0
    assert found.total == found.parameters + found.optimizer


def test_parameters_are_divided_as_rules_say(job, no_shape_checks):
    mesh = {"fsdp": 2, "context": 2, "tensor": 2}
    found = plan(job(mesh, rules={"embed": ("fsdp", "context")}))
    assert found.held.gradients == 2 * ((KERNELS + 2 * HEAD) // 8 + NORMS)
    assert found.phases[0].arguments == found.held.total + 4 * 4 * 8
    assert "embed over fsdp, context" in report.title(found)


def test_the_cache_is_divided_by_batch_heads_and_tokens(job):
    whole = held_bytes(job(ONE, name="cpu:1", train=False)).cache
    assert whole == 2 * 3 * 8 * 2 * 16 * 8 * 2 + 3 * 0 + 4 * 8
    mesh = {"data": 2, "tensor": 2, "context": 2}
    assert held_bytes(job(mesh, train=False)).cache == (whole - 4 * 8) // 8 + 4 * 8


def test_a_training_step_is_compiled_as_it_is_run(job):
    found = plan(job(dtype="float32"))
    (phase,) = found.phases
    assert phase.arguments == found.held.total + 4 * 2 * 16  # and the tokens, 2 of 8 sequences
    assert phase.peak >= found.held.total + found.held.gradients
    assert phase.work == 3 * 8 * (2 * (KERNELS + HEAD) * 16 + 3 * 4 * 32 * 16 * 17 // 2) // 8
    assert 0.9 * phase.work < phase.flops < 3 * phase.work
    assert {row.kind for row in phase.collectives} & {"all-gather", "all-reduce"}
    assert phase.moved > found.held.total
    assert found.fits is None
    assert not found.changes


def test_generation_is_a_prompt_and_a_token(job):
    found = plan(job(train=False))
    prefill, decode = found.phases
    assert (prefill.name, decode.name) == ("prefill", "decoding step")
    assert prefill.work == 8 * (2 * (KERNELS + HEAD) * 16 + 3 * 4 * 32 * 16 * 17 // 2) // 8
    assert decode.work == 8 * (2 * (KERNELS + HEAD) + 3 * 4 * 32 * 16) // 8
    assert decode.arguments >= found.held.total
    assert prefill.flops > decode.flops > 0


def test_a_window_is_less_work(job):
    from flax_attn.plan import work

    wide = job(ONE, name="cpu:1")
    windowed = replace(wide.model.config, window=5)
    narrow = replace(wide, model=replace(wide.model, config=windowed))
    mesh = jax.sharding.AbstractMesh((1,), ("data",))
    works = [work.prefill(one, model_on(one, mesh)).attention for one in (wide, narrow)]
    seen = [sum(min(i + 1, window) for i in range(16)) for window in (16, 5)]
    assert works[0] - works[1] == 8 * 3 * 4 * 32 * (seen[0] - seen[1])


def test_a_model_with_dropout_and_a_tied_head_is_trained(job):
    config = GPT2Config(24, 3, 2, context_length=16, vocab_size=40)
    one = job({"data": 4, "fsdp": 2}, model=LibraryModel(GPT2, config), dtype="float32")
    (phase,) = plan(one).phases
    kernels = 2 * (4 * 24 * 24 + 2 * 24 * 96) + 24 * 40
    assert phase.work == 3 * (2 * kernels * 16 + 2 * 4 * 24 * 16 * 17 // 2)


def small(job, memory, **options):
    one = job(**options)
    return replace(
        one, topology=replace(one.topology, chip=replace(one.topology.chip, memory=memory))
    )


def test_what_does_not_fit_says_what_would(job):
    one = small(job, 60_000)
    found = changes(
        one, Held(10_000, 40_000, 10_000), Phase("training step", 0, peak=500_000), 60_000
    )
    assert [change.what for change in found][:2] == ["remat", "more fsdp"]
    assert [change.fits for change in found] == [False] * (len(found) - 1) + [True]
    peaks = [change.peak for change in found]
    assert peaks == sorted(peaks, reverse=True)
    assert found[-1].peak <= 60_000
    for change in found:
        assert held_bytes(change.job).total < change.peak
    assert found[-1].job.topology.size > 8
    assert found[1].job.mesh == {"data": 1, "fsdp": 4, "tensor": 2}


def test_remat_comes_first_and_is_not_offered_twice_nor_to_generation(job):
    big = Phase("step", 0, peak=10**6)
    for options in ({"remat": True}, {"train": False}):
        one = small(job, 60_000, **options)
        assert "remat" not in [change.what for change in changes(one, held_bytes(one), big, 60_000)]


def test_what_no_chips_make_fit_ends(job):
    one = small(job, 1)
    found = changes(one, held_bytes(one), Phase("step", 0, peak=10**6), 1)
    assert found
    assert not any(change.fits for change in found)


def test_a_plan_that_does_not_fit_is_shown_with_what_would(job):
    found = plan(small(job, 200_000))
    assert found.fits is False
    assert found.changes
    assert report.verdict(found) == "does not fit, too much by"
    assert [table.title for table in report.tables(found)][
        -1
    ] == "What would fit, estimated; each change with those above it"


@pytest.mark.parametrize(
    ("refusal", "peak"),
    [
        (
            "Ran out of memory in memory space hbm. Used 21.50G of 15.75G hbm. Exceeded by 5.75G.",
            21.5,
        ),
        (
            (
                "Ran out of memory on HBM, the total memory required for HLO temporaries (20.00G)"
                " exceeds available HBM"
            ),
            21.5,
        ),
    ],
)
def test_memory_that_the_compiler_refuses_is_the_peak(job, refusal, peak):
    class Lowered:
        def compile(self):
            raise jax.errors.JaxRuntimeError(f"RESOURCE_EXHAUSTED: {refusal}")

    phase = phases._phase("training step", Lowered, job(), Work(72, 8), round(1.5 * 2**30))
    assert (phase.compiled, phase.peak, phase.work) == (False, round(peak * 2**30), 10)
    found = Plan(small(job, 16 * 2**30), held_bytes(job()), [phase])
    assert found.fits is False
    assert [table.title for table in report.tables(found)] == [None]
    assert phase.times(CHIPS["v5e"]) == {}
    # The compiler keeps some memory for itself.
    assert Plan(small(job, 22 * 2**30), held_bytes(job()), [phase]).fits is False


def test_other_errors_of_the_compiler_are_raised(job):
    class Lowered:
        def compile(self):
            raise jax.errors.JaxRuntimeError("INTERNAL: a bug")

    with pytest.raises(jax.errors.JaxRuntimeError, match="INTERNAL: a bug"):
        phases._phase("training step", Lowered, job(), Work(72, 8), 0)


def test_times_are_amounts_by_published_rates():
    sent = [
        Collective("all-reduce", ("data",), 3, 10**9),
        Collective("all-gather", ("fsdp",), 1, 10**9),
    ]
    phase = Phase(
        "step", work=197 * 10**12, flops=2 * 197 * 10**12, moved=819 * 10**9, collectives=sent
    )
    assert phase.times(CHIPS["v5e"]) == {"compute": 2.0, "memory": 1.0, "links": 0.01}
    assert replace(phase, kernels=197 * 10**12).times(CHIPS["v5e"])["compute"] == 3.0
    assert replace(phase, flops=0, endless=1).times(CHIPS["v5e"])["compute"] == 1.0
    assert phase.times(CHIPS["cpu"]) == {}


def test_loops_that_are_counted_once_are_said(job):
    shown = [
        report.times(Plan(job(), Held(0), []), Phase("step", 0, endless=count)).caption
        for count in (0, 2)
    ]
    assert shown == [
        None,
        "At least: 2 loops run an unknown number of times, and are counted once.",
    ]


def test_everything_is_written_as_json(job):
    found = plan(job({"data": 8}, name="cpu:8"))
    written = json.loads(json.dumps(found.as_dict()))
    assert written["mesh"] == {"data": 8}
    assert written["phases"][0]["collectives"][0]["axes"] == ["data"]


def test_a_line_of_markdown_has_a_cell_for_each_column(job):
    one = replace(job(), topology=replace(topology("cpu:8"), chip=CHIPS["v6e"]))
    phase = Phase("training step", 0, 2**30, 2**30, 3 * 2**30, 918 * 10**12)
    line = report.markdown_row(Plan(one, Held(2**29, 2**29), [phase]))
    assert (
        line.count("|")
        == report.markdown_heading()[0].count("|")
        == report.markdown_heading()[1].count("|")
    )
    assert "3.00 GiB of 32.00 GiB | yes | 1 | 0 | 0 |" in line


def test_the_state_is_that_of_the_real_step(job):
    """What is planned for is what a run has: the same arrays, on one device."""
    one = job(ONE, name="cpu:1", batch=2)
    model = one.build()(nnx.Rngs(0))
    arrays = [
        x
        for x in jax.tree.leaves(nnx.state(model))
        if not jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
    ]
    assert held_bytes(one).parameters == sum(x.nbytes for x in arrays)
