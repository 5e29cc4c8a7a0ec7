"""The figures: each one draws and is labelled; where a wrong mark would mislead, what is drawn is what was given."""

from itertools import combinations

import numpy as np
import pytest
from matplotlib.collections import LineCollection
from matplotlib.colors import to_rgb
from matplotlib.container import BarContainer
from matplotlib.patches import Rectangle, StepPatch

from kimivl_lab import KimiVLConfig, MoonViTConfig, plots
from kimivl_lab.graphs.packing import Replay
from kimivl_lab.lessons.time_to_first_token import EngineKnee
from kimivl_lab.measure.published import PublishedCase
from kimivl_lab.measure.timing import Timing
from kimivl_lab.planner.plan import plan_budgets
from kimivl_lab.planner.workload import TokenCounts, count_tokens
from kimivl_lab.plots import (
    amx,
    attention,
    budgets,
    cache,
    cost_model,
    floor,
    graphs,
    parallel,
    position,
    published,
    rope,
    syncs,
    time_to_first_token,
)
from kimivl_lab.plots.syncs import BufferStep, Timeline
from tests.drawing import drawing, picture, words  # noqa: F401

pytestmark = pytest.mark.usefixtures("drawing")

TITLES = {"title": "a title", "subtitle": "a subtitle"}
TITLE = {"title": "a title"}


def around(ms):
    return Timing(0.8 * ms, ms, 1.25 * ms, 5)


def timed(case, variant, ms, patches=1024, **more):
    times = {f"latency_ms_{name}": factor * ms for name, factor in (("p20", 0.8), ("p50", 1), ("p80", 1.25))}
    return {"case": case, "variant": variant, "patches": patches, **times, **more}


def call(budget, tokens, eager, replay):
    """The rows of one whole call of a record of graphs."""
    more = {"phase": "budget", "budget_tokens": budget, "tokens": tokens}
    return [timed("", way, ms, **more) for way, ms in (("eager", eager), ("replay", replay))]


def recorded(case, ms, auto, collectives):
    """One batch's rows of a record of ranks: modes by their median, auto with the collectives of its choice."""
    counts = (0, 1, 12, collectives)
    return [
        timed(case, mode, p50, ranks_count=2.0, collective_count=count)
        for (mode, p50), count in zip((ms | {"auto": auto}).items(), counts, strict=True)
    ]


CUT = recorded("1 of 40x40", {"single": 200.0, "data": 210.0, "tensor": 120.0}, 126.0, 12)
SHARED = recorded("8 of coco_val2017", {"single": 1000.0, "data": 500.0, "tensor": 700.0}, 510.0, 1)
FLOOR = [
    timed("8 of receipts", "slow", 600.0, 34232, floor_ms=10.0),
    timed("8 of receipts", "fast", 30.0, 34232, floor_ms=10.0),
    timed("4x40", "slow", 8.0, 160, floor_ms=1.0),
    timed("4x40", "fast", 2.0, 160, floor_ms=1.0),
]
NAMES = {"slow": "torch", "fast": "ours"}
ATTENTION = [timed("32x32", "sdpa", 9.0), timed("32x32", "amx", 6.0), timed("32x32", "sdpa_masked", 11.0)]
FORWARDS = [
    timed("32x32", "transformers", 7000.0, peak_share=0.5),
    timed("32x32", "kimivl_lab", 3500.0, peak_share=0.9),
]
TOWERS = {"transformers": "theirs", "kimivl_lab": "ours"}
CALLS = [*call(4.0, 2.0, 10.0, 9.0), *call(4.0, 4.0, 10.0, 5.0), *call(64.0, 32.0, 20.0, 38.0)]
CALLS += call(64.0, 64.0, 40.0, 39.0)
CAPTURES = [
    {"phase": "capture", "variant": "replay", "budget_tokens": budget, "capture_ms": ms, "pool_mib": mib}
    for budget, ms, mib in ((4.0, 500.0, 0.0), (64.0, 900.0, 60.5))
]
SIZES = [(28 * 50, 28, 7), (28 * 15, 28 * 20, 3)]
PLANS = {engine: plan_budgets(SIZES, (1, 2), engine=engine) for engine in ("vllm", "lab")}
COUNTS = TokenCounts(np.array([10, 40, 100]), np.array([2.0, 1.0, 1.0]))
CACHE = {"case": "a", "bound_entries": None, "bound_mib": None}
RATES = [
    CACHE | {"variant": "lru by bytes", "bound_mib": 64.0, "largest_mib": 60.0, "hit_rate": 0.8},
    CACHE | {"variant": "fifo by entries", "bound_entries": 256.0, "largest_mib": 500.0, "hit_rate": 0.9},
]
LOOKUPS = [
    timed("8 of receipts", name, ms, 34232, floor_ms=1.0)
    for name, ms in (("adaptive", 10), ("cache_hit", 2), ("cache_miss", 18))
]
COSTLY = [
    timed("4x40", name, ms, 160, floor_ms=1.0) for name, ms in (("adaptive", 1), ("cache_hit", 2), ("cache_miss", 3))
]
OPERATOR = attention.Operator(10**6, 10**7, Timing(1.9, 2.0, 2.2, 5))
MAXIMA = amx.Maxima([[3.0], [9.0]], [[3.0], [9.0]], [[False], [True]])
CONFIG = MoonViTConfig.preset("kimi-vl-a3b")
WAITING = Timeline(launches=[(0, 2), (2, 4), (14, 16)], waits=[(4, 14)], kernels=[(2, 5), (5, 8), (16, 19)])
REWRITTEN = [BufferStep("host", "A", 0, "A"), BufferStep("host", "B", 0, "B"), BufferStep("device", "A", 0, "B")]
CASES = [PublishedCase("", "", "right", 1.5, 2.0, 4.5, "right"), PublishedCase("", "", "a miss", 1.2, 0.1, 0.4, "miss")]
SQUARE = np.eye(2)
KNEE = EngineKnee(
    {"load_share": [0.1, 0.9], "ttft_ms": [10.0, 50.0]},
    {"load_share": [0.5], "ttft_ms": [20.0], "ttft_low_ms": [18.0], "ttft_high_ms": [25.0]},
)

