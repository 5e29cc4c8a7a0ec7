"""The cost model of one GPU from its data sheet: predicted, for a choice between data and tensor parallel.

    NVLink, Infinity Fabric   every rank reaches every other one directly, so an all-reduce is two steps at any number
                              of ranks (the two-shot all-reduce of vLLM and SGLang): 5 us a step, 0.75 of the link
    PCIe                      a ring of 2 (R - 1) steps: 10 us a step, 0.6 of the link

The seconds and shares are assumed. On a server of your own, replace them by what was measured there: `kimivl-lab advise
--rates RECORD` takes records of `bench.encoder`, `bench.graphs` and `bench.parallel`.

Test: tests/test_gpus.py. Data: data/published/devices.csv.
"""

from dataclasses import dataclass, replace

import torch

from ..config import MoonViTConfig
from ..gpus import Gpu
from ..planner.replay_cost import KERNEL_FLOOR_S, LAUNCH_S, SUSTAINED
from .cost_model import CostModel, LinkCost, MachineRates, cost_model_by_formula
from .work import steps_and_bytes

_MEMORY_SHARE = 0.8  # of the data sheet's bandwidth that large copies reach
_DIRECT_STEP_S, _DIRECT_SHARE = 5e-6, 0.75
_RING_STEP_S, _RING_SHARE = 1e-5, 0.6


@dataclass(frozen=True)
class DirectLink(LinkCost):
    """A link that reaches every rank at once: an all-reduce is two steps, another collective one."""

    def seconds(self, kind: str, ranks: int, size: int) -> float:
        steps, sent = steps_and_bytes(kind, ranks, size)
        return self.alpha * min(steps, 2 if kind == "all_reduce" else 1) + self.beta * sent


def gpu_rates(gpu: Gpu, *, launch_s: float = LAUNCH_S, flops_per_s: float | None = None) -> MachineRates:
    """Rates of one GPU and its link: shares of the data sheet's, and assumed latencies.

    Args:
        flops_per_s: that large products reach, where it was measured.
    """
    ring = gpu.link == "PCIe"
    return MachineRates(
        flops_per_s=SUSTAINED * gpu.flops_per_s if flops_per_s is None else flops_per_s,
        bytes_per_s=_MEMORY_SHARE * gpu.bytes_per_s,
        launch_s=launch_s,
        link_s=_RING_STEP_S if ring else _DIRECT_STEP_S,
        link_bytes_per_s=(_RING_SHARE if ring else _DIRECT_SHARE) * gpu.link_bytes_per_s,
    )


def cost_model_of_gpu(
    config: MoonViTConfig,
    gpu: Gpu,
    dtype: torch.dtype = torch.bfloat16,
    *,
    launch_s: float = LAUNCH_S,
    slow: float = 1.0,
    flops_per_s: float | None = None,
) -> CostModel:
    """The cost model of ranks that are this GPU.

    Args:
        launch_s: of one kernel: `LAUNCH_S` without graphs, `KERNEL_FLOOR_S` in a graph or behind a busy device.
        slow: multiplies the latency of each step of a collective, to see what depends on it.
        flops_per_s: as of `gpu_rates`.
    """
    rates = gpu_rates(gpu, launch_s=launch_s, flops_per_s=flops_per_s)
    model = cost_model_by_formula(config, dtype, rates, f"data sheet of {gpu.name}, latencies assumed, not measured")
    link = (LinkCost if gpu.link == "PCIe" else DirectLink)(slow * rates.link_s, 1 / rates.link_bytes_per_s)
    return replace(model, links=dict.fromkeys(model.links, link))


def parallel_gain(
    config: MoonViTConfig,
    gpu: Gpu,
    sizes: list[int],
    ranks: int,
    *,
    launch_s: float = LAUNCH_S,
    flops_per_s: float | None = None,
) -> tuple[float, float]:
    """(least, most) predicted time of tensor parallel over that of data parallel; above 1 data parallel is faster.

    The range is over kernels that take 3 us or `launch_s` at least, and steps of a collective that take half or twice
    as long.

    Args:
        sizes: patches of each image of the call.
        launch_s, flops_per_s: as of `cost_model_of_gpu`.

    Raises:
        ValueError: ranks that cannot share the tower.
    """
    ratios = []
    for least_s in (KERNEL_FLOOR_S, launch_s):
        for slow in (0.5, 2.0):
            model = cost_model_of_gpu(config, gpu, launch_s=least_s, slow=slow, flops_per_s=flops_per_s)
            tensor, data = (model.predict(mode, sizes, ranks).seconds for mode in ("tensor", "data"))
            ratios.append(tensor / data)
    return min(ratios), max(ratios)
