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
#     question: How does one learned table give a position embedding to images of every size, and how fast can that be?
#     minutes_cpu: 1
#     gpu: optional
#     data: a learned position table, records of data/measurements
# ---

# %% [markdown]
# # Position embedding: one table for every image size
#
# [Map of the course](00_start_here.ipynb) · [Glossary](GLOSSARY.md) · [Notation](NOTATION.md) · previous: [10 From images to patches](10_images_to_patches.ipynb) · next: [25 A cache of position embeddings](25_position_cache.ipynb)
#
# Lesson 10 cut images into patches. A patch alone does not say where in its image it was.
#
# ## The question
#
# How does one learned table give a position embedding to images of every size, and how fast can
# that be?

# %% [markdown]
# ## You will be able to
#
# - **compute** a line of the interpolation matrix by hand, and the whole matrix in code;
# - **tell** the right interpolation from four wrong ones, on grids where they differ;
# - **predict** the FLOPs and bytes of three implementations, and compare their times with the
#   least time that the bytes allow.
#
# ## Needs
#
# Notebook [10](10_images_to_patches.ipynb), for grids. Reading and solving takes about 90
# minutes. The notebook runs in about a minute on a CPU. A GPU is used by one cell, the live
# measurement.
#
# ## Versions and machine

# %% tags=["nbval-ignore-output"]
import warnings

import torch

warnings.filterwarnings("ignore", message="IProgress not found")  # about a widget that is not used
from kimivl_lab.measure.provenance import device_name, versions

device = "cuda" if torch.cuda.is_available() else "cpu"
print(device_name(device))
print(versions())

# %%
import matplotlib.pyplot as plt
import torch.nn.functional as F

from kimivl_lab import image_geometry, plots
from kimivl_lab.datasets import data_path
from kimivl_lab.lessons.checks import check, check_function
from kimivl_lab.lessons.devices import devices
from kimivl_lab.lessons.guesses import Comparison, compare, guess
from kimivl_lab.lessons.resampling import additive_share, axis_matrix, keys_weight, learned_table
from kimivl_lab.lessons.resampling import needed_cells, operator_work, resample, torch_resample
from kimivl_lab.measure.accuracy import relative_error
from kimivl_lab.measure.records import find_record, read_record
from kimivl_lab.measure.timing import time_interleaved
from kimivl_lab.moonvit.position import Learnable2DInterpPosEmb
from kimivl_lab.plots import floor, position

plots.use_style()
_ = torch.set_grad_enabled(False)

# %% [markdown]
# ## The table: what a position embedding is
#
# The patch embedding depends on the pixels of a patch, and not on its place in the image.
# [MoonViT](GLOSSARY.md#moonvit) therefore adds a [position
# embedding](GLOSSARY.md#position-embedding) to each patch: one learned vector for each place of a
# grid of 64 x 64. These vectors are the [position table](GLOSSARY.md#position-table). An image
# with another grid, such as the 32 x 46 of china, gets vectors that are interpolated from the
# table.
#
# Kimi-VL's table comes with its checkpoint, which is not part of this repository. The figures
# here use the learned table of a smaller encoder, DINOv2 ViT-S/14. It also has patches of 14
# pixels; its table is 37 x 37 x 384 (rows x columns x features), and it is interpolated by the
# same rule.
#
# What has such a table learned? Suppose that each vector were a vector of its row plus a vector
# of its column. Two small tables with one feature show what that means:
#
# | | |
# |---|---|
# | `[[1, 2], [3, 4]]` | row part 1 or 3, column part 0 or 1: the sum explains all of it |
# | `[[1, 2], [4, 3]]` | no sum fits: the best one explains 80 % of the variance |
#
# **Your guess.** How much of the variance of the learned table does such a sum explain?

# %%
additive_guess = guess("explained by row plus column", None, unit="%")

# %%
table = learned_table()  # (row, column, feature)
print("table", tuple(table.shape))
compare(Comparison(additive_guess, measured=100 * additive_share(table)))

# %% [markdown]
# The table was learned from images alone, and it has found rows and columns. The next figure
# shows the same in another way. It takes one place and compares its vector with all others. The
# cosine similarity is 1 for vectors of the same direction.

