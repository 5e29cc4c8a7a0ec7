"""What the tests of `kimivl_lab.parallel` run on several ranks: each case returns something small to assert on.

All cases of a world size run in one set of processes; a case that raises returns its error as text.
"""

import copy
import hashlib
import os
import time
import traceback
from dataclasses import replace
from datetime import timedelta
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module
from torch.utils._python_dispatch import TorchDispatchMode

from kimivl_lab import EncoderCudaGraphRunner, KimiVLConfig, KimiVLEncoder, MoonViTConfig, MoonVitPretrainedModel
from kimivl_lab.geometry import patch_counts
from kimivl_lab.kernels.packed_linear import PACKED_KERNELS
from kimivl_lab.kernels.rotation import rotate_complex
from kimivl_lab.measure.ranks import RankTiming, time_on_ranks
from kimivl_lab.moonvit.attention import eager_attention
from kimivl_lab.moonvit.layers import MoonVitEncoderLayer, ResolvedOptions
from kimivl_lab.parallel.auto import AutoParallelTower
from kimivl_lab.parallel.balance import Assignment
from kimivl_lab.parallel.collectives import all_reduce, record_collectives
from kimivl_lab.parallel.cost_model import LinkCost, assumed_cost_model
from kimivl_lab.parallel.data_parallel import run_dp_sharded_vision_model
from kimivl_lab.parallel.groups import init_group
from kimivl_lab.parallel.linear import ColumnParallelLinear, QKVParallelLinear, RowParallelLinear
from kimivl_lab.parallel.tensor_parallel import tensor_parallel, tensor_parallel_sizes
from tests.conftest import pixels_for, relative_error, tiny_encoder

TIMEOUT_S = 15.0
SLEEP_S = 0.1
GRIDS = [(2, 2), (4, 6), (10, 4), (2, 12), (8, 8), (6, 2), (4, 4), (12, 2), (2, 6)]
COUNTS = (0, 1, 3, 5, 9)


def run_cases(folder: str) -> dict[str, Any]:
    """Every case's result by name. `folder`: a checkpoint in the published layout."""
    group = init_group(timeout_s=TIMEOUT_S)
    results = {}
    for case in CASES:
        try:
            with torch.no_grad():
                results[case.__name__] = case(group, folder)
        except Exception:
            results[case.__name__] = traceback.format_exc()
    return results


@cache
def _first_encoder(seed: int) -> KimiVLEncoder:
    return tiny_encoder(seed)


def encoder_of(seed: int = 1) -> KimiVLEncoder:
    """A copy, quicker than a new one."""
    return copy.deepcopy(_first_encoder(seed))


def tower_of(seed: int = 1) -> MoonVitPretrainedModel:
    return encoder_of(seed).vision_tower


def modes(group) -> list[str]:
    can_cut = group.size() in tensor_parallel_sizes(MoonViTConfig.preset("tiny"))
    return ["data", "auto"] + ["tensor"] * can_cut


def free_links(config, dtype=torch.float32):
    """A cost model to which tensor parallel is always faster."""
    model = assumed_cost_model(config, dtype)
    return replace(model, patch_s=0.0, call_s=0.0, links={kind: LinkCost(0.0, 0.0) for kind in model.links})


