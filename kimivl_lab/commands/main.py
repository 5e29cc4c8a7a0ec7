"""The command line, `kimivl-lab`: `encode` makes features from image files, `plan` makes graph budgets from image
sizes, `advise` makes a page of decisions for a server, `chat` answers questions about images, `make-checkpoint` writes
a small random model, `ttft` measures a running server, `info` says what this machine offers.

Each command is a module of this package with a function `run(arguments)`, which returns the exit status: 0, or 2 after
anything that the user can mend. The module is imported when its command runs, so that `--help` answers at once.

Test: tests/test_cli.py, tests/test_plan.py, tests/test_faults_commands.py.
"""

import argparse
import sys
from collections.abc import Sequence
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, NoReturn

from ..checks import as_positive
from .output import CommandError, shortened, show, tell

_SEEDS = range(-(2**63), 2**64)  # the ones that torch takes


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit status."""
    try:
        arguments = _parser().parse_args(argv)
        return import_module(f".{arguments.command.replace('-', '_')}", __package__).run(arguments)
    except CommandError as error:
        tell("error", str(error))
    except MemoryError as error:
        tell("error", f"not enough memory {error}")
    except KeyboardInterrupt:
        tell("error", "interrupted")
        return 130  # as shells report it
    return 2


class _Parser(argparse.ArgumentParser):
    """A parser whose help ends quietly in a closed pipe, and whose errors repeat no long argument."""

    def print_help(self, file: object = None) -> None:
        show(self.format_help().rstrip("\n"), plain=True)

    def error(self, message: str) -> NoReturn:
        super().error(shortened(message))


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="kimivl-lab", description="Kimi-VL's vision encoder on the command line.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND", dest="command")
    _add_encode(commands)
    _add_plan(commands)
    _add_advise(commands)
    _add_chat(commands)
    _add_make_checkpoint(commands)
    _add_ttft(commands)
    commands.add_parser("info", help="this machine, the versions, and the kernels that run here")
    return parser


def _add_encode(commands: Any) -> None:
    command = commands.add_parser("encode", help="image files -> a safetensors file of features")
    add = command.add_argument
    count = partial(add, type=_positive, metavar="N")
    add("images", nargs="+", type=Path, metavar="IMAGE", help="an image file, or a folder of images")
    add("--out", type=Path, required=True, metavar="FILE", help="the safetensors file to write")
    add("--recursive", action="store_true", help="also take the images in sub-folders")
    source = command.add_mutually_exclusive_group()
    source.add_argument(
        "--preset", default="lab", metavar="NAME", help="random weights of this size, such as tiny (default: lab)"
    )
    source.add_argument("--checkpoint", type=Path, metavar="DIR", help="config.json and the weights of a Kimi-VL")
    add("--projected", action="store_true", help="vectors for the language model instead of the tower's features")
    add("--dtype", choices=("float32", "bfloat16"), default="float32", help="default: float32")
    add("--device", choices=("auto", "cpu", "cuda"), default="auto", help="default: auto, a GPU if there is one")
    count("--in-token-limit", help="most patches of an image before padding")
    add("--strict", action="store_true", help="write nothing unless every image can be read")
    add("--seed", type=_seed, default=0, metavar="N", help="of random weights (default: 0)")
    shards = "more features than N MiB become several files and an index; memory holds N MiB (default: 1024)"
    count("--max-shard-mib", default=1024, help=shards)


def _add_plan(commands: Any) -> None:
    command = commands.add_parser("plan", help="image sizes -> the CUDA graph budgets with the least predicted time")
    _add_sizes(command)
    _add_server(command)
    add = command.add_argument
    count = partial(add, type=_positive, metavar="N")
    count("--max-graphs", default=8, help="most budgets (default: 8)")
    count("--memory-limit-mib", help="most MiB of static buffers")
    count(
        "--max-images", help="most images in one replay (default: those of a call; for vLLM also what its layout needs)"
    )
    count("--round-to", help="also show sizes with sides rounded down to multiples of N pixels, for SGLang")
    add("--plot", type=Path, metavar="FILE", help="also draw the budgets and their waste: .png, .svg or .pdf")
    add("--json", action="store_true", help="print JSON instead of tables")


def _add_advise(commands: Any) -> None:
    command = commands.add_parser("advise", help="image sizes and a server -> a page of decisions with their flags")
    _add_sizes(command)
    _add_server(command)
    command.add_argument("--markdown", action="store_true", help="print Markdown instead of a table")


def _add_chat(commands: Any) -> None:
    command = commands.add_parser("chat", help="a checkpoint's answer to a question about images")
    add = command.add_argument
    count = partial(add, type=_positive, metavar="N")
    words = "image files, then the question in quotes; without a question a terminal asks for several"
    add("words", nargs="*", metavar='IMAGE... "QUESTION"', help=words)
    add("--checkpoint", type=Path, required=True, metavar="DIR", help="a whole Kimi-VL, tokenizer included")
    add("--system", metavar="TEXT", help="the system's message (default: the template's)")
    count("--max-new-tokens", default=256, help="most tokens of an answer (default: 256)")
    add("--temperature", type=_temperature, default=0.0, metavar="T", help="0 takes the likeliest token (default: 0)")
    add("--seed", type=_seed, default=0, metavar="N", help="of the samples (default: 0)")
    add("--dtype", choices=("auto", "float32", "bfloat16"), default="auto", help="default: auto, the checkpoint's")
    add("--device", choices=("auto", "cpu", "cuda"), default="auto", help="default: auto, a GPU if there is one")
    add("--attention", default="auto", metavar="NAME", help="of the encoder, a name that `kimivl-lab info` lists")
    count("--in-token-limit", help="most patches of an image before padding (default: the checkpoint's)")


def _add_make_checkpoint(commands: Any) -> None:
    command = commands.add_parser(
        "make-checkpoint", help="a small Kimi-VL with random weights, in the published layout"
    )
    add = command.add_argument
    count = partial(add, type=_positive, metavar="N")
    add("folder", type=Path, metavar="DIR", help="the folder to write")
    add("--force", action="store_true", help="also into a folder that is not empty")
    add("--seed", type=_seed, default=0, metavar="N", help="of the weights (default: 0)")
    add("--dtype", choices=("float32", "bfloat16"), default="bfloat16", help="default: bfloat16")
    count("--vocab-size", default=163840, help="ids, 512 or more (default: 163840, as published)")
    count("--shards", default=2, help="files for the weights (default: 2)")
    count("--vision-layers", default=2, help="layers of the vision tower (default: 2)")
    count("--text-layers", default=3, help="layers of the language model, the first of them dense (default: 3)")
    count("--experts", default=4, help="experts of a layer, 2 or more (default: 4)")


_TTFT_STEPS = """\
Choose --rate: this server answers as many requests a second as it can, its capacity. Half of that is a usual load.

    kimivl-lab ttft --endpoint http://127.0.0.1:8000 --requests 40 --rate 1000 --out build/capacity

