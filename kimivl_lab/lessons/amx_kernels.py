"""The helpers of the appendix on AMX kernels: instructions counted, attention with slack, bytes by cache level.

    attention_instructions(72)            # (6, 5): tile instructions of K Q^T and V^T P^T, for 32 keys and 16 queries
    bytes_read(1024, 1152, 4304, 256, 9)  # bytes by level: {"memory": .., "second": .., "first": ..}

The kernels themselves are `kimivl_lab/kernels/amx/*.c`; `constants` reads how they cut their work.
Test: tests/test_lessons_amx_kernels.py. Record: attention__*__bfloat16__*.csv, encoder__*__bfloat16__*.csv.
"""

import math
import re
from collections.abc import Callable, Sequence
from importlib.resources import files
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..config import MoonViTConfig
from ..kernels.library import unavailable
from ..kernels.packed_linear import PACKED_KERNELS, packed_unavailable
from ..measure.accuracy import relative_error
from ..measure.roofline import matmul
from ..measure.timing import time_interleaved
from ..moonvit.attention import ATTENTION_BACKENDS
from ..moonvit.metadata import EncoderMetadata
from ..moonvit.model import MoonVitPretrainedModel
from ..plots.amx import Maxima

FLOPS = 2 * 16 * 16 * 32  # of one tile instruction in bfloat16
FIRST, SECOND = 48 * 2**10, 2 * 2**20  # bytes of the first-level and the second-level cache of a core that has AMX
_CPU, _BF16 = torch.device("cpu"), torch.bfloat16


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def linear_instructions(rows: int, inputs: int, outputs: int) -> int:
    """Tile instructions of a linear layer: rows and outputs in blocks of 32 (2 x 2 tiles), inputs in steps of 32."""
    return 4 * ceil_div(rows, 32) * ceil_div(outputs, 32) * ceil_div(inputs, 32)


def attention_instructions(d: int) -> tuple[int, int]:
    """Tile instructions of K Q^T and of V^T P^T for 32 keys and 16 queries of a head with d features."""
    return 2 * ceil_div(d, 32), ceil_div(d + 1, 16)


def useful_shares(d: int) -> tuple[float, float, float]:
    """The part of the tile work that is not padding: of K Q^T, of V^T P^T, of both."""
    scores, sums = attention_instructions(d)
    return d / 16 / scores, d / 16 / sums, d / 8 / (scores + sums)


def eight_bit_gain(d: int) -> float:
    """How many times fewer instructions attention takes if all operands have 8 bits, for 64 keys and 16 queries."""
    scores, sums = attention_instructions(d)
    return (2 * scores + 2 * sums) / (4 * ceil_div(d, 64) + sums)


def constants() -> dict[str, int]:
    """The numbers that the C sources define: CHUNK, ROW_BYTES, MOST_ROWS, RUN, SLACK and others."""
    folder = files("kimivl_lab.kernels.amx")
    sources = "".join(
        folder.joinpath(name).read_text(encoding="utf-8") for name in ("linear.c", "attention.c", "tiles.h")
    )
    return {name: int(value) for name, value in re.findall(r"^#define (\w+) (\d+)", sources, re.MULTILINE)}


# --- attention with slack --------------------------------------------------------------------------------------------


class Runs(NamedTuple):
    """(n, d) result of `attend_runs`, and for each run and query: its maximum, top after it, whether top was raised."""

    result: Tensor
    here: Tensor
    top: Tensor
    raised: Tensor


def attend_runs(q: Tensor, k: Tensor, v: Tensor, slack: float = 8.0, run: int = 128) -> Runs:
    """Attention of one head as the kernel computes it, with its history; q (n, d), k and v (m, d), n a multiple of 16.

    Args:
        slack: by how many powers of two a score may exceed `top` before `top` is raised.
        run: keys that are handled together.
    """
    scale = q.shape[-1] ** -0.5 * math.log2(math.e)
    values = torch.cat((v.T, v.new_ones(1, len(v))))  # (d + 1, m)
    out, top = q.new_zeros(len(values), len(q)), q.new_full((len(q),), torch.finfo(q.dtype).min)
    history = []
    for at in range(0, len(k), run):
        scores = k[at : at + run] @ q.T  # (run, n)
        here = scores.amax(0)
        exceeds = (here > top + slack / scale).view(-1, 16).any(1).repeat_interleave(16)  # 16 queries act as one
        raised = torch.where(exceeds, here.maximum(top), top)
        out = out * torch.exp2((top - raised) * scale)
        out = out + values[:, at : at + run] @ torch.exp2((scores - raised) * scale)
        top = raised
        history.append((here * scale, top * scale, exceeds if at else torch.zeros_like(exceeds)))
    here, tops, exceeded = (torch.stack(column) for column in zip(*history, strict=True))
    return Runs((out[:-1] / out[-1]).T, here, tops, exceeded)


