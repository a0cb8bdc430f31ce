"""Whole models beside Hugging Face's: the same GPT-2 with the same weights, in turns."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from rich.table import Table

from flax_attn.bench.machine import read_limit
from flax_attn.bench.timing import medians
from flax_attn.models import GPT2, generate
from flax_attn.training.step import train_step

if TYPE_CHECKING:
    from transformers import GPT2LMHeadModel

PROMPT, NEW = 128, 128
SMALL: dict[str, Any] = {"n_embd": 64, "n_head": 4, "n_layer": 2, "vocab_size": 512}  # for --quick
TOLERANCE = 1e-3  # of the largest logit: both sum in float32, through all layers


@dataclass(frozen=True)
class TaskResult:
    """What was measured of one task.

    Args:
        task: what was done.
        unit: of the two figures; more is better for those that end in "/s".
        ours: our figure.
        theirs: that of transformers.
        compile_seconds: what our first call took beyond a later one; None where nothing is compiled.
        note: details.
    """

    task: str
    unit: str
    ours: float
    theirs: float
    compile_seconds: float | None = None
    note: str = ""

    @property
    def gain(self) -> float:
        """How many times better ours is."""
        return self.ours / self.theirs if self.unit.endswith("/s") else self.theirs / self.ours


def run(rounds: int, quick: bool, progress: Callable[[str], None] = lambda task: None) -> Iterator[TaskResult]:
    """Measure task after task; each first checks that both compute the same."""
    with tempfile.TemporaryDirectory() as folder:
        theirs = _make_checkpoint(folder, quick)
        ours: Any = GPT2.from_pretrained(folder)
        for b in (1, 8):
            progress(f"decoding, batch {b}")
            yield _decode(ours, theirs, b, rounds)
        progress("prefill")
        yield _prefill(ours, theirs, 1024, rounds)
        for dropout in (0.0, 0.1):
            progress(f"training, dropout {dropout}")
            yield _train(folder, dropout, (4, 512), rounds)
        if Path("/proc/self/status").exists():
            progress("memory")
            yield _memory(folder)


def table(results: Sequence[TaskResult]) -> Table:
    """Return what was measured as a table."""
    rows = Table("task", "unit", "ours", "transformers", "gain", "compiles in", "", title="GPT-2 small, float32")
    for one in results:
        compiled = "" if one.compile_seconds is None else f"{one.compile_seconds:.1f} s"
        rows.add_row(one.task, one.unit, f"{one.ours:.4g}", f"{one.theirs:.4g}", f"{one.gain:.2f}x", compiled, one.note)
    return rows


def _make_checkpoint(folder: str, quick: bool) -> GPT2LMHeadModel:
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(**(SMALL if quick else {}))).eval()
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    model.save_pretrained(folder)
    return model


def _decode(ours: GPT2, theirs: Any, b: int, rounds: int) -> TaskResult:
    import torch

    prompts = np.random.default_rng(0).integers(0, ours.config.vocab_size, (b, PROMPT))
    tensor = torch.from_numpy(prompts)

    def their_tokens(new: int) -> Any:
        options = {"attention_mask": torch.ones_like(tensor), "max_new_tokens": new, "min_new_tokens": new}
        return theirs.generate(tensor, do_sample=False, **options)[:, PROMPT:]

    start = time.perf_counter()
    mine = generate(ours, prompts, NEW)
    first = time.perf_counter() - start
    same = np.mean(np.asarray(mine) == their_tokens(NEW).numpy())
    generate(ours, prompts, 1)  # compiles the prompt with the smaller cache
    runs = {("ours", new): lambda n, new=new: [generate(ours, prompts, new) for _ in range(n)] for new in (1, NEW)} | {
        ("theirs", new): lambda n, new=new: [their_tokens(new) for _ in range(n)] for new in (1, NEW)
    }
    taken = medians(runs, rounds)
    speed = {who: b * (NEW - 1) / (taken[who, NEW] - taken[who, 1]) for who in ("ours", "theirs")}
    rate = speed["ours"] / b * _bytes(ours) / 1e9
    note = f"reads {rate:.1f} GB/s, the machine's limit is {read_limit():.1f}; {same:.0%} of greedy tokens equal"
    task, compile_seconds = f"decode {NEW} after {PROMPT}, batch {b}", first - taken["ours", NEW]
    return TaskResult(task, "tokens/s", speed["ours"], speed["theirs"], compile_seconds, note)


def _prefill(ours: GPT2, theirs: Any, t: int, rounds: int) -> TaskResult:
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
    taken = medians(runs, rounds)
    return TaskResult(f"prefill {t}", "s", taken["ours"], taken["theirs"], first - taken["ours"])


def _train(folder: str, dropout: float, shape: tuple[int, int], rounds: int) -> TaskResult:
    import torch
    from transformers import GPT2LMHeadModel

    options = dict.fromkeys(("attn_pdrop", "resid_pdrop", "embd_pdrop"), dropout)
    theirs = GPT2LMHeadModel.from_pretrained(folder, **options).train()
    ours: Any = GPT2.from_pretrained(folder, dropout=dropout)
    ours.train()
    tokens = np.random.default_rng(0).integers(0, ours.config.vocab_size, shape)
    tensor, tokens = torch.from_numpy(tokens), jnp.asarray(tokens)
    their_optimizer = torch.optim.AdamW(theirs.parameters(), lr=1e-4)
    optimizer = nnx.Optimizer(ours, optax.adamw(1e-4), wrt=nnx.Param)

    def their_step() -> float:
        their_optimizer.zero_grad()
        loss = theirs(tensor, labels=tensor).loss
        loss.backward()
        their_optimizer.step()
        return loss.item()

    start = time.perf_counter()
    loss = float(train_step(ours, optimizer, tokens))
    first = time.perf_counter() - start
    their_loss = their_step()
    if not dropout:
        _check_equal("losses", np.array(loss), np.array(their_loss))
    runs = {
        "ours": lambda n: [float(train_step(ours, optimizer, tokens)) for _ in range(n)],
        "theirs": lambda n: [their_step() for _ in range(n)],
    }
    taken = medians(runs, rounds)
    task = f"training step {shape}, dropout {dropout}"
    return TaskResult(task, "s", taken["ours"], taken["theirs"], first - taken["ours"])


_LOAD = {
    "ours": """
