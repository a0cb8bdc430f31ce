"""Losses of batches with padding, packed documents and ids of every type."""

from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from flax_attn.models import GPT2, GPT2Config
from flax_attn.models.loss import next_token_loss
from flax_attn.parity import tolerance

from .attention import jit
from .integers import DTYPES, ENDS, NARROW, Integers, draw_counts
from .judge import Wrong

TOKENS = 7
OUTSIDE = (-100, -1, -(2**31), 2**31 - 1)


@dataclass(frozen=True)
class Loss:
    """One batch."""

    vocab: int
    tokens: np.ndarray  # Python integers, (b, t)
    dtype: str
    x64: bool
    lengths: Integers | None
    segments: np.ndarray | None
    segment_dtype: str
    single: bool
    gradients: bool
    wrong: bool = False
    backends: tuple[str, ...] = ("loss",)

    def __str__(self) -> str:
        segments = None if self.segments is None else self.segments.tolist()
        return (
            f"next_token_loss, vocabulary of {self.vocab}{', x64' if self.x64 else ''}"
            f"{', one row' if self.single else ''}{', with gradients' if self.gradients else ''}\n"
            f"tokens={self.tokens.tolist()} ({self.dtype})\nlengths={self.lengths}\n"
            f"segments={segments} ({self.segment_dtype})"
        )

    @property
    def refusable(self) -> bool:
        """Whether lengths are no lengths of these tokens, or wider than JAX's integers."""
        if self.lengths is None:
            return False
        fit = all(0 <= x <= TOKENS for x in self.lengths.values.reshape(-1))
        return not (fit and (self.x64 or self.lengths.narrow))

    @cached_property
    def documents(self) -> list[np.ndarray]:
        """The tokens of each document, without padding."""
        found = []
        b = len(self.tokens)
        lengths = (
            np.full(b, TOKENS) if self.lengths is None else np.broadcast_to(self.lengths.values, b)
        )
        for row in range(b):
            real = self.tokens[row][: min(max(lengths[row], 0), TOKENS)]
            ids = np.zeros(TOKENS, int) if self.segments is None else self.segments[row]
            start = 0
            for i in range(1, len(real) + 1):
                if i == len(real) or ids[i] != ids[start]:
                    found.append(real[start:i].astype(int))
                    start = i
        return [document for document in found if len(document) > 1]

    def check(self, backend: str) -> None:
        """Raise unless the loss and its gradients are those of the documents alone."""
        with jax.enable_x64(True):
            targets = sum(len(document) - 1 for document in self.documents)
            sums = [
                _alone(self.vocab, len(x))(jnp.asarray(x, jnp.int32)[None]) for x in self.documents
            ]
            total = (
                jax.tree.map(lambda *x: sum(map(np.asarray, x)) / targets, *sums) if sums else None
            )
        with jax.enable_x64(self.x64):
            found = self._found()
        if total is None:
            if float(found[0]) != 0:
                raise Wrong(f"a loss of {float(found[0])} without a target")
            return
        value, gradients = jax.tree.map(lambda x: np.asarray(x, np.float64), found)
        self._compare({"loss": value}, {"loss": np.asarray(total[0])}, tolerance.FORWARD)
        if self.gradients:
            names = range(len(gradients))
            ours, theirs = (
                {str(i): np.asarray(side[i]) for i in names} for side in (gradients, total[1])
            )
            self._compare(ours, theirs, tolerance.GRADIENT)

    def _compare(self, ours: dict, theirs: dict, limit: float) -> None:
        if not self.x64:  # in float32: by what a float32 knows
            limit = tolerance.REORDERED * float(np.finfo(np.float32).eps)
        errors = tolerance.gradient_errors(ours, theirs)
        if not max(errors.values()) <= limit:
            shown = {name: f"{error:.3g}" for name, error in errors.items()}
            raise Wrong(f"errors {shown} above {limit:.3g}")

    def _found(self) -> Any:
        tokens = jnp.asarray(self.tokens.astype(self.dtype))
        lengths = None if self.lengths is None else self.lengths.array()
        segments = (
            None if self.segments is None else jnp.asarray(self.segments.astype(self.segment_dtype))
        )
        if self.single:
            tokens = tokens[0]
            segments = None if segments is None else segments[0]
        traced = {}
        if self.lengths is not None and self.lengths.form == "jax":
            traced = {"lengths": jnp.asarray(lengths)}
        graph, state = _model(self.vocab, "float64" if self.x64 else "float32")

        def loss(state, tokens, segments, traced):
            options = {"lengths": lengths, "segments": segments} | traced
            return next_token_loss(nnx.merge(graph, state), tokens, **options)

        value, gradients = jit(jax.value_and_grad(loss))(state, tokens, segments, traced)
        return value, jax.tree.leaves(gradients)