# name of the figure -> (how to draw it, what a reader must find written in it)
FIGURES = {
    "patch_grid": (lambda: plots.patch_grid(picture(6, 3)), ["6 x 3 px become 4 patches, 1 token"]),
    "patch_gallery": (lambda: plots.patch_gallery([{"wide": picture(900, 100)}, {"tiny": picture(6, 3)}]),
                      ["tiny, 6 x 3 px", "1 token", "98 % padding"]),
    "encoder_diagram": (lambda: plots.encoder_diagram({"a": picture(640, 427)}, KimiVLConfig.preset("kimi-vl-a3b")),
                        ["1,472 patches in, 368 tokens out", "368 x 4,608", "27 blocks"]),
    "flops_by_size": (lambda: plots.flops_by_size([16, 64], {"linear": [0.75, 0.5], "attention": [0.25, 0.5]},
                                                  {"limit": 32}, "t"), ["linear", "attention", "limit"]),
    "stage_profile": (lambda: plots.stage_profile({"a": 0.25, "b": 0.75}, {"a": around(3), "b": around(5)},
                                                  {"a": 1.0, "b": 5.0}, **TITLES), ["3.0x", "1.0x", "38%", "62%"]),
    "token_distribution": (lambda: plots.token_distribution({"large": [1100, 1050, 900]}, 1024, "t"),
                           ["large", "median 1,050, 67% over"]),
    "limit_map": (lambda: plots.limit_map([16, 1000], np.array([[4, 144], [144, 4356]]), 4096, 5400,
                                          [(1000, 1000, 4356)], "t"), ["1000 x 1000: 4,356"]),
    "padding_cost": (lambda: plots.padding_cost({"a": 0.02}, {"a": 0.03}, [(4, 0.5)], [(1, 1.0)], "t"), ["a", "5.0%"]),
    "useful_share": (lambda: amx.useful_share([64, 72], {"one": [1.0, 0.75]}, 72, **TITLE),
        ["one", "75%", "head size 72"]),
    "running_maxima": (lambda: amx.running_maxima({"slack 0": MAXIMA, "slack 8": MAXIMA}, ["steep"], 128, **TITLE,
                                                  slack=[0, 8]), ["slack 8", "steep: 1 rescalings", "keys seen"]),
    "loop_nest": (lambda: amx.loop_nest([amx.Loop("tasks", "W", 2**21, "memory"), amx.Loop("steps", "sums", 4096,
                  "registers")], **TITLES), ["tasks", "W: 2.0 MiB", "sums: 4 KiB", "memory"]),
    "operand_chain": (lambda: amx.operand_chain({"scores": (amx.Operand("K", 32, 72, "rows"),
                      amx.Operand("Q", 72, 16, "pairs"), amx.Operand("S", 32, 16, "softmax"))}, **TITLES),
                      ["scores", "K", "pairs", "="]),
    "recorded_wins": (lambda: amx.recorded_wins(ATTENTION, FORWARDS, {"sdpa": "sdpa", "amx": "ours"}, TOWERS, **TITLES),
                      ["1.5x", "32 x 32\n1,024 patches", "7.00 / 3.50 s"]),
    "packed_mask": (lambda: attention.packed_mask({"a": picture(56, 112), "b": picture(28, 28)}, [1], {"w": [0]},
                                                  bound=("bound", [1], [0]), **TITLE),
        ["a, 32", "b, 4", "bound"]),
    "missing_rows": (lambda: attention.missing_rows([{"batch": {"a": (picture(112, 56), 8)}}], **TITLE),
                     ["batch", "24 of 32 missing"]),
    "memory_growth": (lambda: attention.memory_growth([1, 4], {"mask": [1.0, 2.0**20]}, {"seen": [(4, 1.5)]},
                                                      (4, 1.0, "here"), **TITLES),
                      ["mask", "seen", "1 MiB", "64 GiB", "here"]),
    "mask_steps": (lambda: attention.mask_steps({"one": np.array([[1.25, -np.inf], [0, 1]])}, [1, 1],
                   **TITLE), ["one", "1.25", "-inf", "image 2"]),
    "launch_grid": (lambda: attention.launch_grid({"bound 4": ({"a": 9, "empty": 0}, 4)}, 4, **TITLE),
                    ["bound 4", "a, 9", "empty", "needed, but not launched"]),
    "roofline": (lambda: attention.roofline({"pass": OPERATOR}, 100.0, 10.0, **TITLES),
                 ["pass", "2.0x", "ridge 10", "100 GFLOP/s", "10.0 GB/s"]),
    "packed_replays": (lambda: budgets.packed_replays([90, 100, 5000], {"exact": [Replay((0, 1), 190, 256),
                                                      Replay((2,), 5000, None)]}, **TITLE),
                       ["exact", "1.01 rows a real row", "eager", "256", "5,000"]),
    "plan_overview": (lambda: budgets.plan_overview("mine.csv", count_tokens(SIZES), PLANS),
                      ["mine.csv: CUDA-graph budgets for 10 images", f"{PLANS['vllm'].waste[1]:.2f} times",
                       f"planned for vLLM: {PLANS['vllm'].replays_a_call[2]:.1f} replays", "this plan"]),
    "hit_rates": (lambda: cache.hit_rates(RATES, {"a": "letters"}, entries=256, mib=64, **TITLES),
                  ["letters", "least recently used, bounded in bytes", "256 entries", "64 MiB", "most MiB held"]),
    "break_even_line": (lambda: cache.break_even_line(10, 2, 18, {"a quarter": 0.25}, "t"),
                        ["a quarter: 14.0 ms", "break-even 50%", "without a cache"]),
    "hit_and_miss": (lambda: cache.hit_and_miss([*LOOKUPS, *COSTLY], **TITLES),
                     ["8 receipt scans, 34,232", "50%", "never", "byte floor of the hit", "no cache"]),
    "predicted_against_measured": (lambda: cost_model.predicted_against_measured({"data": [(around(6), 6)]},
                                   {"single": [(around(20), 20)]}, 0.15, **TITLES), ["measured, ms", "predicted, ms"]),
    "crossover_map": (lambda: cost_model.crossover_map({"2 ranks": np.array([[2.0, 0.25]])}, [64, 512], [1], **TITLES),
                      ["2 ranks", "2.00", "1/4", "patches of one image"]),
    "times_over_floor": (lambda: floor.times_over_floor(FLOOR, NAMES, reference="slow", best="fast", title="t",
                                                         subtitle="s"),
                         ["4 x 40, 160 patches", "8 receipt scans, 34,232", "4.0x", "20.0x", "torch\n/ ours"]),
    "launch_timeline": (lambda: graphs.launch_timeline({"eager": ([(0, 1), (1, 1)], [(1, 0.5), (2, 0.5)])}, **TITLES),
                        ["eager: host", "2.5 launches, device busy 40%"]),
    "two_staircases": (lambda: graphs.two_staircases({"w": COUNTS}, {"w": ([64, 128], [10, 40, 110])}, ("twos", "own"),
                                                     **TITLE), ["w: 2.00 to 1.06 times", "more with twos"]),
    "replay_steps": (lambda: graphs.replay_steps([1, 4], [around(1), around(2)], {4: around(1.5)}, {"host": [1, 1]},
                                                 **TITLES),
        ["eager", "replay", "host", "a graph costs more than eager"]),
    "request_to_output": (lambda: graphs.request_to_output([16, 24], 16, [0, 16, 40, 52, 64], {"pixels": "(64, 3)"}, 9,
                                                           **TITLE),
                          ["image 1: 24 patches", "pixels (64, 3)", "52", "16 tokens", "new tensor, 10 tokens"]),
    "recorded_replays": (lambda: graphs.recorded_replays([*CALLS, *CAPTURES], **TITLES),
                         ["50% full", "100", "no saving\nmeasured", "2 times the rows"]),
    "who_holds_what": (lambda: parallel.who_holds_what(CONFIG, 4, "t"),
        ["rank 3", "all-reduce", "gather", "F = 4,304"]),
    "schedule": (lambda: parallel.schedule({"even": [[(4096, 4.0)], [(64, 4.0)]]}, 4.0, axis="ms", **TITLES),
                 ["even: slowest rank 0.0% over the least", "idle 0%", "4,096", "ms"]),
    "bytes_through_layers": (lambda: parallel.bytes_through_layers(27, 9.5, 9.5, "t"),
                             ["54 x 9.5 = 513 MB", "54 times less", "blocks done"]),
    "recorded_modes": (lambda: parallel.recorded_modes(SHARED + CUT, **TITLES),
                       ["tensor, 1.05x", "data, 1.02x", "1 of 40 x 40\n1,024 patches, 200 ms", "1 / 2"]),
    "similarity_maps": (lambda: position.similarity_maps({"table": [((1, 0), SQUARE)]}, "t"), ["table"]),
    "kernel_and_centres": (lambda: position.kernel_and_centres(np.arange(3.0), {"one": np.zeros(3)},
                                                               {"half": np.array([0.5])}, 4, "t"), ["one", "half"]),
    "matrix_line": (lambda: position.matrix_line(np.array([[-0.007, 0.089, 0.979, -0.061, 0.0]]), 0, 1.9,
                                                 (np.linspace(-2, 2, 5), np.array([0.0, 0, 1, 0, 0])), "t"),
                    ["position 0 lies at 1.9", "distance 0.1", "0.979", "output position (line of A)"]),
    "fault_maps": (lambda: position.fault_maps({"a": SQUARE, "b": SQUARE / 9}, "t"), ["a", "b", "relative error"]),
    "error_by_side": (lambda: position.error_by_side([2, 4, 64], {"a": [1e-6, 2e-6, 0.0]}, "t", "a note"),
                      ["a", "a note"]),
    "phase_maps": (lambda: rope.phase_maps({"columns": [("slot 0", SQUARE)] * 2, "rows": [("slot 1", SQUARE)] * 2},
                   "t"),
        ["rows", "slot 1"]),
    "wavelengths": (lambda: rope.wavelengths([6.0, 129.0], {"the side": 64}, 64, "t"), ["the side"]),
    "swapped_axes": (lambda: rope.swapped_axes({"2 x 2": [("right", SQUARE)]}, "t"), ["2 x 2", "right", "+1.0"]),
    "score_maps": (lambda: rope.score_maps({(1, 0): SQUARE, (0, 0): SQUARE}, "t"),
        ["query at row 1, column 0", "score"]),
    "angle_errors": (lambda: rope.angle_errors([1, 2], {"low": [1e-3, 0.1], "high": [0.0, 1e-7]}, "t"),
        ["low", "high"]),
    "timelines": (lambda: syncs.timelines({"waiting": WAITING}, axis="µs", **TITLES),
                  ["waiting", "µs", "host waits", "device idle"]),
    "waits_by_depth": (lambda: syncs.waits_by_depth([2, 27], {"each layer": {1: [5, 30]}, "no layer": {1: [0, 0]}},
                       **TITLE),
                       ["each layer", "no layer", "images in the batch"]),
    "pinned_buffers": (lambda: syncs.pinned_buffers({"rewritten": REWRITTEN}, **TITLE),
                       ["rewritten", "writes A", "wants A, gets B", "buffer 1"]),
    "price_of_waits": (lambda: syncs.price_of_waits([1.0, 10.0], {"5 µs": [26.0, 30.0]}, {"30 waits": ([0.2, 0.1],
                       [0.6, 0.3])}, marks={"known": (7, 0.03)}, **TITLES), ["5 µs", "30 waits", "known"]),
    "published": (lambda: published.predicted_against_published({"rule": ("K p τ / F", CASES)}, **TITLES),
                  ["rule", "K p τ / F", "prediction right: 1", "miss: 1", "1: a miss"]),
    "stacked_stages": (lambda: time_to_first_token.stacked_stages({"one": {"prefill": 30.0}, "all": {"encode": 1204.0,
                       "prefill": 40.0}}, **TITLES), ["one", "encode", "1,244", "time, ms"]),
    "knee": (lambda: time_to_first_token.knee([0.5, 0.9], dict.fromkeys(("mean", "median", "P99"), [1.5, 5.5]),
             {0.5: {"mean": 1.4}}, **TITLES), ["mean, measured", "P99, simulated", "utilisation"]),
    "request_by_request": (lambda: time_to_first_token.request_by_request([0, 1], [0, 4], [4, 5], **TITLES),
                           ["waits to be sent", "is served"]),
    "tails": (lambda: time_to_first_token.tails({"slow": np.arange(200.0), "fast": np.arange(100.0)}, {"slow": {"mean":
              100, "P99": 1198}, "fast": {"mean": 50, "P99": 99}}, **TITLES), ["slow", "P99 1,198", "mean 50"]),
    "luck": (lambda: time_to_first_token.luck({"own": {"P99": np.array([0.4, 1.3])}, "same": {"P99": np.ones(2)}},
             {"P99": 0.7}, **TITLES), ["own", "same", "P99", "very many requests"]),
    "faster_encoder": (lambda: time_to_first_token.faster_encoder([1, float("inf")], {"busy": [373.0, 81.0]}, **TITLES),
                       ["1x", "no time", "busy"]),
    "engine_knees": (lambda: time_to_first_token.engine_knees({"receipts": {"vllm": KNEE}}, **TITLES),
                     ["receipts", "vllm", "share of the capacity"]),
    "published_savings": (lambda: syncs.published_savings({"alone": (0.25, 1.2, 1.05)}, **TITLES), ["alone", "1.05"]),
}  # fmt: skip


