"""A field that config.json leaves out means what transformers takes for it."""

import json
from dataclasses import replace

import pytest
from transformers import AutoConfig

from attn_spec.hugging_face.fields import read_fields
from flax_attn.models.hugging_face.folder import read_config
from flax_attn.models.registry import FAMILIES
from parity_tests.models.folders import fields_of

# Each class, and each kind of file that it reads.
KINDS = {f"{cls.__name__}-{kind}": (cls, kind) for cls in FAMILIES for kind in cls.family.read}
CHOOSE_THE_CLASS = {"model_type", "architectures"}


def read(cls, kind, fields, folder):
    """Return the config that a file of these fields stands for, and the names that were read."""
    (folder / "config.json").write_text(json.dumps(fields))
    found = read_fields(folder)
    return spelt_out(cls.family.read[kind](found, None)), found.used


def spelt_out(config):
    """Return a config with numbers for None, where None stands for one that follows."""
    numbers = {}
    if getattr(config, "num_kv_heads", 0) is None:
        numbers["num_kv_heads"] = config.num_heads
    if getattr(config, "head_dim", 0) is None:
        numbers["head_dim"] = config.d_model // config.num_heads
    return replace(config, **numbers)


def filled(folder):
    """Return the fields of a file with those that transformers fills in."""
    AutoConfig.from_pretrained(folder).save_pretrained(folder / "filled")
    return fields_of(folder / "filled")


def default_fields(cls, kind, folder):
    config = AutoConfig.for_model(kind)
    config.architectures = [cls.family.architecture]
    config.save_pretrained(folder)
    return fields_of(folder)


def is_required(cls, kind, left, field, folder):
    try:
        read(cls, kind, left, folder)
    except ValueError as error:
        return f"lacks the field {field}" in str(error)
    return False


def both_readings(cls, kind, left, folder):
    """Return the config that we read of a file, and the one with the fields of transformers."""
    ours, _ = read(cls, kind, left, folder)
    theirs, _ = read(cls, kind, filled(folder), folder)
    return ours, theirs


def read_with_one_left_out(cls, kind, folder):
    """Yield each field that a file need not have, and both readings without it."""
    fields = default_fields(cls, kind, folder)
    _, used = read(cls, kind, fields, folder)
    for field in sorted(used & fields.keys() - CHOOSE_THE_CLASS):
        left = {name: value for name, value in fields.items() if name != field}
        # Sizes have no value that a file could mean: transformers would make up a model.
        if not is_required(cls, kind, left, field, folder):
            yield field, both_readings(cls, kind, left, folder)


@pytest.mark.parametrize("name", KINDS)
def test_a_field_that_is_left_out_has_the_value_of_transformers(name, tmp_path):
    compared = dict(read_with_one_left_out(*KINDS[name], tmp_path))
    assert len(compared) > 5
    assert {field: pair for field, pair in compared.items() if pair[0] != pair[1]} == {}


@pytest.mark.parametrize("name", KINDS)
def test_no_field_of_transformers_is_taken_for_a_misspelt_one(name, tmp_path):
    cls, kind = KINDS[name]
    default_fields(cls, kind, tmp_path)
    fields = read_fields(tmp_path)
    read_config(cls, cls.family, fields, 0.0)
    # There are some that are not read.
    assert fields.values.keys() - fields.used
