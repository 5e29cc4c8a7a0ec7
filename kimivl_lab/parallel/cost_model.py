"""What a batch costs alone, data parallel and tensor parallel: predicted, and the choice that follows.

    single    call + sum over images of (image + (linear + patch) n + attention n^2)
    data      the same over the images of the slowest rank, + one all-gather padded to the longest rank, or the
              broadcast of a single image
    tensor    call + sum over images of (image + patch n + (linear n + attention n^2) / ranks), + 2 all-reduces a
              layer, each of all patches

n are an image's patches. Tensor parallel divides the linear layers and what works on a rank's own heads or columns:
attention, rope, activation. Norms, residuals, the patch and position embedding and the merge run on every rank: they
are `patch`. Each collective costs its latency and bandwidth, and `sync_overhead_s`: in a forward no two ranks arrive
at the same time.

The rates come from a fit on measured forwards (`kimivl_lab.bench.fit_cost_model`), or are assumed and say so.
Everything is a function of host integers: ranks that hold the same model choose the same without a message.

Test: tests/test_cost_model.py. Record: parallel__*.csv (phases "calibration" and "sweep").
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import fsum

import numpy as np
import torch

from ..config import MoonViTConfig
from ..moonvit.flops import tower_flops
from .balance import balance_by_cost
from .work import COLLECTIVES, TowerWork, steps_and_bytes

RATES = ("call_s", "image_s", "patch_s", "linear_s_per_flop", "attention_s_per_flop")
_KERNELS_PER_LAYER = 10
_PASSES_PER_LAYER = 10  # of D numbers a patch: 2 norms read and write, 2 residuals read twice and write


@dataclass(frozen=True)
class LinkCost:
    """Latency and transfer time of one step of a collective: `alpha` in seconds, `beta` in seconds a byte."""

    alpha: float
    beta: float

    def seconds(self, kind: str, ranks: int, size: int) -> float:
        """Of one collective that leaves `size` bytes on every rank; 0 on one rank. `kind`: see `steps_and_bytes`."""
        steps, sent = steps_and_bytes(kind, ranks, size)
        return self.alpha * steps + self.beta * sent


@dataclass(frozen=True)
class Prediction:
    """Seconds of one forward: computing, on the slowest rank, and collectives."""

    compute: float
    collectives: float = 0.0

    @property
    def seconds(self) -> float:
        return self.compute + self.collectives


@dataclass(frozen=True)
class CostModel:
    """Seconds of a forward by the sizes of its images; see the module.

    Attributes:
        call_s, image_s: seconds of a forward whatever is in it, and of each image.
        patch_s: of each patch, outside of what tensor parallel divides.
        linear_s_per_flop, attention_s_per_flop: of what it divides.
        sync_overhead_s: of each collective in a forward, beyond what it takes when ranks do nothing else.
        links: of each kind of collective.
        source: where the numbers come from, in words for a plot.
        measured_ranks: world sizes among the fitted points; predictions at others are simulation.
    """

    work: TowerWork
    call_s: float
    image_s: float
    patch_s: float
    linear_s_per_flop: float
    attention_s_per_flop: float
    sync_overhead_s: float
    links: dict[str, LinkCost]
    source: str
    measured_ranks: tuple[int, ...] = ()

    def image_cost(self, patches: int) -> float:
        """Seconds that one image adds to the forward of the rank that encodes it: what to balance by."""
        return self.seconds_of((0, *self._amounts([patches])[1:]))

    def predict(
        self, mode: str, sizes: Sequence[int], ranks: int, by_rank: Sequence[Sequence[int]] | None = None
    ) -> Prediction:
        """Seconds of one forward, as a measurement with the same arguments should find them.

        Args:
            mode: "single", "data" or "tensor".
            sizes: patches of each image.
            ranks: world size; 1 for "single".
            by_rank: of mode "data", the images of each rank; by default as `balance_by_cost` places them.

        Raises:
            ValueError: an unknown mode, "single" on several ranks, "tensor" on ranks that cannot share the tower,
                images placed on another number of ranks, or a collective that the model does not know.
        """
        amounts, collectives, links = self.terms(mode, sizes, ranks, by_rank)
        return Prediction(self.seconds_of(amounts), collectives * self.sync_overhead_s + links)

    def choose(self, sizes: Sequence[int], ranks: int) -> str:
        """ "data" or "tensor", whichever is predicted to be faster; "data" where tensor parallel cannot run."""
        if ranks == 1 or ranks not in self.work.tensor_parallel_sizes:
            return "data"
        tensor, data = self.predict("tensor", sizes, ranks), self.predict("data", sizes, ranks)
        return "tensor" if tensor.seconds < data.seconds else "data"

    def crossover(self, sizes: Sequence[int], counts: Sequence[int], ranks: int) -> np.ndarray:
        """(counts, sizes) seconds of tensor parallel over those of data parallel, for `counts` images of each size.

        Above 1 data parallel is faster, below 1 tensor parallel.
        """

        def seconds(mode: str) -> np.ndarray:
            return np.array([[self.predict(mode, [size] * count, ranks).seconds for size in sizes] for count in counts])

        return seconds("tensor") / seconds("data")

    def terms(
        self, mode: str, sizes: Sequence[int], ranks: int, by_rank: Sequence[Sequence[int]] | None
    ) -> tuple[tuple[float, ...], int, float]:
        """What `predict` adds up: amounts of `RATES` on the slowest rank, the number of collectives, their seconds."""
        work = self.work
        if mode == "tensor":
            if ranks not in work.tensor_parallel_sizes:
                legal = ", ".join(map(str, work.tensor_parallel_sizes))
                raise ValueError(f"{ranks} ranks cannot share this tower tensor parallel: legal sizes are {legal}")
            collectives = work.all_reduces if ranks > 1 else 0
            link = self._link("all_reduce", ranks, work.activation_bytes(sum(sizes)))
            return self._amounts(sizes, ranks), collectives, collectives * link
        if mode == "data":
            if by_rank is None:
                by_rank = balance_by_cost(sizes, ranks, self.image_cost).by_rank
            if len(by_rank) != ranks:
                raise ValueError(f"by_rank places images on {len(by_rank)} ranks, not on {ranks}")
            own = [self._amounts([sizes[image] for image in images]) for images in by_rank]
            kind = "broadcast" if len(sizes) == 1 else "all_gather"
            link = self._link(kind, ranks, work.data_parallel_bytes(sizes, by_rank))
            return max(own, key=self.seconds_of), int(ranks > 1), link
        if mode != "single" or ranks != 1:
            raise ValueError(f"mode must be 'single' on 1 rank, 'data' or 'tensor', got {mode!r} on {ranks}")
        return self._amounts(sizes), 0, 0.0

    def seconds_of(self, amounts: Sequence[float]) -> float:
        """`amounts` in the order of `RATES`, each by its rate."""
        return fsum(getattr(self, rate) * amount for rate, amount in zip(RATES, amounts, strict=True))

    def _amounts(self, sizes: Sequence[int], ranks: int = 1) -> tuple[float, ...]:
        """What one of `ranks` tensor-parallel ranks computes, in the order of `RATES`."""
        patches, pairs = sum(sizes), sum(size * size for size in sizes)
        linear, attention = self.work.linear_flops * patches, self.work.attention_flops * pairs
        return 1, len(sizes), patches, linear / ranks, attention / ranks

    def _link(self, kind: str, ranks: int, size: int) -> float:
        if ranks == 1:
            return 0.0
        if kind not in self.links:
            raise ValueError(f"the model knows no {kind}, only {', '.join(self.links) or 'no collective'}: measure it")
        return self.links[kind].seconds(kind, ranks, size)


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
        sync_overhead_s=0.0,
        links={kind: LinkCost(rates.link_s, 1 / rates.link_bytes_per_s) for kind in COLLECTIVES},
        source=source,
    )


def assumed_cost_model(config: MoonViTConfig, dtype: torch.dtype, device: torch.device | str = "cpu") -> CostModel:
    """`cost_model_by_formula` with `ASSUMED_RATES`: what to choose by until this machine has been measured."""
    kind = torch.device(device).type
    if kind not in ASSUMED_RATES:
        raise ValueError(f"no assumed rates of device {kind!r}: one of {', '.join(ASSUMED_RATES)}")
    return cost_model_by_formula(config, dtype, ASSUMED_RATES[kind], f"assumed rates of a {kind} rank, not measured")
