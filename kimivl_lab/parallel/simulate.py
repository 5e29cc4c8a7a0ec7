"""A batch on more ranks than there are: predicted times, each marked as simulated where no measurement backs it."""

from collections.abc import Sequence
from dataclasses import dataclass

from .cost_model import CostModel

WORLD_SIZES = (1, 2, 4, 8, 16, 32, 64)


@dataclass(frozen=True)
class ScalingPoint:
    """Predicted seconds of one batch on `ranks`, and how much faster that is than one rank.

    `simulated`: the model was not fitted on this world size.
    """

    mode: str
    ranks: int
    seconds: float
    speedup: float
    simulated: bool


def simulate_scaling(
    model: CostModel, sizes: Sequence[int], world_sizes: Sequence[int] = WORLD_SIZES
) -> list[ScalingPoint]:
    """Data parallel, then tensor parallel where it can run, on each of `world_sizes`.

    Args:
        sizes: patches of each image.
    """
    alone = model.predict_single(sizes).seconds
    runs = [("data", ranks) for ranks in world_sizes]
    runs += [("tensor", ranks) for ranks in world_sizes if model.work.divides_by(ranks)]
    points = []
    for mode, ranks in runs:
        seconds = model.predict(mode, sizes, ranks).seconds
        points.append(ScalingPoint(mode, ranks, seconds, alone / seconds, ranks not in model.measured_ranks))
    return points
