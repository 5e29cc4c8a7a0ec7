"""Peak memory of a call."""

import pytest
import torch

from kimivl_lab.measure.memory import peak_memory_mib

here = peak_memory_mib(lambda: None)


@pytest.mark.skipif(here is None, reason="this system does not tell a process its peak")
@pytest.mark.parametrize("mib", [16, 64])
def test_a_repeated_call_needs_what_the_first_needed(mib):
    """What the first call frees must not hide the second's need."""

    def run():
        return torch.zeros(mib * 2**18 // 16, 16).add_(1).sum()

    for _ in range(2):
        needed = peak_memory_mib(run)
        assert needed is not None
        assert mib - 4 <= needed <= mib + 24