# %%
grid = image_geometry(640, 427).grid_hw  # of the photograph china.jpg, 640 x 427 (width x height)
resampled = torch_resample(table, grid)
places = ((0.1, 0.1), (0.5, 0.5), (0.28, 0.82), (0.82, 0.23))
maps = {}
for words, vectors in {"table": table, "interpolated": resampled}.items():
    h, w, _ = vectors.shape
    unit = F.normalize(vectors, dim=-1)
    cells = [(int(y * h), int(x * w)) for y, x in places]
    maps[f"{words}, {h} x {w}"] = [(cell, (unit @ unit[cell]).numpy()) for cell in cells]
fig, axes = position.similarity_maps(maps, "The table has learned rows, columns and neighbours")
plt.show()

# %% [markdown]
# *How to read it:* each map belongs to the place in its ring. A light cell has a similar vector.
# The neighbours are similar, and so are the row and the column of the ring. Below, the same table
# interpolated to the grid 32 x 46 (rows x columns): the pattern is stretched, and stays the same.

# %% [markdown]
# ## Predict: one line of the interpolation matrix
#
# [Bicubic interpolation](GLOSSARY.md#bicubic-interpolation) works on one axis at a time. Take a
# small case: an axis of 8 table cells, and 5 output positions.
#
# **Step 1, where.** Five positions cover the same length as eight cells, so each position is
# $8/5 = 1.6$ cells wide. A coordinate $u$ counts cells: the centre of cell 0 is $u = 0$, and its
# left edge is $u = -\tfrac12$. So position $j$ has its centre at
#
# $$u_j = \left(j + \tfrac12\right) \frac85 - \tfrac12, \qquad u_1 = 1.5 \cdot 1.6 - 0.5 = 1.9$$
#
# **Step 2, which cells.** The position takes the two cells on each side: 0, 1, 2 and 3. These
# four cells are its [taps](GLOSSARY.md#tap). Their distances $\delta$ from 1.9 are 1.9, 0.9, 0.1
# and 1.1.
#
# **Step 3, how much.** The weight $k$ of a tap depends on its distance and on a constant $c$,
# which is $-0.75$ in MoonViT:
#
# $$k(\delta) = \begin{cases}(c+2)\,\delta^3 - (c+3)\,\delta^2 + 1 & \delta \le 1 \\
# c\,(\delta^3 - 5\delta^2 + 8\delta - 4) & 1 < \delta < 2\end{cases}$$
#
# For the cell at distance 0.9: $1.25 \cdot 0.729 - 2.25 \cdot 0.81 + 1 = 0.089$. For the cell at
# 1.1: $-0.75 \cdot (1.331 - 6.05 + 8.8 - 4) = -0.061$. A weight can be negative; the four weights
# sum to 1.
#
# **Your guess.** What is the weight of the nearest cell, at distance 0.1?

# %%
weight_guess = guess("weight at distance 0.1", None)

# %%
distances = torch.tensor([1.9, 0.9, 0.1, 1.1], dtype=torch.float64)
weights = keys_weight(distances)
print("cells 0 to 3:", [f"{weight:+.4f}" for weight in weights], f"sum {weights.sum():.4f}")
compare(Comparison(weight_guess, predicted=weights[2].item()))

# %%
steps = torch.linspace(-2.2, 2.2, 441, dtype=torch.float64)
curve = (steps.numpy(), keys_weight(steps).numpy())
title = "One line of the matrix: four weights around 1.9"
fig, axes = position.matrix_line(axis_matrix(5, 8).numpy(), 1, 1.9, curve, title)
plt.show()

# %% [markdown]
# *How to read it:* left, the weight function has its centre at the coordinate 1.9 (dashed). The
# weight of a cell is the height of the curve at that cell. Right, the same four weights in line 1
# of the interpolation matrix $A$ with 5 lines and 8 columns. The vector of an output position is
# the sum of the table's cells, each times its weight in the line. In line 0 the tap at $-1$ is
# outside the table. Its weight is added to that of the border cell 0. The same is done for every
# tap outside.

# %% [markdown]
# **Your code: the whole matrix.** Write the interpolation matrix of one axis with `out_size`
# lines and `in_size` columns, in float64. The function `keys_weight(distances)` gives the
# weights. `clamp(0, in_size - 1)` moves a cell that is outside to the border. There the weights
# must be *added* (`scatter_add` or a loop).


