"""The table of GPUs, how names are matched, and the cost model that follows from a data sheet."""

import csv

import pytest
import torch

from kimivl_lab.config import MoonViTConfig
from kimivl_lab.datasets import data_path
from kimivl_lab.gpus import find_gpu, gpus
from kimivl_lab.parallel.cost_model import LinkCost
from kimivl_lab.parallel.gpu_rates import DirectLink, cost_model_of_gpu, parallel_gain

FULL = MoonViTConfig.preset("kimi-vl-a3b")


def test_every_gpu_has_numbers_of_its_size_and_a_source():
    table = {gpu.name: gpu for gpu in gpus()}
    assert {"RTX 4090", "L40S", "A100 SXM 80 GB", "H100 SXM", "H200 SXM", "B200"} <= table.keys()
    for gpu in table.values():
        assert 30 < gpu.flops_per_byte < 500 and 1e10 < gpu.link_bytes_per_s < gpu.bytes_per_s, gpu.name
        assert gpu.source and (gpu.url.startswith("https://") or "no data sheet" in gpu.source)
    assert table["H100 SXM"].flops_per_byte == pytest.approx(989e12 / 3350e9)
    with data_path("published", "devices.csv").open(newline="") as file:
        assert all(None not in line and None not in line.values() for line in csv.DictReader(file))


@pytest.mark.parametrize(
    ("said", "meant"),
    [
        ("h100", "H100 SXM"),
        ("NVIDIA H100 80GB HBM3", "H100 SXM"),
        ("NVIDIA GeForce RTX 4090", "RTX 4090"),
        ("NVIDIA A100-SXM4-80GB", "A100 SXM 80 GB"),
        ("l4", "L4"),
        ("L40S", "L40S"),
        ("NVIDIA RTX PRO 6000 Blackwell", "RTX PRO 6000"),
        ("GB200", "GB200"),
    ],
)
def test_a_gpu_is_found_by_what_people_and_drivers_call_it(said, meant):
    assert find_gpu(said).name == meant


@pytest.mark.parametrize("name", ["", "T4", "H100 PCIe", "H100 NVL", "RTX 6000", "RTX 4090 Laptop", "B200X", "h 100"])
def test_another_gpu_is_unknown_and_the_known_ones_are_listed(name):
    with pytest.raises(ValueError, match=r"RTX 4090.*H200 SXM"):
        find_gpu(name)


def test_a_direct_link_takes_as_many_steps_on_eight_ranks_as_on_two():
    direct, ring = DirectLink(1.0, 0.0), LinkCost(1.0, 0.0)
    assert [direct.seconds("all_reduce", ranks, 64) for ranks in (1, 2, 8)] == [0, 2, 2]
    assert [direct.seconds("all_gather", ranks, 64) for ranks in (2, 8)] == [1, 1]
    assert [ring.seconds("all_reduce", ranks, 64) for ranks in (2, 8)] == [2, 14]
    assert DirectLink(0.0, 1.0).seconds("all_reduce", 8, 64) == ring.seconds("all_reduce", 8, 64) - 14 + 2 * 7 / 8 * 64


def test_the_link_decides_whether_one_large_image_should_be_cut():
    by_nvlink = parallel_gain(FULL, find_gpu("H100"), [4096], 4)
    by_pcie = parallel_gain(FULL, find_gpu("L40S"), [4096], 4)
    assert by_nvlink[0] <= by_nvlink[1] < 1 < by_pcie[0]
    assert parallel_gain(FULL, find_gpu("H100"), [1024] * 8, 4)[0] > 1, "many images: data parallel"


def test_a_model_says_that_it_is_not_measured():
    model = cost_model_of_gpu(FULL, find_gpu("H100"), torch.bfloat16)
    assert "not measured" in model.source and "H100" in model.source
    with pytest.raises(ValueError, match="3 ranks cannot share"):
        parallel_gain(FULL, find_gpu("H100"), [64], 3)