def digest(tensor: Tensor) -> str:
    return hashlib.sha256(tensor.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()


# --- the vision half, by mode ----------------------------------------------------------------------------------------


def equality(group, folder):
    """(mode, images) -> relative error to one process, shape, collectives, digest."""
    results = {}
    for mode in [*modes(group), "auto, links free"]:
        encoder, alone = encoder_of(), encoder_of()
        name, _, free = mode.partition(",")
        encoder.set_encoder_parallel(name, group, free_links(encoder.config.vision_config) if free else None)
        for count in COUNTS:
            grids, pixels = GRIDS[:count], pixels_for(GRIDS[:count], seed=count)
            with record_collectives() as log:
                got = encoder.get_image_features(pixels, torch.tensor(grids).view(-1, 2))
            want = alone.get_image_features(pixels, grids)
            error = relative_error(got, want) if count else 0.0
            results[mode, count] = (error, tuple(got.shape), [one.kind for one in log], digest(got))
    return results


def bfloat16(group, folder):
    """mode -> errors to float32 of several ranks and of one, dtype, digest."""
    pixels, results = pixels_for(GRIDS), {}
    exact = encoder_of().get_image_features(pixels, GRIDS)
    one_rank = relative_error(encoder_of().bfloat16().get_image_features(pixels, GRIDS), exact)
    for mode in modes(group):
        got = encoder_of().bfloat16().set_encoder_parallel(mode, group).get_image_features(pixels, GRIDS)
        results[mode] = (relative_error(got, exact), one_rank, got.dtype, digest(got))
    return results


def published_checkpoint(group, folder):
    """Relative error of a cut encoder that was loaded from the whole checkpoint."""
    if 4 % group.size():
        return None
    encoder = KimiVLEncoder.from_pretrained(folder).eval().set_encoder_parallel("tensor", group)
    pixels = pixels_for(GRIDS)
    return relative_error(encoder.get_image_features(pixels, GRIDS), encoder_of().get_image_features(pixels, GRIDS))


# --- data parallel ---------------------------------------------------------------------------------------------------


class StubTower:
    """Features that are the patches' own first numbers, on no module at all; remembers what it was given."""

    device, dtype = torch.device("cpu"), torch.bfloat16
    config = MoonViTConfig.preset("tiny")

    def __init__(self):
        self.calls = []

    def __call__(self, pixel_values, image_grid_hws):
        self.calls.append((len(pixel_values), image_grid_hws))
        return pixel_values.flatten(1)[:, : self.config.hidden_size].to(self.dtype).unflatten(0, (-1, 4))


class PixelCopies(TorchDispatchMode):
    """Counts the patches that operators write into memory other than that of `pixels`."""

    def __init__(self, pixels: Tensor) -> None:
        super().__init__()
        self.storage = pixels.untyped_storage().data_ptr()
        self.patches = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor) and result.shape[1:] == (3, 14, 14):
            self.patches += len(result) * (result.untyped_storage().data_ptr() != self.storage)
        return result


def own_pixels(group, folder):
    """For 0, 1, 3, 9 images: patches copied, given to the tower, owned, in all; and whether the result is right."""
    results = []
    for count in (0, 1, 3, 9):
        grids, pixels, tower = GRIDS[:count], pixels_for(GRIDS[:count]), StubTower()
        with PixelCopies(pixels) as copies:
            got = run_dp_sharded_vision_model(tower, pixels, grids, group)
        want = StubTower()(pixels, grids)
        given = sum(patches for patches, _ in tower.calls)
        owned = sum(sum(patch_counts(own)) for _, own in tower.calls)
        right = torch.equal(got, want) and got.dtype == tower.dtype
        results.append((copies.patches, given, owned, sum(patch_counts(grids)), len(tower.calls), right))
    return results


def loaded_pixels(group, folder):
    """Images that `load_pixels` was asked for, and whether the result is right."""
    images = pixels_for(GRIDS).split(patch_counts(GRIDS))
    asked = []

    def load(mine):
        asked.extend(mine)
        return torch.cat([images[image] for image in mine])

    got = run_dp_sharded_vision_model(StubTower(), None, GRIDS, group, load_pixels=load)
    return asked, torch.equal(got, StubTower()(torch.cat(images), GRIDS))


def graph_runner(group, folder):
    """Relative error when each rank replays graphs."""
    tower, pixels = tower_of(), pixels_for(GRIDS)
    runner = EncoderCudaGraphRunner(tower, budgets=[16, 64], max_images=8, backend="trace")
    return relative_error(run_dp_sharded_vision_model(runner, pixels, GRIDS, group), tower(pixels, GRIDS))


