"""Train a small GPT-2 on the documentation strings of Python's standard library.

    pip install "flax-attn[generate]"
    python examples/train_gpt2.py --folder build/gpt2
    flax-attn generate --model build/gpt2/model --prompt "Return the"

A tokenizer of 2048 tokens is trained first. Documents are packed into rows, and none sees another.
The same command resumes a run that was stopped. The folder `model` is one that transformers loads,
too.

References:
    Radford et al. 2019, "Language Models are Unsupervised Multitask Learners".
"""

import argparse
import ast
import json
import sysconfig
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import jax
import numpy as np
import optax
from flax import nnx
from rich.console import Console
from rich.progress import Progress
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from flax_attn import GPT2, GPT2Config
from flax_attn.models import generate
from flax_attn.training import Checkpoints, train_step

CONFIG = GPT2Config(
    d_model=192, num_heads=6, num_layers=4, context_length=256, vocab_size=2048, dropout=0.1
)
END, PROMPT, ROWS = "<|endoftext|>", "Return the", 8
NOT_LIBRARY = {"idlelib", "lib2to3", "site-packages", "test", "tests"}


def docstrings(library: Path) -> list[str]:
    """Return the unique docstrings under a folder, in file order, without importing anything."""
    found: dict[str, None] = {}
    for file in sorted(library.rglob("*.py")):
        if NOT_LIBRARY.isdisjoint(file.relative_to(library).parts):
            found.update(dict.fromkeys(_docstrings_of(file)))
    return list(found)


def _docstrings_of(file: Path) -> Iterator[str]:
    # Parsed, not imported: some modules of the library do things when they are imported.
    for node in ast.walk(ast.parse(file.read_bytes())):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node)
            if text:
                yield text


def make_tokenizer(file: Path, texts: list[str], vocab_size: int) -> Tokenizer:
    """Load the tokenizer from a file, or learn byte pairs from the texts and write it."""
    if file.exists():
        return Tokenizer.from_file(str(file))
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    # With all bytes in the alphabet there is no text that it cannot encode.
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.save(str(file))
    return tokenizer