# %%
def my_axis_matrix(out_size, in_size):
    """(out_size, in_size) float64: line j holds the weights of output position j."""
    return ...


# %% [markdown]
# The check compares with torch. A matrix times an identity matrix is the matrix itself. So torch
# interpolates an identity matrix, and the result is its interpolation matrix.


# %%
def torch_matrix(out_size, in_size):
    cells = torch.eye(in_size, dtype=torch.float64).view(in_size, 1, 1, in_size)
    return F.interpolate(cells, (1, out_size), mode="bicubic").view(in_size, out_size).T


sizes = [(5, 8), (12, 5), (1, 6), (7, 7)]
cases = [((out, size), torch_matrix(out, size)) for out, size in sizes]
hint = "centre (j + 1/2) in_size / out_size - 1/2; four cells from floor(centre) - 1; add, not set"
check_function("interpolation matrix", my_axis_matrix, cases, rtol=1e-9, hint=hint)

# %% [markdown]
# ### Two choices inside the word "bicubic"
#
# "Bicubic" fixes neither the constant $c$ nor where $u_j$ lies. Programs differ in both:
#
# - **The constant.** torch uses $c = -0.75$, and $-0.5$ if `antialias=True`. (For a grid smaller
#   than the table, `antialias` also takes more than 4 taps. That is a second difference.)
# - **The centres.** `align_corners=True` puts the first and the last position on the first and
#   the last cell: $u_j = j \cdot 7/4$ for 5 positions on 8 cells.
#
# Which constant does a program use? Interpolate a single 1 among zeros. The result is the list of
# the weights, the [impulse response](GLOSSARY.md#impulse-response).

# %%
impulse = torch.zeros(1, 1, 1, 9, dtype=torch.float64)
impulse[..., 4] = 1
modes = {
    "c = -0.75, torch's bicubic": {"mode": "bicubic"},
    "c = -0.5, antialias=True": {"mode": "bicubic", "antialias": True},
    "bilinear": {"mode": "bilinear"},
}
fine = {words: F.interpolate(impulse, (1, 900), **how).flatten() for words, how in modes.items()}
offsets = (torch.arange(900, dtype=torch.float64) + 0.5) / 100 - 4.5  # from the 1, in cells
for c, response in zip((-0.75, -0.5), fine.values(), strict=False):
    print(f"torch's weights are k with c = {c}:", torch.allclose(response, keys_weight(offsets, c)))

# %%
j = torch.arange(5)
centres = {
    "half-pixel centres: u = (j + 1/2) 8/5 - 1/2": ((j + 0.5) * 8 / 5 - 0.5).numpy(),
    "aligned corners: u = j 7/4": (j * 7 / 4).numpy(),
}
curves = {words: response.numpy() for words, response in fine.items()}
title = "Two choices hide in the word bicubic"
fig, axes = position.kernel_and_centres(offsets.numpy(), curves, centres, 8, title)
plt.show()

# %% [markdown]
# *How to read it:* left, a larger $|c|$ dips lower and therefore sharpens more. All curves agree
# at whole distances. Right, five positions on eight cells. With half-pixel centres, each position
# lies in the middle of its part of the axis. With aligned corners, the outer positions lie on the
# outer cells. MoonViT was trained with $c = -0.75$ and half-pixel centres.

# %% [markdown]
# ## Build: four wrong versions
#
# Both axes together: $E = A_h \cdot \text{table} \cdot A_w^\top$ for each feature, with one
# matrix for the rows and one for the columns. `resample` in `kimivl_lab/lessons/resampling.py`
# does this in float64, with both choices as arguments. So we can make wrong versions too: the
# constant $-0.5$, aligned corners, `antialias=True`, and bilinear interpolation (2 taps, straight
# lines). Each is one argument away from the right one. The constant $-0.5$ was a real bug in a
# port of MoonViT ([mlx-vlm issue 1241](https://github.com/Blaizzy/mlx-vlm/issues/1241)).
#
# **Your guess.** The grid is 32 x 46. Which version differs most from the right one?

