"""Whole models beside Hugging Face's: the same GPT-2 with the same weights, in turns."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from flax_attn.bench.machine import read_limit
from flax_attn.bench.tasks import TaskResult
from flax_attn.bench.timing import least
from flax_attn.models import GPT2, generate
from flax_attn.training.step import train_step

PROMPT, NEW = 128, 64
SMALL: dict[str, Any] = {"n_embd": 64, "n_head": 4, "n_layer": 2, "vocab_size": 512}  # for --quick
TOLERANCE = 1e-3  # of the largest logit: both sum in float32, through all layers


def run(
    rounds: int, quick: bool, progress: Callable[[str], None] = lambda task: None
) -> Iterator[TaskResult]:
    """Measure task after task; each first checks that both compute the same."""
    with tempfile.TemporaryDirectory() as folder:
        theirs = make_checkpoint(config(quick), folder)
        ours: Any = GPT2.from_pretrained(folder)
        for b in (1, 8):
            progress(f"decoding, batch {b}")
            yield decode(ours, theirs, b, rounds, read=_bytes(ours))
        progress("decoding, bfloat16")
        yield _decode_bfloat16(folder, theirs, rounds)
        progress("prefill")
        yield prefill(ours, theirs, 1024, rounds)
        for dropout in (0.0, 0.1):
            progress(f"training, dropout {dropout}")
            yield from _train(folder, dropout, (4, 512), rounds)


def config(quick: bool) -> Any:
    """Return transformers' config of GPT-2 small, or of a model of two narrow layers."""
    from transformers import GPT2Config

    return GPT2Config(**(SMALL if quick else {}))


