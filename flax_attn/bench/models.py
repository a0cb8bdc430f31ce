"""Whole models beside Hugging Face's: the same GPT-2 with the same weights, in turns."""

import tempfile
import time
from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import replace
from functools import partial
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
# What a model in bfloat16 holds its matrices in; transformers holds them in bfloat16 beside each.
HELD = (None, "int8")
TOLERANCE = 1e-3  # of the largest logit: both sum in float32, through all layers


def run(
    rounds: int, quick: bool, progress: Callable[[str], None] = lambda task: None
) -> Iterator[TaskResult]:
    """Measure task after task; each first checks that both compute the same."""
    with tempfile.TemporaryDirectory() as folder:
        sizes = config(quick)
        theirs = make_checkpoint(sizes, folder)
        ours: Any = GPT2.from_pretrained(folder)
        read = _bytes(ours)
        for b in (1, 8):
            progress(f"decoding, batch {b}")
            task = decode(ours, theirs, b, rounds, read=read)
            yield task
        lower = deepcopy(theirs).bfloat16()
        for held in HELD:
            model: Any = GPT2.from_pretrained(folder, param_dtype=jnp.bfloat16, weights=held)
            for b in (1, 8):
                name = held or "bfloat16"
                progress(f"decoding, {name}, batch {b}")
                task = decode(model, lower, b, rounds, read=_bytes(model))
                yield replace(task, task=f"{task.task}, {name}")
        progress("prefill")
        task = prefill(ours, theirs, 1024, rounds)
        yield task
        shape = (4, 512)
        for dropout in (0.0, 0.1):
            progress(f"training, dropout {dropout}")
            yield from _train(folder, dropout, shape, rounds)


def config(quick: bool) -> Any:
    """Return transformers' config of GPT-2 small, or of a model of two narrow layers."""
    from transformers import GPT2Config

    return GPT2Config(**(SMALL if quick else {}))


def make_checkpoint(config: Any, folder: str) -> Any:
    """Return a transformers model of this config with random parameters, and write its folder."""
    import torch
    from transformers import AutoModelForCausalLM

    # Random weights are as fast as trained ones; without an end token all make as many tokens.
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

    def our_tokens(new: int) -> Any:
        return generate(ours, prompts, new)

    def their_tokens(new: int) -> Any:
        found = theirs.generate(
            tensor,
            attention_mask=torch.ones_like(tensor),
            max_new_tokens=new,
            min_new_tokens=new,
            do_sample=False,
        )
        return found[:, context:]

    start = time.perf_counter()
    mine = our_tokens(NEW)
    first = time.perf_counter() - start
    same = np.mean(np.asarray(mine) == their_tokens(NEW).numpy())
    our_tokens(1)  # compiles the prompt with the smaller cache
    runs: dict[Any, Any] = {}
    # The difference between many tokens and one is what the prompt has no part in.
    for new in (1, NEW):
        runs["ours", new] = _repeated(partial(our_tokens, new))
        runs["theirs", new] = _repeated(partial(their_tokens, new))
    taken = least(runs, rounds)
    rate = b * (NEW - 1) / (taken["ours", NEW] - taken["ours", 1])
    their_rate = b * (NEW - 1) / (taken["theirs", NEW] - taken["theirs", 1])
    note = f"{same:.0%} of greedy tokens equal"
    if read is not None:
        gigabytes = rate / b * read / 1e9
        note = f"reads {gigabytes:.1f} GB/s, the machine's limit is {read_limit():.1f}; {note}"
    task = f"decode {NEW} after {context}, batch {b}"
    return TaskResult(task, "tokens/s", rate, their_rate, first - taken["ours", NEW], note)


def _repeated(run: Callable[[], Any]) -> Callable[[int], list[Any]]:
    """Return what calls a function a number of times."""
    return lambda repeats: [run() for _ in range(repeats)]


def prefill(ours: Any, theirs: Any, t: int, rounds: int) -> TaskResult:
    """Measure the logits of the token after `t` others."""
    import torch

    tokens = np.random.default_rng(0).integers(0, ours.config.vocab_size, (1, t))
    tensor = torch.from_numpy(tokens)
    jitted = nnx.jit(lambda model, tokens: model.logits(model.hidden(tokens)[:, -1]))

    def our_logits() -> jax.Array:
        return jax.block_until_ready(jitted(ours, tokens))

    @torch.no_grad()
    def their_logits() -> Any:
        return theirs(tensor, logits_to_keep=1).logits[:, -1]

    start = time.perf_counter()
    mine = np.asarray(our_logits())
    first = time.perf_counter() - start
    _check_equal("logits of prefill", mine, their_logits().numpy())
    runs = {"ours": _repeated(our_logits), "theirs": _repeated(their_logits)}
    taken = least(runs, rounds)
    # What the first call took beyond a later one is mostly compiling.
    seconds = first - taken["ours"]
    return TaskResult(f"prefill {t}", "s", taken["ours"], taken["theirs"], seconds)


def _train(
    folder: str, dropout: float, shape: tuple[int, int], rounds: int
) -> Iterator[TaskResult]:
    from transformers import GPT2LMHeadModel

    options = dict.fromkeys(("attn_pdrop", "resid_pdrop", "embd_pdrop"), dropout)
    theirs = GPT2LMHeadModel.from_pretrained(folder, **options).train()
    tokens = np.random.default_rng(0).integers(0, theirs.config.vocab_size, shape)
    their_step = _their_training(theirs, tokens)
    their_loss = their_step()
    runs: dict[str, Any] = {"theirs": _repeated(their_step)}
    first = {}
    for form, scan_layers in (("layers one by one", False), ("layers scanned", True)):
        step = _training(folder, dropout, tokens, scan_layers)
        start = time.perf_counter()
        loss = step()
        first[form] = time.perf_counter() - start
        # With dropout the two draw different numbers.
        if not dropout:
            _check_equal("losses", np.array(loss), np.array(their_loss))
        runs[form] = _repeated(step)
    taken = least(runs, rounds)
    for form, seconds in first.items():
        task = f"training step {shape}, dropout {dropout}, {form}"
        yield TaskResult(task, "s", taken[form], taken["theirs"], seconds - taken[form])


def _their_training(model: Any, tokens: np.ndarray) -> Callable[[], float]:
    """Return a function that takes a step of transformers' model and returns its loss."""
    import torch

    tensor = torch.from_numpy(tokens)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

    def step() -> float:
        optimizer.zero_grad()
        loss = model(tensor, labels=tensor).loss
        loss.backward()
        optimizer.step()
        return loss.item()

    return step


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
    held = jax.tree.leaves(nnx.state(model, nnx.Variable))
    return sum(x.nbytes for x in held) - model.pos_emb.embedding[...].nbytes


def _check_equal(what: str, ours: np.ndarray, theirs: np.ndarray) -> None:
    # A check of what is timed, not of the numbers: those have proofs of their own.
    error = float(np.abs(ours - theirs).max() / np.abs(theirs).max())
    if not error < TOLERANCE:
        raise ValueError(
            f"{what} must agree with transformers within {TOLERANCE:.0e} of the largest; got"
            f" {error:.1e}"
        )