# %%
wrong = {
    "c = -0.5": resample(table, grid, c=-0.5),
    "aligned corners": resample(table, grid, corners=True),
    "antialiased": torch_resample(table, grid, antialias=True),
    "bilinear": torch_resample(table, grid, "bilinear"),
}
worst_guess = guess("largest error", None, choices=tuple(wrong))

# %%
exact = resample(table, grid)
misses = {words: relative_error(one, exact) for words, one in wrong.items()}
of_patch = exact.norm(dim=-1)
errors = {
    f"{words}\n{misses[words]:.1%} overall": ((one - exact).norm(dim=-1) / of_patch).numpy()
    for words, one in wrong.items()
}
print("largest error:", max(misses, key=lambda words: misses[words]), "| guess:", worst_guess.value)
fig, axes = position.fault_maps(errors, f"Four near misses on a {grid[0]} x {grid[1]} grid")
plt.show()

# %% [markdown]
# *How to read it:* a dark patch has a large error. A wrong constant and bilinear are wrong
# everywhere, except where a centre meets a cell on both axes (light dots). Aligned corners are
# right in the middle of the image, and their error grows towards the border. The antialiased
# version is wrong everywhere by about the same amount.
#
# Could a simple test find them? Three candidates: the shape of the result, its norm, and a
# comparison at the table's own size.

# %%
own = {
    "c = -0.5": resample(table, (37, 37), c=-0.5),
    "aligned corners": resample(table, (37, 37), corners=True),
    "antialiased": torch_resample(table, (37, 37), antialias=True),
    "bilinear": torch_resample(table, (37, 37), "bilinear"),
}
print("version           shape           norm / right norm   error 32 x 46   error 37 x 37")
for words, one in wrong.items():
    norm, at_home = one.norm() / exact.norm(), relative_error(own[words], table)
    print(f"{words:17s} {tuple(one.shape)}   {norm:17.3f} {misses[words]:15.1%} {at_home:15.1e}")
assert max(relative_error(one, table) for one in own.values()) < 1e-12 < 0.02 < min(misses.values())

# %% [markdown]
# The shape is right, and the norm differs by 2.1 % at most. At the table's own size all four are
# exact, because each centre meets a cell. So a test needs another grid: not the table's size, not
# square, one side larger and one smaller than the table's.

# %% [markdown]
# ## Check equality: the library against the matrices
#
# The library has three implementations of the same formula:
#
# - `interpolate`: torch's bicubic, the reference in most code;
# - `gather`: each patch is the weighted sum of its $4 \cdot 4 = 16$ cells of the table;
# - `separable`: first one axis with 4 taps, then the other axis with 4 taps.
#
# `adaptive` takes `gather` or `separable`, whichever moves less (exercise 3). The check compares
# them with the matrices on six grids. The control is the wrong constant: it must fail.

# %%
module = Learnable2DInterpPosEmb(64, 64, 16).eval()  # the table of 64 x 64, with 16 features
module.weight.normal_(generator=torch.Generator().manual_seed(0))
grids = [(36, 46), (2, 510), (446, 12), (66, 66), (4, 40), (64, 64)]
right = torch.cat([resample(module.weight, one).flatten(0, 1) for one in grids])
for name in ("gather", "separable", "adaptive", "interpolate"):
    error = relative_error(module.get_pos_embeds(grids, implementation=name), right)
    print(f"{name:12s} error below 1e-7: {error < 1e-7!s:6s} below 1e-5: {error < 1e-5}")
control = torch.cat([resample(module.weight, one, c=-0.5).flatten(0, 1) for one in grids])
print(f"control, c = -0.5: error {relative_error(control, right):.1%}")

# %% [markdown]
# ### Why torch's own operator is less exact
#
# All of them compute in [float32](GLOSSARY.md#float32). But torch also computes the coordinate
# $u_j$ in float32. A float32 number has 24 bits. For a coordinate such as 60.3, six bits stand
# before the point, and 18 are left behind it: the coordinate is rounded by up to $2^{-19}$, about
# $2 \cdot 10^{-6}$. The weights get an error of that size. The library computes coordinates and
# weights in float64 and rounds only the weights.

