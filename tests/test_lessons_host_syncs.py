"""The helpers of lesson 60: the model of waits, buffers, what is left of waits, and published savings."""

import pytest
import torch

from kimivl_lab.lessons import host_syncs
from kimivl_lab.lessons.checks import WrongAnswer
from kimivl_lab.syncs.counter import on_device
from kimivl_lab.syncs.pretend import PretendDevice


@pytest.mark.parametrize("launch, kernel, back", [(8, 20, 25), (8, 4, 25), (5, 300, 40), (6, 6, 10)])
@pytest.mark.parametrize("waits", [[], [4, 8], [1], [3, 6, 9]])
def test_the_simulation_is_the_formula(launch, kernel, back, waits):
    played = host_syncs.simulate(12, waits, launch=launch, kernel=kernel, back=back)
    free = launch + kernel + 11 * max(launch, kernel)
    assert played.end == free + len(waits) * (back + min(launch, kernel))
    assert len(played.launches) == len(played.kernels) == 12 and len(played.waits) == len(waits)
    assert all(ran[0] >= launched[1] for launched, ran in zip(played.launches, played.kernels, strict=True))
    assert host_syncs.simulated_price(launch, kernel, back) == back + min(launch, kernel)


def test_waits_are_noted_by_the_launches_before_them():
    with PretendDevice(order := host_syncs.WaitOrder()):
        x = torch.zeros(2, device="cuda")
        x.add_(1)
        x.tolist()
    assert (order.launches, order.waits) == (2, [2])


def test_only_a_buffer_that_is_written_too_early_gives_wrong_offsets():
    right = {policy: host_syncs.fill_buffers(policy)[1] for policy in host_syncs.POLICIES}
    assert [all(of_batch.values()) for of_batch in right.values()] == [False, True, True]
    assert right[host_syncs.POLICIES[0]] == {"A": False, "B": False, "C": True}


def test_values_come_with_their_waits():
    assert host_syncs.with_waits(lambda x, by: x * by)([1, 2], 3) == [[3, 6], 0]
    assert host_syncs.with_waits(lambda x: x[x > 1])([1, 2]) == [[2], 1]
    assert host_syncs.with_waits(lambda x: ...)([1]) is None


@pytest.mark.parametrize("wrong", ["values", "shape", "staged", "unknown"])
def test_answers_that_only_seem_to_wait_less_are_refused(wrong):
    x, right = on_device(torch.eye(3), pretended=True), torch.eye(3)
    tricks = {
        "values": lambda x: x + 1,
        "shape": lambda x: x[0],
        "staged": lambda x: x + torch.zeros(3, 3).to("cuda", non_blocking=True),
        "unknown": lambda x: torch.linalg.inv(x),
    }
    with pytest.raises(WrongAnswer):
        host_syncs.waits_left(tricks[wrong], x, right=right, start=9)


def test_what_is_left_is_counted():
    x, right = on_device(torch.eye(3), pretended=True), torch.eye(3)
    assert host_syncs.waits_left(lambda x: x + 0, x, right=right, start=1) == 0
    assert host_syncs.waits_left(lambda x: x if x.sum() > 0 else -x, x, right=right, start=1) is None
    assert host_syncs.waits_left(lambda x: x if x.sum() > 0 else -x, x, right=right, start=2) == 1


def test_savings_are_predicted_from_measured_reads_alone():
    low, high = host_syncs.read_alone_us()
    assert (low, high) == (32.21, 45.4), "an estimate is no measurement"
    for one in host_syncs.savings():
        assert one.low == pytest.approx(one.waits * low / 1e3) and one.high == pytest.approx(one.waits * high / 1e3)
        assert one.published > 0
    assert sum(one.low <= one.published <= one.high for one in host_syncs.savings()) == 1


def test_curves_hold_the_published_tower_between_their_bounds():
    kernel, prices, slower, marks = host_syncs.price_curves(400)
    assert {len(curve) for curve in prices.values()} == {len(kernel)}
    ((at, share),) = marks.values()
    low, high = slower["26 waits"]
    nearest = abs(kernel - at).argmin()
    assert low[nearest] < share < high[nearest]


@pytest.mark.parametrize("events, size", [("wcwcwc", 1), ("wwcwcc", 2), ("wwwccc", 3), ("w", 1)])
def test_a_ring_holds_what_is_written_and_not_copied(events, size):
    assert host_syncs.buffers_needed(events) == size


def test_no_write_is_refused():
    with pytest.raises(ValueError, match="'cc'"):
        host_syncs.buffers_needed("cc")


def test_slow_motion_runs_every_variant_and_drops_the_warm_up():
    slow = host_syncs.slow_motion((0, 1), launches=4, repeats=3)
    assert {count: len(group) for count, group in slow.runs.items()} == {0: 3, 1: 3}
    assert {len(one.waits) for one in slow.runs[1]} == {1} and not slow.runs[0][0].waits
    assert slow.launch >= 0.4 and slow.kernel >= 1 and slow.back > 0
