"""What differs between this library and vLLM when graphs run by budget: packing, rows of a graph, buffers."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from .vllm import WIDEST_ROW, vllm_rows


@dataclass(frozen=True)
class Engine:
    """Attributes:
    packing: a key of `PACKERS`.
    rows: (merged tokens, most images) -> merged tokens of the smallest graph that holds them.
    widest_image: merged tokens up to which an image's share of a budget is allocated exactly; None: always.
    shares_buffers: all graphs use one set of static buffers, as large as the largest needs; or each has its own.
    """

    packing: str
    rows: Callable[[int, int], int]
    widest_image: int | None
    shares_buffers: bool

    def slots(self, largest_image: int, images: int) -> int:
        """Images in one replay for calls of `images`: more where the largest would not be allocated exactly."""
        return images if self.widest_image is None else max(images, -(-largest_image // self.widest_image))

    def memory(self, budgets: Sequence[int], max_images: int) -> int:
        """Bytes of the static buffers of all graphs."""
        needs = [static_bytes(self.rows(budget, max_images)) for budget in budgets]
        return max(needs) if self.shares_buffers else sum(needs)


ENGINES = {
    "lab": Engine("exact", lambda tokens, max_images: tokens, widest_image=None, shares_buffers=True),
    "vllm": Engine("next_fit_deferred", vllm_rows, widest_image=WIDEST_ROW, shares_buffers=False),
}


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
    """Bytes of a graph's static input and output of so many merged tokens; the published Kimi-VL in bfloat16:

        tokens * (merge_size * (patch_dim * e + hidden_size * e + head_dim / 2 * 2 * 4 + 8) + text_hidden_size * e)

    with e bytes an element: pixels, position embeddings, rope in float32, gather index in int64, and the rows for the
    language model. 4 * 3,776 + 4,096 = 19,200 bytes a token. The offsets, 4 bytes an image, are not counted.
    """
    patch = (patch_dim + hidden_size) * element_size + head_dim * 4 + 8
    return tokens * (merge_size * patch + text_hidden_size * element_size)
