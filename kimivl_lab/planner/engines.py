"""The two engines that a plan can be made for, this library and vLLM, where their graphs differ.

Test: tests/test_budgets.py.
"""

from collections.abc import Sequence
from typing import Literal

from .vllm import WIDEST_ROW, vllm_rows


class LabEngine:
    """This library: exact packing, graphs that compute their budget, one set of static buffers for all graphs.

    Attributes:
        packing: how a call is cut into replays; a key of `PACKERS`.
        shares_buffers: all graphs use one set of static buffers, as large as the largest graph needs.
    """

    packing: Literal["exact", "next_fit_deferred"] = "exact"
    shares_buffers = True

    def rows(self, tokens: int, max_images: int) -> int:
        """Merged tokens that the smallest graph computes that holds `tokens`."""
        return tokens

    def default_max_images(self, largest_image: int, images_per_call: int) -> int:
        """Most images in one replay, where the caller does not say: those of one call."""
        return images_per_call

    def memory(self, budgets: Sequence[int], max_images: int) -> int:
        """Bytes of the static buffers of all graphs."""
        needs = [static_bytes(self.rows(budget, max_images)) for budget in budgets]
        return max(needs) if self.shares_buffers else sum(needs)


class VllmEngine(LabEngine):
    """vLLM: its packing rule, graphs that may compute more than their budget, static buffers for each graph."""

    packing = "next_fit_deferred"
    shares_buffers = False

    def rows(self, tokens: int, max_images: int) -> int:
        return vllm_rows(tokens, max_images)

    def default_max_images(self, largest_image: int, images_per_call: int) -> int:
        # With this many images in a replay, each image's part of the largest budget fits one row of vLLM's layout, so
        # no budget has to be rounded up to a multiple of the widest row.
        return max(images_per_call, -(-largest_image // WIDEST_ROW))


ENGINES = {"lab": LabEngine(), "vllm": VllmEngine()}


def static_bytes(
    tokens: int,
    *,
    hidden_size: int = 1152,
    head_dim: int = 72,
    patch_dim: int = 588,
    merge_size: int = 4,
    text_hidden_size: int = 2048,
    element_size: int = 2,
) -> int:
    """Bytes of a graph's static input and output for `tokens` merged tokens.

        tokens * (merge_size * (patch_dim * e + hidden_size * e + head_dim / 2 * 2 * 4 + 8) + text_hidden_size * e)

    with e bytes an element: pixels, position embeddings, rope in float32, gather index in int64, and the vectors for
    the language model. The offsets, 4 bytes an image, are not counted. The defaults are the published Kimi-VL in
    bfloat16: 4 * 3,776 + 4,096 = 19,200 bytes a token.
    """
    patch = (patch_dim + hidden_size) * element_size + head_dim * 4 + 8
    return tokens * (merge_size * patch + text_hidden_size * element_size)
