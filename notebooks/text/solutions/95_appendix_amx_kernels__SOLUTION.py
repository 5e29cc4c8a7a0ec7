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
#     question: Solutions to the exercises of Kernels for a CPU's matrix unit
#     minutes_cpu: 1
#     gpu: optional
#     data: none
# ---

# %% [markdown]
# # Appendix, kernels for a CPU's matrix unit: solutions
#
# The guesses, cells and exercises of [95_appendix_amx_kernels](../95_appendix_amx_kernels.ipynb),
# answered with their steps. Try them there first.

# %% tags=["nbval-ignore-output"]
import warnings

warnings.filterwarnings("ignore", message="IProgress not found")  # about a widget that is not used
from kimivl_lab.measure.provenance import device_name, versions

print(device_name("cpu"))
print(versions())

# %%
import math

import torch

from kimivl_lab.lessons import amx_kernels as lab
from kimivl_lab.lessons.checks import check, check_function
from kimivl_lab.lessons.guesses import guess

_ = torch.set_grad_enabled(False)

# %% [markdown]
# ## In the text
#
# **The guesses.** Both products have 4.5 useful instructions, of 6 and of 5: $9 / 11 = 82$ %.
# Rising scores: the steepest group climbs 160 powers of two in 32 runs, 5 in each, so a slack of
# 8 is exceeded in every second run, about 15 times. The group that climbs 80 exceeds it in about
# every third or fourth run, some 9 times. The flat group never exceeds it.

# %%
share_guess = guess("useful share at head size 72", 82, unit="%")
rescaling_guess = guess("rescalings, rising keys, slack 8", 24, unit="rescalings")

# %% [markdown]
# **Instructions of a linear layer.** Four for each tile block and step.


# %%
def instructions(rows, inputs, outputs):
    return 4 * math.ceil(rows / 32) * math.ceil(outputs / 32) * math.ceil(inputs / 32)


sizes = [(40, 40, 64), (1024, 1152, 3456), (1024, 1152, 4304), (1, 4304, 1152)]
expected = {size: lab.linear_instructions(*size) for size in sizes}
check_function("instructions of a linear layer", instructions, expected)

# %% [markdown]
# **The running maximum.** `top` changes only when a run exceeds it by more than the slack.


# %%
def tops(maxima, slack):
    found = []
    for here in maxima:
        if not found or here > found[-1] + slack:
            found.append(here)
        else:
            found.append(found[-1])
    return found


cases = [((3, 9, 12, 13), 8), ((3, 9, 12, 13), 0), ((5, 1, 13, 14), 8), ((-20, -12, -11), 8)]
check_function("running maximum", tops, {case: lab.tops(*case) for case in cases})

# %% [markdown]
# **A chunk.** 9 steps of $32 \cdot 32 \cdot 2 = 2{,}048$ bytes are 18 KiB of $W$, and as much of
# $x$. Together 36 of 48 KiB.

# %%
chunk_kib = 36
check("KiB of a chunk", chunk_kib, 2 * 2048 * lab.constants()["CHUNK"] / 1024)

# %% [markdown]
# ## Exercises
#
# ### 1. How much slack is allowed?
#
# $2^{20} \cdot 2^{107} < 2^{128}$, and 108 would reach it. With values above 1 in $V$ the other
# rows of $O^\top$ grow larger than the sum of the weights, and leave less room. float16 ends at
# 65,504, just below $2^{16}$: 15. float8 (e4m3) ends at 448, below $2^9$: 8. bfloat16 has the
# range of float32: the kernel's slack of 8 is far from any limit.

# %%
answer_1 = (107, 15, 8)
largest = [torch.finfo(one).max for one in (torch.float32, torch.float16, torch.float8_e4m3fn)]
expected = [int(math.log2(largest[0] / 2**20)), *(int(math.log2(one)) for one in largest[1:])]
check("exponents", answer_1, expected)

