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
#     question: Solutions to the exercises of Position embedding
#     minutes_cpu: 1
#     gpu: optional
#     data: a learned position table, records of data/measurements
# ---

# %% [markdown]
# # Position embedding: solutions
#
# The guesses, cells and exercises of [20_position_embedding](../20_position_embedding.ipynb),
# answered with their steps. Try them there first.

# %% tags=["nbval-ignore-output"]
import warnings

warnings.filterwarnings("ignore", message="IProgress not found")  # about a widget that is not used
from kimivl_lab.measure.provenance import device_name, versions

print(device_name("cpu"))
print(versions())

# %%
import torch
import torch.nn.functional as F

from kimivl_lab.datasets import data_path
from kimivl_lab.lessons.checks import check, check_function
from kimivl_lab.lessons.guesses import Comparison, compare, guess
from kimivl_lab.lessons.resampling import additive_share, axis_matrix, keys_weight, learned_table
from kimivl_lab.lessons.resampling import operator_work, resample
from kimivl_lab.measure.records import find_record, read_record
from kimivl_lab.moonvit.position import axis_taps

_ = torch.set_grad_enabled(False)

# %% [markdown]
# ## In the text
#
# **The guesses.** An image has no preferred diagonal, and a model needs row and column: a large
# share is a good guess. The weight at distance 0.1 must be near 1, because it is exactly 1 at
# distance 0. Bilinear interpolation smooths every value, so it differs most. The times: the FLOPs
# differ by a factor of 2 and the bytes not at all, so a guess of 2 is reasonable, and wrong:
# torch spends its time on indices.

# %%
additive_guess = guess("explained by row plus column", 90, unit="%")
weight_guess = guess("weight at distance 0.1", 0.95)
versions_of_it = ("c = -0.5", "aligned corners", "antialiased", "bilinear")
worst_guess = guess("largest error", "bilinear", choices=versions_of_it)
slower_guess = guess("interpolate over separable", 2, unit="times")
weight = keys_weight(torch.tensor([0.1], dtype=torch.float64)).item()
compare(
    Comparison(additive_guess, measured=100 * additive_share(learned_table())),
    Comparison(weight_guess, predicted=weight),
)

# %% [markdown]
# **The whole matrix.** The four taps of all positions are one (out_size, 4) tensor. `scatter_add`
# adds where two taps meet at a border cell; an assignment would keep only one of them.


# %%
def my_axis_matrix(out_size, in_size):
    centre = (torch.arange(out_size, dtype=torch.float64) + 0.5) * in_size / out_size - 0.5
    cells = centre.floor()[:, None] + torch.arange(-1, 3)  # (out_size, 4)
    weights = keys_weight(centre[:, None] - cells)
    matrix = torch.zeros(out_size, in_size, dtype=torch.float64)
    return matrix.scatter_add(1, cells.long().clamp(0, in_size - 1), weights)


def torch_matrix(out_size, in_size):
    cells = torch.eye(in_size, dtype=torch.float64).view(in_size, 1, 1, in_size)
    return F.interpolate(cells, (1, out_size), mode="bicubic").view(in_size, out_size).T


sizes = [(5, 8), (12, 5), (1, 6), (7, 7)]
cases = [((out, size), torch_matrix(out, size)) for out, size in sizes]
check_function("interpolation matrix", my_axis_matrix, cases, rtol=1e-9)

# %% [markdown]
# **FLOPs of `separable`.** $4 \min(64h, 64w)$ taps for the cells in between and $4hw$ for the
# patches. For 36 x 46: $4 \cdot (2{,}304 + 1{,}656) = 15{,}840$ sums of $D$ features.


# %%
def separable_flops(h, w, D=1152):
    return 2 * D * (4 * min(64 * h, 64 * w) + 4 * h * w)


cases = {one: operator_work(one)["separable"].flops for one in [(36, 46), (446, 12), (4, 40)]}
check_function("FLOPs of separable", separable_flops, cases)

# %% [markdown]
# ## Exercises
#
# ### 1. A line at the border, by hand
#
# The centre is $0.5 \cdot 64/32 - 0.5 = 0.5$. The taps $-1, 0, 1, 2$ have the distances 1.5, 0.5,
# 0.5 and 1.5. $k(1.5) = -0.75 \cdot (3.375 - 11.25 + 12 - 4) = -0.094$ and
# $k(0.5) = 1.25 \cdot 0.125 - 2.25 \cdot 0.25 + 1 = 0.594$. The tap at $-1$ falls on cell 0:
# $0.594 - 0.094 = 0.5$.

# %%
answer_1 = 0.594 - 0.094
check("weight of cell 0", answer_1, axis_matrix(32, 64)[0, 0].item(), rtol=0.002)

# %% [markdown]
# ### 2. The floor of a strip
#
# 6 rows touch at most $4 \cdot 6 = 24$ rows of the table, 10 columns at most 40 of its columns.
# With the 60 patches of the result: $(24 \cdot 40 + 60) \cdot 1{,}152 \cdot 2$ bytes.

# %%
answer_2 = (24 * 40 + 60) * 1152 * 2
check("bytes", answer_2, operator_work((6, 10), itemsize=2)["gather"].moved, rtol=0.01)

# %% [markdown]
# ### 3. When `adaptive` changes its operator
#
# $8\,(\min(64h, 64w) + hw) < 20hw$. Divide by $hw$: $64/\max(h, w) < 1.5$, so the longer side is
# above $42\tfrac23$, whatever the other side. The first even number is 44.

# %%
answer_3 = 44
expected = next(s for s in range(2, 512, 2) if 8 * (64 * 2 + 2 * s) < 20 * 2 * s)
check("longer side", answer_3, expected)

# %% [markdown]
# ### 4. What would a faster operator save? (operator)
#
# The difference of the two times over the 2,000 ms. A fast operator is worth having, and it does
# not make the encoder several times faster: the linear maps and attention take the rest.

# %%
folder = data_path("measurements")
rows, _ = read_record(find_record("position", folder, device="cpu-*", dtype="float32"))
ms = {(row["case"], row["variant"]): row["latency_ms_p50"] for row in rows}
saved = ms["66x66", "interpolate"] - ms["66x66", "separable"]
answer_4 = 100 * saved / 2000
check("% of the encoder's time", answer_4, 100 * saved / 2000, rtol=0.03)

# %% [markdown]
# ### 5. ★ Write `gather`
#
# Indexing with $(h, 1, 4, 1)$ and $(1, w, 1, 4)$ gives all pairs of a row tap and a column tap:
# $(h, w, 4, 4, D)$. The weights of a pair multiply.


# %%
def my_gather(table, grid):
    y, y_weight = axis_taps(grid[0], table.shape[0], table.dtype, "cpu")
    x, x_weight = axis_taps(grid[1], table.shape[1], table.dtype, "cpu")
    cells = table[y[:, None, :, None], x[None, :, None, :]]  # (h, w, 4, 4, D)
    weights = y_weight[:, None, :, None] * x_weight[None, :, None, :]  # (h, w, 4, 4)
    return (cells * weights[..., None]).sum((2, 3))


small = torch.arange(7 * 9 * 2, dtype=torch.float64).view(7, 9, 2) ** 1.5
cases = [((small, one), resample(small, one)) for one in [(4, 11), (10, 3), (7, 9)]]
check_function("gather", my_gather, cases, rtol=1e-6)