def tops(maxima: Sequence[float], slack: float) -> list[float]:
    """The running maximum after each run: raised to the run's maximum when that exceeds it by more than `slack`."""
    found: list[float] = []
    for here in maxima:
        top = found[-1] if found else -math.inf
        found.append(here if here > top + slack else top)
    return found


RISES = (0, 80, 160)


def rising_scores() -> tuple[Tensor, Tensor, Tensor]:
    """q (48, 72), k and v (4096, 72): from the first key to the last, scores rise by `RISES` powers of two."""
    generator = torch.Generator("cpu").manual_seed(0)
    q, k, v = (torch.randn(size, 72, generator=generator, device="cpu") for size in (16 * len(RISES), 4096, 4096))
    rise = torch.tensor(RISES, dtype=torch.float32, device="cpu").repeat_interleave(16)
    q[:, 0], k[:, 0] = rise / (72**-0.5 * math.log2(math.e)), torch.linspace(0, 1, 4096, device="cpu")
    return q, k, v


def rescalings(order: str, slack: float) -> tuple[Maxima, int, str]:
    """Attention over `rising_scores` with its keys in an order, "rising", "shuffled" or "falling".

    Returns:
        the maxima of one query of each group, the rescalings of all groups, and "equal", "not equal" or "NaN".
    """
    q, k, v = rising_scores()
    want = (q.double() @ k.double().T / 72**0.5).softmax(-1) @ v.double()
    generator = torch.Generator("cpu").manual_seed(1)
    index = {
        "rising": torch.arange(4096, device="cpu"),
        "shuffled": torch.randperm(4096, generator=generator, device="cpu"),
        "falling": torch.arange(4096, device="cpu").flip(0),
    }[order]
    runs = attend_runs(q, k[index], v[index], slack)
    maxima = Maxima(*(values[:, ::16].tolist() for values in runs[1:]))
    if not runs.result.isfinite().all():
        return maxima, sum(map(sum, maxima.raised)), "NaN"
    equal = relative_error(runs.result, want) < 1e-4
    return maxima, sum(map(sum, maxima.raised)), "equal" if equal else "not equal"


# --- blocking --------------------------------------------------------------------------------------------------------


def level(nbytes: int) -> str:
    """The smallest level that holds `nbytes`: "first", "second" or "memory"."""
    return "first" if nbytes <= FIRST else "second" if nbytes <= SECOND else "memory"


def bytes_read(rows: int, inputs: int, outputs: int, task_rows: int, chunk: int) -> dict[str, int]:
    """Level -> bytes that a linear layer reads into tiles, its loops nested as in `linear.c`.

    An operand is read again from the smallest level that holds everything touched since it was read before: x after all
    rows of the task have passed, W after one block of rows. float32 sums travel between the chunks of a panel.
    """
    steps, panels, blocks = ceil_div(inputs, 32), ceil_div(outputs, 32), ceil_div(rows, 32)
    tiles = 2048 * steps * panels * blocks  # bytes of x, and as many of W
    x_first, w_first = 64 * steps * rows, 2048 * steps * panels * ceil_div(rows, task_rows)
    read = {"memory": x_first + w_first, "second": 0, "first": 0}
    read[level(64 * steps * task_rows)] += tiles - x_first
    read[level(2 * 2048 * chunk)] += tiles - w_first
    read[level(128 * task_rows + 2048 * chunk)] += 4096 * panels * blocks * (ceil_div(steps, chunk) - 1)
    return read


