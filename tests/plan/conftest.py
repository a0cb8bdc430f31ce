"""A small model as a folder holds it, and what is planned of it on 8 simulated devices."""

import json

import pytest

from flax_attn.models.llama import Llama, LlamaConfig
from flax_attn.plan.job import Job
from flax_attn.plan.models import LibraryModel
from flax_attn.plan.topology import topology

CONFIG = LlamaConfig(
    32, 48, num_heads=4, num_layers=3, num_kv_heads=2, context_length=64, vocab_size=56
)


SMALL = LibraryModel(Llama, CONFIG)


@pytest.fixture
def job():
    def make(mesh=None, batch=8, tokens=16, name="cpu:8", model=SMALL, **options):
        mesh = {"data": 2, "fsdp": 2, "tensor": 2} if mesh is None else mesh
        return Job("small", model, topology(name), mesh, batch, tokens, **options)

    return make


@pytest.fixture
def folder(tmp_path):
    """Only the config: no weights are read."""
    fields = {
        "model_type": "llama",
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_attention_heads": 4,
    }
    fields |= {
        "num_hidden_layers": 3,
        "num_key_value_heads": 2,
        "vocab_size": 56,
        "max_position_embeddings": 64,
    }
    fields |= {"rms_norm_eps": 1e-6, "hidden_act": "silu", "tie_word_embeddings": False}
    (tmp_path / "small").mkdir()
    (tmp_path / "small" / "config.json").write_text(json.dumps(fields))
    return tmp_path / "small"
