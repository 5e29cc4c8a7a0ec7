"""The timing function: which variant runs when, what is counted, and its percentiles. No test looks at a clock."""

import gc

import pytest

from kimivl_lab.measure.timing import Timing, time_interleaved


def order_of(names, **settings):
    """The order in which the variants ran."""
    ran = []
    timings = time_interleaved({name: lambda name=name: ran.append(name) for name in names}, **settings)
    return "".join(ran), timings


def test_every_round_runs_all_variants_in_a_new_order_of_the_seed():
    ran, timings = order_of("ABC", warmup=0, repeats=60)
    rounds = [ran[at : at + 3] for at in range(0, 180, 3)]
    assert all(sorted(one) == ["A", "B", "C"] for one in rounds)
    assert len(set(rounds)) == 6, "all orders occur"
    assert {name: timing.repeats for name, timing in timings.items()} == {"A": 60, "B": 60, "C": 60}
    assert order_of("ABC", warmup=0, repeats=60)[0] == ran
    assert order_of("ABC", warmup=0, repeats=60, seed="another")[0] != ran


def test_no_variant_gains_by_its_neighbours(monkeypatch):
    """A clock on which a run costs what ran before it: equal variants come out equal, the other keeps its ratio."""
    after = {"fills the cache": 0.5, "empties the cache": 2.0, "first": 1.0, "second": 1.0, "": 1.0}
    now, before = 0.0, ""

    def run(name):
        nonlocal now, before
        now, before = now + 1e6 * (3 if name == "fills the cache" else 1) * after[before], name

    monkeypatch.setattr("time.perf_counter_ns", lambda: now)
    variants = {name: lambda name=name: run(name) for name in after if name}
    timings = time_interleaved(variants, repeats=1001)
    first, second, threefold = (timings[name] for name in ("first", "second", "fills the cache"))
    assert first == second == Timing(0.5, 1.0, 2.0, 1001)
    assert threefold.p50_ms == 3 * first.p50_ms


def test_warm_up_comes_first_and_is_not_counted():
    ran, timings = order_of("AB", warmup=2, repeats=3)
    assert ran[:4] == "AABB" and len(ran) == 10
    assert timings["A"].repeats == 3


def test_progress_is_told_after_each_round():
    rounds = []
    order_of("AB", warmup=1, repeats=3, on_round=rounds.append)
    assert rounds == [1, 2, 3]


@pytest.mark.parametrize("settings", [{"warmup": -1}, {"repeats": 0}])
def test_senseless_numbers_of_runs_are_refused(settings):
    with pytest.raises(ValueError, match="warmup .* repeats"):
        order_of("A", **settings)


def test_percentiles_interpolate_between_samples():
    timing = Timing.of([5.0, 1.0, 3.0, 2.0, 4.0, 6.0])
    assert (timing.p20_ms, timing.p50_ms, timing.p80_ms) == pytest.approx((2.0, 3.5, 5.0))
    assert timing.repeats == 6


def test_one_sample_is_all_its_percentiles():
    timing = Timing.of([0.25])
    assert (timing.p20_ms, timing.p50_ms, timing.p80_ms) == (0.25, 0.25, 0.25)


def test_a_row_has_a_records_columns():
    assert Timing(1.0, 2.0, 3.0, 7).row() == {
        "latency_ms_p50": 2.0,
        "latency_ms_p20": 1.0,
        "latency_ms_p80": 3.0,
        "repeats": 7,
    }


@pytest.mark.parametrize("enabled", [True, False])
def test_garbage_is_not_collected_meanwhile_and_the_setting_is_restored(enabled):
    seen = []

    def failing():
        seen.append(gc.isenabled())
        raise RuntimeError

    before = gc.isenabled()
    (gc.enable if enabled else gc.disable)()
    try:
        with pytest.raises(RuntimeError):
            time_interleaved({"A": failing}, warmup=0)
        assert seen == [False]
        assert gc.isenabled() == enabled
    finally:
        (gc.enable if before else gc.disable)()
