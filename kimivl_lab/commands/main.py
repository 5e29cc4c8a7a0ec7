"""The command line, `kimivl-lab`: `encode` turns picture files into features, `plan` image sizes into graph budgets,
`info` says what this machine offers.

Heavy imports stand inside the functions that need them, so that `--help` answers at once.
"""

import argparse
import contextlib
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..checks import as_positive

if TYPE_CHECKING:
    from .encode import EncodedImage

PRESETS = ("lab", "tiny", "kimi-vl-a3b")
SHOWN_FAULTS = 20  # of the rows or pictures that `plan` leaves out


class CommandError(Exception):
    """What the user can mend; its message is one line."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command; 0 when all went well, 2 after anything that the user can mend."""
    arguments = _parser().parse_args(argv)
    try:
        return arguments.run(arguments)
    except CommandError as error:
        _complain(str(error))
        return 2


def encode(arguments: argparse.Namespace) -> int:
    """Encodes the pictures, writes their features, prints one row a picture."""
    import torch
    from rich.console import Console
    from rich.progress import Progress

    from ..geometry import MAX_GRID_SIDE
    from .encode import encode_files, picture_paths, unique_names
    from .feature_file import FeatureFile

    device = _device(arguments.device)
    try:
        named = unique_names(picture_paths(arguments.images))
    except ValueError as error:
        raise CommandError(str(error)) from error
    widest_grids = json.dumps(dict.fromkeys(named, (MAX_GRID_SIDE, MAX_GRID_SIDE)))
    with contextlib.ExitStack() as stack:
        try:
            file = FeatureFile(arguments.out, list(named), _metadata(arguments) | {"grids": widest_grids})
            stack.enter_context(file)
        except OSError as error:
            raise CommandError(f"cannot write {arguments.out}: {error.strerror or error}") from error
        processor, model = _load(arguments)
        model = model.to(device).eval()
        stack.enter_context(torch.inference_mode())
        progress = Progress(console=Console(stderr=True), transient=True, disable=not sys.stderr.isatty())
        with progress:
            task = progress.add_task("pictures", total=len(named))
            encoded, faults = encode_files(
                named,
                processor,
                model,
                file,
                strict=arguments.strict,
                on_picture=lambda: progress.advance(task),
            )
        file.metadata["grids"] = json.dumps({image.name: image.grid for image in encoded})
        for fault in faults:
            _complain(fault)
        if faults and arguments.strict:
            raise CommandError(f"{arguments.out} is not written: --strict, and not every picture could be read")
    if not encoded:
        raise CommandError(f"{arguments.out} is not written: no picture could be read")
    _print_encoded(arguments, encoded)
    return 2 if faults else 0


def plan(arguments: argparse.Namespace) -> int:
    """Plans budgets for image sizes, prints what they waste and what to paste."""
    from rich.console import Console
    from rich.progress import Progress

    from ..planner.plan import plan_budgets
    from ..planner.workload import count_tokens
    from .plan_report import plans_as_json, print_plans
    from .plan_sizes import plan_sizes

    progress = Progress(console=Console(stderr=True), transient=True, disable=not sys.stderr.isatty())
    try:
        with progress:
            name, sizes, faults = plan_sizes(
                csv_file=arguments.sizes,
                folder=arguments.images,
                workload=arguments.workload,
                in_token_limit=arguments.in_token_limit,
                track=lambda paths: progress.track(paths, description="headers"),
            )
            for fault in faults[:SHOWN_FAULTS]:
                _complain(f"skipped {fault}")
            if len(faults) > SHOWN_FAULTS:
                _complain(f"skipped {len(faults) - SHOWN_FAULTS:,} more")
            if not sizes:
                raise CommandError(f"{name}: no image size could be used")
            limit = arguments.memory_limit_mib
            plans = {}
            for engine in ("vllm", "lab"):
                task = progress.add_task(f"budgets, {engine}", total=1.0)
                plans[engine] = plan_budgets(
                    sizes,
                    arguments.images_per_call,
                    arguments.max_graphs,
                    None if limit is None else limit * 2**20,
                    in_token_limit=arguments.in_token_limit,
                    max_images=arguments.max_images,
                    engine=engine,
                    on_progress=lambda share, task=task: progress.update(task, completed=share),
                )
        workload = count_tokens(sizes, arguments.in_token_limit)
        if arguments.plot:
            from ..plots import use_style
            from ..plots.budgets import plan_overview

            use_style()
            figure, _ = plan_overview(name, workload, plans)
            figure.savefig(arguments.plot)
    except ValueError as error:
        raise CommandError(str(error)) from error
    except OSError as error:
        raise CommandError(f"{error.filename}: {error.strerror}" if error.strerror else str(error)) from error
    if arguments.json:
        print(plans_as_json(name, workload, plans))
    else:
        print_plans(Console(), name, workload, plans)
    return 0


