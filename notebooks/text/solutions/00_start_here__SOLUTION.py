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
#     question: Solutions to the exercises of Start here
#     minutes_cpu: 1
#     gpu: optional
#     data: three photographs of data/images
# ---

# %% [markdown]
# # Start here: solutions
#
# The guesses, cells and exercises of [00_start_here](../00_start_here.ipynb), answered with their
# steps. Try them there first.

# %% tags=["nbval-ignore-output"]
import warnings

warnings.filterwarnings("ignore", message="IProgress not found")  # about a widget that is not used
from kimivl_lab.measure.provenance import device_name, versions

print(device_name("cpu"))
print(versions())

# %%
import math

import torch
from PIL import Image

from kimivl_lab import KimiVLConfig, build_merge_gather_idx, image_geometry
from kimivl_lab.datasets import sample_images
from kimivl_lab.kernels.packed_attention import sdpa_runs
from kimivl_lab.lessons.checks import check, check_function
from kimivl_lab.lessons.devices import devices
from kimivl_lab.lessons.guesses import Comparison, compare, guess
from kimivl_lab.lessons.stages import stage_work

full, lab = KimiVLConfig.preset("kimi-vl-a3b"), KimiVLConfig.preset("lab")
sizes = [Image.open(sample_images()[name]).size for name in ("china", "coffee", "chelsea")]
lengths = [image_geometry(*size).patches for size in sizes]
D, F, N, H = 1152, 4304, 27, 2048
print(lengths)

# %% [markdown]
# ## In the text
#
# **Tokens of an image.** Each side is rounded up to a multiple of 28 pixels, and 28 x 28 pixels
# are one token. 640 gives 23 tokens, 427 gives 16, and 23 x 16 = 368.


# %%
def tokens_of(width, height):
    return math.ceil(width / 28) * math.ceil(height / 28)


sides = [(640, 427), (600, 400), (28, 28), (29, 28), (1, 1), (700, 28)]
cases = {side: image_geometry(*side).tokens for side in sides}
check_function("tokens of an image", tokens_of, cases)

# %% [markdown]
# **The guesses.** A good guess for the parameters: a block is about $5 + 10 = 15$ million, times
# 27 is 405 million, and the table adds 5. For $p/b$ of an H100: 1,000 TFLOP/s over 3 TB/s is
# about 300. A CPU is far lower: two cores do 50 GFLOP/s or more and move 15 GB/s or more.
# Attention equals all linear maps near $n = 2D + F$. The lab preset needs 76 GFLOPs for the three
# photographs: at 50 GFLOP/s one forward takes 1.5 seconds, at 500 a tenth of it. Attention has
# the most of these FLOPs, so it is a good guess for the slowest stage. The stages without
# products move about a quarter of the bytes at a low $p/b$: a few percent.

# %%
parameters_guess = guess("parameters of the tower", 410, unit="million")
h100_guess = guess("p/b of an H100", 300, unit="FLOP/byte")
here_guess = guess("p/b of this machine", 4, unit="FLOP/byte")
crossing_guess = guess("patches where attention equals the linear maps", 6000, unit="patches")
time_guess = guess("one forward", 1500, unit="ms")
stage_guess = guess("slowest stage", "attention", choices=tuple(stage_work(full, lengths, 2)))
share_guess = guess("time of the four stages", 5, unit="%")
h100 = next(one for one in devices() if one.name.startswith("H100"))
compare(
    Comparison(parameters_guess, predicted=416866032 / 1e6),
    Comparison(h100_guess, predicted=h100.flops_per_byte),
    Comparison(crossing_guess, predicted=2 * D + F),
)

# %% [markdown]
# **Work of the MLPs.** Two maps of $2LDF$ FLOPs each. The first reads $LD$ and writes $LF$
# numbers, the second reads $LF$ and writes $LD$, and both read $DF$ weights.


# %%
def mlp_work(L, D, F, N, bytes_a_number):
    flops = N * 2 * (2 * L * D * F)
    moved = N * bytes_a_number * (2 * L * D + 2 * L * F + 2 * D * F)
    return flops, moved


cases = [
    ((3540, 1152, 4304, 27, 2), stage_work(full, [3540], 2)["MLP"]),
    ((100, 288, 1076, 6, 4), stage_work(lab, [100], 4)["MLP"]),
]
check_function("work of the MLPs", mlp_work, cases)

