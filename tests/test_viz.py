import sys

import numpy as np
import pytest

from flax_attn.viz import plot_attention

WEIGHTS = np.random.default_rng(0).dirichlet(np.ones(4), size=(2, 3))
QUERIES, KEYS = ["one", "small", "step"], ["a", "b", "c", "d"]


def maps(figure):
    return [
        axes
        for axes in figure.axes
        if axes.images and axes.get_xlabel() == axes.get_ylabel() == "" and axes.texts
    ]


def test_draws_every_head_with_its_labels_and_weights():
    figure = plot_attention(WEIGHTS, QUERIES, KEYS, titles=["left", "right"], title="cross")
    assert [axes.get_title() for axes in maps(figure)] == ["left", "right"]
    for axes, head in zip(maps(figure), WEIGHTS, strict=True):
        assert [label.get_text() for label in axes.get_yticklabels()] == QUERIES
        assert [label.get_text() for label in axes.get_xticklabels()] == KEYS
        np.testing.assert_array_equal(axes.images[0].get_array(), head)
        assert axes.texts[1].get_text() == f"{head[0, 1]:.2f}"
    assert figure.get_suptitle() == "cross"


def test_all_heads_share_one_colour_scale():
    figure = plot_attention(WEIGHTS, QUERIES, KEYS)
    assert {axes.images[0].get_clim() for axes in maps(figure)} == {(0.0, WEIGHTS.max())}


def test_hidden_weights_stay_blank():
    (axes,) = maps(plot_attention(np.array([[1.0, 0.0], [0.5, 0.5]]), ["a", "b"]))
    assert [text.get_text() for text in axes.texts] == ["1.00", "0.50", "0.50"]


def test_long_texts_are_drawn_without_numbers(tmp_path):
    figure = plot_attention(np.full((5, 40, 40), 1 / 40), [f"token{i}" for i in range(40)])
    figure.savefig(tmp_path / "long.png", dpi=20)
    assert not any(axes.texts for axes in figure.axes)


@pytest.mark.parametrize(
    ("weights", "tokens", "message"),
    [
        (
            np.ones((2, 3, 4, 4)),
            ["a"] * 4,
            r"weights must be \(n, t, s\) or \(t, s\).*Of a batch pass weights\[0\]",
        ),
        (
            np.ones((2, 3, 4)),
            ["a"] * 3,
            r"\(2, 3, 4\) need as many.*got \(2, 3, 3\).*pass key_tokens",
        ),
    ],
)
def test_wrong_sizes_are_named(weights, tokens, message):
    with pytest.raises(ValueError, match=message):
        plot_attention(weights, tokens)


def test_without_matplotlib_it_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match=r"needs matplotlib: pip install matplotlib"):
        plot_attention(WEIGHTS, QUERIES, KEYS)