def info(arguments: argparse.Namespace) -> int:
    """Prints the machine, the versions, and which kernels run here in bfloat16."""
    import torch
    from rich.console import Console
    from rich.table import Table

    from ..kernels.packed_linear import PACKED_KERNELS, packed_unavailable
    from ..measure.provenance import device_name, versions
    from ..moonvit.attention import ATTENTION_BACKENDS, attention_unavailable

    device = torch.device(_device("auto"))
    table = Table(show_header=False, box=None)
    table.add_row("processor", device_name("cpu"))
    table.add_row("threads", str(torch.get_num_threads()))
    gpus = [device_name(f"cuda:{index}") for index in range(torch.cuda.device_count())]
    table.add_row("GPU", ", ".join(gpus) or "none that torch can use")
    for package, version in versions().items():
        table.add_row(package, version)
    for name in ATTENTION_BACKENDS:
        table.add_row(f"attention {name}", attention_unavailable(name, device, torch.bfloat16) or "runs here")
    for name in PACKED_KERNELS:
        table.add_row(f"linear {name}", packed_unavailable(name, device, torch.bfloat16) or "runs here")
    Console().print(table)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="kimivl-lab", description="Kimi-VL's vision encoder on the command line.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    command = commands.add_parser("encode", help="picture files -> a safetensors file of features")
    command.set_defaults(run=encode)
    command.add_argument("images", nargs="+", type=Path, metavar="IMAGE", help="a picture, or a folder of pictures")
    command.add_argument("--out", type=Path, required=True, metavar="FILE", help="written as safetensors")
    source = command.add_mutually_exclusive_group()
    source.add_argument("--preset", choices=PRESETS, default="lab", help="random weights of this size (default: lab)")
    source.add_argument("--checkpoint", type=Path, metavar="DIR", help="config.json and the weights of a Kimi-VL")
    command.add_argument("--projected", action="store_true", help="the language model's rows, not the tower's features")
    command.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    command.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    command.add_argument(
        "--in-token-limit", type=_positive, metavar="N", help="most patches a picture keeps before padding"
    )
    command.add_argument("--strict", action="store_true", help="write nothing unless every picture can be read")
    command.add_argument("--seed", type=int, default=0, help="of random weights (default: 0)")

    command = commands.add_parser("plan", help="image sizes -> the CUDA-graph budgets that waste the least")
    command.set_defaults(run=plan)
    source = command.add_mutually_exclusive_group(required=True)
    source.add_argument("--sizes", type=Path, metavar="CSV", help="rows of width,height[,count] in pixels")
    source.add_argument("--images", type=Path, metavar="DIR", help="a folder of pictures; only headers are read")
    source.add_argument("--workload", metavar="NAME", help="sizes that come with this repository: data/workloads")
    command.add_argument(
        "--images-per-call", type=_positives, default=(1,), metavar="N[,N...]", help="that arrive together (default: 1)"
    )
    command.add_argument("--max-graphs", type=_positive, default=8, metavar="N", help="most budgets (default: 8)")
    command.add_argument(
        "--in-token-limit", type=_positive, default=4096, metavar="N", help="of the processor, patches (default: 4096)"
    )
    command.add_argument("--memory-limit-mib", type=_positive, metavar="N", help="most MiB of static buffers")
    command.add_argument(
        "--max-images", type=_positive, metavar="N", help="most images in one replay (default: that arrive together)"
    )
    command.add_argument("--plot", type=Path, metavar="FILE", help="also draw budgets and waste, .png, .svg or .pdf")
    command.add_argument("--json", action="store_true", help="JSON instead of tables")

    command = commands.add_parser("info", help="this machine, versions, attention backends")
    command.set_defaults(run=info)
    return parser