@pytest.mark.parametrize("name", FIGURES)
def test_a_figure_draws_and_says_what_it_shows(name):
    draw, expected = FIGURES[name]
    fig, _ = draw()
    text = words(fig)
    assert [one for one in expected if one not in text] == []


def test_colours_stay_apart_in_greyscale():
    linear = np.array([to_rgb(color) for color in plots.COLORS.values()])
    linear = np.where(linear <= 0.04045, linear / 12.92, ((linear + 0.055) / 1.055) ** 2.4)
    lightness = 116 * (linear @ (0.2126, 0.7152, 0.0722)) ** (1 / 3) - 16  # CIE L*
    assert min(abs(a - b) for a, b in combinations(lightness, 2)) > 8


def points(ax):
    """Label -> (x, y) of each line that has one."""
    labelled = [line for line in ax.lines if not str(line.get_label()).startswith("_") and len(line.get_xdata())]
    return {str(line.get_label()): np.asarray(line.get_xydata()).round(6).tolist() for line in labelled}


def whiskers(ax):
    """(low, high) of each horizontal line of the line collections."""
    found = [one for one in ax.collections if isinstance(one, LineCollection)]
    lines = [line for one in found for line in one.get_segments()]
    return [(line[0, 0], line[1, 0]) for line in lines if line[0, 1] == line[1, 1]]


