"""Masks: which key each query sees."""

import torch
from torch.nn.attention.bias import causal_lower_right
from torch.nn.attention.flex_attention import create_mask
from transformers import masking_utils

from cards.card import Card, code
from cards.twins import by_index, sdpa, tensor

FUNCTION = "torch.nn.attention.flex_attention.create_mask"
CALL = """
attended = attend(q, k, v, mask=mask, return_weights=True)
output, weights = attended.output, attended.weights
"""
TREE = [-1, 0, 0, 1, 1, 2, 2, 3, 4, 4]  # the parent of each token


def masked(name, shows, mask, take, alt, equals, twin, proof, formula, reference, before=""):
    """Return the card of a mask, whose picture is the weights of one call."""
    example = code(before, f"mask = {mask}", CALL)
    return Card(
        name,
        (shows,),
        take,
        example,
        "weights[0]",
        alt,
        equals,
        twin,
        proof,
        formula,
        reference,
        eager=True,
    )


def flexible(function):
    """Return a twin whose mask FlexAttention makes of a function of indices."""

    def twin(names):
        t, s = len(names["q"]), len(names["k"])
        return sdpa(names, create_mask(function, None, None, t, s, device="cpu")[0, 0])

    return twin


def ancestor(b, n, i, j):
    """Whether token j of the tree is token i, or above it."""
    parents, found = torch.tensor([0, *TREE[1:]]), i == j
    for _ in range(3):
        i = parents[i]
        found = found | (i == j)
    return found


SEGMENTS = [0, 0, 0, 1, 1, 1, 1, 2, 2, 2]

