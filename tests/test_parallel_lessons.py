"""What notebook 50 runs on several ranks returns what the notebook says it does."""

import pytest
import torch

from kimivl_lab import KimiVLConfig, MoonViTConfig
from kimivl_lab.bench.fit_cost_model import MeasuredPoint
from kimivl_lab.gpus import find_gpu
from kimivl_lab.lessons.tp_versus_dp import (
    Encoded,
    Waited,
    bound,
    data_parallel_from,
    encode_in_halves,
    encode_in_modes,
    fools_patches,
    gains,
    idle_percent,
    mean_excess,
    median_errors,
    mlp_summand,
    outcome_words,
    print_encoded,
    print_gpu_rates,
    print_predictions,
    print_rates,
    real_batches,
    recorded_sweep,
    schedules,
    tensor_parallel_parts,
    time_collectives,
    time_modes,
    timed_pairs,
    tp_mode,
)
from kimivl_lab.measure.ranks import run_ranks
from kimivl_lab.measure.timing import Timing
from kimivl_lab.parallel.collectives import Collective
from kimivl_lab.parallel.gpu_rates import cost_model_of_gpu

CONFIG = KimiVLConfig.preset("tiny")
GRIDS = [(4, 6), (2, 2), (8, 4)]


def test_patches_and_collectives_are_counted_on_every_rank():
    ranks = run_ranks(encode_in_modes, 2, CONFIG, GRIDS, ["data", "tensor"])
    assert all(one.error < 1e-5 for rank in ranks for one in rank.values())
    assert [rank["data"].patches for rank in ranks] == [32, 28]
    assert [rank["tensor"].patches for rank in ranks] == [60, 60]
    width = CONFIG.vision_config.hidden_size
    for rank in ranks:
        assert [(one.kind, one.bytes) for one in rank["data"].collectives] == [("all_gather", 2 * 32 * width * 4)]
        assert [(one.kind, one.bytes) for one in rank["tensor"].collectives] == 4 * [("all_reduce", 60 * width * 4)]


@pytest.mark.parametrize("busy", [(True, False), (True, True)])
def test_sums_over_the_half_are_right(busy):
    outcomes = run_ranks(encode_in_halves, 4, CONFIG, GRIDS, busy, False, 20.0)
    for half, at_work in zip((outcomes[:2], outcomes[2:]), busy, strict=True):
        if at_work:
            assert all(isinstance(error, float) and error < 1e-5 for error in half)
        else:
            assert half == [None, None]


def test_sums_over_all_mix_two_requests():
    outcomes = run_ranks(encode_in_halves, 4, CONFIG, GRIDS, (True, True), True, 20.0)
    assert all(isinstance(error, float) and error > 0.01 for error in outcomes)


def test_sums_over_all_wait_in_vain_and_name_the_other_half():
    outcomes = run_ranks(encode_in_halves, 4, CONFIG, GRIDS, (False, True), True, 0.5)
    waited = Waited([0, 1], "all_reduce on 4 ranks: rank 0 did not come; rank 1 did not come")
    assert outcomes == [None, None, waited, waited]


def test_points_say_what_was_measured():
    modes = ["single", "tensor", "data", "data, by patches", "data, round robin"]
    (batch,) = run_ranks(time_modes, 2, CONFIG.vision_config, [GRIDS], modes, 1)[0]
    assert list(batch) == modes
    found = {name: (point.mode, point.ranks, point.by_rank) for name, (point, _) in batch.items()}
    assert found == {
        "single": ("single", 1, None),
        "tensor": ("tensor", 2, None),
        "data": ("data", 2, [[2], [0, 1]]),
        "data, by patches": ("data", 2, [[2], [0, 1]]),
        "data, round robin": ("data", 2, [[0, 2], [1]]),
    }
    for point, timing in batch.values():
        assert point.sizes == [24, 4, 32]
        assert point.seconds == timing.p50_ms / 1e3 > 0
    points = run_ranks(time_collectives, 2, [256, 1024], 1)[0]
    assert [(one.kind, one.ranks, one.bytes) for one in points] == [
        (kind, 2, size) for size in (256, 1024) for kind in ("all_reduce", "all_gather", "broadcast")
    ]


FULL = MoonViTConfig.preset("kimi-vl-a3b")
H100, L40S = (cost_model_of_gpu(FULL, find_gpu(name)) for name in ("H100", "L40S"))


def test_words_for_an_outcome():
    words = [outcome_words(each) for each in (None, 1e-7, 0.5, Waited([1], "rank 1 did not come"))]
    assert words == ["no images", "features right", "features WRONG, and no error", "rank 1 did not come"]


def test_counted_bytes_stand_beside_those_by_hand(capsys):
    seen = {"data": Encoded(0.0, 24, [Collective("all_gather", 600, 0.0)])}
    print_encoded([seen, {"data": Encoded(0.1, 20, [])}], {"data": 700})
    first, second = capsys.readouterr().out.splitlines()
    assert "False" in first and "[24, 20]" in first and "1 all_gather" in first
    assert "700" in second and "600" in second