def hollow(ax, face="none"):
    """[x, y] points of each line of hollow marks."""
    found = [line for line in ax.lines if line.get_markerfacecolor() == face and len(line.get_xdata())]
    return [np.asarray(line.get_xydata()).round(3).tolist() for line in found]


def area(stairs):
    """Between a staircase and its baseline."""
    values, edges, baseline = stairs.get_data()
    return float(((values - (0 if baseline is None else baseline)) * np.diff(edges)).sum())


def test_marks_and_whiskers_stand_where_the_record_says():
    predicted = {"slow": 5.0}
    _, ax = floor.times_over_floor(
        FLOOR, NAMES, reference="slow", best="fast", predicted=predicted, title="t", subtitle="s"
    )
    drawn = points(ax)
    assert drawn["torch"] == [[8, 1], [600, 0]] and drawn["ours"] == [[2, 1], [30, 0]]
    assert drawn["byte floor"] == [[1, 1], [10, 0]]
    assert hollow(ax) == [[[5, 1], [50, 0]]]
    assert np.allclose(whiskers(ax), [(6.4, 10), (480, 750), (1.6, 2.5), (24, 37.5)])


def test_modes_stand_over_one_rank_and_the_batch_to_cut_comes_first():
    _, ax = parallel.recorded_modes(SHARED + CUT, **TITLES)
    drawn = {mode: [x for x, _ in marks] for mode, marks in points(ax).items()}
    assert drawn["data parallel"] == [1.05, 0.5] and drawn["auto"] == [0.63, 0.51]
    assert drawn["tensor parallel"] == [0.6, 0.7] and "one rank" not in drawn