@dataclass(frozen=True)
class Corpus:
    """Tokenized documents, packed end to end into rows of `t` tokens.

    Each epoch has a new order. A document is cut wherever a row ends.
    """

    documents: list[np.ndarray]
    t: int

    @property
    def rows(self) -> int:
        """How many there are in an epoch."""
        return sum(map(len, self.documents)) // self.t

    def epoch(self, number: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the tokens of an epoch and the document number of each token, both `(rows, t)`."""
        # The number is the seed: a run that is resumed in an epoch meets the same order.
        order = np.random.default_rng(number).permutation(len(self.documents))
        documents = [self.documents[i] for i in order]
        tokens = np.concatenate(documents)
        segments = np.repeat(np.arange(len(order)), [len(document) for document in documents])
        return self._as_rows(tokens), self._as_rows(segments)

    def _as_rows(self, x: np.ndarray) -> np.ndarray:
        whole = x[: self.rows * self.t]  # what is left fills no row
        return whole.reshape(-1, self.t).astype(np.int32)

    def batches(self, read: int) -> Iterator[tuple[int, np.ndarray, np.ndarray]]:
        """Yield batches after `read` rows, each with how many rows are read after it."""
        if self.rows < ROWS:
            raise ValueError(
                f"a batch has {ROWS} rows of {self.t} tokens; got {self.rows} in all. Take more"
                " text"
            )
        while True:
            number, done = divmod(read, self.rows)
            tokens, segments = self.epoch(number)
            # The rest of an epoch that fills no batch is skipped: one shape, compiled once.
            for start in range(done, self.rows - ROWS + 1, ROWS):
                end = start + ROWS
                yield number * self.rows + end, tokens[start:end], segments[start:end]
            read = (number + 1) * self.rows


def make_optimizer(model: GPT2, steps: int) -> nnx.Optimizer:
    """Return AdamW with warm-up, cosine decay and clipping."""
    rates = optax.warmup_cosine_decay_schedule(
        0.0, 2e-3, warmup_steps=steps // 10, decay_steps=steps, end_value=1e-4
    )
    adamw = optax.adamw(rates, b2=0.95, weight_decay=0.1)
    return nnx.Optimizer(model, optax.chain(optax.clip_by_global_norm(1.0), adamw), wrt=nnx.Param)


def sample(model: GPT2, tokenizer: Tokenizer, seed: int) -> str:
    """Return a short text of the model, in one line."""
    prompt, stop = tokenizer.encode(PROMPT).ids, tokenizer.token_to_id(END)
    key = jax.random.key(seed)
    new = generate(model, prompt, 40, temperature=0.7, top_k=40, stop_tokens=[stop], key=key)
    return " ".join(tokenizer.decode([*prompt, *new]).split())


def train(
    model: GPT2, corpus: Corpus, tokenizer: Tokenizer, folder: Path, steps: int, every: int
) -> list[float]:
    """Train from the last checkpoint to step `steps`; return the losses.

    Save and sample regularly.
    """
    optimizer, losses = make_optimizer(model, steps), []
    with Checkpoints(folder) as checkpoints, Progress(transient=True) as progress:
        done, start = resume(checkpoints, model, optimizer)
        bar = progress.add_task("", total=steps, completed=done)
        began = time.perf_counter()
        # The batches never end; the numbers of the steps do.
        batches = zip(range(done + 1, steps + 1), corpus.batches(start), strict=False)
        for step, (read, tokens, segments) in batches:
            loss = train_step(model, optimizer, tokens, segments=segments)
            losses.append(float(loss))
            progress.update(bar, completed=step, description=f"loss {losses[-1]:.3f}")
            if step % every == 0 or step == steps:
                checkpoints.save(step, model, optimizer, rows_read=read)
                recent = losses[-every:]
                speed = len(recent) * tokens.size / (time.perf_counter() - began)
                text = sample(model, tokenizer, step)
                report(progress.console, step, recent, speed, text)
                # What saving and sampling take is not the speed of training.
                began = time.perf_counter()
    return losses


def resume(checkpoints: Checkpoints, model: GPT2, optimizer: nnx.Optimizer) -> tuple[int, int]:
    """Restore the last checkpoint, if any; return its step and the number of rows read so far."""
    if checkpoints.latest is None:
        return 0, 0
    step, extra = checkpoints.restore(model, optimizer)
    print(f"goes on after step {step}")
    return step, extra["rows_read"]


def report(console: Console, step: int, losses: list[float], speed: float, text: str) -> None:
    """Print the loss and the speed of the last steps, and a sample of the model."""
    console.print(
        f"step {step:>5}   loss {np.mean(losses):.3f}   {speed:,.0f} tokens/s", highlight=False
    )
    console.print(f"    {text}", style="green", markup=False, highlight=False)


def write(model: GPT2, tokenizer: Tokenizer, folder: Path) -> None:
    """Write a Hugging Face checkpoint folder with the tokenizer and the end-of-text token."""
    model.save_pretrained(folder)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"eos_token_id": tokenizer.token_to_id(END)}  # where `generate` stops
    (folder / "generation_config.json").write_text(json.dumps(config))


def main(
    folder: Path, steps: int = 600, every: int = 100, config: GPT2Config = CONFIG
) -> tuple[GPT2, list[float]]:
    """Train, write the model, and return it and the loss of every step."""
    folder.mkdir(parents=True, exist_ok=True)
    texts = docstrings(Path(sysconfig.get_path("stdlib")))
    tokenizer = make_tokenizer(folder / "tokenizer.json", texts, config.vocab_size)
    corpus = make_corpus(texts, tokenizer, config.context_length)
    # Few texts hold fewer pairs of bytes than were asked for.
    config = replace(config, vocab_size=tokenizer.get_vocab_size())
    model = GPT2(config, rngs=nnx.Rngs(0))
    losses = train(model, corpus, tokenizer, folder / "checkpoints", steps, every)
    write(model, tokenizer, folder / "model")
    return model, losses


def make_corpus(texts: list[str], tokenizer: Tokenizer, t: int) -> Corpus:
    """Return the texts as a corpus with an end behind each, and print how many there are."""
    end = tokenizer.token_to_id(END)
    documents = [np.array([*found.ids, end]) for found in tokenizer.encode_batch(texts)]
    corpus = Corpus(documents, t)
    counts = f"{len(texts)} documents, {sum(map(len, documents))} tokens, {corpus.rows} rows"
    Console().print(counts, highlight=False)
    return corpus


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description="Train a small GPT-2 on the documentation of Python's library."
    )
    parser.add_argument(
        "--folder", type=Path, required=True, help="of checkpoints and model; a run in it goes on"
    )
    parser.add_argument(
        "--steps", type=int, default=600, help="in all (default 600); the schedule ends with them"
    )
    parser.add_argument(
        "--every",
        type=int,
        default=100,
        help="how many steps lie between checkpoints (default 100)",
    )
    main(**vars(parser.parse_args()))
