"""What notebook 70 uses: a graph by hand, sizes up to which graphs win, and encoders of which some are broken."""

import pytest
import torch

from kimivl_lab.gpus import find_gpu
from kimivl_lab.graphs.guards import GraphCaptureError
from kimivl_lab.lessons import cuda_graphs as lesson
from kimivl_lab.measure.published import graph_rows, not_predictable
from kimivl_lab.planner.plan import plan_budgets
from kimivl_lab.planner.replay_cost import kernels
from kimivl_lab.planner.workload import count_tokens


@pytest.fixture(autouse=True)
def without_gradients():
    with torch.no_grad():
        yield


def test_a_naive_graph_reads_new_values_at_its_old_address():
    tower = lesson.small_tower()
    static, other = torch.randn(2, 16, 3, 14, 14).unbind()
    graph = lesson.NaiveGraph(lambda: tower(static, [(4, 4)]))
    static.copy_(other)
    graph.replay()
    assert lesson.same(graph.output, tower(other, [(4, 4)]))
    assert not lesson.same(graph.output, tower(other, [(2, 8)]))
    assert lesson.same(tower(other, [(4, 4)]), lesson.small_tower()(other, [(4, 4)]))


def test_nan_and_other_shapes_are_not_the_same():
    one = torch.ones(3)
    assert not lesson.same(one * float("nan"), one) and not lesson.same(one[:2], one)


@pytest.mark.parametrize("layers", [1, 3])
def test_kernels_are_counted_as_the_planner_says(layers):
    assert lesson.count_kernels(layers) == kernels(layers)


@pytest.mark.parametrize("patches", [4, 400, 1348, 4096])
def test_the_largest_image_is_the_last_that_costs_less(patches):
    limit = (lesson.image_flops(patches) + lesson.image_flops(patches + 4)) / 2
    assert lesson.largest_image(limit) == patches
    assert lesson.largest_image(0) == 0


def test_a_graph_closes_gaps_of_short_kernels_only():
    lanes = lesson.block_timeline((64, 8192), 3.5e9)
    ends = {words: max(start + length for start, length in kernels) for words, (_, kernels) in lanes.items()}
    assert ends["64 patches, graph"] < ends["64 patches, eager"] / 2
    assert ends["8,192 patches, graph"] == pytest.approx(ends["8,192 patches, eager"])


def test_offsets_are_those_that_a_replay_reads():
    assert lesson.graph_offsets([16, 24], 4, 64) == [0, 16, 40, 52, 64]
    assert lesson.graph_offsets([84], 9, 160)[:4] == [0, 84, 93, 103]


def test_the_flat_program_is_right_when_all_inputs_are_rewritten():
    tower = lesson.small_tower()
    inputs, program = lesson.flat_program(tower, 8, 3)
    pixels = torch.randn(24, 3, 14, 14)
    inputs.write(lesson.replay_values(tower, pixels, [(2, 4), (4, 4)], 3), images=2, rows=32)
    program.run()
    assert lesson.same(program.output[:6], tower(pixels, [(2, 4), (4, 4)]))


def test_broken_encoders_are_right_at_first_and_wrong_later():
    tower = lesson.small_tower()
    calls = [[(4, 4)], [(2, 8)], [(4, 8)], [(4, 4)], [(2, 2), (2, 4)]]
    for one in lesson.candidates(tower):
        kept = []
        for grids in calls:
            pixels = torch.randn(sum(h * w for h, w in grids), 3, 14, 14)
            kept.append((one(pixels, grids), tower(pixels, grids)))
        assert all(lesson.same(*pair) for pair in kept) == one.right, one
        assert str(one.right) not in repr(one)
    assert [one.right for one in lesson.candidates(tower)].count(True) == 2


def test_calls_are_timed_at_full_budgets_and_between_them():
    timed = lesson.time_calls(repeats=1)
    assert list(timed.replay) == [2**k for k in range(8)] and set(timed.replay) < set(timed.eager)
    assert timed.host_ms == timed.eager[1].p50_ms and timed.operators > 100
    assert set(timed.unclear) <= set(timed.replay) and timed.work_ms[1] == 0
    assert len(timed.table().splitlines()) == 2 + 8 + 2


def test_only_the_order_of_the_merge_is_forgotten():
    forgetful = lesson.ForgetfulGraph()
    assert forgetful.is_right((4, 8)) and not forgetful.is_right((2, 16))
    mending = [name for name in forgetful.inputs if forgetful.is_right((2, 16), name)]
    assert mending == ["merge_gather_idx"]
    assert not forgetful.is_right((8, 4))
    for bad in (((4, 4), None), ((2, 16), "pixels")):
        with pytest.raises(ValueError):
            forgetful.is_right(*bad)


def test_tables_hold_a_line_for_each_case():
    counts = count_tokens([(224, 224), (1120, 1120)])
    table = lesson.gpu_table(["RTX 4090", "H100"], {"one two": counts}).splitlines()
    assert [line.split()[0] for line in table[2:]] == ["RTX", "H100"]
    assert f"{lesson.gpu_limit(find_gpu('H100')):,}" in table[3] and "50%" in table[3]
    assert len(lesson.published_table().splitlines()) == 1 + not_predictable()[0] + len(graph_rows("control"))
    plan = plan_budgets([(224, 224)], (1, 8), engine="vllm")
    assert [line.split()[0] for line in lesson.plan_table(plan).splitlines()[2:]] == ["1", "8"]


def test_what_is_drawn_of_a_request_is_what_its_graph_reads():
    inputs, program = lesson.flat_program(lesson.small_tower(), 16, 3)
    lengths, budget, offsets, shapes, operators = lesson.drawn_request([16, 24], inputs, program)
    assert (lengths, budget, offsets, operators) == ([16, 24], 16, [0, 16, 40, 52, 64], program.operators)
    assert shapes["merge_gather_idx"] == "(64,)" and "cu_seqlens" not in shapes


def test_a_refusal_is_the_error_without_its_place():
    def fails():
        raise GraphCaptureError("capture: item() at /a/b.py:3 in c")

    assert lesson.refusal(fails) == "GraphCaptureError, capture: item()"
    assert lesson.refusal(lambda: None) == "no error"
