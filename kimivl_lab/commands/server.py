"""The server that `plan` and `advise` count for: its GPU, vLLM's limits, its ranks, and the price of a replay.

Test: tests/test_plan.py, tests/test_advise.py.
"""

import argparse
from dataclasses import dataclass

from ..gpus import Gpu, find_gpu
from ..planner.replay_cost import REPLAY_COST, measured_replay_cost, predicted_replay_cost
from ..planner.vllm import MAX_BATCHED_TOKENS, default_batched_tokens

DEFAULT_GPU = "H100 SXM"  # whose numbers are constants, so that a plan needs no table


@dataclass(frozen=True)
class Server:
    """Attributes:
    gpu: of the table; None where none was named or the name is unknown.
    batched_tokens, batched_tokens_source: vLLM's --max-num-batched-tokens, and who set it.
    model_len: vLLM's --max-model-len.
    ranks: GPUs that share the images of a call.
    replay_cost, replay_cost_source: the price of a replay in rows, and where it comes from.
    """

    gpu: Gpu | None
    batched_tokens: int
    batched_tokens_source: str
    model_len: int
    ranks: int
    replay_cost: int
    replay_cost_source: str

    @classmethod
    def of(cls, arguments: argparse.Namespace, *, known: bool = True) -> "Server":
        """The server that the arguments describe.

        Args:
            known: False counts a GPU that is not in the table as an H100, and says so.

        Raises:
            ValueError: an unknown GPU, where it must be known; a record that gives no price. OSError: of the record.
        """
        gpu, named = None, DEFAULT_GPU
        if arguments.gpu is not None:
            try:
                gpu = find_gpu(arguments.gpu)
                named = gpu.name
            except ValueError:
                if known:
                    raise
                named = f"{DEFAULT_GPU}, because the rates of {arguments.gpu[:40]!r} are not known"
        tokens, tokens_source = arguments.max_num_batched_tokens, "given"
        if tokens is None:
            tokens = MAX_BATCHED_TOKENS if gpu is None else default_batched_tokens(gpu)
            tokens_source = f"default of vllm serve on {named}"
        if arguments.costs is not None:
            from ..measure.records import read_record  # torch, which only a record needs

            price, source = measured_replay_cost(read_record(arguments.costs)[0]), f"measured, {arguments.costs.name}"
        elif arguments.replay_cost_rows is not None:
            price, source = arguments.replay_cost_rows, "given"
        else:
            price = REPLAY_COST if gpu is None else predicted_replay_cost(gpu)
            source = f"predicted for {named}"
        return cls(gpu, tokens, tokens_source, arguments.max_model_len, arguments.ranks, price, source)

    @property
    def largest_budget(self) -> int:
        """The largest budget that vLLM makes by itself."""
        return min(self.batched_tokens, self.model_len)

    def share(self, images: int) -> int:
        """Images of a call that the busiest rank encodes: of 8 images on 3 ranks, 3."""
        return -(-images // self.ranks)