@cache
def _model(vocab: int, dtype: str) -> Any:
    with jax.enable_x64(True):
        config = GPT2Config(6, 2, 1, context_length=TOKENS, vocab_size=vocab, dropout=0.0)
        model = GPT2(config, dtype=jnp.float64, param_dtype=jnp.float64, rngs=nnx.Rngs(0))
        graph, state = nnx.split(model)
        rng = np.random.default_rng(8)
        state = jax.tree.map(lambda x: rng.normal(size=x.shape).astype(np.float32) / 4, state)
        if dtype == "float32":
            graph, _ = nnx.split(GPT2(config, rngs=nnx.Rngs(0)))
            return graph, jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), state)
        return graph, jax.tree.map(lambda x: jnp.asarray(x, jnp.float64), state)


@cache
def _alone(vocab: int, length: int) -> Any:
    """Return the sum of the losses of one document, and its gradients."""
    graph, state = _model(vocab, "float64")

    def loss(state, tokens):
        logits = nnx.merge(graph, state)(tokens)[0, :-1]
        chosen = jnp.take_along_axis(jax.nn.log_softmax(logits), tokens[0, 1:, None], axis=-1)
        return -chosen.sum()

    compiled = jit(jax.value_and_grad(loss))

    def run(tokens):
        value, gradients = compiled(state, tokens)
        return value, jax.tree.leaves(gradients)

    return run


def draw(rng: np.random.Generator) -> Loss:
    """Return a random batch."""
    vocab = int(rng.choice([11, 130, 300]))
    x64 = bool(rng.random() < 0.7)
    single = bool(rng.random() < 0.2)
    b = 1 if single else 2
    dtype = str(rng.choice(DTYPES if x64 else NARROW))
    limits = np.iinfo(dtype)
    tokens = rng.integers(0, min(vocab, limits.max + 1), size=(b, TOKENS)).astype(object)
    lengths = None
    if rng.random() < 0.6:
        near = range(TOKENS + 1) if rng.random() < 0.8 else range(-1, TOKENS + 3)
        lengths = draw_counts(rng, "lengths", near, b, x64, far=0.1)
        if single and lengths.values.size != 1:
            lengths = None
        elif single:
            lengths = Integers("lengths", lengths.values.reshape(()), lengths.form, lengths.dtype)
    if lengths is not None and rng.random() < 0.5:
        outside = [x for x in (*OUTSIDE, vocab, vocab + 7) if limits.min <= x <= limits.max]
        behind = np.arange(TOKENS) >= np.broadcast_to(lengths.values, b)[:, None]
        if outside:
            tokens[behind.astype(bool)] = outside[rng.integers(len(outside))]
    segment_dtype = str(rng.choice(DTYPES if x64 else NARROW))
    segments = _draw_segments(rng, b, segment_dtype) if rng.random() < 0.4 else None
    return Loss(
        vocab,
        tokens,
        dtype,
        x64,
        lengths,
        segments,
        segment_dtype,
        single,
        bool(rng.random() < 0.6),
    )


def _draw_segments(rng: np.random.Generator, b: int, dtype: str) -> np.ndarray:
    limits = np.iinfo(dtype)
    pool = [x for x in (0, 1, 2, 3, *ENDS) if limits.min <= x <= limits.max]
    rows = []
    for _ in range(b):
        ids = rng.choice(len(pool), size=3, replace=False)
        runs = np.sort(rng.integers(0, 3, size=TOKENS))
        rows.append([pool[ids[run]] for run in runs])
    return np.array(rows, object)
