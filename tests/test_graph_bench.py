"""What the benchmark of graphs makes of its rows."""

import pytest

from kimivl_lab.bench import graphs
from kimivl_lab.geometry import num_tokens


@pytest.mark.parametrize("tokens", [1, 7, 64, 255, 1104, 2208, 257])
def test_an_image_of_so_many_tokens(tokens):
    assert num_tokens(graphs.image_of(tokens)) == (256 if tokens == 257 else tokens)  # 257 is prime, a side holds 255


def test_crossover_is_where_replays_stop_paying_for_good():
    def rows(ratios):
        common = {"phase": "budget", "variant": "replay"}
        full = [
            {**common, "tokens": budget, "budget_tokens": budget, "speedup_ratio": ratio}
            for budget, ratio in ratios.items()
        ]
        return [*full, {**common, "tokens": 1, "budget_tokens": 2, "speedup_ratio": 0.1}]

    assert graphs.crossover(rows({4: 3.0, 16: 2.0})) is None
    assert graphs.crossover(rows({4: 3.0, 16: 1.0, 64: 1.2, 256: 1.01, 1024: 0.9})) == 256
