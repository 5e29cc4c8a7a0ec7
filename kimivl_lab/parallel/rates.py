"""A cost model from a machine's rates by formula, and rates to assume where nothing has been measured."""

from dataclasses import dataclass

import torch

from ..config import MoonViTConfig
from ..moonvit.flops import tower_flops
from .collectives_model import KINDS, LinkCost
from .cost_model import CostModel
from .tower_work import TowerWork

_KERNELS_PER_LAYER = 10
_PASSES_PER_LAYER = 10  # of D numbers a patch: 2 norms read and write, 2 residuals read twice and write


@dataclass(frozen=True)
class MachineRates:
    """Of one rank.

    Attributes:
        flops_per_s: of a large matrix product.
        bytes_per_s: of a large copy, read plus written.
        launch_s: seconds to start a kernel, or to call an operator.
        link_s, link_bytes_per_s: of one step of a collective.
    """

    flops_per_s: float
    bytes_per_s: float
    launch_s: float
    link_s: float
    link_bytes_per_s: float


# Round orders of magnitude, no machine's: a processor core with shared memory, a data-centre GPU with a fast link.
ASSUMED_RATES = {
    "cpu": MachineRates(flops_per_s=1e11, bytes_per_s=1e10, launch_s=1e-5, link_s=5e-4, link_bytes_per_s=1e9),
    "cuda": MachineRates(flops_per_s=3e14, bytes_per_s=2e12, launch_s=5e-6, link_s=1e-5, link_bytes_per_s=1e11),
}


def cost_model_by_formula(config: MoonViTConfig, dtype: torch.dtype, rates: MachineRates, source: str) -> CostModel:
    """FLOPs and bytes over rates: weights are read once a forward, activations in every pass that is not a product.

    Everything is as fast as the rates allow; a fit is nearer to the truth.

    Args:
        source: whose rates these are, in words for a plot.
    """
    work = TowerWork.of(config, dtype)
    embed = tower_flops(config, [(1, 1)])["patch_embed"]
    passed = _PASSES_PER_LAYER * work.layers * work.activation_bytes(1)
    weights = work.linear_flops // 2 * work.itemsize
    return CostModel(
        work=work,
        call_s=_KERNELS_PER_LAYER * work.layers * rates.launch_s + weights / rates.bytes_per_s,
        image_s=0.0,
        patch_s=embed / rates.flops_per_s + passed / rates.bytes_per_s,
        linear_s_per_flop=1 / rates.flops_per_s,
        attention_s_per_flop=1 / rates.flops_per_s,
        meet_s=0.0,
        links={kind: LinkCost(rates.link_s, 1 / rates.link_bytes_per_s) for kind in KINDS},
        source=source,
    )


def assumed_cost_model(config: MoonViTConfig, dtype: torch.dtype, device: torch.device | str = "cpu") -> CostModel:
    """`cost_model_by_formula` with `ASSUMED_RATES`: what to choose by until this machine has been measured."""
    kind = torch.device(device).type
    if kind not in ASSUMED_RATES:
        raise ValueError(f"no assumed rates of device {kind!r}: one of {', '.join(ASSUMED_RATES)}")
    return cost_model_by_formula(config, dtype, ASSUMED_RATES[kind], f"assumed rates of a {kind} rank, not measured")
