"""What a batch costs alone, data parallel and tensor parallel: predicted, and the choice that follows.

    single    call + sum over images of (image + (linear + patch) n + attention n^2)
    data      the same over the images of the slowest rank, + one all-gather padded to the longest rank, or the
              broadcast of a single image
    tensor    call + sum over images of (image + patch n + (linear n + attention n^2) / ranks), + 2 all-reduces a
              layer, each of all patches

n are an image's patches. Tensor parallel divides the linear layers and what works on a rank's own heads or columns:
attention, rope, activation. Norms, residuals, the patch and position embedding and the merge run on every rank: they
are `patch`. Each collective costs its latency and bandwidth, and `meet`, the wait for ranks that never come together.
These six rates and the links are all there is. They come from a fit on measured forwards, of `CALIBRATION_GRIDS` at
least, or from assumed rates that say so.

Everything is a function of host integers: ranks that hold the same model choose the same without a message.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from math import fsum
from pathlib import Path

import numpy as np
import torch

from ..config import MoonViTConfig
from ..geometry import Grid
from .balance import Assignment, balance_by_cost
from .collectives_model import CollectivePoint, LinkCost, fit_links
from .least_squares import fit_nonnegative
from .tower_work import TowerWork

CALIBRATION_GRIDS: tuple[tuple[Grid, ...], ...] = (
    ((8, 8),),
    ((16, 16),),
    ((32, 32),),
    ((48, 48),),
    ((64, 64),),
    ((8, 8),) * 32,
    ((16, 16),) * 8,
    ((32, 32),) * 4,
    ((64, 64), (16, 16), (16, 16)),
)  # one image and many, small and large: measured in every mode, these batches tell the rates apart
_FIT_ROUNDS = 5


@dataclass(frozen=True)
class MeasuredPoint:
    """One measured forward of a batch.

    Attributes:
        mode: "single", "data" or "tensor".
        sizes: patches of each image, in the order of the batch.
        ranks: world size; 1 for "single".
        seconds: until the slowest rank has the features of all images (median of repeats).
        by_rank: of mode "data", the images of each rank (`Assignment.by_rank`); None: as `balance_by_cost` places them.
    """

    mode: str
    sizes: Sequence[int]
    ranks: int
    seconds: float
    by_rank: Sequence[Sequence[int]] | None = None


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
        meet_s: of each collective in a forward, beyond what it takes when ranks do nothing else.
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
    meet_s: float
    links: dict[str, LinkCost]
    source: str
    measured_ranks: tuple[int, ...] = ()

    def image_cost(self, patches: int) -> float:
        """Seconds that one image adds to the forward of the rank that encodes it: what to balance by."""
        return self._seconds((0, *self._amounts([patches])[1:]))

    def predict_single(self, sizes: Sequence[int]) -> Prediction:
        """One rank alone. `sizes`: patches of each image."""
        return self.predict("single", sizes, 1)

    def predict_dp(self, sizes: Sequence[int], ranks: int, assignment: Assignment | None = None) -> Prediction:
        """Data parallel, the images placed by `assignment`, or by `balance_by_cost` on this model when None."""
        return self.predict("data", sizes, ranks, assignment and assignment.by_rank)

    def predict_tp(self, sizes: Sequence[int], ranks: int) -> Prediction:
        """Tensor parallel."""
        return self.predict("tensor", sizes, ranks)

    def predict(
        self, mode: str, sizes: Sequence[int], ranks: int, by_rank: Sequence[Sequence[int]] | None = None
    ) -> Prediction:
        """What `MeasuredPoint` with the same arguments should measure.

        Raises:
            ValueError: an unknown mode, "single" on several ranks, "tensor" where heads or MLP columns do not divide,
                images placed on another number of ranks, or a collective that the model does not know.
        """
        amounts, meetings, links = self._terms(mode, sizes, ranks, by_rank)
        return Prediction(self._seconds(amounts), meetings * self.meet_s + links)

    def choose(self, sizes: Sequence[int], ranks: int) -> str:
        """ "data" or "tensor", whichever is predicted to be faster; "data" where tensor parallel cannot run."""
        if ranks == 1 or not self.work.divides_by(ranks):
            return "data"
        tensor, data = self.predict_tp(sizes, ranks), self.predict_dp(sizes, ranks)
        return "tensor" if tensor.seconds < data.seconds else "data"

    def crossover(self, sizes: Sequence[int], counts: Sequence[int], ranks: int) -> np.ndarray:
        """(counts, sizes) seconds of tensor parallel over those of data parallel, for `counts` images of each size.

        Above 1 data parallel is faster, below 1 tensor parallel.
        """
        ratios = np.empty((len(counts), len(sizes)))
        for row, count in enumerate(counts):
            for column, size in enumerate(sizes):
                batch = [size] * count
                ratios[row, column] = self.predict_tp(batch, ranks).seconds / self.predict_dp(batch, ranks).seconds
        return ratios

    def validate(self, points: Sequence[MeasuredPoint]) -> list[float]:
        """Predicted over measured seconds of each point, less 1: 0.1 is predicted 10 % too slow."""
        predicted = [self.predict(point.mode, point.sizes, point.ranks, point.by_rank) for point in points]
        return [one.seconds / point.seconds - 1 for one, point in zip(predicted, points, strict=True)]

    @classmethod
    def fit(
        cls,
        config: MoonViTConfig,
        dtype: torch.dtype,
        points: Sequence[MeasuredPoint],
        collectives: Sequence[CollectivePoint] = (),
        *,
        source: str,
    ) -> "CostModel":
        """The model closest to measured forwards, by relative least squares; collectives are fitted first, alone.

        Args:
            points: forwards of one machine, of `CALIBRATION_GRIDS` at least: batches that are alike cannot tell the
                rates apart, and only tensor parallel tells `patch_s` from the linear layers.
            collectives: of each kind that the points' forwards run, over the sizes they run.
            source: device and date, in words for a plot.

        Raises:
            ValueError: no points, or one that `predict` refuses.
        """
        if not points:
            raise ValueError("a fit needs measured points, got none")
        ranks = tuple(sorted({point.ranks for point in points}))
        model = cls(TowerWork.of(config, dtype), 0.0, 0.0, 0.0, 1e-9, 1e-9, 0.0, fit_links(collectives), source, ranks)
        for _ in range(_FIT_ROUNDS):  # which rank is slowest depends on the rates
            terms = [model._terms(point.mode, point.sizes, point.ranks, point.by_rank) for point in points]
            *rates, meet_s = fit_nonnegative(
                [(*amounts, meetings) for amounts, meetings, _ in terms],
                [point.seconds for point in points],
                [links for *_, links in terms],
            )
            model = replace(model, **dict(zip(_RATES, rates, strict=True)), meet_s=meet_s)
        return model

    def save(self, path: Path | str) -> None:
        """Writes the model as JSON."""
        Path(path).write_text(json.dumps(asdict(self), indent=1) + "\n")

    @classmethod
    def load(cls, path: Path | str) -> "CostModel":
        """Reads what `save` wrote; ValueError if the file holds something else.

        All ranks must hold the same model, or they would not choose the same.
        """
        fields = json.loads(Path(path).read_text())
        try:
            fields["work"] = TowerWork(**fields["work"])
            fields["links"] = {kind: LinkCost(**link) for kind, link in fields["links"].items()}
            fields["measured_ranks"] = tuple(fields["measured_ranks"])
            return cls(**fields)
        except (KeyError, TypeError) as error:
            raise ValueError(f"{path} holds no cost model of this version: {error}") from error

    def _terms(
        self, mode: str, sizes: Sequence[int], ranks: int, by_rank: Sequence[Sequence[int]] | None
    ) -> tuple[tuple[float, ...], int, float]:
        """What the slowest rank computes, in amounts of `_RATES`; collectives, and the seconds of their links."""
        work = self.work
        if mode == "tensor":
            if not work.divides_by(ranks):
                raise ValueError(
                    f"tensor parallel needs {work.heads} heads and {work.intermediate_size} MLP columns to divide by "
                    f"the ranks, got {ranks}"
                )
            meetings = work.all_reduces if ranks > 1 else 0
            link = self._link("all_reduce", ranks, work.activation_bytes(sum(sizes)))
            return self._amounts(sizes, ranks), meetings, meetings * link
        if mode == "data":
            if by_rank is None:
                by_rank = balance_by_cost(sizes, ranks, self.image_cost).by_rank
            if len(by_rank) != ranks:
                raise ValueError(f"by_rank places images on {len(by_rank)} ranks, not on {ranks}")
            shares = [self._amounts([sizes[image] for image in images]) for images in by_rank]
            kind = "broadcast" if len(sizes) == 1 else "all_gather"
            link = self._link(kind, ranks, work.data_parallel_bytes(sizes, by_rank))
            return max(shares, key=self._seconds), int(ranks > 1), link
        if mode != "single" or ranks != 1:
            raise ValueError(f"mode must be 'single' on 1 rank, 'data' or 'tensor', got {mode!r} on {ranks}")
        return self._amounts(sizes), 0, 0.0

    def _amounts(self, sizes: Sequence[int], ranks: int = 1) -> tuple[float, ...]:
        """What one of `ranks` tensor-parallel ranks computes, in the order of `_RATES`."""
        patches, pairs = sum(sizes), sum(size * size for size in sizes)
        linear, attention = self.work.linear_flops * patches, self.work.attention_flops * pairs
        return 1, len(sizes), patches, linear / ranks, attention / ranks

    def _seconds(self, amounts: Sequence[float]) -> float:
        return fsum(getattr(self, rate) * amount for rate, amount in zip(_RATES, amounts, strict=True))

    def _link(self, kind: str, ranks: int, size: int) -> float:
        if ranks == 1:
            return 0.0
        if kind not in self.links:
            raise ValueError(f"the model knows no {kind}, only {', '.join(self.links) or 'no collective'}: measure it")
        return self.links[kind].seconds(kind, ranks, size)


_RATES = ("call_s", "image_s", "patch_s", "linear_s_per_flop", "attention_s_per_flop")