MASKS = (
    masked(
        "Causal",
        "Mask.causal",
        "Mask.causal()",
        "Text is continued: a token may not see what comes after it.",
        "A lower triangle: each query gives its weight to the keys up to its own position.",
        "torch.nn.functional.scaled_dot_product_attention(is_causal=True)",
        lambda names: sdpa(names, is_causal=True),
        ("multi_head_causal",),
        "j <= i",
        "Vaswani et al. 2017 (arXiv:1706.03762)",
    ),
    masked(
        "Causal, fewer queries than keys",
        "Mask.causal",
        "Mask.causal(offset=6)  # s - t",
        "Some keys come from a cache. Offset 0 is PyTorch's top-left form, `s - t` FlashAttention's"
        " bottom-right one.",
        "Four queries and ten keys: the first query sees seven keys, the last one sees all ten.",
        "torch.nn.attention.bias.causal_lower_right(t, s)",
        lambda names: sdpa(names, causal_lower_right(4, 10)),
        ("multi_head_cross_causal",),
        "j <= offset + i",
        "Dao 2023, FlashAttention-2 (arXiv:2307.08691)",
        before="q = q[6:]",
    ),
    masked(
        "Sliding window",
        "Mask.sliding_window",
        "Mask.sliding_window(4)",
        "A long text is continued at a cost that grows linearly: each token sees `width` keys, its"
        " own included.",
        "A diagonal band: each query sees its own key and the three before it.",
        "transformers.masking_utils.sliding_window_causal_mask_function(4)",
        by_index(masking_utils.sliding_window_causal_mask_function(4)),
        ("multi_head_packed_window", "multi_head_window"),
        "0 <= i - j < width",
        "Jiang et al. 2023, Mistral (arXiv:2310.06825)",
    ),
    masked(
        "Window to both sides",
        "Mask.window",
        "Mask.window(2, 2)  # left, right",
        "Text is encoded and only neighbours matter.",
        "A diagonal band of five keys: two before the query, its own, and two after it.",
        "transformers.masking_utils.sliding_window_bidirectional_mask_function(2)",
        by_index(masking_utils.sliding_window_bidirectional_mask_function(2)),
        ("modernbertmaskedlm",),
        "-left <= j - i <= right",
        "Beltagy et al. 2020, Longformer (arXiv:2004.05150)",
    ),
    masked(
        "Padding",
        "Mask.lengths",
        "Mask.lengths(key=7)  # or one for each row",
        "Rows of a batch differ in length. A query that sees no key gives 0, never NaN.",
        "All queries see the first seven keys, and none sees the last three.",
        "transformers.masking_utils.padding_mask_function(mask)",
        by_index(masking_utils.padding_mask_function(torch.arange(10)[None] < 7)),
        ("multi_head_padding",),
        "i < query_length and j < key_length",
        "Vaswani et al. 2017 (arXiv:1706.03762)",
    ),
    masked(
        "Packed documents",
        "Mask.segments",
        "Mask.segments(ids)",
        "Several documents share a row of the batch and may not see one another.",
        "Three squares on the diagonal: each token sees those of its own document.",
        "transformers.masking_utils.packed_sequence_mask_function(ids)",
        by_index(masking_utils.packed_sequence_mask_function(torch.tensor([SEGMENTS]))),
        ("multi_head_packed_window", "multi_head_rope_yarn_packed"),
        "segment(i) == segment(j)",
        "Krell et al. 2021 (arXiv:2107.02027)",
        before=f"ids = jnp.array({SEGMENTS})",
    ),
    masked(
        "Prefix",
        "Mask.prefix",
        "Mask.prefix(4)",
        "A prompt or an image is read in both directions, and what follows is continued"
        " (prefix-LM).",
        "A lower triangle whose first four columns are seen by every query.",
        f"{FUNCTION}(lambda b, n, i, j: (j <= i) | (j < 4))",
        flexible(lambda b, n, i, j: (j <= i) | (j < 4)),
        ("multi_head_prefix_dense",),
        "j <= i or j < length",
        "Raffel et al. 2019, T5 (arXiv:1910.10683)",
    ),
    masked(
        "Any array",
        "Mask.dense",
        "Mask.dense(seen)",
        "The mask comes from elsewhere as booleans, True for what is seen.",
        "Keys seen at random, about four in ten.",
        "torch.nn.functional.scaled_dot_product_attention(attn_mask=mask)",
        lambda names: sdpa(names, tensor(names["seen"])),
        ("multi_head_prefix_dense",),
        "array[b, n, i, j]",
        "Vaswani et al. 2017 (arXiv:1706.03762)",
        before="""
        key = jax.random.key(0)
        seen = jax.random.bernoulli(key, 0.4, (10, 10))
        """,
    ),
    masked(
        "Dilated",
        "Mask.where",
        "Mask.where(third) & Mask.causal()",
        "Every third token is enough: a wider view for the same number of keys.",
        "Stripes along the diagonal: each query sees its own key and every third one before it.",
        f"{FUNCTION}(lambda b, n, i, j: ((i - j) % 3 == 0) & (j <= i))",
        flexible(lambda b, n, i, j: ((i - j) % 3 == 0) & (j <= i)),
        ("multi_head_function_mask",),
        "(i - j) mod step = 0",
        "Beltagy et al. 2020, Longformer (arXiv:2004.05150); Dong et al. 2024, FlexAttention"
        " (arXiv:2412.05496)",
        before="""
        def third(b, n, i, j):
            return (i - j) % 3 == 0
        """,
    ),
    masked(
        "Neighbourhood of an image",
        "Mask.where",
        "Mask.where(near)",
        "Tokens are the patches of an image, and each sees those around it.",
        "Bands: each of the ten patches, in rows of five, sees those at most one row and one column"
        " away.",
        f"{FUNCTION}(near)",
        flexible(lambda b, n, i, j: ((i // 5 - j // 5).abs() <= 1) & ((i % 5 - j % 5).abs() <= 1)),
        ("multi_head_function_mask",),
        "|row(i) - row(j)| <= r and |column(i) - column(j)| <= r",
        "Hassani et al. 2022 (arXiv:2204.07143), which moves the window inwards at the edges; this"
        " one ends there",
        before="""
        def near(b, n, i, j):  # patches in rows of 5
            row = abs(i // 5 - j // 5)
            column = abs(i % 5 - j % 5)
            return (row <= 1) & (column <= 1)
        """,
    ),
    masked(
        "Tree",
        "Mask.where",
        "Mask.where(ancestor)",
        "Several continuations are checked in one pass, as in speculative decoding: a token sees"
        " its ancestors.",
        "Scattered keys at and before each query: its ancestors in a tree of ten tokens.",
        f"{FUNCTION}(ancestor)",
        flexible(ancestor),
        ("multi_head_function_mask",),
        "j = i or j is an ancestor of i",
        "Miao et al. 2023, SpecInfer (arXiv:2305.09781)",
        before=f"""
        parents = {TREE}
        seen = jnp.eye(10, dtype=bool)
        for i in range(1, 10):
            above = seen[parents[i]]
            seen = seen.at[i].set(above | seen[i])
        def ancestor(b, n, i, j):
            return seen[i, j]
        """,
    ),
    masked(
        "Combined",
        "Mask",
        "Mask.segments(chunks) & Mask.causal()",
        "Two rules hold at once: `&` keeps both, and their structure. Here chunks of four tokens,"
        " as in Llama 4.",
        "Three triangles on the diagonal: each token sees those before it in its chunk of four.",
        "transformers.masking_utils.chunked_causal_mask_function(4, left_padding)",
        by_index(masking_utils.chunked_causal_mask_function(4, torch.zeros(1, dtype=torch.int64))),
        ("multi_head_packed_window", "multi_head_prefix_dense"),
        "a(i, j) and b(i, j)",
        "Dong et al. 2024, FlexAttention (arXiv:2412.05496)",
        before="chunks = jnp.arange(10) // 4",
    ),
)