def test_shares_of_the_peak_and_ratios_are_the_records():
    _, (left, right) = amx.recorded_wins(ATTENTION, FORWARDS, {"sdpa": "sdpa", "amx": "ours"}, TOWERS, **TITLES)
    assert points(left) == {"sdpa": [[9, 0]], "ours": [[6, 0]]}
    assert points(right) == {"theirs": [[0.5, 0]], "ours": [[0.9, 0]]}
    assert np.allclose(whiskers(right), [(0.4, 0.625), (0.72, 1.125)])


def test_replays_are_drawn_over_eager_by_their_filling():
    _, (left, right) = graphs.recorded_replays([*CALLS, *CAPTURES], **TITLES)
    drawn = {label: [y for _, y in marks] for label, marks in points(left).items()}
    assert drawn["50% full"] == [0.9, 1.9] and drawn["100% full"] == [0.5, 0.975]
    assert [bar.get_bbox().height for bar in right.patches if isinstance(bar, Rectangle)] == [100]
    with pytest.raises(ValueError, match="3 fillings, not 4"):
        graphs.recorded_replays([*CALLS, *call(4.0, 1.0, 2.0, 1.0), *call(4.0, 3.0, 2.0, 1.0)], **TITLES)


def test_published_cases_stand_at_the_middle_of_their_predicted_range():
    _, (ax,) = published.predicted_against_published({"rule": ("x", CASES)}, **TITLES)
    assert points(ax) == {"prediction right: 1": [[3, 1.5]], "miss: 1": [[0.2, 1.2]]}
    assert np.allclose(whiskers(ax), [(2.0, 4.5), (0.1, 0.4)])


