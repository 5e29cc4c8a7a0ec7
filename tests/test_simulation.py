"""The model of a serving engine: by hand, against queueing theory, and its rules over random loads."""

import math
import random
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kimivl_lab.engines.simulation import CallCost, Job, Limits, Stages, saturated_rate, simulate

STAGES = Stages(
    encode=CallCost(2.0, 0.01, 0.0001), language=CallCost(1.0, 0.005), prepare=CallCost(0.5, 0.001), deliver_s=0.25
)
ALONE = Limits(requests=1)

jobs = st.lists(
    st.builds(
        Job,
        arrival=st.integers(0, 50_000).map(lambda ms: ms / 1000),  # a later one stays later when the load is denser
        images=st.lists(st.integers(1, 300), max_size=3).map(tuple),
        text=st.integers(1, 50),
        new_tokens=st.integers(1, 4),
    ),
    min_size=1,
    max_size=25,
)
limits = st.builds(
    Limits,
    batched_tokens=st.integers(1, 600),
    encoder_tokens=st.none() | st.integers(1, 400),
    requests=st.integers(1, 8),
)


def test_one_request_takes_the_sum_of_its_stages():
    timeline = simulate([Job(3.0, (100, 50), text=30, new_tokens=3)], STAGES)
    (one,) = timeline.requests
    prepare, encode, prefill, decode = 0.5 + 0.15, 2 + 1.5 + 0.0001 * (100**2 + 50**2), 1 + 0.005 * 180, 1.005
    assert (one.arrival, one.ready, one.start) == (3.0, 3 + prepare, 3 + prepare)
    assert one.encode_end - one.start == pytest.approx(encode)
    assert one.ttft == pytest.approx(prepare + encode + prefill + 0.25)
    assert one.end - one.first_token == pytest.approx(2 * decode)
    assert [step.tokens for step in timeline.steps] == [(180,), (1,), (1,)]


def test_images_are_prepared_by_their_pixels():
    (one,) = simulate([Job(0.0, (100,), pixels=(4000,))], STAGES).requests
    assert one.ready == pytest.approx(0.5 + 4.0)


def test_two_requests_at_once_share_a_step_and_its_fixed_times():
    """Prepared in turn, so only the third finds the second waiting: it joins the step after the first one's."""
    quick = replace(STAGES, prepare=CallCost(0.1))
    timeline = simulate([Job(0, (100,)), Job(0, (100,)), Job(0, (100,))], quick)
    assert [step.images for step in timeline.steps] == [(100,), (100, 100)]
    second, third = timeline.requests[1:]
    assert second.first_token == third.first_token == pytest.approx(timeline.steps[0].end + 2 + 2 + 2 + 2.01 + 0.25)


def test_a_prompt_is_split_where_the_tokens_or_the_images_of_a_step_end():
    """A step of 120 tokens: 100 + 20 of the second image, whose encoder budget allows it only later."""
    jobs = [Job(0, (100, 80), text=20)]
    together = simulate(jobs, STAGES, Limits(batched_tokens=120, encoder_tokens=180)).steps
    assert [(step.images, step.tokens) for step in together] == [((100, 80), (120,)), ((), (80,))]
    apart = simulate(jobs, STAGES, Limits(batched_tokens=120, encoder_tokens=100)).steps
    assert [(step.images, step.tokens) for step in apart] == [((100,), (100,)), ((80,), (100,))]
    whole = simulate([Job(0, (100,)), Job(0, (100,))], replace(STAGES, prepare=CallCost()), Limits(150, chunked=False))
    assert [step.tokens for step in whole.steps] == [(101,), (101,)]


def test_an_answer_goes_on_beside_another_prompt():
    stages = replace(STAGES, prepare=CallCost())
    steps = simulate([Job(0, text=10, new_tokens=4), Job(0.5, text=20)], stages).steps
    assert [step.tokens for step in steps] == [(10,), (1, 20), (1,), (1,)]


