"""The helpers of the appendix: counted instructions, attention with slack, bytes by level."""

import math

import pytest
import torch

from kimivl_lab.lessons import amx_kernels as lab
from kimivl_lab.measure.accuracy import relative_error


def test_instructions_of_small_shapes_by_hand():
    assert lab.linear_instructions(40, 40, 64) == 4 * 2 * 2 * 2
    assert lab.linear_instructions(1, 1, 1) == 4
    assert [lab.attention_instructions(d) for d in (64, 72, 80, 96)] == [(4, 5), (6, 5), (6, 6), (6, 7)]
    assert lab.useful_shares(72) == pytest.approx((0.75, 0.9, 9 / 11))
    assert [round(lab.eight_bit_gain(d), 2) for d in (64, 72, 96, 128)] == [2.0, 1.69, 1.73, 2.0]


@pytest.mark.parametrize("slack", [0, 8, 30])
def test_attention_with_slack_is_softmax(slack):
    q, k, v = torch.randn(3, 240, 72, dtype=torch.float64)
    want = (q @ k.T / 72**0.5).softmax(-1) @ v
    assert relative_error(lab.attend_runs(q, k, v, slack).result, want) < 1e-12


def test_the_history_is_that_of_the_running_maximum():
    q, k, v = lab.rising_scores()
    one = lab.attend_runs(q[:16].repeat_interleave(16, 0)[:16], k, v, 8)  # 16 equal queries act as one
    assert one.top[:, 0].tolist() == lab.tops(one.here[:, 0].tolist(), 8)


def test_slack_saves_rescalings_and_no_limit_overflows():
    many, few, none = (lab.rescalings("rising", slack)[1:] for slack in (0, 8, 1e9))
    assert many[0] > 3 * few[0] > 0 == none[0]
    assert (many[1], few[1], none[1]) == ("equal", "equal", "NaN")
    assert lab.rescalings("shuffled", 8)[1:] == (0, "equal")


def test_top_rises_only_above_the_slack():
    assert lab.tops((3, 9, 12, 13), 8) == [3, 3, 12, 12]
    assert lab.tops((3, 11, 12), 8) == [3, 3, 12]
    assert lab.tops((-5, -9), 0) == [-5, -5]


def test_the_sources_cut_as_the_model_assumes():
    of = lab.constants()
    assert of["CHUNK"] * 2 * 2048 <= lab.FIRST and of["ROW_BYTES"] < lab.SECOND
    assert 6 * 32 * of["RUN"] < lab.FIRST, "scores and weights of a run"
    assert of["SLACK"] == 8 and of["RUN"] == 128
    assert lab.task_rows(1152) == 256 and lab.task_rows(4304) < 256


@pytest.mark.parametrize("rows, chunk", [(32, 36), (1024, 36), (256, 36), (256, 9), (256, 8)])
def test_every_tile_is_read_from_some_level(rows, chunk):
    read = lab.bytes_read(1024, 1152, 4304, rows, chunk)
    tiles = 2 * 2048 * 36 * 135 * 32
    sums = 4096 * 135 * 32 * (math.ceil(36 / chunk) - 1)
    assert sum(read.values()) == tiles + sums
    assert lab.level(48 * 1024) == "first" and lab.level(48 * 1024 + 1) == "second" and lab.level(2**22) == "memory"


def test_the_live_cells_name_what_they_check_and_time(capsys):
    lab.check_kernels()
    lab.time_kernels(quick=True)
    text = capsys.readouterr().out
    assert "attention, sdpa" in text and "F.linear" in text
    assert ("left out" in text) == (not lab.kernels_here())
