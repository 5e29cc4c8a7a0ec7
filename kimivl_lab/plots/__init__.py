"""Figures of the notebooks and the report, each a function that returns (fig, ax); the only place that draws.

A figure takes numbers and draws them, it computes nothing that a notebook would want to assert on. Colours keep apart
in greyscale and for colour-blind readers, and never carry a meaning alone: hatching, line styles or words repeat it.
"""

from .encoder import encoder_diagram, flops_by_size, stage_profile
from .patches import patch_gallery, patch_grid
from .style import COLORS, COUNTED, measured_on, new_figure, set_titles, use_style
from .workloads import limit_map, padding_cost, token_distribution

__all__ = [
    "COLORS",
    "COUNTED",
    "encoder_diagram",
    "flops_by_size",
    "limit_map",
    "measured_on",
    "new_figure",
    "padding_cost",
    "patch_gallery",
    "patch_grid",
    "set_titles",
    "stage_profile",
    "token_distribution",
    "use_style",
]