# %%
double = Learnable2DInterpPosEmb(64, 64, 16).double().eval()
double.weight.copy_(module.weight)
sides = list(range(2, 257, 2))
by_side = {"torch's bicubic, float32": [], "the library's separable, float32": []}
for side in sides:
    best = double.get_pos_embeds([(side, side)], implementation="separable")
    for words, name in zip(by_side, ("interpolate", "separable"), strict=True):
        one = module.get_pos_embeds([(side, side)], implementation=name)
        by_side[words].append(relative_error(one, best))
title = "A rounded coordinate costs torch's float32 bicubic its last digits"
fig, ax = position.error_by_side(sides, by_side, title, "against float64, table of 64 x 64")
plt.show()

# %% [markdown]
# *How to read it:* one dot for each square grid. The lower dots are the best that float32 allows
# (dashed). Where 64 divided by the side is a power of two, such as at 32 or 128, the coordinates
# need no rounding, and torch is as exact as the library. An error of 0, at 64, is not drawn.
#
# Models run in [bfloat16](GLOSSARY.md#bfloat16), with about 3 decimal digits. The result must be
# rounded to bfloat16; this cannot be avoided. The library computes in float32 and rounds once. If
# the weights are rounded too, as torch does with a bfloat16 table, the result gets worse:

# %%
half = Learnable2DInterpPosEmb(37, 37, 384).bfloat16().eval()
half.weight.copy_(table)
best = resample(half.weight, grid).flatten(0, 1)
rounded_weights = torch_resample(half.weight, grid).flatten(0, 1)
both = {"float32, rounded once": half.get_pos_embeds([grid]), "all in bfloat16": rounded_weights}
for words, one in both.items():
    share = (one == best.bfloat16()).double().mean().item()
    print(f"{words:22s} error {relative_error(one, best):.4f}, correctly rounded: {share:.0%}")

# %% [markdown]
# ## Predict: what should it cost?
#
# Take the grid 36 x 46 ($n = 1{,}656$ patches), $D = 1{,}152$ and float32.
#
# **FLOPs.** One tap of one feature is a multiplication and an addition, 2 FLOPs. `interpolate`
# sums 4 taps in each of 4 rows, and then the 4 results.
#
# | implementation | taps | for 36 x 46 |
# |---|---|---|
# | `gather` | $16 n$ | $16 \cdot 1{,}656 = 26{,}496$ |
# | `interpolate` | $(16 + 4)\, n$ | $33{,}120$ |
# | `separable` | **yours** | **yours** |
#
# Each tap has $D$ features, so `gather` does $2 \cdot 1{,}152 \cdot 26{,}496 = 61$ MFLOP.
#
# **Bytes.** Every implementation must read the cells that the grid needs and write the result. A
# row of the grid touches at most 4 rows of the table. So the grid 36 x 46 needs all 64 x 64
# cells, but the grid 4 x 40 needs only $16 \cdot 64 = 1{,}024$. For 36 x 46 that makes
# $(4{,}096 + 1{,}656) \cdot 1{,}152 \cdot 4$ bytes, 26.5 MB.
#
# **Your code.** `separable` first makes $h \times 64$ cells (each from 4 cells that stand above
# one another), then $h \times w$ from these (each from 4 side by side). Or it begins with the
# other axis and makes $64 \times w$ first. It takes the cheaper order. Write the FLOPs.


# %%
def separable_flops(h, w, D=1152):
    return ...


cases = {one: operator_work(one)["separable"].flops for one in [(36, 46), (446, 12), (4, 40)]}
hint = "4 taps for each cell in between, 4 for each patch; 2 FLOPs and D features for each tap"
check_function("FLOPs of separable", separable_flops, cases, hint=hint)

# %% [markdown]
# The FLOPs for each byte say what the operators wait for (lesson 00). Compare them with $p/b$ of
# the four GPUs:

# %%
print("grid (h x w)      MFLOP: interpolate   gather   separable      MB   FLOP/byte, at most")
for one in [(4, 40), (36, 46), (446, 12), (128, 128)]:
    work = operator_work(one)
    flops = [work[name].flops / 1e6 for name in ("interpolate", "gather", "separable")]
    most = max(of.intensity for of in work.values())
    numbers = f"{flops[0]:23.0f} {flops[1]:8.0f} {flops[2]:11.0f} {work['gather'].moved / 1e6:7.1f}"
    print(f"{one[0]:3d} x {one[1]:3d} {numbers} {most:12.1f}")