# %% [markdown]
# ### 2. Eight bits
#
# For 64 keys and 16 queries, $K Q^\top$ is four tiles of keys, each with $\lceil d/64 \rceil$
# steps instead of $\lceil d/32 \rceil$. $V^\top P^\top$ has as many rows as before, and one step
# of 64 keys instead of two. Where $d$ is a multiple of 64 the gain is two. At 72 it is 1.69 only:
# the features are padded to 128 instead of 96.


# %%
def eight_bit_gain(d):
    now = 4 * math.ceil(d / 32) + 2 * math.ceil((d + 1) / 16)
    return now / (4 * math.ceil(d / 64) + math.ceil((d + 1) / 16))


cases = {(d,): lab.eight_bit_gain(d) for d in (64, 72, 80, 96, 112, 128, 200)}
check_function("gain of 8 bits", eight_bit_gain, cases, rtol=0.01)

# %% [markdown]
# ### 3. A product in tiles
#
# For each of the four tiles of the result, add up two steps. A tile of $W^\top$ by pairs is, in
# the cell on W, `stack` of its even and odd rows.


# %%
def tile_product(left, right):
    return torch.einsum("ipt,pjt->ij", left.unflatten(1, (-1, 2)), right.unflatten(1, (-1, 2)))


def product_in_tiles(x, W):
    result = x.new_zeros(32, 32)
    for i in (0, 16):
        for j in (0, 16):
            for step in (0, 32):
                B = W[j : j + 16, step : step + 32].T  # (32, 16)
                by_pairs = torch.stack((B[0::2], B[1::2]), dim=-1).flatten(1)  # (16, 32)
                A = x[i : i + 16, step : step + 32]  # (16, 32)
                result[i : i + 16, j : j + 16] += tile_product(A, by_pairs)
    return result


numbers = torch.arange(4096, dtype=torch.float64).reshape(2, 32, 64).sin()
cases = [((numbers[0], numbers[1]), numbers[0] @ numbers[1].T)]
check_function("product in tiles", product_in_tiles, cases, rtol=1e-9)

# %% [markdown]
# ### 4. Which kernel for your server? (operator)
#
# With the kernel for 96, $72 / 96 = 75$ % of the work is useful, so $30 \cdot 0.25 = 7.5$ % of
# the encoder's time multiplies padding. The kernel for 128 takes $128 / 96 = 4/3$ of the time of
# those 30 %: the encoder is 10 % slower. So it is worth checking which one the engine takes, and
# it is not worth writing a kernel for 72 unless attention weighs far more, as it does for very
# large images.

# %%
answer_4 = (30 * (1 - 72 / 96), 30 * (128 / 96 - 1))
check("(% on padding, % slower)", answer_4, (7.5, 10), rtol=0.01)

# %% [markdown]
# ### 5. ★ The best chunk of the model
#
# Up to 12 steps, a chunk of $W$ and the rows of one tile block fit the first level:
# $2 \cdot 2{,}048 \cdot 12 = 48$ KiB. Then only $x$ comes from the second level, and perhaps the
# unfinished sums. The sums of 256 rows take $128 \cdot 256 = 32$ KiB. Beside a chunk of up to 8
# steps (16 KiB) they stay in the first level too. From 9 steps on they go to the second. So 8 is
# the longest of the lengths that read least, and 9 reads more. From 13 steps on $W$ comes from
# the second level.

# %%
for length in (1, 4, 8, 9, 12, 13, 36):
    read = lab.bytes_read(1024, 1152, 4304, 256, length)
    print(f"{length:2d} steps: " + ", ".join(f"{of} {n / 1e6:3.0f} MB" for of, n in read.items()))
answer_5 = 8


def second(length):
    return lab.bytes_read(1024, 1152, 4304, 256, length)["second"]


best = max(range(1, 37), key=lambda length: (-second(length), length))
check("steps of a chunk", answer_5, best)