def test_summands_of_the_ranks_add_up_to_the_mlp():
    torch.manual_seed(0)
    x, w0, b0, w1 = (torch.randn(shape).double() for shape in [(5, 4), (4, 12), (12,), (12, 4)])
    whole = torch.nn.functional.gelu(x @ w0 + b0) @ w1
    for ranks in (2, 3, 4):
        parts = [mlp_summand(x, w0, b0, w1, rank, ranks) for rank in range(ranks)]
        assert torch.allclose(torch.stack(parts).sum(0), whole)
        assert not torch.allclose(parts[0], whole / ranks)


def test_equal_patches_are_not_equal_work_and_the_idle_time_is_that_of_all_ranks():
    giant = [16384] + 4 * [4096]
    placed = schedules(FULL, giant, 2)
    one, four = ([work for _, work in images] for images in placed["by patches"])
    assert one == [pytest.approx(46.9, abs=0.05)] and sum(four) == pytest.approx(21.8, abs=0.05)
    assert bound(FULL, giant, 2) == pytest.approx(one[0])
    assert idle_percent(placed["by patches"]) == pytest.approx(100 * (1 - (one[0] + sum(four)) / (2 * one[0])))
    assert idle_percent([[(1, 1.0)], [(1, 3.0)], []]) == pytest.approx(100 * 5 / 9)


def test_real_batches_keep_the_limit_and_by_cost_is_never_worse():
    batches = real_batches(4096, images=8, count=5)
    assert [len(batch) for batch in batches] == [8] * 5 and batches == real_batches(4096, images=8, count=5)
    assert 4096 < max(map(max, batches)) <= 1.2 * 4096  # the limit is that before padding
    excess = mean_excess(FULL, batches, 4)
    assert -1e-9 < excess["by cost"] <= excess["by patches"] < excess["round robin"]


def test_parts_of_tensor_parallel_add_up_to_the_prediction():
    for model, ranks in ((H100, 2), (H100, 8), (L40S, 4)):
        fixed, divided, reduced = tensor_parallel_parts(model, 4096, ranks)
        predicted = model.predict("tensor", [4096], ranks).seconds
        assert fixed + divided / ranks + 54 * reduced == pytest.approx(1e3 * predicted)
        assert fixed + divided == pytest.approx(1e3 * model.predict("single", [4096], 1).seconds)


def test_data_parallel_is_chosen_from_the_found_number_on():
    for model, patches, ranks in ((H100, 4096, 8), (H100, 16384, 2), (L40S, 1024, 4)):
        count = data_parallel_from(model, patches, ranks)
        assert all(model.choose([patches] * more, ranks) == "data" for more in range(count, 65))
        assert count == 1 or model.choose([patches] * (count - 1), ranks) == "tensor"
    assert tp_mode(H100, [4096], 8) == "weights" and tp_mode(L40S, [4096], 8) == "data"


def test_a_batch_fools_the_balance_by_patches_or_is_refused(capsys):
    assert fools_patches(FULL, None) is None
    assert fools_patches(FULL, [16384] + 48 * [1024]) is True
    assert fools_patches(FULL, [16384] + 4 * [4096]) is False
    assert "1.00 times" in capsys.readouterr().out
    for refused in ([], [2] * 8, [20000], [4096] * 65):
        assert fools_patches(FULL, refused) is False
        assert "4 to 16,384" in capsys.readouterr().out


def measured(p20=99.0, p80=101.0):
    """Batches of one image of 4,096: 100 ms on one rank, 80 ms tensor parallel."""
    points = {"single": (MeasuredPoint("single", [4096], 1, 0.1), 100.0)}
    points["tensor"] = (MeasuredPoint("tensor", [4096], 2, 0.08), 80.0)
    return [{mode: (point, Timing(p20, ms, p80, 3)) for mode, (point, ms) in points.items()}]


def test_predictions_stand_beside_measurements_and_a_busy_machine_is_named(capsys):
    (batch,) = measured()
    single, tensor = (H100.predict(mode, [4096], ranks).seconds for mode, ranks in (("single", 1), ("tensor", 2)))
    assert gains(H100, batch, "tensor") == (pytest.approx(single / tensor), pytest.approx(1.25))
    assert median_errors(H100, [batch]) == {
        "single": pytest.approx(1 - single / 0.1),
        "tensor": pytest.approx(1 - tensor / 0.08),
    }
    pairs = timed_pairs(H100, [batch])
    assert pairs["single"] == [(batch["single"][1], pytest.approx(1e3 * single))] and pairs["data"] == []
    print_predictions(H100, measured())
    quiet = capsys.readouterr().out
    print_predictions(H100, measured(80.0, 120.0))
    assert "spreads are wide" in capsys.readouterr().out and "spreads are wide" not in quiet
    assert f"{1e3 * tensor:.1f}" in quiet and "100.0" in quiet


def test_tables_of_rates_hold_every_rate(capsys):
    print_rates(L40S, H100)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 1 + 6 + 2 * 3 and "19.2" in lines[8] and "338" in lines[8]
    print_gpu_rates(("H100", "L40S"), 4096, (2, 8))
    text = capsys.readouterr().out
    assert [line.split()[-2:] for line in text.splitlines()[-2:]] == [["38", "59"], ["512", "1,000"]]


def test_the_recorded_sweep_counts_the_batches_in_which_auto_is_close():
    rows, origin, close = recorded_sweep()
    few, all_of_them = map(int, close.split(" of "))
    assert 0 < few <= all_of_them == len({row["case"] for row in rows}) and origin["preset"]
