"""The price of a replay: from the stated model, from a record, and refused where a record cannot give it."""

import pytest

from kimivl_lab.config import KimiVLConfig
from kimivl_lab.datasets import data_path
from kimivl_lab.gpus import find_gpu
from kimivl_lab.measure.records import read_record
from kimivl_lab.moonvit.flops import tower_flops
from kimivl_lab.planner import replay_cost
from kimivl_lab.planner.replay_cost import REPLAY_COST, eager_cost, measured_replay_cost


def replays(times):
    more = {"phase": "budget", "variant": "replay"}
    return [more | {"tokens": b, "budget_tokens": b, "latency_ms_p50": ms} for b, ms in times.items()]


def test_the_flops_of_a_row_are_the_encoders():
    config = KimiVLConfig.preset("kimi-vl-a3b")
    tower = tower_flops(config.vision_config, [(2, 2)])
    wide, text = 4 * config.vision_config.hidden_size, config.text_config.hidden_size
    assert tower["linear"] + tower["patch_embed"] + 2 * (wide * wide + wide * text) == replay_cost.ROW_FLOPS


def test_the_default_is_the_price_on_an_h100():
    assert replay_cost.predicted_replay_cost(0.6 * find_gpu("H100").flops_per_s) == REPLAY_COST
    assert replay_cost.predicted_replay_cost(0.6 * find_gpu("RTX 4090").flops_per_s) == 31
    assert eager_cost(REPLAY_COST) == 2 * REPLAY_COST and eager_cost(0) == 0


def test_a_fit_finds_what_the_times_were_made_of():
    assert measured_replay_cost(replays({10: 2.0, 20: 3.0, 40: 5.0})) == 10
    assert measured_replay_cost(replays({b: 3 + 0.2 * b + 0.001 * b * b for b in (4, 16, 64, 256, 1104)})) == 15
    assert measured_replay_cost(replays({10: 1.0, 20: 2.0})) == 0, "no fixed time"


def test_only_replays_of_full_budgets_count():
    rows = replays({10: 2.0, 20: 3.0, 40: 5.0})
    other = [{**rows[0], "variant": "eager", "latency_ms_p50": 99.0}, {**rows[0], "tokens": 5, "latency_ms_p50": 77.0}]
    assert measured_replay_cost([*other, *rows, {"phase": "capture", "variant": "replay"}]) == 10


def test_the_kept_record_gives_a_price():
    """On a CPU a replay is cheap: some rows of a small tower, not hundreds."""
    paths = list(data_path("measurements").glob("graphs__*.csv"))
    assert paths and all(0 <= measured_replay_cost(read_record(path)[0]) < 50 for path in paths)


@pytest.mark.parametrize(
    ("times", "message"),
    [
        ({}, "0 replays of full budgets"),
        ({64: 3.0}, "1 replays"),
        ({64: 3.0, 128: 0.0}, "not positive"),
        ({64: 3.0, 128: float("nan")}, "not positive"),
        ({64: 3.0, 128: None}, "not positive"),
        ({64: 3.0, 128: 2.0}, "do not grow"),
        ({64: 3.0, 128: 3.0}, "do not grow"),
    ],
)
def test_a_record_that_gives_no_price_is_refused(times, message):
    with pytest.raises(ValueError, match=message):
        measured_replay_cost(replays(times))