# %% [markdown]
# **Attention, one image at a time.** `transpose(0, 1)` brings the heads to the front, so that one
# product handles all heads of an image.


# %%
def attend_each(q, k, v, lengths):
    results = []
    for one_q, one_k, one_v in zip(*(one.split(lengths) for one in (q, k, v)), strict=True):
        one_q, one_k, one_v = (one.transpose(0, 1) for one in (one_q, one_k, one_v))
        scores = one_q @ one_k.transpose(1, 2) / q.shape[-1] ** 0.5  # (heads, n, n)
        results.append((scores.softmax(-1) @ one_v).transpose(0, 1))  # (n, heads, d)
    return torch.cat(results)


torch.manual_seed(1)
q, k, v = torch.randn(3, 28, 2, 4)
two_images = (q, k, v, [24, 4])
one_image = (q[:4], k[:4], v[:4], [4])
cases = [(two_images, sdpa_runs(*two_images)), (one_image, sdpa_runs(*one_image))]
check_function("attention of each image", attend_each, cases, rtol=1e-5)

# %% [markdown]
# ## Exercises
#
# ### 1. When attention is as large as the rest
#
# $4n^2D = 2n(4D^2 + 2DF)$. Divide by $4nD$: $n = 2D + F = 2 \cdot 288 + 1{,}076 = 1{,}652$. The
# number of blocks cancels.

# %%
answer_1 = 2 * 288 + 1076
c = lab.vision_config
check("patches", answer_1, 2 * c.hidden_size + c.intermediate_size)

# %% [markdown]
# ### 2. One mask over everything
#
# $\left(\sum n\right)^2 / \sum n^2$. For $m$ images of one size it is $m$; here the sizes differ,
# so it is less than 3.

# %%
answer_2 = sum(lengths) ** 2 / sum(n * n for n in lengths)
apart, together = stage_work(full, lengths, 2), stage_work(full, [sum(lengths)], 2)
check("factor", answer_2, together["attention"].flops / apart["attention"].flops, rtol=0.01)

# %% [markdown]
# ### 3. How many patches keep a GPU busy?
#
# The $DF$ weights of a linear map are read in $DFs / b$ seconds, and $L$ patches compute with
# them for $2DFL / p$ seconds. The two are equal at $L = sp / 2b$.


# %%
def patches_to_saturate(p, b, bytes_a_weight):
    return bytes_a_weight * p / (2 * b)


cases = {(1e15, 4e12, 2): 250, (1e15, 4e12, 1): 125, (3e14, 2e12, 4): 300}
check_function("patches to saturate", patches_to_saturate, cases, rtol=1e-6)

# %% [markdown]
# ### 4. GPUs for a stream of images (operator)
#
# 1,008 x 784 pixels are a grid of 56 x 72, $n = 4{,}032$ patches. The blocks cost
# $n \cdot 2N(4D^2 + 2DF) + 4Nn^2D$ FLOPs. The ends cost $2n \cdot 588 D$ and
# $2(n/4) \cdot (16D^2 + 4DH)$.

# %%
n = (1008 // 14) * (784 // 14)
blocks = n * 2 * N * (4 * D * D + 2 * D * F) + 4 * N * n * n * D
ends = 2 * n * 588 * D + 2 * (n // 4) * (16 * D * D + 4 * D * H)
answer_4 = 20 * (blocks + ends) / (989e12 / 2)
one_image = stage_work(full, [image_geometry(1008, 784).patches], 2)
seconds = sum(of.flops for of in one_image.values()) / (h100.flops_per_s / 2)
check("part of one H100", answer_4, 20 * seconds, rtol=0.02)

# %% [markdown]
# ### 5. ★ The order of the merge
#
# A square begins at row $2i$ and column $2j$. Its four patches are at $(2i, 2j)$,
# $(2i, 2j + 1)$, $(2i + 1, 2j)$, $(2i + 1, 2j + 1)$, and the patch at (row, column) has the
# number row $\cdot w$ + column.


# %%
def merge_order(h, w):
    return [
        (row + down) * w + column + right
        for row in range(0, h, 2)
        for column in range(0, w, 2)
        for down in (0, 1)
        for right in (0, 1)
    ]


grids = ((2, 4), (4, 2), (4, 6), (2, 2))
cases = {grid: build_merge_gather_idx([grid]).tolist() for grid in grids}
check_function("merge order", merge_order, cases)