from flax_attn.models import GPT2, generate
generate(GPT2.from_pretrained(folder), list(range(128)), 32)
""",
    "theirs": """
import torch
from transformers import GPT2LMHeadModel
model = GPT2LMHeadModel.from_pretrained(folder).eval()
model.generate(torch.arange(128)[None], attention_mask=torch.ones(1, 128), max_new_tokens=32, do_sample=False)
""",
}


def _memory(folder: str) -> TaskResult:
    peaks = []
    for code in _LOAD.values():
        # Of this process alone: getrusage also counts the process that forked it.
        tail = "\nprint(*(line for line in open('/proc/self/status') if line.startswith('VmHWM')))"
        command = [sys.executable, "-c", f"folder = {folder!r}\n{code}{tail}"]
        output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        peaks.append(int(output.split()[-2]) / 2**20)
    weights = sum(path.stat().st_size for path in Path(folder).glob("*.safetensors")) / 2**30
    return TaskResult("load and generate", "GiB at peak", peaks[0], peaks[1], note=f"the weights are {weights:.2f} GiB")


def _bytes(model: GPT2) -> int:
    # A step reads all weights but the positions; the token embedding is the head.
    params = nnx.state(model, nnx.Param)
    return sum(x.nbytes for x in jax.tree.leaves(params)) - model.pos_emb.embedding[...].nbytes


def _check_equal(what: str, ours: np.ndarray, theirs: np.ndarray) -> None:
    error = float(np.abs(ours - theirs).max() / np.abs(theirs).max())
    if not error < TOLERANCE:
        raise ValueError(f"{what} must agree with transformers within {TOLERANCE:.0e} of the largest; got {error:.1e}")
