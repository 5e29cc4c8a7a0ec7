"""The kit of the lessons: guesses, checks of answers, the environment, and the devices' data sheets."""

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from kimivl_lab import EncoderOptions, KimiVLConfig, KimiVLEncoder
from kimivl_lab.lessons.checks import WrongAnswer, check, check_function
from kimivl_lab.lessons.devices import devices
from kimivl_lab.lessons.environment import environment, print_environment
from kimivl_lab.lessons.guesses import Comparison, compare, guess
from kimivl_lab.lessons.stages import Work, flops_shares, stage_work, time_stages
from kimivl_lab.plots.guesses import guess_plot

# --- guesses ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("blank", [None, ...])
def test_no_guess_passes_and_says_so(blank, capsys):
    time = guess("time of a forward", blank, unit="ms")
    stage = guess("slowest stage", blank, choices=("MLP", "attention"))
    assert time.value is None and stage.value is None
    assert capsys.readouterr().out.count("no guess yet") == 2
    compare(Comparison(time, predicted=41.0, measured=57.3), Comparison(stage))
    line = capsys.readouterr().out.splitlines()[1]
    assert line.split() == ["time", "of", "a", "forward,", "ms", "-", "41", "57.3", "-"]


def test_a_guess_stands_beside_prediction_and_measurement(capsys):
    time = guess("time", 40, unit="ms")
    capsys.readouterr()
    compare(Comparison(time, predicted=41.0, measured=57.3), Comparison(time, predicted=1204.4))
    first, second = capsys.readouterr().out.splitlines()[1:]
    assert first.split()[-4:] == ["40", "41", "57.3", "1.43"]
    assert second.split()[-4:] == ["40", "1,204", "-", "30.11"]


@pytest.mark.parametrize("wrong", [0, -3, "forty", True, float("nan"), float("inf")])
def test_a_guess_that_is_no_positive_number_is_refused(wrong):
    with pytest.raises(ValueError, match=r"time.*in ms"):
        guess("time", wrong, unit="ms")
    with pytest.raises(ValueError, match="'MLP'"):
        guess("stage", "norms", choices=("MLP", "attention"))


def test_the_plot_marks_what_is_known():
    comparisons = [
        Comparison(guess("a", 40, unit="ms"), 41.0, 57.3),
        Comparison(guess("b", None, unit="ms"), 3.0, None),
        Comparison(guess("c", None, unit="ms")),
    ]
    _, ax = guess_plot(comparisons, title="t", subtitle="s")
    lines = [np.asarray(line.get_xydata()) for line in ax.lines if line.get_marker() != "None"]
    marks = {tuple(point) for line in lines for point in line[np.isfinite(line).all(axis=1)].tolist()}
    assert marks == {(40, 2), (41.0, 2), (57.3, 2), (3.0, 1)}
    assert sorted(ax.get_legend_handles_labels()[1]) == ["measured", "predicted", "your guess"]
    assert ax.get_xlabel() == "ms"


# --- checks ----------------------------------------------------------------------------------------------------------

MATRIX = torch.arange(6.0).view(2, 3)
RIGHT = {
    "the number": (1652, 1652, 0),
    "a float that is it": (1652.0, 1652, 0),
    "rounded": (2.80, 2.804, 0.01),
    "a rounding of floats": (249.99999999999997, 250, 0),
    "a numpy number": (np.int64(7), 7, 0),
    "a tensor with one number": (torch.tensor(7), 7, 0),
    "a tensor": (MATRIX.clone(), MATRIX, 0),
    "a tensor nearly": (MATRIX * 1.0001, MATRIX, 1e-3),
    "a list for a tuple": ([616, 476, 40], (616, 476, 40), 0),
    "a word": ("MLP", "MLP", 0),
    "a bool": (True, True, 0),
}
WRONG = {
    "zero": (0, 1652, 0),
    "one more": (1653, 1652, 0),
    "outside the tolerance": (2.84, 2.804, 0.01),
    "minus": (-1652, 1652, 0),
    "not a number": (float("nan"), 1652, 0.5),
    "a word": ("1652", 1652, 0),
    "true for one": (True, 1, 0),
    "one for true": (1, True, 0),
    "a transposed tensor": (MATRIX.T.contiguous(), MATRIX, 0.1),
    "a tensor that broadcasts": (MATRIX[:1], MATRIX, 10),
    "integers for floats": (MATRIX.long(), MATRIX, 0),
    "a list for a tensor": (MATRIX.tolist(), MATRIX, 0),
    "too few members": ((616, 476), (616, 476, 40), 0),
    "swapped members": ((476, 616), (616, 476), 0),
    "a number for members": (616, (616, 476), 0),
}


@pytest.mark.parametrize("name", RIGHT)
def test_a_right_answer_is_told_so_with_its_tolerance(name, capsys):
    answer, expected, rtol = RIGHT[name]
    check("patches", answer, expected, rtol=rtol)
    printed = capsys.readouterr().out
    assert printed.startswith("patches: right, ") and ("exact" if rtol == 0 else "tolerance") in printed


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_answer_is_refused_with_the_hint_and_without_the_solution(name, capsys):
    answer, expected, rtol = WRONG[name]
    with pytest.raises(WrongAnswer, match="patches.*Hint: multiply") as caught:
        check("patches", answer, expected, rtol=rtol, hint="multiply")
    assert capsys.readouterr().out == ""
    if isinstance(expected, int) and expected > 1 and answer != -expected:
        assert f"{expected:,}" not in str(caught.value)
    assert caught.value._render_traceback_() == [f"WrongAnswer: {caught.value}"]