def test_ranks_share_the_images_of_a_step():
    encode = CallCost(per_token_s=0.01)
    stages = replace(STAGES, encode=encode, prepare=CallCost())
    for ranks, slowest in ((1, 400), (2, 200), (3, 200), (4, 100), (8, 100)):
        (step,) = simulate([Job(0, (100,) * 4)], stages, ranks=ranks).steps
        assert step.encode_end - step.start == pytest.approx(encode((slowest,)))


@pytest.mark.parametrize("load", [0.3, 0.6, 0.8])
def test_the_wait_is_that_of_queueing_theory(load):
    """M/D/1: Poisson arrivals, one server, constant service D. The mean wait is load * D / (2 * (1 - load))."""
    draw, arrival, served = random.Random(1), 0.0, []
    for _ in range(40_000):
        arrival += draw.expovariate(load)
        served.append(Job(arrival, (1,), text=1))
    timeline = simulate(served, Stages(encode=CallCost(0.75), language=CallCost(0.25)), ALONE)
    wait = sum(timeline.ttft) / len(served) - 1
    assert wait == pytest.approx(load / (2 * (1 - load)), rel=0.05)
    assert timeline.busy_share == pytest.approx(load, rel=0.02)


@settings(max_examples=150, deadline=None)
@given(jobs, limits, st.integers(1, 4))
def test_no_server_works_on_two_things_and_no_work_is_lost(jobs, limits, ranks):
    timeline = simulate(jobs, STAGES, limits, ranks)
    for busy in (timeline.prepares, [(step.start, step.end) for step in timeline.steps]):
        assert all(start <= end for start, end in busy)
        assert all(before[1] <= after[0] for before, after in pairwise(busy))
    largest = max((image for job in jobs for image in job.images), default=1)
    for step in timeline.steps:
        assert step.start <= step.encode_end <= step.end and 0 < sum(step.tokens) <= limits.batched_tokens
        assert sum(step.images) <= max(limits.encoder_tokens or limits.batched_tokens, largest)
        assert len(step.tokens) <= limits.requests
    images = sorted(image for step in timeline.steps for image in step.images)
    assert images == sorted(image for job in jobs for image in job.images)  # each is encoded once
    assert sum(sum(step.tokens) for step in timeline.steps) == sum(job.prompt + job.new_tokens - 1 for job in jobs)
    for job, one in zip(jobs, timeline.requests, strict=True):
        assert job.arrival == one.arrival <= one.ready <= one.start <= one.encode_end < one.first_token <= one.end
        least = STAGES.prepare(job.images) + max(map(STAGES.language, [[1]])) + STAGES.deliver_s
        assert one.ttft >= least - 1e-9
    assert timeline == simulate(jobs, STAGES, limits, ranks)


@settings(max_examples=60, deadline=None)
@given(jobs)
def test_at_a_low_rate_each_request_takes_the_sum_of_its_stages(jobs):
    apart = [replace(job, arrival=1000.0 * place) for place, job in enumerate(jobs)]
    for job, one in zip(apart, simulate(apart, STAGES).requests, strict=True):
        stages = STAGES.prepare(job.images) + STAGES.encode(job.images) + STAGES.language([job.prompt])
        assert one.ttft == pytest.approx(stages + STAGES.deliver_s)


@settings(max_examples=100, deadline=None)
@given(jobs, jobs, st.floats(0.1, 1))
def test_more_load_never_makes_a_request_faster(jobs, more, factor):
    """Without batching: more requests, shorter gaps, or a slower encoder raise no request's speed."""
    base = simulate(jobs, STAGES, ALONE).ttft
    slow = replace(STAGES, encode=lambda images: 1.5 * STAGES.encode(images))
    dense = [replace(job, arrival=factor * job.arrival) for job in jobs]
    for other in (
        simulate([*jobs, *more], STAGES, ALONE).ttft[: len(jobs)],
        simulate(dense, STAGES, ALONE).ttft,
        simulate(jobs, slow, ALONE).ttft,
    ):
        assert all(after >= before - 1e-6 for before, after in zip(base, other, strict=True))