def test_areas_between_staircases_are_what_each_wastes():
    _, (ax,) = graphs.two_staircases({"w": COUNTS}, {"w": ([64, 128], [10, 40, 110])}, ("twos", "own"), **TITLE)
    more, wasted, images, *_ = (patch for patch in ax.patches if isinstance(patch, StepPatch))
    real, first, second = 40.0, (64 + 64 + 64 + 128) / 4, (10 + 10 + 40 + 110) / 4
    assert [area(one) for one in (images, wasted, more)] == pytest.approx([real, second - real, first - second])
    _, axes = budgets.plan_overview("mine.csv", count_tokens(SIZES), PLANS)
    shaded, images, outline = (patch for patch in axes[1].patches if isinstance(patch, StepPatch))
    assert (
        area(outline)
        == pytest.approx(area(shaded) + area(images))
        == pytest.approx(PLANS["vllm"].waste[1] * area(images))
    )


def test_times_are_drawn_over_those_of_vllms_own_budgets():
    _, axes = budgets.plan_overview("mine.csv", count_tokens(SIZES), PLANS)
    own, plan = PLANS["vllm"].powers_of_two, PLANS["vllm"]
    assert own is not None
    bars = [bar.get_width() for bar in axes[2].containers[1]]
    assert bars == pytest.approx([plan.time[images] / own.time[images] for images in (1, 2)])
    curve = dict(np.asarray(axes[3].lines[0].get_xydata()))
    base = sum(own.time.values()) / 2
    assert curve == pytest.approx({number: time / base for number, time in plan.by_graphs.items()})


