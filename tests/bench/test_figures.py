import pytest

from flax_attn.bench.benchmark import Measurement
from flax_attn.bench.figures import curve, exponent, ratio, summary
from flax_attn.bench.workload import Workload

SMALL, LONG = Workload(4, 12, 256, 64), Workload(1, 12, 8192, 64)


def row(section, name, work, seconds, **found):
    return Measurement(section, name, work, seconds=(seconds,) * 3, **found)


def test_ratio_is_our_time_over_theirs_for_the_same_work():
    rows = [
        row("attention", "ours", LONG, 9.0),
        row("attention", "ours", SMALL, 1.0),
        row("attention", "theirs", SMALL, 4.0),
    ]
    assert ratio(rows, "ours", rows[2]) == 0.25
    assert ratio(rows, "ours", rows[1]) == 1.0


@pytest.mark.parametrize("timed", ["ours", "theirs", "neither"])
def test_there_is_no_ratio_to_what_was_not_timed(timed):
    rows = [
        Measurement("attention", name, SMALL, seconds=(1.0,) * (name == timed))
        for name in ("ours", "theirs")
    ]
    assert ratio(rows, "ours", rows[1]) is None


@pytest.mark.parametrize("power", [0, 1, 2, 2.5])
def test_exponent_of_a_known_curve(power):
    sizes = [128, 256, 512, 1024, 2048]
    assert exponent(sizes, [3.0 * size**power for size in sizes]) == power


def test_fixed_cost_at_small_sizes_does_not_bend_the_exponent():
    assert exponent([1, 2, 4, 8], [500, 500, 16, 64]) == 2


def test_one_point_has_no_exponent():
    assert exponent([128], [1.0]) is None
    assert exponent([], []) is None


def test_a_curve_ends_where_nothing_was_timed(report):
    assert curve(report.rows, "tokens", "jax.nn", "best")[0] == [128, 256, 512]
    assert curve(report.rows, "tokens", "ours auto", "temporaries") == (
        [128, 256, 512, 1024],
        [128, 256, 512, 1024],
    )


def test_visible_pairs_count_the_mask():
    assert Workload(1, 1, 9, 4, step=True).pairs == 9
    for work in (
        Workload(1, 1, 9, 4),
        Workload(1, 1, 9, 4, window=3),
        Workload(1, 1, 9, 4, window=20),
    ):
        assert work.pairs == work.mask().materialise(1, 1, 9, 9).sum()


def test_operations_are_those_of_two_products_or_seven():
    assert Workload(2, 3, 5, 7).flops == 2 * 2 * 2 * 3 * 15 * 7
    assert Workload(2, 3, 5, 7, backward=True).flops == 2 * 7 * 2 * 3 * 15 * 7


def test_the_summary_takes_the_rows_it_names_and_leaves_out_what_was_not_measured():
    both, windowed = Workload(1, 12, 2048, 64, backward=True), Workload(1, 12, 8192, 64, window=512)
    layer = Workload(2, 12, 1024, 64, backward=True, layer=True)
    compiled = Measurement(
        "memory",
        "ours",
        Workload(1, 8, 8192, 64, backward=True),
        "compiled",
        temporaries=80 * 2**20,
    )
    rows = [
        row("attention", "ours", SMALL, 1.0),
        row("attention", "torch SDPA", SMALL, 1.0),
        row("attention", "ours", LONG, 1.0),
        row("attention", "torch SDPA", LONG, 4.0),
        row("attention", "jax.nn", LONG, 5.0),
        row("attention", "ours", both, 3.0),
        row("attention", "torch SDPA", both, 5.0),
        row("attention", "jax.nn", both, 10.0),
        row("window", "ours", LONG, 8.0),
        row("window", "ours", windowed, 1.0),
        row("layer", "ours", layer, 2.0),
        row("layer", "nnx.MultiHeadAttention", layer, 5.0),
        compiled,
    ]
    assert summary(rows, "ours") == {
        "forward / torch SDPA, geometric mean": 0.5,
        "forward / torch SDPA, largest": 1.0,
        "forward+backward / torch SDPA, T 512 to 4096, geometric mean": 0.6,
        "forward+backward / torch SDPA, largest": 0.6,
        "forward, forward+backward / jax.nn, T from 1024, largest": 0.3,
        "window / full causal, largest": 0.125,
        "temporaries of forward+backward, MiB": 80.0,
        "layer / nnx.MultiHeadAttention": 0.4,
    }
