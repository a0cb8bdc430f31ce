"""Attention beyond keys and values, beside transformers.

A mixture of experts, latents, and a state of fixed size.
"""

import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import jax

from flax_attn.bench.models import decode, make_checkpoint, prefill
from flax_attn.bench.tasks import TaskResult
from flax_attn.models.registry import from_pretrained

CONTEXTS = (256, 4096)  # tokens before those that are decoded
_SIZES: dict[str, Any] = {
    "hidden_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "vocab_size": 8192,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": False,
}
_SMALL: dict[str, Any] = {"hidden_size": 64, "vocab_size": 256}  # for --quick
CONFIGS: dict[str, dict[str, Any]] = {
    "Mixtral": {
        "intermediate_size": 768,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "sliding_window": None,
    },
    "DeepseekV3": {
        "intermediate_size": 1408,
        "num_key_value_heads": 8,
        "q_lora_rank": 256,
        "kv_lora_rank": 128,
        "qk_nope_head_dim": 64,
        "qk_rope_head_dim": 32,
        "v_head_dim": 64,
        "first_k_dense_replace": 4,  # all layers: what is measured is the attention
    },
    "Qwen3Next": {
        "intermediate_size": 1408,
        "head_dim": 64,
        "linear_num_key_heads": 4,
        "linear_num_value_heads": 8,
        "linear_key_head_dim": 64,
        "linear_value_head_dim": 64,
        "mlp_only_layers": [0, 1, 2, 3],
    },
}


def run(
    rounds: int, quick: bool, progress: Callable[[str], None] = lambda task: None
) -> Iterator[TaskResult]:
    """Measure family after family; each task first checks that both compute the same."""
    contexts = (32, 64) if quick else CONTEXTS
    prompt = 4 * contexts[0]
    for name in CONFIGS:
        with tempfile.TemporaryDirectory() as folder:
            config = _config(name, quick)
            theirs = make_checkpoint(config, folder)
            ours: Any = from_pretrained(folder)
        progress(f"{name}: prefill")
        task = prefill(ours, theirs, prompt, rounds)
        yield _of(name, task)
        for context in contexts:
            progress(f"{name}: decoding after {context}")
            task = decode(ours, theirs, 1, rounds, context)
            yield _of(name, task)
            task = _cache(ours, theirs, context)
            yield _of(name, task)


def _config(name: str, quick: bool) -> Any:
    import transformers

    small = _SMALL if quick else {}
    return getattr(transformers, f"{name}Config")(**_SIZES | CONFIGS[name] | small)


def _cache(ours: Any, theirs: Any, context: int) -> TaskResult:
    """Return the bytes that a cache of so many tokens holds."""
    import torch

    # What transformers holds is seen in a cache that was filled.
    mine = sum(x.nbytes for x in jax.tree.leaves(ours.init_cache(1, context)))
    with torch.no_grad():
        cache = theirs(torch.zeros((1, context), dtype=torch.long), use_cache=True).past_key_values
    return TaskResult(f"cache of {context}", "MiB", mine / 2**20, _bytes(cache) / 2**20)


def _bytes(cache: Any) -> int:
    """Return the bytes of the tensors in an object of transformers, nested ones included."""
    import torch

    # Its classes keep tensors under several names, and some of them twice.
    seen, todo, total = set(), [cache], 0
    while todo:
        one = todo.pop()
        if id(one) in seen:
            continue
        seen.add(id(one))
        if isinstance(one, torch.Tensor):
            total += one.nbytes
        elif isinstance(one, list | tuple):
            todo += one
        elif isinstance(one, dict):
            todo += one.values()
        elif type(one).__module__.startswith("transformers.cache_utils"):
            todo += vars(one).values()
    return total


def _of(name: str, result: TaskResult) -> TaskResult:
    return replace(result, task=f"{name}: {result.task}")