def test_a_schedule_draws_every_image_and_every_wait():
    _, (ax,) = parallel.schedule({"uneven": [[(4096, 8.0)], [(64, 1.0), (1024, 2.0)], []]}, 4.0, axis="ms", **TITLES)
    bars = [bar for group in ax.containers if isinstance(group, BarContainer) for bar in group]
    drawn = [(bool(bar.get_hatch()), bar.get_x(), bar.get_width()) for bar in bars]
    assert drawn == [(False, 0, 8), (True, 8, 0), (False, 0, 1), (False, 1, 2), (True, 3, 5), (True, 0, 8)]


def test_the_mask_is_block_diagonal_and_to_scale():
    pictures = {"a": picture(56, 112), "b": picture(84, 28), "c": picture(28, 28)}  # 32, 12, 4 patches
    _, (mask, _) = attention.packed_mask(pictures, [1], {"w": [0]}, bound=("bound", [1], [0]), **TITLE)
    boxes = [patch for patch in mask.patches if isinstance(patch, Rectangle) and not patch.get_hatch()]
    drawn = [(*one.get_xy(), one.get_width(), one.get_height()) for one in boxes]
    assert drawn == [(0, 0, 32, 32), (32, 32, 12, 12), (44, 44, 4, 4)]
    assert list(mask.get_xticks()) == [0, 32, 44, 48]


def test_operators_lie_on_the_roofline_plot_where_their_times_put_them():
    product = attention.Operator(10**9, 10**7, around(15))  # 100 FLOP a byte
    _, (left, right) = attention.roofline({"pass": OPERATOR, "product": product}, 100.0, 10.0, **TITLES)
    marked = [np.asarray(line.get_xydata()).round(6).tolist() for line in left.lines if line.get_marker() in ("o", "s")]
    assert sorted(point for line in marked for point in line) == [[0.1, 0.5], [100, 66.666667]]
    predicted = next(line for line in right.lines if line.get_label() == "roofline")
    assert np.asarray(predicted.get_xdata()).tolist() == [1, 10]


def test_idle_is_all_that_is_not_a_kernel_until_both_are_done():
    assert WAITING.idle == [(0, 2), (8, 16)] and WAITING.end == 19
    _, (ax,) = syncs.timelines({"waiting": WAITING}, axis="µs", **TITLES)
    bars = {str(one.get_label()): one.get_paths() for one in ax.collections}
    drawn = {name: [tuple(path.get_extents().intervalx) for path in paths] for name, paths in bars.items()}
    assert drawn["device idle"] == [(0, 2), (8, 16)] and drawn["host waits"] == [(4, 14)]
    assert drawn["kernel"] == list(WAITING.kernels)


def test_waits_and_services_of_a_test_are_to_scale():
    _, ax = time_to_first_token.request_by_request([0, 2, 3], [0, 4, 8], [4, 8, 12], **TITLES)
    bars = [[(bar.get_x(), bar.get_width()) for bar in group] for group in ax.containers]
    assert bars == [[(0, 0), (2, 2), (3, 5)], [(0, 4), (4, 4), (8, 4)]]


def test_an_engines_times_stand_at_their_load_with_their_interval():
    _, (ax,) = time_to_first_token.engine_knees({"receipts": {"metadata": KNEE}}, **TITLES)
    line, mark, *_ = (np.asarray(one.get_xydata()).tolist() for one in ax.lines)
    assert line == [[0.1, 10], [0.9, 50]] and mark == [[pytest.approx(0.488), 20]]
    (spread,) = (one.get_segments()[0] for one in ax.collections if isinstance(one, LineCollection))
    assert spread[:, 1].tolist() == [18, 25]


def test_unreached_marks_are_hollow():
    _, ax = rope.wavelengths([6.0, 128.0, 129.0], {"the side": 64}, 64, "t")
    assert [np.asarray(line.get_ydata()).tolist() for line in ax.lines[:2]] == [[6, 128], [129]]


def test_maps_of_one_figure_share_their_scale():
    _, axes = rope.score_maps({(1, 1): SQUARE, (0, 0): SQUARE - 3}, "t")
    assert [ax.images[0].get_clim() for ax in axes] == [(-3, 1)] * 2
    _, axes = position.fault_maps({"a": np.array([[0.0, 0.02]]), "b": np.array([[0.1, 0.002]])}, "t")
    assert [ax.images[0].get_clim() for ax in axes] == [(1e-3, 0.1)] * 2