def test_with_batching_one_more_request_can_make_another_faster():
    """The anomaly that the module names: a step that begins later takes a second request with it."""
    stages = Stages(encode=CallCost(), language=CallCost(10.0))
    two = [Job(0.0, text=1), Job(0.1, text=1)]
    alone, crowded = simulate(two, stages), simulate([*two, Job(-9.8, text=1)], stages)
    assert crowded.ttft[1] < alone.ttft[1] and crowded.ttft[0] > alone.ttft[0]


def test_the_saturated_rate_is_the_knee():
    """Below it the last requests wait as the first ones, above it longer and longer."""
    jobs = [Job(0.0, (100,), text=20, new_tokens=2)] * 200
    capacity = saturated_rate(jobs, STAGES, ALONE)
    assert capacity == pytest.approx(
        1 / (STAGES.encode([100]) + STAGES.language([120]) + STAGES.language([1])), rel=0.01
    )
    ends = {}
    for share in (0.9, 1.2):
        spread = [replace(job, arrival=place / (share * capacity)) for place, job in enumerate(jobs)]
        times = simulate(spread, STAGES, ALONE).ttft
        ends[share] = times[-1] / times[0]
    assert ends[0.9] == pytest.approx(1) and ends[1.2] > 20


@given(st.floats(0, 5), st.floats(1e-6, 1), st.floats(0, 1e-3))
def test_a_fit_finds_the_cost_that_made_the_times(fixed, per_token, per_pair):
    cost = CallCost(fixed, per_token, per_pair)
    calls = [(10,), (200,), (50, 50), (400, 10, 10), (1000,)]
    found = CallCost.fit(calls, [cost(call) for call in calls])
    for call in [*calls, (300, 300)]:
        assert found(call) == pytest.approx(cost(call), rel=1e-3)


def test_a_fit_has_no_negative_coefficient():
    """Times that fall with the tokens: the closest cost is a constant."""
    assert CallCost.fit([(10,), (20,)], [2.0, 1.0]).per_token_s == 0
    assert CallCost.fit([(7,)], [3.0])((7,)) == pytest.approx(3.0)


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        (lambda: simulate([], STAGES), "no requests"),
        (lambda: simulate([Job(math.nan)], STAGES), "nan"),
        (lambda: simulate([Job(0, (0,))], STAGES), "0"),
        (lambda: simulate([Job(0, new_tokens=0)], STAGES), "new_tokens"),
        (lambda: simulate([Job(0, text=0)], STAGES), "prompt"),
        (lambda: simulate([Job(0)], STAGES, ranks=0), "ranks"),
        (lambda: simulate([Job(0)], STAGES, Limits(batched_tokens=0)), "batched_tokens"),
        (lambda: simulate([Job(0, text=9)], STAGES, Limits(batched_tokens=8, chunked=False)), "9 tokens .* 8"),
        (lambda: CallCost.fit([(1,)], [0.0]), "positive"),
        (lambda: CallCost.fit([(1,), ()], [1.0, 1.0]), "empty"),
        (lambda: CallCost.fit([(1,)], [1.0, 1.0]), "1 and 2"),
    ],
)
def test_what_cannot_be_simulated_is_refused(wrong, named):
    with pytest.raises(ValueError, match=named):
        wrong()


@pytest.mark.parametrize("stage", ["encode", "language", "prepare"])
@pytest.mark.parametrize("seconds", [math.nan, math.inf, -0.5])
def test_a_stage_that_takes_no_time_that_can_be_is_refused(stage, seconds):
    """With a time that is not a number the clock never reached the second arrival: a loop without end."""
    stages = replace(Stages(CallCost(0.1), CallCost(0.1)), **{stage: lambda items: seconds})
    with pytest.raises(ValueError, match=f"0 s or more, got {seconds}"):
        simulate([Job(0.0, (4,))], stages)