def task_rows(inputs: int) -> int:
    """Rows of x that a task of `linear.c` takes at most, for layers of `inputs` features."""
    of = constants()
    return min(of["MOST_ROWS"], of["ROW_BYTES"] // (64 * ceil_div(inputs, 32)) // 32 * 32)


# --- the kernels in C, where they run --------------------------------------------------------------------------------


def kernels_here() -> list[str]:
    """["amx"] where the kernels in C run, otherwise an empty list."""
    return ["amx"] if unavailable("amx", _CPU, _BF16) is None else []


def check_kernels() -> None:
    """Compares torch's results in bfloat16, and those of the kernels where they run, with float64; prints each.

    Raises:
        AssertionError: an error above 2^-7, the scale of bfloat16's rounding.
    """
    tower = MoonVitPretrainedModel(MoonViTConfig.preset("tiny")).eval()
    metadata = tower.prepare_encoder_metadata([(32, 32), (12, 20)])
    qkv = torch.randn(1264, 3, 16, 72, device="cpu").to(_BF16)
    want = ATTENTION_BACKENDS["eager"](*qkv.double().unbind(1), metadata)
    errors = {}
    for name in ("sdpa", *kernels_here()):
        errors[f"attention, {name}"] = relative_error(ATTENTION_BACKENDS[name](*qkv.unbind(1), metadata), want)
    sizes = ((1000, 1152), (4304, 1152), (4304,), (1000, 4304))
    x, weight, bias, residual = (torch.randn(size, device="cpu").to(_BF16) for size in sizes)
    weight = weight / 34
    y = F.linear(*(tensor.double() for tensor in (x, weight, bias)))
    errors["linear layer, F.linear"] = relative_error(F.linear(x, weight, bias), y)
    for name in kernels_here():
        kernel, packed = PACKED_KERNELS[name], PACKED_KERNELS[name].pack(weight)
        gelu = kernel.multiply(x, packed, 4304, bias, None, True)
        errors[f"linear layer with GELU, {name}"] = relative_error(gelu, F.gelu(y, approximate="tanh"))
        added = kernel.multiply(x, packed, 4304, bias, residual, False)
        errors[f"linear layer with residual, {name}"] = relative_error(added, y + residual.double())
    for name, error in errors.items():
        print(f"checked: {name:34s} error {error:.1e}, at most 2^-7: {error < 2**-7}")
    if reason := unavailable("amx", _CPU, _BF16):
        print(f"left out: the kernels in C: {reason}")
    assert max(errors.values()) < 2**-7


def time_kernels(quick: bool = False) -> None:
    """Times one linear layer and one attention, interleaved in random order, and prints ms and TFLOP/s.

    Sizes are smaller where products in bfloat16 are slow, which a first product finds out.
    """
    probe = matmul(_BF16, size=256)
    slow = quick or time_interleaved({"probe": probe}, warmup=1, repeats=3)["probe"].p50_ms > 1
    rows, side = (128, 12) if slow else (1024, 32)
    print(f"{rows} rows, 1,152 -> 4,304, and attention of one layer over {side} x {side} patches")
    x, weight = torch.randn(rows, 1152, device="cpu").to(_BF16), torch.randn(4304, 1152, device="cpu").to(_BF16)
    runs: dict[str, Callable[[], Tensor]] = {"F.linear": lambda: F.linear(x, weight)}
    for name, kernel in PACKED_KERNELS.items():
        if reason := packed_unavailable(name, _CPU, _BF16):
            print(f"left out: linear, {name}: {reason}")
        else:
            runs[f"linear, {name}"] = _product(kernel, x, weight)
    _print_times(runs, 2 * rows * 1152 * 4304)
    tower = MoonVitPretrainedModel(MoonViTConfig.preset("tiny")).eval()
    grid = tower.prepare_encoder_metadata([(side, side)])
    qkv = torch.randn(side * side, 3, 16, 72, device="cpu").to(_BF16).unbind(1)
    attend = {f"attention, {name}": _attention(name, qkv, grid) for name in ("sdpa", *kernels_here())}
    _print_times(attend, 4 * 16 * 72 * side**4)


def _product(kernel: Any, x: Tensor, weight: Tensor) -> Callable[[], Tensor]:
    packed = kernel.pack(weight)
    return lambda: kernel.multiply(x, packed, len(weight), None, None, False)


def _attention(name: str, qkv: Sequence[Tensor], metadata: EncoderMetadata) -> Callable[[], Tensor]:
    return lambda: ATTENTION_BACKENDS[name](*qkv, metadata)


def _print_times(runs: dict[str, Callable[[], Tensor]], flops: int) -> None:
    for name, one in time_interleaved(runs, warmup=1, repeats=7).items():
        spread = f"{one.p50_ms:8.2f} ms ({one.p20_ms:.2f} to {one.p80_ms:.2f})"
        print(f"{name:22s} {spread}, {flops / one.p50_ms / 1e9:.3f} TFLOP/s")
