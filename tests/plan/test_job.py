import jax
import pytest

from flax_attn.models import GPT2
from flax_attn.models.mixtral import Mixtral, MixtralConfig
from flax_attn.models.smollm3 import SmolLM3, SmolLM3Config
from flax_attn.plan.job import Job, parse_mesh, parse_rules
from flax_attn.plan.models import MODELS, LibraryModel, find_decoder
from flax_attn.plan.topology import simulated, topology

MIXTRAL = LibraryModel(Mixtral, MixtralConfig(32, 48, num_heads=4, num_layers=2, num_experts=4))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"mesh": {"data": 2, "fsdp": 3}},
            r"must multiply to the 8 devices of cpu:8; got data=2 \* fsdp=3 = 6. Change",
        ),
        (
            {"mesh": {"data": 8, "model": 1}},
            "mesh are context, data, expert, fsdp, tensor; got model. Name it",
        ),
        ({"mesh": {"data": 8, "tensor": 0}}, "tensor must be a positive integer; got tensor=0"),
        (
            {"batch": 6},
            (
                r"the batch must be divisible by data=2 \* fsdp=2 of the mesh; got 6. Change"
                r" --batch or --mesh"
            ),
        ),
        (
            {"mesh": {"context": 8}, "tokens": 12},
            (
                "the tokens of a sequence must be divisible by context=8 of the mesh; got 12."
                " Change --tokens or --mesh"
            ),
        ),
        (
            {"mesh": {"tensor": 8}},
            "the query heads must be divisible by tensor=8 of the mesh; got 4. Change --mesh$",
        ),
        (
            {"mesh": {"expert": 8}, "model": MIXTRAL},
            "the experts must be divisible by expert=8 of the mesh; got 4. Change --mesh$",
        ),
    ],
)
def test_what_does_not_divide_is_refused(job, options, message):
    with pytest.raises(ValueError, match=message):
        job(**options)


def test_a_model_with_an_embedding_for_each_position_takes_no_more_tokens():
    name, model = find_decoder("gpt2")
    assert model.cls is GPT2
    with pytest.raises(
        ValueError,
        match=r"gpt2 has an embedding for each of 1024 positions; got 2048 tokens. Plan 1024",
    ):
        Job(name, model, topology("cpu:1"), {"data": 1}, 1, 2048)


def test_rotary_positions_take_more_tokens_than_the_config_says(job):
    assert job(tokens=128).model.config.context_length == 64


def test_models_are_named_or_read_from_a_folder(folder):
    name, model = find_decoder(str(folder))
    assert (name, model.config.num_kv_heads) == ("small", 2)
    assert MODELS["llama3-8b"].config.rope.base == 500000.0
    with pytest.raises(
        ValueError,
        match=r"a model is one of gpt2, .*, a folder with a config.json, or .*; got 'llama9'",
    ):
        find_decoder("llama9")


@pytest.mark.parametrize("text", ["data", "data=x", "data=2,data=2", "", "data=2;fsdp=4"])
def test_a_mesh_is_written_as_axes_and_sizes(text):
    with pytest.raises(
        ValueError,
        match=r"a mesh is written as its axes and their sizes, each axis once; got .* Write",
    ):
        parse_mesh(text)


def test_what_is_no_decoder_is_refused_with_those_that_are(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "vit"}')
    with pytest.raises(
        ValueError,
        match=r"plans are made for decoders; .* holds a ViT. Pass one of GPT2, .*DeepseekV3",
    ):
        find_decoder(str(tmp_path))


def test_the_first_layers_are_planned_alone():
    config = SmolLM3Config(8, 12, 4, 6, window=3, full_layers=(1, 5), unrotated_layers=(0, 3))
    model = LibraryModel(SmolLM3, config)
    found = model.first_layers(3).config
    assert (found.num_layers, found.full_layers, found.unrotated_layers) == (3, (1,), (0,))
    assert model.first_layers(None) is model
    with pytest.raises(
        ValueError, match=r"the model has 6 layers; got layers=7. Pass as many at most"
    ):
        model.first_layers(7)


def test_a_rule_is_written_as_a_name_and_axes():
    with pytest.raises(
        ValueError,
        match=r"a rule is written as the name .* got 'embed'. Write for example embed=fsdp",
    ):
        parse_rules(["embed"])


def test_a_rule_of_an_axis_that_is_not_known_is_refused(job):
    with pytest.raises(ValueError, match=r"the names of axes are .*; got width"):
        job(rules={"width": ("fsdp",)})


@pytest.mark.parametrize(
    ("sold", "written"),
    [
        ("v5e-8", "v5e:2x4"),
        ("v6e-256", "v6e:16x16"),
        ("v5p-8", "v5p:2x2x1"),
        ("v5p-128", "v5p:4x4x4"),
        ("v5p-256", "v5p:4x4x8"),
        ("h200-8", "h200:8"),
    ],
)
def test_the_name_that_chips_are_sold_under_is_answered_with_the_topology(sold, written):
    with pytest.raises(ValueError, match=rf"got '{sold}'\. Write it as {written}$"):
        topology(sold)
    topology(written)


@pytest.mark.parametrize(
    "text", ["v5e-6", "v5p-1", "v9:2x2", "v5e", "v5e:", "v5e:4x", "v5e:0x4", "16x16"]
)
def test_a_topology_that_is_not_known_is_refused(text):
    known = "v5e, v5p, v6e, tpu7x, h200, cpu"
    with pytest.raises(
        ValueError,
        match=f"a topology is one of {known} and the number .* got '{text}'. Write it as",
    ):
        topology(text)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("v5e:4", "chips of v5e are counted along 2 dimensions; got 'v5e:4'"),
        ("v5p:16x16", "chips of v5p are counted along 3 dimensions; got"),
        (
            "h200:16",
            "chips of h200 are counted along 1 dimensions, 8 at most; got 'h200:16'. Write",
        ),
    ],
)
def test_a_topology_of_another_shape_is_refused(text, message):
    with pytest.raises(ValueError, match=message):
        topology(text)


def test_devices_are_counted_as_jax_does():
    sizes = {
        "v5e:16x16": 256,
        "v6e:2x2": 4,
        "v5p:4x4x4": 64,
        "tpu7x:4x4x4": 128,
        "h200:8": 8,
        "cpu:8": 8,
    }
    assert {name: topology(name).size for name in sizes} == sizes


def test_more_devices_than_are_simulated_are_refused():
    jax.devices()  # starts JAX
    with pytest.raises(
        ValueError,
        match=r"cpu:9 needs 9 simulated devices; JAX has started with 8. Call jax.config",
    ):
        simulated(9)


def test_other_errors_of_libtpu_are_raised(monkeypatch):
    def fail(name):
        raise jax.errors.JaxRuntimeError("ABORTED: in use")

    monkeypatch.setattr("flax_attn.aot.tpu.described", fail)
    with pytest.raises(jax.errors.JaxRuntimeError, match="ABORTED"), topology("v5e:4x4").devices():
        pass


def test_what_libtpu_does_not_describe_is_refused(monkeypatch):
    def refuse(name):
        raise jax.errors.JaxRuntimeError("INVALID_ARGUMENT: no such layout\nat line 3")

    monkeypatch.setattr("flax_attn.aot.tpu.described", refuse)
    with (
        pytest.raises(
            ValueError,
            match=r"no topology 'v5e:3x5': INVALID_ARGUMENT: no such layout. Ask for one of",
        ),
        topology("v5e:3x5").devices(),
    ):
        pass
