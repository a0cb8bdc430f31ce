import pytest

from tools import startup


def test_starts_take_turns_with_a_cache_of_their_own_and_the_least_disturbed_counts(monkeypatch):
    asked, caches = [], []

    def run(code, folder, cache):
        asked.append(
            "theirs" if "transformers" in code else "second" if cache in caches else "cold"
        )
        caches.append(cache)
        n = len(asked)
        return {"load": 7.0 - n, "compile": 1.0, "first": 10.0 - n, "rate": 10.0 * n, "peak": 0.0}

    monkeypatch.setattr(startup, "_run", run)
    found = {one.task: (one.ours, one.theirs) for one in startup.measure("folder")}
    assert asked == ["cold", "second", "theirs"] * 2
    assert found == {
        "load": (3.0, 1.0),
        "first token, cold": (6.0, 4.0),
        "first token, second start": (5.0, 4.0),
        "rate after the second token": (40.0, 60.0),
    }


def test_a_process_that_fails_is_an_error_with_what_it_said(tmp_path):
    with pytest.raises(RuntimeError, match=r"makes tokens failed:(.|\n)*No module named 'nothing'"):
        startup._run("import nothing", str(tmp_path), "")