def make_checkpoint(config: Any, folder: str) -> Any:
    """Return a transformers model of this config with random parameters, and write its folder."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).float().eval()
    assert model.generation_config is not None
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    model.save_pretrained(folder)
    return model


def decode(
    ours: Any, theirs: Any, b: int, rounds: int, context: int = PROMPT, read: int | None = None
) -> TaskResult:
    """Measure greedy decoding behind prompts of `context` tokens, what the prompts take left out.

    `read` is how many bytes a step has to read, where that is known.
    """
    import torch

    prompts = np.random.default_rng(0).integers(0, ours.config.vocab_size, (b, context))
    tensor = torch.from_numpy(prompts)

    def their_tokens(new: int) -> Any:
        options = {
            "attention_mask": torch.ones_like(tensor),
            "max_new_tokens": new,
            "min_new_tokens": new,
        }
        return theirs.generate(tensor, do_sample=False, **options)[:, context:]

    start = time.perf_counter()
    mine = generate(ours, prompts, NEW)
    first = time.perf_counter() - start
    same = np.mean(np.asarray(mine) == their_tokens(NEW).numpy())
    generate(ours, prompts, 1)  # compiles the prompt with the smaller cache
    runs = {
        ("ours", new): lambda n, new=new: [generate(ours, prompts, new) for _ in range(n)]
        for new in (1, NEW)
    } | {
        ("theirs", new): lambda n, new=new: [their_tokens(new) for _ in range(n)]
        for new in (1, NEW)
    }
    taken = least(runs, rounds)
    speed = {who: b * (NEW - 1) / (taken[who, NEW] - taken[who, 1]) for who in ("ours", "theirs")}
    note = f"{same:.0%} of greedy tokens equal"
    if read is not None:
        rate = speed["ours"] / b * read / 1e9
        note = f"reads {rate:.1f} GB/s, the machine's limit is {read_limit():.1f}; {note}"
    task, compile_seconds = f"decode {NEW} after {context}, batch {b}", first - taken["ours", NEW]
    return TaskResult(task, "tokens/s", speed["ours"], speed["theirs"], compile_seconds, note)


def _decode_bfloat16(folder: str, theirs: Any, rounds: int) -> TaskResult:
    import torch

    ours: Any = GPT2.from_pretrained(folder, param_dtype=jnp.bfloat16)
    found = decode(ours, deepcopy(theirs).to(torch.bfloat16), 1, rounds, read=_bytes(ours))
    return replace(found, task=f"{found.task}, bfloat16")


def prefill(ours: Any, theirs: Any, t: int, rounds: int) -> TaskResult:
    """Measure the logits of the token after `t` others."""
    import torch

    tokens = np.random.default_rng(0).integers(0, ours.config.vocab_size, (1, t))
    tensor = torch.from_numpy(tokens)
    compute = nnx.jit(lambda model, tokens: model.logits(model.hidden(tokens)[:, -1]))

    @torch.no_grad()
    def their_logits() -> Any:
        return theirs(tensor, logits_to_keep=1).logits[:, -1]

    start = time.perf_counter()
    mine = np.asarray(compute(ours, tokens))
    first = time.perf_counter() - start
    _check_equal("logits of prefill", mine, their_logits().numpy())
    runs = {
        "ours": lambda n: [jax.block_until_ready(compute(ours, tokens)) for _ in range(n)],
        "theirs": lambda n: [their_logits() for _ in range(n)],
    }
    taken = least(runs, rounds)
    return TaskResult(f"prefill {t}", "s", taken["ours"], taken["theirs"], first - taken["ours"])


def _train(
    folder: str, dropout: float, shape: tuple[int, int], rounds: int
) -> Iterator[TaskResult]:
    import torch
    from transformers import GPT2LMHeadModel

    options = dict.fromkeys(("attn_pdrop", "resid_pdrop", "embd_pdrop"), dropout)
    theirs = GPT2LMHeadModel.from_pretrained(folder, **options).train()
    tokens = np.random.default_rng(0).integers(0, theirs.config.vocab_size, shape)
    tensor = torch.from_numpy(tokens)
    their_optimizer = torch.optim.AdamW(theirs.parameters(), lr=1e-4)

    def their_step() -> float:
        their_optimizer.zero_grad()
        loss = theirs(tensor, labels=tensor).loss
        loss.backward()
        their_optimizer.step()
        return loss.item()

    their_loss = their_step()
    runs: dict[str, Any] = {"theirs": lambda n: [their_step() for _ in range(n)]}
    first = {}
    for form, scan_layers in (("layers one by one", False), ("layers scanned", True)):
        step = _training(folder, dropout, tokens, scan_layers)
        start = time.perf_counter()
        loss = step()
        first[form] = time.perf_counter() - start
        if not dropout:
            _check_equal("losses", np.array(loss), np.array(their_loss))
        runs[form] = lambda n, step=step: [step() for _ in range(n)]
    taken = least(runs, rounds)
    for form, seconds in first.items():
        task = f"training step {shape}, dropout {dropout}, {form}"
        yield TaskResult(task, "s", taken[form], taken["theirs"], seconds - taken[form])


def _training(
    folder: str, dropout: float, tokens: np.ndarray, scan_layers: bool
) -> Callable[[], float]:
    """Return a function that takes a step and returns its loss."""
    model: Any = GPT2.from_pretrained(folder, dropout=dropout, scan_layers=scan_layers)
    model.train()
    optimizer, ids = nnx.Optimizer(model, optax.adamw(1e-4), wrt=nnx.Param), jnp.asarray(tokens)
    return lambda: float(train_step(model, optimizer, ids))


def _bytes(model: GPT2) -> int:
    # A step reads all weights but the positions; the token embedding is the head.
    params = nnx.state(model, nnx.Param)
    return sum(x.nbytes for x in jax.tree.leaves(params)) - model.pos_emb.embedding[...].nbytes


def _check_equal(what: str, ours: np.ndarray, theirs: np.ndarray) -> None:
    error = float(np.abs(ours - theirs).max() / np.abs(theirs).max())
    if not error < TOLERANCE:
        raise ValueError(
            f"{what} must agree with transformers within {TOLERANCE:.0e} of the largest; got"
            f" {error:.1e}"
        )