def _positive(text: str) -> int:
    try:
        return as_positive("the value", int(text))
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _positives(text: str) -> tuple[int, ...]:
    return tuple(_positive(number) for number in text.split(","))


def _device(name: str) -> str:
    import torch

    if name == "cuda" and not torch.cuda.is_available():
        raise CommandError("--device cuda: torch finds no CUDA device here")
    return ("cuda" if torch.cuda.is_available() else "cpu") if name == "auto" else name


def _load(arguments: argparse.Namespace) -> tuple[Any, Any]:
    """The image processor and the model, which is called with pixel values and grids."""
    import torch
    from transformers.utils import logging

    from ..config import KimiVLConfig, MoonViTConfig
    from ..images.processor import KimiVLImageProcessor
    from ..kimi_vl.encoder import KimiVLEncoder
    from ..moonvit.model import MoonVitPretrainedModel

    model_class: Any = KimiVLEncoder if arguments.projected else MoonVitPretrainedModel
    config_class = KimiVLConfig if arguments.projected else MoonViTConfig
    dtype = getattr(torch, arguments.dtype)
    limit = {"in_token_limit": arguments.in_token_limit} if arguments.in_token_limit else {}
    folder = arguments.checkpoint
    if folder is None:
        torch.manual_seed(arguments.seed)
        return KimiVLImageProcessor(**limit), model_class(config_class.preset(arguments.preset)).to(dtype)
    if not (folder / "config.json").is_file():
        raise CommandError(f"--checkpoint {folder}: no config.json there")
    logging.disable_progress_bar()
    try:
        model = model_class.from_pretrained(folder, dtype=dtype)
        published = (folder / "preprocessor_config.json").is_file()
        return KimiVLImageProcessor.from_pretrained(folder, **limit) if published else KimiVLImageProcessor(
            **limit
        ), model
    except (OSError, ValueError) as error:
        raise CommandError(f"--checkpoint {error}") from error


def _metadata(arguments: argparse.Namespace) -> dict[str, str]:
    from ..measure.provenance import versions

    return {
        "weights": str(arguments.checkpoint or f"random, preset {arguments.preset}, seed {arguments.seed}"),
        "preset": "" if arguments.checkpoint else arguments.preset,
        "seed": str(arguments.seed),
        "rows": "language model, (t, hidden)" if arguments.projected else "tower, (t, 4, hidden)",
        "versions": json.dumps(versions()),
    }


def _print_encoded(arguments: argparse.Namespace, encoded: "list[EncodedImage]") -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(caption="ms: the encoder's time for the picture's batch, shared by patches; the first batch warms up")
    table.add_column("picture", overflow="fold")
    for heading in ("size, px", "grid h x w", "patches", "tokens", "ms"):
        table.add_column(heading, justify="right")
    for image in encoded:
        (width, height), (rows, columns) = image.size, image.grid
        counts = (f"{image.patches:,}", f"{image.tokens:,}", f"{image.ms:.1f}")
        table.add_row(image.name, f"{width} x {height}", f"{rows} x {columns}", *counts)
    console = Console()
    console.print(table)
    if arguments.checkpoint is None:
        console.print(
            "The weights are RANDOM: shapes and times are real, the features mean nothing.", style="bold yellow"
        )
    console.print(f"{len(encoded)} pictures in {arguments.out}", soft_wrap=True)


def _complain(message: str) -> None:
    print(f"kimivl-lab: error: {' '.join(message.split())}", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
