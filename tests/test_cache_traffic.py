"""Replays of traffic and the numbers of a cache, against sequences by hand."""

import math
from itertools import product

import pytest

from kimivl_lab.lessons import cache_traffic
from kimivl_lab.lessons.cache_traffic import break_even, draw_grids, hits, mib, most_hits, rate_words, replay
from kimivl_lab.moonvit.position_cache import PositionCache


def test_the_worked_sequence():
    assert (hits("ABACA", 2, "fifo"), hits("ABACA", 2), most_hits("ABACA", 2)) == (1, 2, 2)
    assert (hits("ABACB", 2, "fifo"), hits("ABACB", 2)) == (2, 1)
    assert hits("ABCABCABC", 2) == 0 and most_hits("ABCABCABC", 2) == 4


def test_no_policy_has_more_than_the_most_hits():
    for keys in product("ABC", repeat=6):
        assert max(hits(keys, 2), hits(keys, 2, "fifo")) <= most_hits(keys, 2)


def test_a_replay_counts_hits_bytes_and_evictions():
    grids = [(2, 2), (4, 4), (2, 2), (4, 2)]
    everything = replay(PositionCache(), grids)
    assert everything == (0.25, mib([(2, 2), (4, 4), (4, 2)]), 0)
    bounded = replay(PositionCache(max_bytes=None, max_entries=2), grids)
    assert bounded == (0.25, mib([(2, 2), (4, 4)]), 1)


def test_a_drawn_size_that_is_refused_is_left_out(monkeypatch):
    monkeypatch.setattr(cache_traffic, "draw_sizes", lambda *_: [(28, 56), (28, 8000), (56, 28)])
    assert draw_grids("clipart", 3) == [(4, 2), (2, 4)]


def test_the_limit_bounds_the_drawn_grids():
    assert draw_grids("receipts", 500) == draw_grids("receipts", 500)
    assert max(h * w for h, w in draw_grids("receipts", 500)) < 5400
    assert max(h * w for h, w in draw_grids("receipts", 500, in_token_limit=16384)) > 10000


@pytest.mark.parametrize(
    ("times", "rate", "text"),
    [((10, 2, 18), 0.5, "50%"), ((10, 2, 10), 0, "0%"), ((4, 4, 5), 1, "100%"), ((1, 2, 3), math.inf, "never")],
)
def test_break_even(times, rate, text):
    assert break_even(*times) == rate and rate_words(break_even(*times)) == text
