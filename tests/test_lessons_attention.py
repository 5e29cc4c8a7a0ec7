"""What notebook 40 takes from the library: formulas against counts, and lost patches that are really lost."""

import pytest
import torch
from torch import Tensor

from kimivl_lab import MoonViTConfig, MoonVitPretrainedModel
from kimivl_lab.kernels.packed_attention import attend_packed, attention_unavailable
from kimivl_lab.lessons import varlen
from kimivl_lab.lessons.block_operators import block_work, time_block
from kimivl_lab.moonvit.attention import ATTENTION_BACKENDS
from kimivl_lab.moonvit.flops import tower_flops


def test_the_four_matrices_of_a_mask_are_packed_attention():
    lengths = [2, 3]
    scores, mask, masked, weights = varlen.mask_matrices(lengths).values()
    assert int(mask.sum()) == 4 + 9 and torch.equal(masked.isfinite(), mask.bool())
    assert torch.equal(weights[:2, :2], scores[:2, :2].softmax(-1)) and not weights[:2, 2:].any()
    torch.testing.assert_close(weights.sum(1), torch.ones(5))


@pytest.mark.parametrize("lengths", [[2, 3], [7], [1, 9, 4]])
def test_waste_is_what_the_mask_hides(lengths):
    mask = varlen.mask_matrices(lengths)["2  mask: same image?"]
    assert varlen.mask_waste(lengths) == pytest.approx(1 - float(mask.mean()))


def test_mean_waste_stays_below_that_of_equal_images():
    one, eight = varlen.mean_waste("coco_val2017", [1, 8])
    assert one == 0 and 0.8 < eight < 1 - 1 / 8


def test_programs_cover_each_query_once_unless_the_bound_is_too_small():
    offsets = [0, 5, 5, 12]
    for tile in (1, 3, 4, 64):
        covered = [query for first, last in varlen.programs(offsets, 7, tile) for query in range(first, last)]
        assert covered == list(range(12))
    assert varlen.programs(offsets, 4, 4) == [(0, 4), (5, 9)]


def attention_up_to_the_bound(kept: bool) -> varlen.Varlen:
    """Attention whose results behind the bound are zeros, or all kept."""

    def attend(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, max_seqlen: int) -> Tensor:
        out = attend_packed(q, k, v, cu_seqlens, 10**6, "sdpa")
        starts = cu_seqlens[:-1].tolist()
        for start, end in zip(starts, cu_seqlens[1:].tolist(), strict=True):
            if not kept:
                out[min(end, start + max_seqlen) : end] = 0
        return out

    return attend


def test_lost_patches_counts_results_that_are_not_attention():
    q, k, v = torch.randn(3, 12, 2, 8)
    assert varlen.lost_patches(attention_up_to_the_bound(True), q, k, v, [5, 7], 4) == [0, 0]
    assert varlen.lost_patches(attention_up_to_the_bound(False), q, k, v, [5, 7], 4) == [1, 3]
    half = (q.bfloat16(), k.bfloat16(), v.bfloat16())
    assert varlen.lost_patches(attention_up_to_the_bound(False), *half, [5, 7], 6) == [0, 1]
    nan = varlen.lost_patches(lambda q, k, v, cu, bound: torch.full_like(q, torch.nan), q, k, v, [5, 7], 7)
    assert nan == [5, 7]


def test_a_packing_is_judged_by_its_runs_and_its_way_back():
    lengths = [5, 3, 5]
    assert varlen.packing_result(lengths, None) is None and varlen.packing_result(lengths, ...) is None
    assert varlen.packing_result(lengths, ([0, 2, 1], [0, 2, 1])) == (2, True)
    assert varlen.packing_result(lengths, ([0, 1, 2], [0, 1, 2])) == (3, True)
    assert varlen.packing_result(lengths, ([2, 0, 1], [2, 0, 1])) == (2, False)  # a way back is the inverse
    assert varlen.packing_result(lengths, ([0, 0, 2], [0, 1, 2])) == (1, False)


def test_memory_curves_are_bytes_of_the_tensors():
    curves = varlen.memory_curves([2048], itemsize=4)
    both, mask, results, offsets = (2**20 * values[0] for values in curves.values())
    pair = torch.empty(2048, 2048, device="meta")
    assert mask == pair.numel() and both == mask + 4 * pair.numel()
    assert results == 2 * 4 * 2048 * 72 and offsets == 4 * 3


def test_the_work_of_a_block_is_what_the_tower_counts():
    config, grids = MoonViTConfig.preset("lab"), [(4, 6), (2, 2)]
    work = block_work(config, [24, 4], itemsize=4)
    formula = tower_flops(config, grids)
    products = sum(work[name][0] for name in ("wqkv", "wo", "fc0", "fc1"))
    assert config.num_hidden_layers * products == formula["linear"]
    assert config.num_hidden_layers * work["attention"][0] == formula["attention"]
    q = torch.empty(28, config.hidden_size, dtype=torch.float32, device="meta")
    assert work["attention"][1] == 4 * q.nbytes and work["residuals"][1] == 6 * q.nbytes


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_each_operator_of_a_block_is_timed(dtype):
    config = MoonViTConfig.preset("tiny")
    times = time_block(config, [(4, 6), (2, 2)], dtype=dtype, repeats=1, product=64)
    assert list(times.operators) == list(block_work(config, [28], 4))
    assert min(times.gflops, times.gbps, *(one.p50_ms for one in times.operators.values())) > 0


@pytest.mark.gpu
@pytest.mark.parametrize("kernel", ["flash_attn", "torch_varlen"])
def test_a_real_kernel_loses_patches_with_a_bound_in_tokens(kernel):
    if reason := attention_unavailable(kernel, torch.device("cuda"), torch.bfloat16):
        pytest.skip(reason)
    q, k, v = torch.randn(3, 1472, 4, 72, device="cuda").bfloat16()

    def attend(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, max_seqlen: int) -> Tensor:
        return attend_packed(q, k, v, cu_seqlens, max_seqlen, kernel)

    assert varlen.lost_patches(attend, q, k, v, [1472], 1472) == [0]
    (lost,) = varlen.lost_patches(attend, q, k, v, [1472], 368)
    assert lost in (1472 - 384, 1472 - 448, 1472 - 512)  # tiles of 64 or 128, 192 or 256 queries


def test_equal_neighbours_share_a_call(monkeypatch):
    """The lesson's sentence on runs: twelve images of two sizes need 12 calls, sorted 2."""
    tower = MoonVitPretrainedModel(MoonViTConfig.preset("tiny"))
    calls = []
    real = torch.nn.functional.scaled_dot_product_attention

    def counted(*args, **kwargs):
        calls.append(args[0].shape)
        return real(*args, **kwargs)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", counted)
    for grids, expected in (([(6, 8), (4, 4)] * 6, 12), (sorted([(6, 8), (4, 4)] * 6), 2)):
        metadata = tower.prepare_encoder_metadata(grids)
        calls.clear()
        with torch.no_grad():
            ATTENTION_BACKENDS["sdpa"](*torch.randn(3, metadata.num_patches, 1, 8), metadata)
        assert len(calls) == expected


def test_the_second_case_of_pieces_overflows_without_the_largest_score():
    small, large = (q @ torch.cat(keys).T / 8**0.5 for (q, keys, _), _ in varlen.pieces_cases())
    assert small.exp().isfinite().all() and not large.exp().isfinite().all()
