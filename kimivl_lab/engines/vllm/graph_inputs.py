"""Inputs of vLLM's encoder graphs, from this library's metadata. vLLM keeps a fixed buffer for each and fills it.

The offsets of the images have one slot more than images. The padding of a replay is cut evenly over the unused slots by
arithmetic on the device: every row belongs to a segment, no image attends to padding, and the host reads nothing back.
`max_seqlen` is frozen as the rows of the graph, in patches: a bound for every batch that fits.

Test: tests/test_vllm_plugin.py, tests/engine.
"""

import torch
from torch import Tensor

from ...moonvit.metadata import EncoderMetadata


def graph_values(metadata: EncoderMetadata) -> dict[str, Tensor]:
    """The tensors of a forward by name, as vLLM's graphs keep them; `max_seqlen` stays on the host."""
    return {
        "pos_embeds": metadata.pos_embeds,
        "rope_cos_sin": metadata.rope_cos_sin,
        "cu_seqlens": metadata.cu_seqlens,
        "max_seqlen": torch.tensor(metadata.max_seqlen, dtype=torch.int32, device="cpu"),
        "merge_gather_idx": metadata.merge_gather_idx,
    }


def write_offsets(buffer: Tensor, offsets: Tensor) -> None:
    """Copies the offsets of n images, and cuts the rows that they leave evenly over the unused slots.

    `buffer` is (slots + 1,) and ends with the rows of the graph. Its unused slots are those behind the last image.
    Offsets 0 8 12 12 12 in a buffer that ends with 32 become 0 8 12 22 32.
    """
    images = torch.nn.functional.pad(offsets.diff() > 0, (1, 0))  # an image's end, as opposed to an unused slot's
    unused = (~images).cumsum(0, dtype=torch.int32) - 1  # 0 up to the last image, then 1, 2, ...
    buffer.copy_(offsets + (buffer[-1] - offsets[-1]) * unused // unused[-1])
