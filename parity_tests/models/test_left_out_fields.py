"""A field that config.json leaves out means what transformers takes for it."""

import json
from dataclasses import replace

import pytest
from transformers import AutoConfig

from attn_spec.hugging_face.fields import read_fields
from flax_attn.models.registry import FAMILIES

# Each class, and each kind of file that it reads.
KINDS = {f"{cls.__name__}-{kind}": (cls, kind) for cls in FAMILIES for kind in cls.family.read}


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
    return json.loads((folder / "filled" / "config.json").read_text())


@pytest.mark.parametrize("name", KINDS)
def test_a_field_that_is_left_out_has_the_value_of_transformers(name, tmp_path):
    cls, kind = KINDS[name]
    config = AutoConfig.for_model(kind)
    config.architectures = [cls.family.architecture]
    config.save_pretrained(tmp_path)
    fields = json.loads((tmp_path / "config.json").read_text())
    _, used = read(cls, kind, fields, tmp_path)
    different, compared = {}, []
    for field in sorted(used & fields.keys() - {"model_type", "architectures"}):
        left = {other: value for other, value in fields.items() if other != field}
        # Sizes have no value that a file could mean: transformers would make up a model.
        if _is_required(cls, kind, left, field, tmp_path):
            continue
        ours, _ = read(cls, kind, left, tmp_path)
        theirs, _ = read(cls, kind, filled(tmp_path), tmp_path)
        compared.append(field)
        if ours != theirs:
            different[field] = ours, theirs
    assert len(compared) > 5
    assert different == {}


def _is_required(cls, kind, left, field, folder):
    try:
        read(cls, kind, left, folder)
    except ValueError as error:
        return f"lacks the field {field}" in str(error)
    return False
