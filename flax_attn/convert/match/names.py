"""Compare names of modules by meaning: `W_query`, `q_proj` and `query` are one.

So are `norm1` and `ln_1`.
"""

import re
from typing import NamedTuple

SYNONYMS = {
    **dict.fromkeys(("q", "qs", "wq", "queries"), "query"),
    **dict.fromkeys(("k", "ks", "wk", "keys"), "key"),
    **dict.fromkeys(("v", "vs", "wv", "values"), "value"),
    **dict.fromkeys(("o", "wo", "output"), "out"),
    **dict.fromkeys(("att", "attn", "attentions"), "attention"),
    **dict.fromkeys(("ff", "ffn", "ffw", "feedforward"), "mlp"),
    **dict.fromkeys(("ln", "layernorm", "rmsnorm", "groupnorm", "batchnorm", "bn"), "norm"),
    **dict.fromkeys(("emb", "embed", "embedding", "embeddings"), "embed"),
    **dict.fromkeys(("tok", "tokens"), "token"),
    **dict.fromkeys(("pos", "positional", "positions"), "position"),
    **dict.fromkeys(("cls",), "class"),
    **dict.fromkeys(("enc",), "encoder"),
    **dict.fromkeys(("dec",), "decoder"),
    **dict.fromkeys(("down", "downsample"), "down"),
}
# Names whose parts do not say what they mean.
PHRASES = {"wte": "token embed", "wpe": "position embed", "feed forward": "mlp"}
# The norms of a block, by what they stand before or after, in synonyms; longer ones come first. Of
# four norms the one after attention is the second.
NORMS = {
    "post attention norm": "norm 2",
    "pre attention norm": "norm 1",
    "attention norm": "norm 1",
    "norm attention": "norm 1",
    "input norm": "norm 1",
    "norm before": "norm 1",
    "norm after": "norm 2",
    "mlp norm": "norm 2",
    "norm mlp": "norm 2",
}
# What a name is decorated with.
FILLERS = {
    "w",
    "c",
    "to",
    "proj",
    "projection",
    "lin",
    "linear",
    "dense",
    "fc",
    "layer",
    "self",
    "module",
}
# Where a capital follows a small letter, and where digits begin or end.
_WORD_ENDS = re.compile(r"(?<=[a-z])(?=[A-Z])|(?<=\d)(?=[A-Za-z])|(?<=[A-Za-z])(?=\d)")
ATTENTION_INPUTS = {"query", "key", "value"}


class Key(NamedTuple):
    """The meaning of a name: its words, sorted, and its numbers in order."""

    words: tuple[str, ...]
    numbers: tuple[int, ...]


def key_of(path: tuple[str, ...]) -> Key:
    """Return the meaning of a path.

    Example:
        >>> key_of(("attn", "W_query")) == key_of(("attention", "q_proj"))
        True
        >>> key_of(("LayerNorm_0",))
        Key(words=('norm',), numbers=(0,))
    """
    tokens = _path_tokens(path)
    words = {token for token in tokens if not token.isdigit()}
    numbers = tuple(int(token) for token in tokens if token.isdigit())
    return Key(tuple(sorted(words)), numbers)


def in_order(paths: list[tuple[str, ...]], others: list[tuple[str, ...]]) -> list[tuple[str, ...]]:
    """Return the words and numbers of each path, in order, as often as they occur.

    The words of modules around all of these are left out if no other path has them.

    Example:
        >>> in_order([("inner", "a_b"), ("inner", "b_a")], [("a_b",), ("b_a",)])
        [('a', 'b'), ('b', 'a')]
    """
    every = [_path_tokens(path) for path in paths]
    elsewhere = {token for path in others for token in _path_tokens(path)}
    around = set.intersection(*map(set, every)) - elsewhere
    return [tuple(token for token in own if token not in around) for own in every]


def _path_tokens(path: tuple[str, ...]) -> list[str]:
    tokens = []
    for part in path:
        tokens += _tokens(part)
    return tokens


def distinguishing(paths: list[tuple[str, ...]]) -> list[Key]:
    """Return the meaning of each path without the words and outer numbers that all of them have.

    Example:
        >>> distinguishing([("mlp", "up"), ("mlp", "down")])
        [Key(words=('up',), numbers=()), Key(words=('down',), numbers=())]
    """
    keys = [key_of(path) for path in paths]
    # The words of a name that stands alone are all its own.
    common = set.intersection(*(set(key.words) for key in keys)) if len(keys) > 1 else set()
    numbers = _inner([key.numbers for key in keys])
    words = [tuple(word for word in key.words if word not in common) for key in keys]
    return [Key(own, number) for own, number in zip(words, numbers, strict=True)]


def _inner(numbers: list[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """Return numbers without those that all begin with, and those that all end with."""
    for _ in range(2):
        while len(numbers) > 1 and all(numbers) and len({own[0] for own in numbers}) == 1:
            numbers = [own[1:] for own in numbers]
        numbers = [own[::-1] for own in numbers]
    return numbers


def _tokens(name: str) -> list[str]:
    split = _WORD_ENDS.sub(" ", name)
    words = re.findall(r"[a-z]+|\d+", split.lower())
    plain = " ".join(words)
    plain = plain.replace("layer norm", "layernorm").replace("rms norm", "rmsnorm")
    plain = _with_meanings(plain, PHRASES)
    synonyms = " ".join(SYNONYMS.get(token, token) for token in plain.split())
    tokens = _with_meanings(synonyms, NORMS).split()
    kept = [token for token in tokens if token not in FILLERS]
    # A projection with no other name, as `c_proj`, is that of the output.
    if not kept and {"proj", "projection"}.intersection(tokens):
        return ["out"]
    return kept


def _with_meanings(words: str, phrases: dict[str, str]) -> str:
    for phrase, meaning in phrases.items():
        words = re.sub(rf"\b{phrase}\b", meaning, words)
    return words
