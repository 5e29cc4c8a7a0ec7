"""Test cases that run on several ranks, each beside the test that asserts on its result.

    @on_ranks
    def first_patches(group):             # runs on every rank, and returns something small
        return ...

    @pytest.fixture(scope="module")
    def results():
        return results_of(__name__, timeout_s=15.0)

    def test_patches(results):
        assert results(2, first_patches) == [..., ...]     # what each of 2 ranks returned

All cases of a module and a world size run in one set of processes.
"""

import copy
import traceback
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from functools import cache
from importlib import import_module
from typing import Any

import torch
import torch.distributed as dist

from kimivl_lab import KimiVLEncoder, MoonViTConfig, MoonVitPretrainedModel
from kimivl_lab.measure.ranks import run_ranks
from kimivl_lab.parallel.cost_model import LinkCost, assumed_cost_model
from kimivl_lab.parallel.groups import init_group
from tests.conftest import tiny_encoder

GRIDS = [(2, 2), (4, 6), (10, 4), (2, 12), (8, 8), (6, 2), (4, 4), (12, 2), (2, 6)]
_CASES: dict[str, list[Any]] = {}


def on_ranks(case):
    """Registers a case of its module: it gets a new group of all ranks, and the arguments of `results_of`."""
    _CASES.setdefault(case.__module__, []).append(case)
    return case


def results_of(module: str, timeout_s: float, *arguments: object) -> Callable[[int, Any], list[Any]]:
    """A function of (ranks, case): what each rank returned. `timeout_s` is that of the cases' groups."""
    run = cache(lambda ranks: run_ranks(_run_cases, ranks, module, timeout_s, *arguments))

    def of(ranks: int, case: Any) -> list[Any]:
        found = [result[case.__name__] for result in run(ranks)]
        for rank, (_, error) in enumerate(found):
            assert error is None, f"rank {rank}: {error}"
        return [result for result, _ in found]

    return of


def new_group(timeout_s: float) -> dist.ProcessGroup:
    """A group of all ranks, which meet first: they have no more than `timeout_s` to make it together."""
    dist.barrier()
    return dist.new_group(timeout=timedelta(seconds=timeout_s))


def _run_cases(module: str, timeout_s: float, *arguments: object) -> dict[str, tuple[Any, str | None]]:
    import_module(module)
    everyone = init_group(timeout_s=60)
    results = {}
    for case in _CASES[module]:
        group = new_group(timeout_s)
        dist.barrier(everyone)
        try:
            with torch.no_grad():
                results[case.__name__] = case(group, *arguments), None
        except Exception:
            results[case.__name__] = None, traceback.format_exc()
    return results


@cache
def _first_encoder(seed: int) -> KimiVLEncoder:
    return tiny_encoder(seed)


def encoder_of(seed: int = 1) -> KimiVLEncoder:
    """A copy, quicker than a new one."""
    return copy.deepcopy(_first_encoder(seed))


def tower_of(seed: int = 1) -> MoonVitPretrainedModel:
    return encoder_of(seed).vision_tower


def free_links(config, dtype=torch.float32):
    """A cost model to which tensor parallel is always faster."""
    model = assumed_cost_model(config, dtype)
    return replace(model, patch_s=0.0, call_s=0.0, links={kind: LinkCost(0.0, 0.0) for kind in model.links})


class StubTower:
    """Features that are the patches' own first numbers, on no module at all; remembers what it was given."""

    device, dtype = torch.device("cpu"), torch.bfloat16
    config = MoonViTConfig.preset("tiny")

    def __init__(self):
        self.calls = []

    def __call__(self, pixel_values, image_grid_hws):
        self.calls.append((len(pixel_values), image_grid_hws))
        return pixel_values.flatten(1)[:, : self.config.hidden_size].to(self.dtype).unflatten(0, (-1, 4))
