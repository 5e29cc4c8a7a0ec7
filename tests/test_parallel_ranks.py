"""Several ranks, real processes over gloo: the same features as one process, on every rank, in order (faults G)."""

import hashlib
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module
from torch.utils._python_dispatch import TorchDispatchMode

from kimivl_lab import (
    EncoderCudaGraphRunner,
    KimiVLConfig,
    KimiVLEncoder,
    KimiVLForConditionalGeneration,
    MoonViTConfig,
)
from kimivl_lab.geometry import patch_counts
from kimivl_lab.kernels.packed_linear import PACKED_KERNELS
from kimivl_lab.kernels.rotation import rotate_complex
from kimivl_lab.measure.ranks import run_ranks
from kimivl_lab.moonvit.attention import eager_attention
from kimivl_lab.moonvit.layers import MoonVitEncoderLayer, ResolvedOptions
from kimivl_lab.parallel.auto import AutoParallelTower
from kimivl_lab.parallel.balance import Assignment
from kimivl_lab.parallel.collectives import record_collectives
from kimivl_lab.parallel.data_parallel import run_dp_sharded_vision_model
from kimivl_lab.parallel.groups import init_group
from kimivl_lab.parallel.linear import ColumnParallelLinear, QKVParallelLinear, RowParallelLinear
from kimivl_lab.parallel.tensor_parallel import tensor_parallel, tensor_parallel_sizes
from tests.conftest import pixels_for, randomise, relative_error, tiny_encoder
from tests.rank_cases import GRIDS, StubTower, encoder_of, free_links, on_ranks, results_of, tower_of
from tests.tiny_kimi_vl import PLACEHOLDER, tiny_json

TIMEOUT_S = 15.0
COUNTS = (0, 1, 3, 5, 9)
WORLD_SIZES = (1, 2, 3, 4)
CUTTING = (1, 2, 4)  # the tiny tower's 4 heads


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """results(ranks, case): what each rank returned."""
    folder = tmp_path_factory.mktemp("checkpoint")
    tiny_encoder(seed=1).save_pretrained(folder)
    return results_of(__name__, TIMEOUT_S, str(folder))