Compare two servers, or one before and after a change. A server that has just started is slower for its first requests:
let it answer some first, as those above. Measured in turn, both servers meet the same changes of the machine. The seeds
give each pair other images.

    for seed in 1 2 3 4 5; do
      kimivl-lab ttft --endpoint http://127.0.0.1:8000 --rate 4 --seed $seed --out build/$seed-a
      kimivl-lab ttft --endpoint http://127.0.0.1:8001 --rate 4 --seed $seed --out build/$seed-b
    done
    kimivl-lab ttft --compare build/{1..5}-{a,b}    # in bash: build/1-a build/1-b build/2-a ...

The exit status is 0, or 2 if a request failed or nothing could be measured.
"""


def _add_ttft(commands: Any) -> None:
    command = commands.add_parser(
        "ttft",
        help="time to first token of a running server under a load of images",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog=_TTFT_STEPS,
    )
    add = command.add_argument
    count = partial(add, type=_positive, metavar="N")
    add("--endpoint", metavar="URL", help="an OpenAI-compatible server, such as http://127.0.0.1:8000")
    add("--out", type=Path, metavar="DIR", help="a new folder for the run")
    count("--requests", default=100, help="requests to send (default: 100)")
    add("--rate", type=_above_zero, default=1.0, metavar="R", help="requests a second, on average (default: 1)")
    add("--arrivals", choices=("poisson", "constant"), default="poisson", help="default: poisson, independent users")
    source = command.add_mutually_exclusive_group()
    source.add_argument(
        "--workload", default="receipts", metavar="NAME", help="sizes in data/workloads (default: receipts)"
    )
    source.add_argument("--sizes", type=Path, metavar="CSV", help="lines of width,height[,count] in pixels")
    some = "images of a request; of several numbers each request takes one (default: 1)"
    add("--images-per-request", type=_positives, default=(1,), metavar="N[,N...]", help=some)
    count("--max-tokens", default=16, help="new tokens of an answer (default: 16)")
    count("--in-token-limit", default=4096, help="the server's, for the check of its prompt tokens (default: 4096)")
    add("--model", metavar="NAME", help="default: the only one that the server lists")
    add("--api-key", metavar="KEY", help="sent as a bearer token")
    add(
        "--timeout",
        type=_above_zero,
        default=120.0,
        metavar="S",
        help="seconds until a request has failed (default: 120)",
    )
    add("--time-limit", type=_above_zero, metavar="S", help="seconds after which nothing more is sent")
    add("--warmup", type=_not_negative, default=20, metavar="N", help="requests before the test (default: 20)")
    add("--seed", type=_seed, default=0, metavar="N", help="of arrivals and sizes (default: 0)")
    add("--show", type=Path, metavar="DIR", help="summarise a run, also one that was killed")
    pairs = "say whether two servers differ, from runs of the same load; several pairs as A B A B ..."
    add("--compare", type=Path, nargs="+", metavar="DIR", help=pairs)
    least = "with --compare: the least difference that counts, 0.03 for 3 %% (default: 0.03, and 0.15 for one pair)"
    add("--margin", type=_above_zero, metavar="M", help=least)


def _add_sizes(command: Any) -> None:
    source = command.add_mutually_exclusive_group(required=True)
    source.add_argument("--sizes", type=Path, metavar="CSV", help="lines of width,height[,count] in pixels")
    source.add_argument("--log", type=Path, metavar="FILE", help="JSON lines of a server or proxy that hold images")
    source.add_argument("--images", type=Path, metavar="DIR", help="a folder of images, of which the headers are read")
    source.add_argument("--workload", metavar="NAME", help="sizes that come with this repository, in data/workloads")
    add = command.add_argument
    count = partial(add, type=_positive, metavar="N")
    add("--recursive", action="store_true", help="with --images: also the images in sub-folders")
    together = "how many images the encoder gets together: those of one step, of several requests (default: 1)"
    add("--images-per-call", type=_positives, default=(1,), metavar="N[,N...]", help=together)
    count("--in-token-limit", default=4096, help="most patches of an image before padding (default: 4096)")


def _add_server(command: Any) -> None:
    add = command.add_argument
    count = partial(add, type=_positive, metavar="N")
    add("--gpu", metavar="NAME", help='such as "RTX 4090", H100 or B200 (default: that of --rates, or H100)')
    records = (
        "a record of kimivl_lab.bench.encoder, .graphs or .parallel, made with --preset kimi-vl-a3b --dtype bfloat16: "
        "its rates replace those of the data sheet (may be given several times)"
    )
    add("--rates", type=Path, action="append", default=[], metavar="CSV", help=records)
    count("--ranks", default=1, help="GPUs that share the encoder's work (default: 1)")
    count("--max-num-batched-tokens", help="of vllm serve (default: vLLM's for this GPU)")
    count("--max-model-len", default=131072, help="of vllm serve (default: 131072)")
    price = command.add_mutually_exclusive_group()
    rows = "merged tokens that the GPU computes in the fixed time of one replay (default: predicted for this GPU)"
    price.add_argument("--replay-cost-rows", type=_not_negative, metavar="N", help=rows)
    price.add_argument("--costs", type=Path, metavar="CSV", help="a record of kimivl_lab.bench.graphs, for that price")


def _not_negative(text: str) -> int:
    return 0 if text.strip() == "0" else _positive(text)


def _positive(text: str) -> int:
    try:
        return as_positive("the value", int(text))
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be a whole number of 1 or more, got {text!r}") from None


def _positives(text: str) -> tuple[int, ...]:
    return tuple(_positive(number) for number in text.split(","))


def _above_zero(text: str) -> float:
    if (value := _temperature(text)) == 0:
        raise argparse.ArgumentTypeError(f"must be a number above 0, got {text!r}")
    return value


def _temperature(text: str) -> float:
    try:
        if 0 <= (value := float(text)) < float("inf"):
            return value
    except ValueError:
        pass
    raise argparse.ArgumentTypeError(f"must be a number of 0 or more, got {text!r}")


def _seed(text: str) -> int:
    try:
        if (seed := int(text)) in _SEEDS:
            return seed
    except ValueError:
        pass
    raise argparse.ArgumentTypeError(f"must be a whole number from -2**63 to 2**64 - 1, got {text!r}")


if __name__ == "__main__":
    sys.exit(main())