def balances(group, folder):
    """Every balance gives the same features; a bad one and bad pixels are refused before any collective."""
    tower, pixels = tower_of(), pixels_for(GRIDS)

    def all_to_the_last(sizes, ranks):
        return Assignment(list(range(len(sizes))), [0] * (ranks - 1) + [len(sizes)], [0.0] * ranks)

    want = tower(pixels, GRIDS)
    errors = {
        name: relative_error(run_dp_sharded_vision_model(tower, pixels, GRIDS, group, balance=balance), want)
        for name, balance in {"patches": "patches", "cost": "cost", "function": all_to_the_last}.items()
    }
    refused = []
    for arguments in (
        {"balance": "fast"},
        {"balance": lambda sizes, ranks: Assignment([0], [1] + [0] * (ranks - 1), [1.0] * ranks)},
        {"pixel_values": pixels[1:]},
        {"pixel_values": None},
        {"load_pixels": lambda mine: pixels},
        {"group": None},
        {"grid_hws": [(2, 3)]},
    ):
        given: dict[str, Any] = {"pixel_values": pixels, "grid_hws": GRIDS, "group": group} | arguments
        try:
            run_dp_sharded_vision_model(tower, **given)
        except ValueError as error:
            refused.append(str(error))
    return errors, refused


def two_groups(group, folder):
    """4 ranks as two groups of 2, images for the first only: the others bring none, or do not call at all."""
    if group.size() != 4:
        return None
    half, _ = dist.new_subgroups(2, timeout=timedelta(seconds=TIMEOUT_S))
    first = dist.get_rank() < 2
    grids = GRIDS[:3] if first else []
    pixels = pixels_for(GRIDS[:3])
    want = tower_of()(pixels, GRIDS[:3])
    results = []
    for mode in ("data", "tensor"):
        tower = tower_of()
        if mode == "tensor":
            tower = tensor_parallel(tower, half)
        for absent in (False, True):
            if absent and not first:
                results.append(0.0)
                continue
            mine = pixels[: sum(patch_counts(grids))]
            got = run_dp_sharded_vision_model(tower, mine, grids, half) if mode == "data" else tower(mine, grids)
            results.append(relative_error(got, want) if first else float(got.numel()))
    return results


# --- tensor parallel -------------------------------------------------------------------------------------------------


def cut_weights(group, folder):
    """Who holds what, of 4 heads of 2 and numbers that say their row and column; copies and views alike."""
    if 4 % group.size():
        return None
    numbered = nn.Linear(4, 24)
    numbered.weight.copy_(100 * torch.arange(24)[:, None] + torch.arange(4))
    numbered.bias.copy_(torch.arange(24))
    held = {}
    for view in (False, True):
        qkv: Any = QKVParallelLinear.from_linear(numbered, 4, group, view=view).local
        column: Any = ColumnParallelLinear.from_linear(numbered, group, view=view).local
        row: Any = RowParallelLinear.from_linear(numbered, group, view=view).local
        held[view] = {
            "qkv rows": (qkv.weight.reshape(-1, 4)[:, 0] / 100).int().tolist(),
            "qkv bias": qkv.bias.flatten().int().tolist(),
            "column rows": (column.weight[:, 0] / 100).int().tolist(),
            "row columns": row.weight[0].int().tolist(),
            "shares memory": [
                one.weight.untyped_storage().data_ptr() == numbered.weight.untyped_storage().data_ptr()
                for one in (qkv, column, row)
            ],
            "contiguous": [one.weight.is_contiguous() for one in (qkv, column, row)],
        }
    return held


def one_layer_pair(group, folder):
    """Column then row of a whole layer pair, with activation and residual; the bias counts once."""
    if 4 % group.size():
        return None
    torch.manual_seed(0)
    first, second = nn.Linear(8, 16), nn.Linear(16, 8)
    x, residual = torch.randn(5, 8), torch.randn(5, 8)
    want = residual + second(F.gelu(first(x), approximate="tanh"))
    errors = []
    for view in (False, True):
        for kernel in (None, PACKED_KERNELS["prepacked"]):
            column = ColumnParallelLinear.from_linear(first, group, view=view)
            row = RowParallelLinear.from_linear(second, group, view=view)
            got = row(column(x, "gelu_tanh", kernel=kernel), residual=residual, kernel=kernel)
            errors.append(relative_error(got, want))
    return errors


