# ---
# jupyter:
#   jupytext:
#     text_representation:
#       extension: .py
#       format_name: percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
#   kimivl_lab:
#     question: Solutions to the exercises of Rope in two dimensions
#     minutes_cpu: 1
#     gpu: optional
#     data: none
# ---

# %% [markdown]
# # Rope in two dimensions: solutions
#
# The exercises of [30_rope_2d](../30_rope_2d.ipynb), solved. Try them there first.

# %% tags=["nbval-ignore-output"]
import warnings

warnings.filterwarnings("ignore", message="IProgress not found")  # about a widget that nothing here uses
from kimivl_lab.measure.provenance import device_name, versions

print(device_name("cpu"))
print(versions())

# %%
import torch

from kimivl_lab.measure.accuracy import relative_error
from kimivl_lab.kernels.rotation import rotate_complex
from kimivl_lab.moonvit.rope import Rope2DPosEmb

_ = torch.manual_seed(0)
rope_2d = Rope2DPosEmb(72)

# %% [markdown]
# **1.** Write the test: it accepts the right factors, refuses swapped axes and patches numbered column by column.
#
# One patch of a 2 x 6 grid is enough, if it stands off the diagonal: patch 4 is row 0, column 4. Column by column it would be row 0, column 2; with swapped
# axes slot 0 would turn by 0.


# %%
def axes_are_right(factors_of):
    column, row = factors_of((2, 6))[4, :2].angle().tolist()  # slots 0 and 1: theta = 1
    return abs(column - (4 - 2 * torch.pi)) < 1e-5 and abs(row) < 1e-5


right = lambda grid: rope_2d.get_freqs_cis_by_seqlens_list([grid])
assert axes_are_right(right)
assert not axes_are_right(lambda grid: right(grid).unflatten(-1, (18, 2)).flip(-1).flatten(-2))
assert not axes_are_right(lambda grid: right(grid).unflatten(0, grid).transpose(0, 1).flatten(0, 1))

# %% [markdown]
# **2.** The order of the channels for a kernel that pairs $c$ with $c + d/2$.
#
# Its first half holds real parts, its second half imaginary parts: all even channels, then all odd ones. Scores do not change, because q and k are reordered
# alike. transformers ships Kimi-K2.5's tower so.


# %%
def half_split(x, factors):
    """(L, d), (L, d/2) complex -> x turned, channel c paired with c + d/2."""
    pairs = torch.complex(*x.chunk(2, dim=-1)) * factors
    return torch.cat((pairs.real, pairs.imag), dim=-1)


# %%
answer_2 = [*range(0, 72, 2), *range(1, 72, 2)]
q, k, F = torch.randn(24, 72), torch.randn(24, 72), rope_2d.get_freqs_cis_by_seqlens_list([(4, 6)])
turned = rotate_complex(torch.stack((q, k), dim=1)[:, :, None], torch.view_as_real(F))[:, :, 0]  # (24, 2, 72)
scores = turned[:, 0] @ turned[:, 1].T
assert relative_error(half_split(q[:, answer_2], F) @ half_split(k[:, answer_2], F).T, scores) < 1e-6
print(answer_2[:4], "...", answer_2[-4:])

# %% [markdown]
# **3.** The longest side whose positions all stay different in bfloat16.
#
# bfloat16 has 8 bits, so it counts in steps of 1 up to 256; 257 becomes 256. The side with positions 0 to 256 is the last one.

# %%
answer_3 = 2**8 + 1
assert len(torch.arange(answer_3).bfloat16().unique()) == answer_3
assert len(torch.arange(answer_3 + 1).bfloat16().unique()) == answer_3
print(f"{answer_3} patches; grids go up to 510")