@pytest.mark.parametrize("blank", [None, ...])
def test_a_blank_passes_and_says_so(blank, capsys):
    check("patches", blank, 1652)
    check_function("tokens", lambda grid: blank, {((4, 6),): 6})
    assert capsys.readouterr().out == "patches: not answered yet\ntokens: not answered yet\n"


def test_a_near_miss_has_its_own_words():
    with pytest.raises(WrongAnswer, match="near miss: counted twice"):
        check("bytes", 25.2, 12.6, rtol=0.05, near={25.2: "counted twice"})
    check("bytes", 12.6, 12.6, near={25.2: "counted twice"})


def test_a_function_is_tried_on_every_case(capsys):
    cases = {(4, 6): 6, (2, 2): 1, (0, 2): 0}
    check_function("tokens", lambda h, w: h * w // 4, cases)
    assert "all 3 cases" in capsys.readouterr().out
    with pytest.raises(WrongAnswer, match=r"for \(4, 6\) it gives 24.*Hint: 2 x 2"):
        check_function("tokens", lambda h, w: h * w, cases, hint="2 x 2")
    pairs = [((MATRIX,), MATRIX.T), ((MATRIX[:1],), MATRIX[:1].T)]
    check_function("transpose", lambda matrix: matrix.T, pairs)
    with pytest.raises(WrongAnswer, match=r"shape is \(2, 3\), asked for is \(3, 2\)"):
        check_function("transpose", lambda matrix: matrix, pairs)
    large = torch.zeros(3, 3)
    with pytest.raises(WrongAnswer, match=r"for \(\[a tensor of shape \(3, 3\), a tensor of shape \(3, 3\)\]\)"):
        check_function("count", lambda tensors: 0, [(([large, large],), 2)])


# --- stages ----------------------------------------------------------------------------------------------------------


def test_the_formulas_of_the_stages_count_what_torch_counts():
    config, grids = KimiVLConfig.preset("lab"), [(4, 6), (2, 2), (10, 2)]
    lengths = [h * w for h, w in grids]
    with torch.device("meta"):
        encoder = KimiVLEncoder(config, EncoderOptions(attention="sdpa"))
    with FlopCounterMode(display=False) as counter:
        encoder(torch.empty(sum(lengths), 3, 14, 14, device="meta"), grids)
    work = stage_work(config, lengths, itemsize=2)
    assert sum(one.flops for one in work.values()) == counter.get_total_flops()
    assert [stage for stage, one in work.items() if one.flops == 0] == ["position", "norms", "rope", "merge"]
    assert work["rope"].moved == 2 * 6 * 4 * sum(lengths) * 288
    products = {name: p.numel() for name, p in encoder.named_parameters() if name.endswith("weight") and p.ndim > 1}
    products = sum(numbers for name, numbers in products.items() if "pos_emb" not in name)
    nothing = stage_work(config, [0], itemsize=1)
    assert sum(one.moved for stage, one in nothing.items() if stage != "position") == products


def test_the_roofline_is_the_longer_of_arithmetic_and_bytes():
    assert Work(200, 10).seconds(100, 100) == 2 and Work(200, 1000).seconds(100, 100) == 10
    assert Work(200, 10).intensity == 20


def test_shares_of_the_parts_sum_to_one():
    shares = flops_shares(KimiVLConfig.preset("kimi-vl-a3b"), [64, 4304])
    assert [sum(column) for column in zip(*shares.values(), strict=True)] == pytest.approx([1, 1])
    assert shares["attention"][1] == pytest.approx(shares["MLP"][1])  # n = F


def test_every_stage_is_timed_once():
    encoder = KimiVLEncoder(KimiVLConfig.preset("tiny")).eval()
    with torch.no_grad():
        times = time_stages(encoder, torch.zeros(24, 3, 14, 14), torch.tensor([[4, 6]]), repeats=1, product=64)
    assert list(times.stages) == list(stage_work(KimiVLConfig.preset("tiny"), [24], 4))
    assert sum(times.shares.values()) == pytest.approx(1)
    assert min(times.flops_per_s, times.bytes_per_s, times.whole.p50_ms) > 0


# --- environment and devices -----------------------------------------------------------------------------------------


def test_the_environment_is_ready_here_and_a_missing_part_names_its_cure(monkeypatch, capsys):
    assert [
        one.name for one in environment() if not one.ok and "memory" not in one.name and "cores" not in one.name
    ] == []
    monkeypatch.setattr("kimivl_lab.lessons.environment._PACKAGES", ("torch", "no-such-package"))
    monkeypatch.setattr("kimivl_lab.lessons.environment._tested_versions", lambda: {"torch": "1.0.0"})
    print_environment()
    lines = capsys.readouterr().out.splitlines()
    failed = [line for line in lines if line.startswith("FAIL")]
    assert len(failed) >= 2 and all("->" in line for line in failed)
    assert any("no-such-package" in line and "make .venv" in line for line in failed)
    assert any("torch" in line and "tested with 1.0.0" in line for line in failed)
    assert "to mend" in lines[-1]


def test_four_devices_have_their_ratio():
    found = {device.name: device for device in devices()}
    assert len(found) == 4
    assert found["H100 SXM"].flops_per_byte == pytest.approx(989e12 / 3350e9)
    assert all(100 < device.flops_per_byte < 500 for device in found.values())