def new_weights(group, folder):
    """Errors after an unsharded state dict replaces the weights: of a cut tower, and of a twin's whole tower."""
    if 4 % group.size():
        return None
    pixels, other = pixels_for(GRIDS), tower_of(2)
    want = other(pixels, GRIDS)
    cut = tensor_parallel(tower_of(), group)
    whole = tower_of()
    twin = tensor_parallel(whole, group, view=True)
    errors = []
    for tower in (cut, twin):
        tower(pixels, GRIDS)  # whatever is packed or cached is of the old weights
        (whole if tower is twin else cut).load_state_dict(other.state_dict())
        errors.append(relative_error(tower(pixels, GRIDS), want))
    whole.double()
    errors.append(relative_error(twin(pixels.double(), GRIDS), other.double()(pixels.double(), GRIDS)))
    return errors


def memory(group, folder):
    """Bytes of a cut tower's blocks over the whole one's; storages of a twin that are not its tower's."""
    if 4 % group.size():
        return None
    whole = tower_of()

    def linear_bytes(tower):
        return sum(p.nbytes for block in tower.encoder.blocks for p in block.parameters() if p.ndim == 2)

    encoder = encoder_of()
    auto = AutoParallelTower(encoder.vision_tower, group, free_links(encoder.config.vision_config))
    auto(pixels_for(GRIDS), GRIDS)
    owned = {p.untyped_storage().data_ptr() for p in encoder.vision_tower.parameters()}
    assert (auto._cut is None) == (group.size() == 1)
    twin: Any = auto._cut.tower if auto._cut is not None else encoder.vision_tower
    seen: list[Tensor] = list(twin.parameters()) + [
        tensor
        for block in twin.encoder.blocks
        for layer in (block.wqkv, block.wo, block.mlp.fc0, block.mlp.fc1) * (group.size() > 1)
        for tensor in (layer.local.weight, layer.local.bias)
        if tensor is not None
    ]
    foreign = [p for p in seen if p.untyped_storage().data_ptr() not in owned]
    names = set(dict(encoder.named_parameters())) == set(dict(encoder_of().named_parameters()))
    ratio = linear_bytes(tensor_parallel(tower_of(), group)) / linear_bytes(whole)
    return ratio, len(foreign), names


def illegal_size(group, folder):
    """The error of 16 heads where they do not divide, before any weight exists; and the mode that still runs."""
    with torch.device("meta"):
        encoder = KimiVLEncoder(KimiVLConfig.preset("kimi-vl-a3b"))
    try:
        encoder.set_encoder_parallel("tensor", group)
    except ValueError as error:
        return str(error)
    return None


def torch_plan(group, folder):
    """Relative error of one block to the same block parallelised by torch's own plan."""
    if group.size() != 2:
        return None
    tower: Any = tower_of()
    plain: Any = PlainBlock(tower.encoder.blocks[0])
    mesh = DeviceMesh.from_group(group, "cpu")
    plan: dict[str, ParallelStyle] = {name: ColwiseParallel() for name in ("q", "k", "v", "fc0")}
    plan |= {name: RowwiseParallel() for name in ("wo", "fc1")}
    parallelize_module(plain, mesh, plan)
    plain.num_heads //= group.size()
    x = torch.randn(sum(patch_counts(GRIDS)), tower.config.hidden_size, generator=torch.Generator().manual_seed(0))
    metadata = tower.prepare_encoder_metadata(GRIDS)
    want = plain(x, metadata)
    cut: Any = tensor_parallel(tower, group).encoder.blocks[0]
    local = [module.to_local() for module in (plain.wo.weight, plain.fc0.weight)]
    same = [torch.equal(a, b) for a, b in zip(local, (cut.wo.local.weight, cut.mlp.fc0.local.weight), strict=True)]
    kernels = ResolvedOptions.resolve(tower.options, tower.device, tower.dtype)
    return relative_error(cut(x, metadata, replace(kernels, linear=None)), want), same


