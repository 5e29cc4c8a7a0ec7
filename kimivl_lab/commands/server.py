"""The server that `plan` and `advise` count for: its GPU, vLLM's limits, its ranks, and the price of a replay.

Test: tests/test_plan.py, tests/test_advise.py.
"""

import argparse
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..gpus import Gpu, find_gpu
from ..planner.replay_cost import LAUNCH_S, REPLAY_COST, SUSTAINED, measured_replay_cost, predicted_replay_cost
from ..planner.vllm import MAX_BATCHED_TOKENS, default_batched_tokens

if TYPE_CHECKING:
    from .rates import MeasuredRates

DEFAULT_GPU = "H100 SXM"  # whose numbers are constants, so that a plan needs no table


@dataclass(frozen=True)
class Server:
    """Attributes:
    gpu: of the table; None where none was named or the name is unknown.
    batched_tokens, batched_tokens_source: vLLM's --max-num-batched-tokens, and who set it.
    model_len: vLLM's --max-model-len.
    ranks: GPUs that share the images of a call.
    replay_cost, replay_cost_source: the price of a replay in rows, and where it comes from.
    measured: rates that records replace.
    """

    gpu: Gpu | None
    batched_tokens: int
    batched_tokens_source: str
    model_len: int
    ranks: int
    replay_cost: int
    replay_cost_source: str
    measured: "MeasuredRates | None" = None

    @classmethod
    def of(cls, arguments: argparse.Namespace, *, known: bool = True) -> "Server":
        """The server that the arguments describe.

        Args:
            known: False counts a GPU that is not in the table as an H100, and says so. One with a measured FLOP/s
                need not be in the table.

        Raises:
            ValueError: an unknown GPU, where it must be known; a record that gives no price or no rate. OSError: of a
                record.
        """
        gpu, named, measured = None, DEFAULT_GPU, None
        if arguments.rates:
            from .rates import read_rates  # torch, which only a record needs

            measured = read_rates(arguments.rates, arguments.gpu)
        asked = arguments.gpu if measured is None else measured.device
        flops_per_s = None if measured is None else measured.flops_per_s
        if asked is not None:
            try:
                gpu = find_gpu(asked)
                named = gpu.name
            except ValueError:
                if known and flops_per_s is None:
                    raise
                named = f"{DEFAULT_GPU}, because the data sheet of {asked[:60]!r} is not known"
        tokens, tokens_source = arguments.max_num_batched_tokens, "given"
        if tokens is None:
            tokens = MAX_BATCHED_TOKENS if gpu is None else default_batched_tokens(gpu)
            tokens_source = f"default of vllm serve on {named}"
        if arguments.costs is not None:
            from ..measure.records import read_record  # torch, which only a record needs

            price, source = measured_replay_cost(read_record(arguments.costs)[0]), f"measured, {arguments.costs.name}"
        elif arguments.replay_cost_rows is not None:
            price, source = arguments.replay_cost_rows, "given"
        elif measured is not None and measured.replay_cost is not None:
            price, source = measured.replay_cost, f"measured, {measured.sources['graphs']}"
        elif measured is not None and flops_per_s is not None:
            price, source = predicted_replay_cost(flops_per_s), f"predicted from {measured.sources['encoder']}"
        else:
            price = REPLAY_COST if gpu is None else predicted_replay_cost(SUSTAINED * gpu.flops_per_s)
            source = f"predicted from data-sheet rates of {named}"
        return cls(gpu, tokens, tokens_source, arguments.max_model_len, arguments.ranks, price, source, measured)

    @property
    def largest_budget(self) -> int:
        """The largest budget that vLLM makes by itself."""
        return min(self.batched_tokens, self.model_len)

    @property
    def flops_per_s(self) -> float | None:
        """p, which large products reach: measured, or a share of the data sheet's; None where neither is known."""
        if self.measured is not None and self.measured.flops_per_s is not None:
            return self.measured.flops_per_s
        return None if self.gpu is None else SUSTAINED * self.gpu.flops_per_s

    @property
    def launch_s(self) -> float:
        """tau, the host's time to start one kernel: measured or assumed."""
        return LAUNCH_S if self.measured is None or self.measured.launch_s is None else self.measured.launch_s

    @property
    def from_rates(self) -> str:
        """Where p and tau come from, to stand behind "predicted from"."""
        of = {} if self.measured is None else self.measured.sources
        words = [f"rates measured in {of[kind]}" for kind in ("encoder", "graphs") if kind in of]
        if "encoder" not in of and self.gpu is not None:
            words.append(f"data-sheet rates of {self.gpu.name}")
        return " and ".join(words)
