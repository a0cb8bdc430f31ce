from flax_attn.bench import timing


class Race:
    """A clock that moves only while something runs, and a record of what ran how often."""

    def __init__(self, **seconds):
        self.now, self.record = 0.0, []
        self.runs = {name: self._runner(name, cost) for name, cost in seconds.items()}
        self.warm = seconds

    def _runner(self, name, cost):
        def run(repeats):
            self.now += cost * repeats
            self.record.append((name, repeats))

        return run

    def interleave(self, rounds):
        return timing.interleave(self.runs, self.warm, rounds, clock=lambda: self.now)


def test_implementations_take_turns_and_each_begins_once():
    race = Race(a=0.5, b=0.5, c=0.5)
    race.interleave(3)
    assert [name for name, _ in race.record] == ["a", "b", "c", "b", "c", "a", "c", "a", "b"]


def test_seconds_are_those_of_one_call():
    race = Race(short=0.0078125, long=0.5)
    taken = race.interleave(4)
    assert taken == {"short": [0.0078125] * 4, "long": [0.5] * 4}
    assert dict(race.record) == {"short": 12, "long": 1}  # 12 calls fill a turn of 0.1 s


def test_a_slow_implementation_stops_after_two_turns_and_the_others_go_on():
    race = Race(slow=100.0, quick=0.5)
    taken = race.interleave(6)
    assert len(taken["slow"]) == 2
    assert len(taken["quick"]) == 6


def test_nothing_to_time_takes_no_turns():
    assert timing.interleave({}, {}, 3) == {}


def test_the_least_disturbed_turn_counts(monkeypatch):
    turns = {"ours": [3.0, 1.0, 2.0], "theirs": [2.0, 4.0, 5.0]}
    monkeypatch.setattr(
        timing,
        "interleave",
        lambda runs, first, rounds: {name: turns[name][:rounds] for name in runs},
    )
    assert timing.least(dict.fromkeys(turns, print), 3) == {"ours": 1.0, "theirs": 2.0}


def test_spread():
    assert timing.spread([4.0, 1.0, 2.0, 3.0, 2.0]) == 0.5
