"""Models of transformers beside those of this library."""

import numpy as np
import transformers

from flax_attn import models
from parity_tests.right_pairs.pairs import Build, Sides, Size, rngs


def _ids(size: Size) -> np.ndarray:
    return np.random.default_rng(0).integers(0, size.out, (size.batch, size.tokens))


def gpt2(size: Size) -> Sides:
    config = transformers.GPT2Config(
        n_embd=size.width,
        n_head=size.heads,
        n_layer=2,
        n_positions=256,
        vocab_size=size.out,
        # Its own ids are outside of this small vocabulary.
        bos_token_id=0,
        eos_token_id=1,
    )
    sizes = {"num_layers": 2, "context_length": 256, "vocab_size": size.out}
    ours = models.GPT2Config(size.width, size.heads, **sizes)

    def logits(model, ids):
        return model(ids).logits

    theirs = transformers.GPT2LMHeadModel(config).eval()
    return Sides(models.GPT2(ours, rngs=rngs()), theirs, [_ids(size)], {"torch_call": logits})


def bert(size: Size) -> Sides:
    config = transformers.BertConfig(
        hidden_size=size.width,
        num_attention_heads=size.heads,
        num_hidden_layers=2,
        intermediate_size=2 * size.width,
        max_position_embeddings=256,
        vocab_size=size.out,
        # PyTorch gives the row of a padding id no gradient.
        pad_token_id=None,
    )
    ours = models.BertConfig(
        size.width,
        size.heads,
        num_layers=2,
        d_hidden=2 * size.width,
        context_length=256,
        vocab_size=size.out,
    )

    def states(model, ids):
        return model(ids).last_hidden_state

    sides = models.Bert(ours, rngs=rngs()), transformers.BertModel(config).eval()
    family = models.Bert.family
    assert family is not None
    options = {"torch_call": states, "layout": family.layout}
    return Sides(*sides, [_ids(size)], options)


LAYERS: tuple[Build, ...] = (gpt2, bert)
PAIRS: dict[str, Build] = {build.__name__: build for build in LAYERS}
