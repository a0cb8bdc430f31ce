"""The letters of axes, in every shape of a docstring, an einops string or an annotation."""

AXES = {
    "b": "batch",
    "t": "query tokens",
    "s": "key tokens",
    "n": "query heads",
    "k": "key/value heads",
    "g": "query heads per key/value head, n // k",
    "h": "head width of queries and keys",
    "v": "head width of values (equal to h unless said)",
    "d": "model width",
}