def digest(tensor: Tensor) -> str:
    return hashlib.sha256(tensor.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()


def modes(group) -> list[str]:
    can_cut = group.size() in tensor_parallel_sizes(MoonViTConfig.preset("tiny"))
    return ["data", "auto"] + ["tensor"] * can_cut


@on_ranks
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


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize(
    ("ranks", "mode"),
    [(ranks, mode) for ranks in WORLD_SIZES for mode in ("data", "auto", "auto, links free")]
    + [(ranks, "tensor") for ranks in CUTTING],
)
def test_G1_G4_G6_G12_every_mode_equals_one_process(results, ranks, mode, count):
    found = [result[mode, count] for result in results(ranks, equality)]
    error, shape, kinds, digest = found[0]
    assert shape == (sum(patch_counts(GRIDS[:count])) // 4, KimiVLConfig.preset("tiny").text_config.hidden_size)
    assert all(result[0] < 1e-5 for result in found)
    assert {result[3] for result in found} == {digest}
    assert all(result[2] == kinds for result in found)


@pytest.mark.parametrize("ranks", WORLD_SIZES)
def test_G3_G5_every_rank_joins_the_same_collectives(results, ranks):
    found = results(ranks, equality)[0]
    gathers = {0: [], 1: ["broadcast"], **dict.fromkeys((3, 5, 9), ["all_gather"])} if ranks > 1 else {}
    reduces = ["all_reduce"] * 4 * (ranks > 1)
    for count in COUNTS:
        assert found["data", count][2] == gathers.get(count, [])
        if ranks in CUTTING:
            assert found["tensor", count][2] == reduces
    if ranks in (2, 4):  # one image goes to all ranks; with free links so do many
        assert found["auto, links free", 1][2] == found["auto, links free", 9][2] == reduces


@on_ranks
def bfloat16(group, folder):
    """mode -> errors to float32 of several ranks and of one, dtype, digest."""
    pixels, results = pixels_for(GRIDS), {}
    exact = encoder_of().get_image_features(pixels, GRIDS)
    one_rank = relative_error(encoder_of().bfloat16().get_image_features(pixels, GRIDS), exact)
    for mode in modes(group):
        got = encoder_of().bfloat16().set_encoder_parallel(mode, group).get_image_features(pixels, GRIDS)
        results[mode] = (relative_error(got, exact), one_rank, got.dtype, digest(got))
    return results


@pytest.mark.parametrize("ranks", WORLD_SIZES)
def test_low_precision_is_as_near_as_on_one_rank(results, ranks):
    found = results(ranks, bfloat16)
    for mode, (error, one_rank, dtype, digest) in found[0].items():
        assert error < 1.5 * one_rank < 0.03, mode
        assert dtype == torch.bfloat16
        assert all(result[mode][3] == digest for result in found)


@on_ranks
def published_checkpoint(group, folder):
    """Relative error of a cut encoder that was loaded from the whole checkpoint."""
    if 4 % group.size():
        return None
    encoder = KimiVLEncoder.from_pretrained(folder).eval().set_encoder_parallel("tensor", group)
    pixels = pixels_for(GRIDS)
    return relative_error(encoder.get_image_features(pixels, GRIDS), encoder_of().get_image_features(pixels, GRIDS))


@pytest.mark.parametrize("ranks", CUTTING)
def test_the_published_checkpoint_is_loaded_whole_and_cut(results, ranks):
    assert max(results(ranks, published_checkpoint)) < 1e-5


# --- data parallel ---------------------------------------------------------------------------------------------------


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


@on_ranks
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


@pytest.mark.parametrize("ranks", WORLD_SIZES)
def test_G15_no_rank_copies_pixels_that_it_does_not_own(results, ranks):
    by_rank = results(ranks, own_pixels)
    for case in zip(*by_rank, strict=True):
        for copied, given, owned, _, calls, right in case:
            assert copied <= owned == given
            assert calls == (owned > 0)
            assert right
        assert sum(owned for _, _, owned, _, _, _ in case) == case[0][3]


@on_ranks
def loaded_pixels(group, folder):
    """Images that `load_pixels` was asked for, and whether the result is right."""
    images = pixels_for(GRIDS).split(patch_counts(GRIDS))
    asked = []

    def load(mine):
        asked.extend(mine)
        return torch.cat([images[image] for image in mine])

    got = run_dp_sharded_vision_model(StubTower(), None, GRIDS, group, load_pixels=load)
    return asked, torch.equal(got, StubTower()(torch.cat(images), GRIDS))


@pytest.mark.parametrize("ranks", WORLD_SIZES)
def test_a_rank_reads_only_its_own_images(results, ranks):
    found = results(ranks, loaded_pixels)
    assert sorted(image for asked, _ in found for image in asked) == list(range(len(GRIDS)))
    assert all(right for _, right in found)


@on_ranks
def graph_runner(group, folder):
    """Relative error when each rank replays graphs."""
    tower, pixels = tower_of(), pixels_for(GRIDS)
    runner = EncoderCudaGraphRunner(tower, budgets=[16, 64], max_images=8, backend="trace")
    return relative_error(run_dp_sharded_vision_model(runner, pixels, GRIDS, group), tower(pixels, GRIDS))


@pytest.mark.parametrize("ranks", WORLD_SIZES)
def test_ranks_may_replay_graphs(results, ranks):
    assert max(results(ranks, graph_runner)) < 1e-5


@on_ranks
def answers(group, folder):
    """By mode, whether the whole model generates the ids of one process: a prompt with two images, one without."""
    ids = torch.tensor([[1, *[PLACEHOLDER] * 6, 2, *[PLACEHOLDER] * 4, 3], list(range(10, 23))])
    images = {"pixel_values": pixels_for([(4, 6), (8, 2)]), "image_grid_hws": [(4, 6), (8, 2)]}

    def generate(mode):
        model = randomise(KimiVLForConditionalGeneration(KimiVLConfig(**tiny_json())), 3).eval()
        if mode != "none":
            model.set_encoder_parallel(mode, group)
        return model.generate(input_ids=ids, **images, max_new_tokens=4, do_sample=False)

    want = generate("none")
    return {mode: torch.equal(generate(mode), want) for mode in ("data", "auto", *["tensor"] * (group.size() <= 2))}


@pytest.mark.parametrize("ranks", WORLD_SIZES)
def test_the_whole_model_answers_the_same_in_every_mode(results, ranks):
    for found in results(ranks, answers):
        assert len(found) >= 2 and all(found.values()), found


@on_ranks
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


@pytest.mark.parametrize("ranks", WORLD_SIZES)
def test_any_balance_gives_the_same_and_bad_input_is_refused(results, ranks):
    for errors, refused in results(ranks, balances):
        assert max(errors.values()) < 1e-5
        said = ["unknown balance 'fast'", "place each of 9 images", "hold 219 patches, the grids need 220"]
        said += ["exactly one", "exactly one", "got None", "2x3"]
        for message, words in zip(refused, said if ranks > 1 else said[:1] + said[2:], strict=True):
            assert words in message


@on_ranks
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


def test_G7_two_groups_of_two_of_which_one_has_images(results):
    found = results(4, two_groups)
    assert all(error < 1e-5 for errors in found for error in errors)


# --- tensor parallel -------------------------------------------------------------------------------------------------


@on_ranks
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


def test_G10_qkv_is_cut_by_heads(results):
    first = results(2, cut_weights)[0]
    for view in (False, True):
        assert first[view]["qkv rows"] == [*range(0, 4), *range(8, 12), *range(16, 20)]


@pytest.mark.parametrize("ranks", CUTTING)
@pytest.mark.parametrize("view", [False, True])
def test_ranks_hold_all_of_the_weights_once(results, ranks, view):
    parts = [result[view] for result in results(ranks, cut_weights)]
    assert sorted(row for part in parts for row in part["qkv rows"]) == list(range(24))
    assert sum((part["column rows"] for part in parts), []) == list(range(24))
    assert sum((part["row columns"] for part in parts), []) == list(range(4))
    for part in parts:
        assert part["qkv bias"] == part["qkv rows"]
        assert part["shares memory"] == [view] * 3
        assert view or part["contiguous"] == [True] * 3


@on_ranks
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


@pytest.mark.parametrize("ranks", CUTTING)
def test_G11_bias_and_residual_count_once(results, ranks):
    for errors in results(ranks, one_layer_pair):
        assert max(errors) < 1e-6


@on_ranks
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


@pytest.mark.parametrize("ranks", CUTTING)
def test_an_unsharded_state_dict_replaces_the_weights(results, ranks):
    for errors in results(ranks, new_weights):
        assert max(errors) < 1e-5


@on_ranks
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


@pytest.mark.parametrize("ranks", CUTTING)
def test_a_cut_tower_holds_its_share_and_auto_holds_one_copy(results, ranks):
    for ratio, foreign, same_names in results(ranks, memory):
        assert ratio == 1 / ranks
        assert foreign == 0
        assert same_names


@on_ranks
def illegal_size(group, folder):
    """The error of 16 heads where they do not divide, before any weight exists; and the mode that still runs."""
    with torch.device("meta"):
        encoder = KimiVLEncoder(KimiVLConfig.preset("kimi-vl-a3b"))
    try:
        encoder.set_encoder_parallel("tensor", group)
    except ValueError as error:
        return str(error)
    return None


def test_G8_sixteen_heads_on_three_ranks_name_the_legal_sizes(results):
    for message in results(3, illegal_size):
        assert message.endswith("divide by 3 ranks: legal sizes are 1, 2, 4, 8, 16")
    for ranks in (1, 2, 4):
        assert results(ranks, illegal_size) == [None] * ranks


@on_ranks
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


def test_torch_plan_gives_the_same_block(results):
    for error, same_weights in results(2, torch_plan):
        assert error < 1e-5
        assert same_weights == [True, True]


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


@pytest.mark.gpu
def test_nccl_on_the_gpus_there_are():
    ranks = max(ranks for ranks in CUTTING if ranks <= torch.cuda.device_count())
    for errors in run_ranks(encode_on_gpus, ranks):
        assert set(errors) == {"data", "auto", "tensor"}
        assert max(errors.values()) < 1e-4
