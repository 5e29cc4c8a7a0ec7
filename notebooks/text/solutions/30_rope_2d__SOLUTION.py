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
#     question: Solutions to the exercises of RoPE in two dimensions
#     minutes_cpu: 1
#     gpu: optional
#     data: none
# ---

# %% [markdown]
# # RoPE in two dimensions: solutions
#
# The guesses, cells and exercises of [30_rope_2d](../30_rope_2d.ipynb), answered with their
# steps. Try them there first.

# %% tags=["nbval-ignore-output"]
import warnings

warnings.filterwarnings("ignore", message="IProgress not found")  # about a widget that is not used
from kimivl_lab.measure.provenance import device_name, versions

print(device_name("cpu"))
print(versions())

# %%
import torch

from kimivl_lab.kernels.rotation import rotate_complex
from kimivl_lab.lessons import rope_2d as lesson
from kimivl_lab.lessons.checks import check, check_function
from kimivl_lab.lessons.guesses import guess

# %% [markdown]
# ## In the text
#
# **Angles of a patch.** For each $i$, first the column times $\theta_i$, then the row times
# $\theta_i$.


# %%
def angles_of(row, column, d):
    angles = []
    for i in range(d // 4):
        theta = 10000 ** (-4 * i / d)
        angles += [column * theta, row * theta]
    return angles


cases = [(3, 5, 8), (0, 4, 72), (7, 0, 72), (9, 2, 24)]
expected = [(case, lesson.angles(*case)) for case in cases]
check_function("angles of a patch", angles_of, expected, rtol=1e-6)

# %% [markdown]
# **The guesses.** $\theta$ falls by a factor $10000^{4/72} = 1.67$ for each $i$, so the
# wavelengths are 6.3, 10.5, 17.5, 29, 49, 81, 135: six of them are at most 128. On 6 x 6 only a
# test of each patch sees the fault. On 2 x 6 the set differs too. For the time, 4.9 is the
# prediction; caches make it smaller.

# %%
turn_guess = guess("values of i with half a turn on 64 patches", 6)
square_guess = guess("tests that see exchanged axes on 6 x 6", 1)
flat_guess = guess("tests that see exchanged axes on 2 x 6", 2)
complex_guess = guess("time of complex over time of in_place", 3)

# %% [markdown]
# **Bytes of `real`.** The two copies move $6 + 6$ bytes. Each of four products reads 2 and writes
# 2 for one number, because it works on half of the numbers: 16. The difference and the sum read
# $2 + 2$ and write 2 each: 12. The stack reads 4 and writes 4: 8. Together 48.

# %%
real_bytes = (2 + 4) + 4 * (2 + 2) + 2 * (2 + 2 + 2) + (4 + 4) + (4 + 2)
check("bytes of real for one number", real_bytes, lesson.bytes_a_number("real"))

# %% [markdown]
# ## Exercise 1: a test for the axes
#
# Patch 10 of a grid of 2 x 6 is in row 1, column 4. Its first four angles must be $4\theta_0$,
# $\theta_0$, $4\theta_1$ and $\theta_1$. Angles of complex numbers lie between $-\pi$ and $\pi$,
# so the factors are compared instead. Each fault changes at least one of the four: exchanged axes
# all of them; numbering column by column makes patch 10 stand in row 0, column 5; row slots that
# use the column change slot 1; and the next $\theta$ changes slot 0.


# %%
def axes_are_right(factors_of):
    row, column, theta_1 = 1, 4, 10000 ** (-4 / 72)
    wanted = torch.tensor([column, row, column * theta_1, row * theta_1])
    found = factors_of((2, 6))[row * 6 + column, :4]
    return bool((found - torch.polar(torch.ones(4), wanted)).abs().max() < 1e-5)


verdicts = lesson.axes_verdicts(axes_are_right)
expected = [True, False, False, False, False]
check("verdicts on the right factors and four faulty ones", verdicts, expected)

# %% [markdown]
# ## Exercise 2: half-split order
#
# The kernel takes the first half of the features as first numbers of the slots, and the second
# half as second numbers. So all even features come first, then all odd ones. Scores do not
# change, because q and k are reordered alike.

# %%
answer_2 = [*range(0, 72, 2), *range(1, 72, 2)]

torch.manual_seed(5)
qk, factors = torch.randn(2, 24, 1, 72), lesson.right_factors((4, 6))
halves = [torch.complex(*x[:, 0, answer_2].chunk(2, dim=-1)) * factors for x in qk]
a, b = (torch.cat((one.real, one.imag), dim=-1) for one in halves)
turned = rotate_complex(qk.transpose(0, 1), torch.view_as_real(factors))[:, :, 0]  # (24, 2, 72)
check("scores of the half-split kernel", a @ b.T, turned[:, 0] @ turned[:, 1].T, rtol=1e-5)

# %% [markdown]
# ## Exercise 3: positions in bfloat16
#
# 8 significant bits count in steps of 1 up to $2^8 = 256$. The next number is 258, so 257 is
# rounded to 256. The positions 0 to 256 all differ: the longest side is 257.

# %%
answer_3 = 2**8 + 1
side = next(n for n in range(1, 1000) if len(torch.arange(n + 1).bfloat16().unique()) < n + 1)
check("longest side", answer_3, side)

# %% [markdown]
# ## Exercise 4: what fusing RoPE wins
#
# A patch has $2 \cdot 16 \cdot 72 = 2{,}304$ numbers of queries and keys. $4{,}096 \cdot 2{,}304$
# numbers times 16 bytes are 151 MB in one block, and 4.08 GB in 27 blocks. At 3,350 GB/s this
# takes 1.22 ms.

# %%
answer_4 = 27 * 4096 * 2304 * (20 - 4) / 3.35e12 * 1e3
saved = lesson.bytes_moved("complex", 4096) - lesson.bytes_moved("in_place", 4096)
check("ms saved in one forward", answer_4, 27 * saved / 3.35e12 * 1e3, rtol=0.02)

# %% [markdown]
# ## Exercise 5: turn in place, without complex numbers
#
# The new first number is $x_0\cos - x_1\sin$, and the new second number needs the *old* $x_0$. So
# one copy of $x_0$ is kept: half of the bytes of `pairs`. `addcmul_` multiplies and adds without
# a tensor in between.


# %%
def turn_in_place(pairs, cos, sin):
    a, b = pairs.unbind(-1)  # views
    old = a.clone()
    a.mul_(cos).addcmul_(b, sin, value=-1)
    b.mul_(cos).addcmul_(old, sin)
    return pairs


verdicts = lesson.in_place_verdicts(turn_in_place)
check("right values, the same memory, little new memory", verdicts, (True, True, True))
