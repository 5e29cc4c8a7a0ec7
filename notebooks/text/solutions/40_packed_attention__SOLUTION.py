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
#     question: Solutions to the exercises of Packed attention
#     minutes_cpu: 1
#     gpu: optional
#     data: none
# ---

# %% [markdown]
# # Packed attention: solutions
#
# The guesses, cells and exercises of [40_packed_attention](../40_packed_attention.ipynb),
# answered with their steps. Try them there first.

# %% tags=["nbval-ignore-output"]
import warnings

warnings.filterwarnings("ignore", message="IProgress not found")  # about a widget that is not used
from kimivl_lab.measure.provenance import device_name, versions

print(device_name("cpu"))
print(versions())

# %%
import torch

from kimivl_lab import MoonViTConfig, image_geometry
from kimivl_lab.lessons import varlen
from kimivl_lab.lessons.block_operators import block_work
from kimivl_lab.lessons.checks import check, check_function
from kimivl_lab.lessons.guesses import guess

# %% [markdown]
# ## In the text
#
# **Waste of a mask.** The squares of the lengths over the square of their sum, taken from 1.


# %%
def waste(lengths):
    return 1 - sum(n * n for n in lengths) / sum(lengths) ** 2


cases = [((n,), varlen.mask_waste(n)) for n in ([2, 3], [7], [4, 4, 4, 4], [1, 9])]
check_function("waste of a mask", waste, cases, rtol=1e-6)

# %% [markdown]
# **The guesses.** Five equal images would waste 80 %, and four 75 %. The icon is small, so the
# five images waste a little less than 80 %. Of four similar photographs, the bound in tokens is
# about one photograph: little is left out. The mask computes 4.4 times the scores, and it is also
# built and read: 5 is a good guess. The four operators without a product wait for memory. GELU is
# often furthest, because of its tanh.

# %%
waste_guess = guess("scores thrown away", 78, unit="%")
lost_guess = guess("patches left out of four images", 10, unit="%")
slower_guess = guess("time of the mask over time of the loop", 5)
memory_guess = guess("operators that wait for memory", 4)
operators = tuple(block_work(MoonViTConfig.preset("lab"), [16], 4))
furthest_guess = guess("furthest from its roofline", "gelu", choices=operators)

# %% [markdown]
# **Programs that have work.** For each image, tiles begin at `start`, one every `tile` queries.
# The launch has $\lceil \text{max\_seqlen} / \text{tile} \rceil$ of them. A tile that begins
# behind `end` has no work, and the last tile ends at `end`. The expression `-(-a // b)` divides
# and rounds up.


# %%
def programs_with_work(cu_seqlens, max_seqlen, tile):
    found = []
    for image in range(len(cu_seqlens) - 1):
        start, end = cu_seqlens[image], cu_seqlens[image + 1]
        for t in range(-(-max_seqlen // tile)):
            first = start + t * tile
            if first < end:
                found.append((first, min(first + tile, end)))
    return found


cases = [([0, 5, 7], 5, 4), ([0, 5, 7], 8, 4), ([0, 2, 5, 5], 3, 2), ([0, 5, 7], 4, 4)]
expected = [(case, varlen.programs(*case)) for case in cases]
check_function("programs that have work", programs_with_work, expected)

# %% [markdown]
# ## Exercise 1: the memory of a mask
#
# $L = 16 \cdot 32 \cdot 46 = 23{,}552$. A pair takes 1 byte for yes or no and 2 bytes for the
# number in bfloat16. $3 \cdot 23{,}552^2 = 1.66 \cdot 10^9$ bytes, and divided by $2^{30}$ this
# is 1.55 GiB.

# %%
answer_1 = 3 * (16 * 32 * 46) ** 2 / 2**30
batch = 16 * image_geometry(640, 427).patches
check("GiB of both matrices", answer_1, 3 * batch**2 / 2**30, rtol=0.02)

# %% [markdown]
# ## Exercise 2: the image that shows the mistake
#
# The sides 640 and 480 are rounded up to 644 and 504 pixels: 46 x 36 patches, 1,656 in all, and
# 414 tokens. The smallest budget that holds 414 is 512. As a bound in patches, 512 gives
# $512 / 128 = 4$ tiles of 128 queries. So 512 patches are computed, and $1{,}656 - 512 = 1{,}144$
# are not.

# %%
answer_2 = 36 * 46 - 4 * 128
one = image_geometry(640, 480)
budget = next(size for size in (64, 128, 256, 512, 1024) if size >= one.tokens)
computed = sum(b - a for a, b in varlen.programs([0, one.patches], budget, 128))
check("patches never computed", answer_2, one.patches - computed)

# %% [markdown]
# ## Exercise 3: the order of packing
#
# Sorting brings equal lengths together, so each size is one run. `order[i]` is the image that
# stands at place i. `back` must say at which place each image stands: it is the order that sorts
# `order`.


# %%
def packing_order(lengths):
    order = sorted(range(len(lengths)), key=lengths.__getitem__)
    back = sorted(range(len(order)), key=order.__getitem__)
    return order, back


came = [48, 16, 48, 32, 16, 48]
result = varlen.packing_result(came, packing_order(came))
check("calls, and whether back restores the order", result, (len(set(came)), True))

# %% [markdown]
# ## Exercise 4: what fusing can win
#
# If GELU and the residuals cost nothing, $88.5 - 6.4 - 1.2 = 80.9$ ms remain. The gain is
# $88.5 / 80.9 = 1.09$. The 27 % of the bytes do not tell this. The products and attention take
# most of the time, and they wait for arithmetic, not for these bytes.

# %%
answer_4 = 88.5 / 80.9
check("largest gain of fusing", answer_4, 88.5 / (88.5 - 6.4 - 1.2), rtol=0.01)

# %% [markdown]
# ## Exercise 5: attention without all the scores
#
# Softmax does not change if one number is taken from all scores of a query. Taking the largest
# score seen so far keeps every `exp` at 1 or below. When the largest grows from `old` to `new`,
# everything summed so far was computed with `old`, and
# $e^{S - \text{new}} = e^{S - \text{old}} \cdot e^{\text{old} - \text{new}}$ for a score $S$. So
# both sums are multiplied by the second factor. In the beginning the largest is minus infinity,
# and the factor is $e^{-\infty} = 0$.


# %%
def attend_in_pieces(q, keys, values):
    largest = torch.full((len(q), 1), -torch.inf)
    total, weighted = torch.zeros(len(q), 1), torch.zeros(len(q), values[0].shape[1])
    for k, v in zip(keys, values, strict=True):
        scores = q @ k.T / q.shape[1] ** 0.5  # (n, keys of the piece)
        new = torch.maximum(largest, scores.amax(1, keepdim=True))
        factor, exps = (largest - new).exp(), (scores - new).exp()
        total = factor * total + exps.sum(1, keepdim=True)
        weighted = factor * weighted + exps @ v
        largest = new
    return weighted / total


check_function("attention in pieces", attend_in_pieces, varlen.pieces_cases(), rtol=1e-5)
