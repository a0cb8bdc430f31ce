"""Whole models beside Hugging Face's: the same GPT-2, the same weights, in turns."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from rich.table import Table

from flax_attn.bench.timing import interleave, median
from flax_attn.models import GPT2, generate
from flax_attn.training.step import train_step

PROMPT, NEW = 128, 128
SMALL: dict[str, Any] = {"n_embd": 64, "n_head": 4, "n_layer": 2, "vocab_size": 512}  # for --quick
AGREE = 1e-3  # of the largest logit: both sum in float32, through all layers


@dataclass(frozen=True)
class Row:
    """What was measured of one task.

    Args:
        task: what was done.
        unit: of the two figures, of which more is better for those that end in "/s".
        ours: our figure.
        theirs: that of transformers.
        compile_seconds: what our first call took beyond a later one; None where nothing is compiled.
        note: what else there is to say.
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


def rows(rounds: int, quick: bool, tell: Callable[[str], None] = lambda task: None) -> Iterator[Row]:
    """Measure task after task, of which each begins with a check that both compute the same."""
    with tempfile.TemporaryDirectory() as folder:
        theirs = _make_checkpoint(folder, quick)
        ours: Any = GPT2.from_pretrained(folder)
        for b in (1, 8):
            tell(f"decoding, batch {b}")
            yield _decode(ours, theirs, b, rounds)
        tell("prefill")
        yield _prefill(ours, theirs, 1024, rounds)
        for dropout in (0.0, 0.1):
            tell(f"training, dropout {dropout}")
            yield _train(folder, dropout, (4, 512), rounds)
        if Path("/proc/self/status").exists():
            tell("memory")
            yield _memory(folder)


def table(found: list[Row]) -> Table:
    """Return what was measured as a table."""
    result = Table("task", "unit", "ours", "transformers", "gain", "compiles in", "", title="GPT-2 small, float32")
    for row in found:
        compiled = "" if row.compile_seconds is None else f"{row.compile_seconds:.1f} s"
        result.add_row(
            row.task, row.unit, f"{row.ours:.4g}", f"{row.theirs:.4g}", f"{row.gain:.2f}x", compiled, row.note
        )
    return result


def _make_checkpoint(folder: str, quick: bool) -> Any:
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(**(SMALL if quick else {}))).eval()
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    model.save_pretrained(folder)
    return model


def _decode(ours: GPT2, theirs: Any, b: int, rounds: int) -> Row:
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
    generate(ours, prompts, 1)  # compiles the prompt with room for fewer tokens
    runs = {("ours", new): lambda n, new=new: [generate(ours, prompts, new) for _ in range(n)] for new in (1, NEW)} | {
        ("theirs", new): lambda n, new=new: [their_tokens(new) for _ in range(n)] for new in (1, NEW)
    }
    taken = {name: median(seconds) for name, seconds in interleave(runs, dict.fromkeys(runs, 1.0), rounds).items()}
    speed = {who: b * (NEW - 1) / (taken[who, NEW] - taken[who, 1]) for who in ("ours", "theirs")}
    rate = speed["ours"] / b * _bytes(ours) / 1e9
    note = f"reads {rate:.1f} GB/s, the machine's limit is {read_limit():.1f}; {same:.0%} of greedy tokens equal"
    task, compile_seconds = f"decode {NEW} after {PROMPT}, batch {b}", first - taken["ours", NEW]
    return Row(task, "tokens/s", speed["ours"], speed["theirs"], compile_seconds, note)


def _prefill(ours: GPT2, theirs: Any, t: int, rounds: int) -> Row:
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
    _check_equal("the logits of prefill", mine, their_logits().numpy())
    runs = {
        "ours": lambda n: [jax.block_until_ready(compute(ours, tokens)) for _ in range(n)],
        "theirs": lambda n: [their_logits() for _ in range(n)],
    }
    taken = {name: median(s) for name, s in interleave(runs, dict.fromkeys(runs, 1.0), rounds).items()}
    return Row(f"prefill {t}", "s", taken["ours"], taken["theirs"], first - taken["ours"])


def _train(folder: str, dropout: float, shape: tuple[int, int], rounds: int) -> Row:
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
        _check_equal("the loss", np.array(loss), np.array(their_loss))
    runs = {
        "ours": lambda n: [float(train_step(ours, optimizer, tokens)) for _ in range(n)],
        "theirs": lambda n: [their_step() for _ in range(n)],
    }
    taken = {name: median(s) for name, s in interleave(runs, dict.fromkeys(runs, 1.0), rounds).items()}
    task = f"training step {shape}, dropout {dropout}"
    return Row(task, "s", taken["ours"], taken["theirs"], first - taken["ours"])


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


def _memory(folder: str) -> Row:
    peaks = []
    for code in _LOAD.values():
        # Of the process image alone: what getrusage tells includes the process that forked it.
        tail = "\nprint(*(line for line in open('/proc/self/status') if line.startswith('VmHWM')))"
        command = [sys.executable, "-c", f"folder = {folder!r}\n{code}{tail}"]
        output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        peaks.append(int(output.split()[-2]) / 2**20)
    weights = sum(path.stat().st_size for path in Path(folder).glob("*.safetensors")) / 2**30
    return Row("load and generate", "GiB at peak", peaks[0], peaks[1], note=f"the weights are {weights:.2f} GiB")


def read_limit() -> float:
    """Return how many GB/s the machine reads at best, found with a sum over an array that no cache holds."""
    array = jnp.ones(2**28, jnp.float32)
    total = jax.jit(jnp.sum)
    total(array).block_until_ready()
    seconds = interleave({"sum": lambda n: [total(array).block_until_ready() for _ in range(n)]}, {"sum": 0.1}, 5)
    return array.nbytes / min(seconds["sum"]) / 1e9


def _bytes(model: GPT2) -> int:
    # A step reads all weights but the positions; the table of the tokens is the head.
    params = nnx.state(model, nnx.Param)
    return sum(x.nbytes for x in jax.tree.leaves(params)) - model.pos_emb.embedding[...].nbytes


def _check_equal(what: str, ours: np.ndarray, theirs: np.ndarray) -> None:
    error = float(np.abs(ours - theirs).max() / np.abs(theirs).max())
    if not error < AGREE:
        raise ValueError(f"{what} differ by {error:.1e} of the largest: nothing is timed that computes something else")