print(f"least p/b of the four GPUs: {min(gpu.flops_per_byte for gpu in devices()):.0f} FLOP/byte")

# %% [markdown]
# On a GPU all three wait for memory. On a CPU $p/b$ is only a few FLOPs for each byte (lesson 00
# prints yours), so arithmetic takes a part of the time there. In both cases the byte floor is the
# least time. For 36 x 46 the FLOPs of the three differ by a factor of 2, and their bytes not at
# all.
#
# **Your guess.** How many times slower than `separable` is torch's `interpolate` for 36 x 46 on a
# CPU?

# %%
slower_guess = guess("interpolate over separable", None, unit="times")

# %% [markdown]
# ## Measure: three implementations and the least time
#
# First on your machine, with the published size of the table and the grid 36 x 46. The **byte
# floor** is the time of a copy that moves as many bytes; it is timed in the same rounds. All
# variants run in random order. `adaptive` calls the code of `separable` here: its time shows how
# far two measurements of the same code differ.

# %% tags=["nbval-ignore-output"]
full = Learnable2DInterpPosEmb(64, 64, 1152).to(device).eval()
full.weight.normal_()
names = ("interpolate", "gather", "separable", "adaptive")
runs = {
    name: lambda name=name: full.get_pos_embeds([(36, 46)], implementation=name) for name in names
}
source = torch.ones(operator_work((36, 46))["gather"].moved // 8, device=device)  # read and written
target = source.clone()
runs["copy"] = lambda: target.copy_(source)
timed = time_interleaved(runs, device=device, warmup=2, repeats=9)
least = timed["copy"].p50_ms
print(f"{device_name(device)}: 36 x 46, byte floor {least:.2f} ms")
for name in names:
    t = timed[name]
    spread = f"{t.p50_ms:6.2f} (p20 {t.p20_ms:.2f}, p80 {t.p80_ms:.2f})"
    print(f"{name:12s} ms p50 {spread:36s} over the floor {t.p50_ms / least:5.1f}")
ratio = timed["interpolate"].p50_ms / timed["separable"].p50_ms
compare(Comparison(slower_guess, measured=ratio))

# %% [markdown]
# Then the kept [record](GLOSSARY.md#record), with more grids.

# %% tags=["headline"]
folder = data_path("measurements")
rows, origin = read_record(find_record("position", folder, device="cpu-*", dtype="float32"))
rows = [row for row in rows if " of " not in row["case"]]  # single images; batches are lesson 25
gains = [row["speedup_ratio"] for row in rows if row["variant"] == "separable"]
title = f"Whole cells at once: {min(gains):.1f} to {max(gains):.1f} times faster than torch"
shown = {"interpolate": "torch", "gather": "gather", "separable": "separable"}
note = floor.recorded_on(origin, "float32, D = 1,152, median and p20 to p80")
fig, ax = floor.times_over_floor(
    rows, shown, reference="interpolate", best="separable", title=title, subtitle=note
)
plt.show()

# %% [markdown]
# *How to read it:* one line for each grid (h x w). The upright tick is the byte floor: the time
# to read the table's cells that this grid needs and to write the result. It grows with the grid,
# and it is short for low grids such as 4 x 40, which need few cells. The numbers at the right are
# torch's time over `separable`'s.
#
# torch does a quarter more FLOPs than `gather`. But its CPU code fetches indices and weights
# again for every number of the result. `gather` and `separable` fetch them once for the 1,152
# numbers of a cell. On a GPU torch's operator is slow for another reason: each thread walks
# through all features in a loop ([PyTorch PR
# 174578](https://github.com/pytorch/pytorch/pull/174578) measures it on Kimi's table).

# %% [markdown]
# And `gather` against `separable`: what predicts their times? Two counts are possible, the FLOPs,
# and the cells that each implementation really moves. `gather` reads 16 cells for each patch.
# `separable` reads fewer, but it also writes the cells in between and reads them again (exercise
# 3 has the formulas). The table shows `separable` divided by `gather`.

# %%
ms = {(row["case"], row["variant"]): row["latency_ms_p50"] for row in rows}
print("grid (h x w)   by FLOPs   by cells moved   recorded time")
misses_of = {"FLOPs": 0.0, "cells": 0.0}
for case in dict.fromkeys(row["case"] for row in rows):
    h, w = map(int, case.split("x"))
    work = operator_work((h, w))
    by_flops = work["separable"].flops / work["gather"].flops
    by_cells = 8 * (min(64 * h, 64 * w) + h * w) / (20 * h * w)
    by_time = ms[case, "separable"] / ms[case, "gather"]
    misses_of["FLOPs"] += abs(by_time - by_flops)
    misses_of["cells"] += abs(by_time - by_cells)
    print(f"{case:14s} {by_flops:8.2f} {by_cells:16.2f} {by_time:15.2f}")
assert misses_of["cells"] < misses_of["FLOPs"]

# %% [markdown]
# The cells moved are the better prediction. By its FLOPs `separable` looks better than it is,
# because they do not count what it writes and reads in between. Neither operator reaches the byte
# floor. The floor reads each cell of the table once. The operators read a cell again for each
# tap, at best from a cache of the processor (a small fast memory).

# %% [markdown]
# ## What to remember
#
# - The rule: constant $-0.75$, half-pixel centres, no antialias, border cells repeated. At the
#   table's own size the four wrong versions give the right result; test a grid of another size
#   that is not square.
# - Compute coordinates in float64 or in integers and sums in float32, and round once at the end.
# - The operator does a few FLOPs for each byte: on a GPU it waits for memory. Code that handles
#   whole cells comes within a few times its byte floor; code that handles single numbers does
#   not.
# - A time over its byte floor shows the implementation. Count what it moves, not only its FLOPs.

# %% tags=["result"]
first, second = misses["c = -0.5"], misses["aligned corners"]
print(f"On a 32 x 46 grid the constant -0.5 is {first:.1%} wrong and aligned corners {second:.1%};")
print("at the table's own size both are exact, so a test there finds neither.")

# %% [markdown]
# ## On Monday
#
# - **Decide** whether your port of the encoder needs a test. It does if its position test uses a
#   64 x 64 grid or square grids only. Compare the features of one 644 x 504 image (width x
#   height, grid 36 x 46) with the published code. The errors that you look for are 2 to 6 % of
#   the position embedding, far above rounding.
# - **Flag:** vLLM 0.32, as read, has no flag for this operator and recomputes it for each image.
#   SGLang has the variable `SGLANG_VIT_ENABLE_VECTORIZED_POS_EMBED`, default 1, as read in a copy
#   of its source: one vectorised call instead of a loop over images. Only some models read this
#   variable; look it up for yours. In this library: `EncoderOptions(position="adaptive")`, or
#   `"cached"`, which is the default and the topic of [lesson 25](25_position_cache.ipynb).
# - **Check:** record one request with `torch.profiler` and look for `upsample_bicubic2d`. Divide
#   its time by that of the whole encoder. Under 1 %: leave it.

# %% [markdown]
# ## Exercises
#
# Solutions, with the steps:
# [solutions/20_position_embedding__SOLUTION.ipynb](solutions/20_position_embedding__SOLUTION.ipynb).
#
# ### 1. A line at the border, by hand
#
# 32 output positions on 64 cells, $c = -0.75$. What is the weight of cell 0 in line 0? Give three
# digits.

# %%
answer_1 = None

line = axis_matrix(32, 64)[0]
hint = "the centre is 0.5; the taps are -1, 0, 1, 2; the tap at -1 goes to cell 0"
near = {line[1].item(): "the tap at -1 is missing: its weight goes to cell 0 too"}
check("weight of cell 0", answer_1, line[0].item(), rtol=0.002, hint=hint, near=near)

# %% [markdown]
# ### 2. The floor of a strip
#
# How many bytes must any implementation move at least for a grid of 6 x 10 (rows x columns), with
# the 64 x 64 table, $D = 1{,}152$ and bfloat16?

# %%
answer_2 = None  # bytes

check(
    "bytes",
    answer_2,
    operator_work((6, 10), itemsize=2)["gather"].moved,
    rtol=0.01,
    hint="cells that the taps can touch, plus patches, times 2,304 bytes",
    near={
        (4096 + 60) * 2304: "a strip does not need the whole table",
        needed_cells((6, 10)) * 2304: "the result is written too",
    },
)

# %% [markdown]
# ### 3. When `adaptive` changes its operator
#
# `adaptive` counts the cells that each operator moves, and takes the operator with fewer. It
# counts $20hw$ for `gather` (16 read for each patch, 4 for the result and its copy), and
# $8\,(\min(64h, 64w) + hw)$ for `separable`. What is the smallest **even** number of patches on
# the longer side for which `separable` moves less?

# %%
answer_3 = None  # patches

side = next(s for s in range(2, 512, 2) if 8 * (64 * 2 + 2 * s) < 20 * 2 * s)
hint = "divide both by hw: the longer side is all that is left"
check("longer side", answer_3, side, hint=hint, near={43: "every side of a grid is even"})

# %% [markdown]
# ### 4. What would a faster operator save? (operator)
#
# A CPU server encodes images of the grid 66 x 66, one at a time. The whole encoder takes 2,000 ms
# with `interpolate`. The cell prints the recorded times of both operators. Which part of the
# 2,000 ms, in %, do you save with `separable`?

# %%
answer_4 = None  # %

torch_ms, separable_ms = ms["66x66", "interpolate"], ms["66x66", "separable"]
print(f"66 x 66: interpolate {torch_ms:.1f} ms, separable {separable_ms:.1f} ms")
check(
    "% of the encoder's time",
    answer_4,
    100 * (torch_ms - separable_ms) / 2000,
    rtol=0.03,
    hint="only the difference of the two times is saved",
    near={
        100 * (torch_ms - separable_ms) / torch_ms: "that is the share of the operator's own time",
        100 * torch_ms / 2000: "separable takes time too",
    },
)

# %% [markdown]
# ### 5. ★ Write `gather`
#
# `axis_taps(out_size, in_size, dtype, "cpu")` returns two (out_size, 4) tensors: the cells of
# each position, clamped at the border, and their weights. Write the interpolation of a table of
# shape (rows, columns, $D$) to a grid $(h, w)$ as a weighted sum of 16 cells for each patch. The
# result has the shape $(h, w, D)$. (Index the table once with tensors of shape $(h, 1, 4, 1)$ and
# $(1, w, 1, 4)$.)


# %%
from kimivl_lab.moonvit.position import axis_taps


def my_gather(table, grid):
    y, y_weight = axis_taps(grid[0], table.shape[0], table.dtype, "cpu")
    x, x_weight = axis_taps(grid[1], table.shape[1], table.dtype, "cpu")
    return ...


# %%
small = torch.arange(7 * 9 * 2, dtype=torch.float64).view(7, 9, 2) ** 1.5
cases = [((small, one), resample(small, one)) for one in [(4, 11), (10, 3), (7, 9)]]
hint = "cells (h, w, 4, 4, D) times weights (h, w, 4, 4, 1), summed over both 4s"
check_function("gather", my_gather, cases, rtol=1e-6, hint=hint)

# %% [markdown]
# ## References
#
# - R. Keys, [Cubic convolution interpolation](https://doi.org/10.1109/TASSP.1981.1163711), 1981:
#   the weight function. For smooth functions $c = -1/2$ is the most exact; the model was trained
#   with $-3/4$.
# - [mlx-vlm issue 1241](https://github.com/Blaizzy/mlx-vlm/issues/1241): $c = -0.5$ in a port of
#   MoonViT. It was right at 64 x 64 and was found at 36 x 46.
# - [PyTorch PR 174578](https://github.com/pytorch/pytorch/pull/174578): the CUDA operator on
#   position tables.
# - The table: DINOv2 ViT-S/14, [Oquab et al. 2023](https://arxiv.org/abs/2304.07193), Apache-2.0;
#   source and licence are in the repository's `data/README.md`.
#
# **Next:** images of equal size need the same embedding, and it is computed each time. Lesson 25
# keeps it.
#
# [Map of the course](00_start_here.ipynb) · [Glossary](GLOSSARY.md) · [Notation](NOTATION.md) · previous: [10 From images to patches](10_images_to_patches.ipynb) · next: [25 A cache of position embeddings](25_position_cache.ipynb)