class PlainBlock(nn.Module):
    """The block in plain nn.Linear layers, q, k and v apart, as torch's plan wants them."""

    def __init__(self, block: MoonVitEncoderLayer) -> None:
        super().__init__()
        self.num_heads = block.num_heads
        self.norm0, self.norm1 = block.norm0, block.norm1
        weights, biases = block.wqkv.weight.chunk(3), block.wqkv.bias.chunk(3)
        self.q, self.k, self.v = (plain_linear(w, b) for w, b in zip(weights, biases, strict=True))
        self.wo = plain_linear(block.wo.weight, block.wo.bias)
        self.fc0 = plain_linear(block.mlp.fc0.weight, block.mlp.fc0.bias)
        self.fc1 = plain_linear(block.mlp.fc1.weight, block.mlp.fc1.bias)

    def forward(self, x, metadata):
        h = self.norm0(x)
        q, k, v = (linear(h).unflatten(-1, (self.num_heads, -1)) for linear in (self.q, self.k, self.v))
        q, k = rotate_complex(torch.stack((q, k), 1), metadata.rope_cos_sin).unbind(1)
        x = x + self.wo(eager_attention(q, k, v, metadata).flatten(1))
        return x + self.fc1(F.gelu(self.fc0(self.norm1(x)), approximate="tanh"))


def plain_linear(weight: Tensor, bias: Tensor) -> nn.Linear:
    linear = nn.Linear(weight.shape[1], weight.shape[0])
    linear.weight.copy_(weight)
    linear.bias.copy_(bias)
    return linear


# --- ranks that do not come ------------------------------------------------------------------------------------------


def lose_a_rank(scenario: str, rank: int, ranks: int, port: int, timeout_s: float, queue) -> None:
    """One rank of a group that loses some on the way to an all-gather; puts (scenario, rank, error, ...) in `queue`."""
    torch.set_num_threads(1)
    os.environ |= {"RANK": f"{rank}", "WORLD_SIZE": f"{ranks}", "MASTER_ADDR": "localhost", "MASTER_PORT": f"{port}"}
    everyone = init_group(timeout_s=30)  # a slow start is not what is tested
    group = dist.new_group(timeout=timedelta(seconds=timeout_s))
    dist.barrier(everyone)

    def load(mine):
        if scenario == "cannot read its images" and rank == 1:
            raise FileNotFoundError("page_7.png")
        return torch.cat([pixels_for([GRIDS[image]]) for image in mine])

    if scenario == "dies" and rank == 1 or scenario == "keeper of the store dies" and rank == 0:
        os._exit(1)
    if scenario == "hangs" and rank == 1 or scenario.startswith("shards") and rank >= 2:
        time.sleep(60)
    start = time.monotonic()
    try:
        run_dp_sharded_vision_model(StubTower(), None, GRIDS, group, load_pixels=load)
    except Exception as error:
        missing = getattr(error, "missing", [])
        queue.put((scenario, rank, type(error).__name__, str(error), missing, time.monotonic() - start))
    time.sleep(60)  # until killed: nobody's leaving may end the others


def fail_on_rank_1() -> None:
    if dist.get_node_local_rank() == 1:
        raise ValueError("no picture")


def time_uneven_ranks() -> dict[str, RankTiming]:
    """One variant whose last rank comes late to an all-reduce, one without work."""
    group = init_group(timeout_s=TIMEOUT_S)

    def uneven():
        if group.rank() == group.size() - 1:
            time.sleep(SLEEP_S)
        all_reduce(torch.ones(1024), group)

    return time_on_ranks({"uneven": uneven, "idle": lambda: None}, group, torch.device("cpu"), repeats=2)


def encode_on_gpus() -> dict[str, float]:
    """mode -> relative error to one GPU, over NCCL."""
    group = init_group("cuda", timeout_s=60)
    pixels = pixels_for(GRIDS)
    with torch.no_grad():
        want = encoder_of().cuda().get_image_features(pixels, GRIDS)
        return {
            mode: relative_error(
                encoder_of().cuda().set_encoder_parallel(mode, group).get_image_features(pixels, GRIDS), want
            )
            for mode in modes(group)
        }


CASES = (
    equality,
    bfloat16,
    published_checkpoint,
    own_pixels,
    loaded_pixels,
    graph_runner,
    balances,
    two_groups,
    cut_weights,
    one_layer_pair,
    new_weights,
    memory,
    illegal_size,
    torch_plan,
)
