"""vLLM's OpenAI server, which also takes the time of each request's encoder: `python -m ...timed_server OPTIONS`.

vLLM has such a clock for its own benchmarks and no option for it. `POST /collective_rpc` with the method
"get_encoder_timing_stats" reads it, where the server was started with VLLM_SERVER_DEV_MODE=1: for a benchmark, not for
a server that others reach. On a GPU the clock waits for the device before and after each call of the encoder.

Source: vLLM 0.32 (vllm/config/observability.py, vllm/v1/worker/gpu_model_runner.py).
Test: tests/test_engine_bench.py. Record: engine__*.csv.
"""

from importlib import import_module
from typing import Any


def main() -> None:
    cli_args: Any = import_module("vllm.entrypoints.launchers.cli_args")
    entry = import_module("vllm.entrypoints.launchers.api_server.entry")
    make = cli_args.make_arg_parser

    def with_clock(parser: Any) -> Any:
        parser = make(parser)
        parser.set_defaults(enable_mm_processor_stats=True)
        return parser

    cli_args.make_arg_parser = with_clock
    entry.main()


if __name__ == "__main__":
    main()
