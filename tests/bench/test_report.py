import json
from dataclasses import replace

import pytest
from rich.console import Console

from flax_attn.backends.registry import BACKENDS, load
from flax_attn.bench import suite
from flax_attn.bench.benchmark import Measurement
from flax_attn.bench.plot import plot_growth
from flax_attn.bench.tables import notes, tables

WIDEST = {
    "timed": {
        "seconds": (123.456, 234.567),
        "temporaries": 2**40,
        "compile_seconds": 59.9,
        "error": 0.99,
    },
    "disagrees": {"note": "its error is 7 times the allowed one"},
}


@pytest.fixture
def show(capsys):
    def printed(report):
        console = Console(width=120)
        for table in tables(report):
            console.print(table)
        return capsys.readouterr().out

    return printed


@pytest.fixture
def text(report, show):
    return show(report)


@pytest.mark.parametrize("status", WIDEST)
def test_tables_fit_120_columns_and_cut_nothing(report, show, status):
    benchmarks = suite.benchmarks(suite.FULL, suite.default_backends("cpu"), "cpu")
    entries = (
        (b.section, implementation.name, work)
        for b in benchmarks
        for implementation, work in b.entries
    )
    text = show(
        replace(
            report, rows=tuple(Measurement(*entry, status, **WIDEST[status]) for entry in entries)
        )
    )
    assert max(map(len, text.splitlines())) <= 120
    assert "…" not in text
    assert status == "timed" or text.count(status) > 100


def cells(text, start):
    return [line.split() for line in text.splitlines() if line.strip().startswith(start)]


def test_table_shows_time_spread_turns_ratio_and_rate(text):
    theirs = cells(text, "torch SDPA")[0]
    assert theirs == ["torch", "SDPA", "1000", "50%", "3", "0.50", "0.4", "0%", "-", "-", "0.50"]
    assert cells(text, "sloppy")[0][:2] == ["sloppy", "disagrees"]


def test_table_of_growth_ends_with_the_exponent(text):
    assert [row[-1] for row in cells(text, "ours auto")[1:]] == ["2.00", "1.00"]
    assert [row[-1] for row in cells(text, "jax.nn")] == ["3.00", "2.00"]
    assert "too large" in text


def test_the_summary_belongs_to_the_full_table(report):
    assert report.summary == {
        "forward / torch SDPA, geometric mean": 0.5,
        "forward / torch SDPA, largest": 0.5,
    }
    assert not replace(report, sizes="quick").summary


def test_notes_name_everyone_left_out_once(report):
    twice = replace(report, rows=report.rows + report.rows)
    assert notes(twice) == [
        (
            "sloppy, (4, 256, 12, 64) forward, float32: disagrees: its error is 7 times the"
            " allowed one"
        ),
        "attnax flash: not installed: pip install attnax",
        (
            "jax.nn, (1, 2048, 8, 64) forward+backward, float32: too large: needs 9.0 GiB of"
            " temporaries, and the limit is 4.0 GiB"
        ),
    ]


def test_json_holds_what_was_measured_and_reads_back_the_same(report, tmp_path):
    path = tmp_path / "bench.json"
    report.write(str(path))
    read = json.loads(path.read_text(), parse_constant=pytest.fail)
    assert read == json.loads(json.dumps(report.as_dict()))
    theirs = read["rows"][1]
    assert (theirs["best"], theirs["spread"], theirs["ours_over_it"]) == (1.0, 0.5, 0.5)
    assert theirs["seconds"] == [1.0, 1.0, 2.0]
    assert read["machine"] == report.machine
    assert {(g["over"], g["implementation"], g["cost"]): g["exponent"] for g in read["growth"]}[
        "tokens", "jax.nn", "best"
    ] == 3
    assert read["summary"] == report.summary


def test_plot_draws_every_curve_to_its_own_end(report, tmp_path):
    pytest.importorskip("matplotlib")
    figure = plot_growth(report)
    figure.savefig(tmp_path / "growth.png")
    assert (tmp_path / "growth.png").read_bytes().startswith(b"\x89PNG")
    time, memory = figure.axes
    assert [len(line.get_xdata()) for line in time.lines] == [4, 3, 4]
    assert [line.get_label() for line in memory.lines] == [
        "ours auto: T^1.00",
        "jax.nn: T^2.00",
        "textbook: T^1",
    ]
    assert (
        {axes.get_xscale() for axes in figure.axes}
        == {axes.get_yscale() for axes in figure.axes}
        == {"log"}
    )


def test_plot_without_growth_is_refused(report):
    pytest.importorskip("matplotlib")
    with pytest.raises(ValueError, match="Leave out --shape"):
        plot_growth(replace(report, rows=report.rows[:4]))


def test_a_run_measures_the_given_shapes_in_both_directions():
    seen = []
    report = suite.run(
        shapes=[(1, 2, 6, 4)],
        backends=["reference"],
        rounds=2,
        progress=lambda benchmarks, benchmark: seen.append(benchmark),
    )
    assert [benchmark.section for benchmark in seen] == ["attention", "attention"]
    assert report.sizes == "given"
    mine = [row for row in report.rows if row.implementation == report.ours]
    assert [row.work.backward for row in mine] == [False, True]
    assert all(row.seconds and row.flops_per_second for row in mine)
    assert report.machine["jax"]
    assert report.limit > 0


def test_an_unknown_backend_is_refused_before_any_work():
    with pytest.raises(ValueError, match="backend must be one of"):
        suite.run(backends=["cuda"])


SECTIONS = {
    "attention",
    "window",
    "dtype",
    "bfloat16",
    "step",
    "memory",
    "layer",
    "tokens",
    "heads",
}


@pytest.mark.parametrize("sizes", [suite.FULL, suite.QUICK], ids=["full", "quick"])
def test_the_suite_covers_every_section_and_grows(sizes):
    benchmarks = suite.benchmarks(sizes, ["auto", "reference"], "cpu")
    assert {b.section for b in benchmarks} == SECTIONS
    names = {
        b.section: [implementation.name for implementation, _ in b.entries] for b in benchmarks
    }
    assert all(
        names[section].count("ours reference") == 1 for section in ("memory", "tokens", "heads")
    )
    tokens = [b.entries[0][1].t for b in benchmarks if b.section == "tokens"]
    assert tokens == sorted(tokens)
    widths = {
        b.entries[0][1].n * b.entries[0][1].h
        for b in benchmarks
        if b.section in ("tokens", "heads")
    }
    assert widths == {sizes.width}


@pytest.mark.parametrize("platform", ["cpu", "gpu", "tpu"])
def test_every_backend_of_a_platform_is_measured_once(platform):
    names = suite.default_backends(platform)
    assert (names[0], names[-1]) == ("auto", "blocked")
    assert len(set(names)) == len(names)
    special = {name for name in BACKENDS if load(name).platforms == (platform,)}
    assert special - {"native"} <= set(names)  # which auto takes, where it was built
