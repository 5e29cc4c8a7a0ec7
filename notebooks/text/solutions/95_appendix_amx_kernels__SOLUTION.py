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
#     question: Solutions to the exercises of the appendix on kernels of one's own
#     minutes_cpu: 1
#     gpu: optional
#     data: none
# ---

# %% [markdown]
# # Appendix: kernels of one's own: solutions
#
# The exercises of [95_appendix_amx_kernels](../95_appendix_amx_kernels.ipynb), solved. Try them there first.

# %% tags=["nbval-ignore-output"]
import warnings

warnings.filterwarnings("ignore", message="IProgress not found")  # about a widget that nothing here uses
from kimivl_lab.measure.provenance import device_name, versions

print(device_name("cpu"))
print(versions())

# %%
import torch


def ceil_div(a, b):
    return -(-a // b)


# %% [markdown]
# **1.** How much slack is legal? The largest whole power of two that a weight may reach, if a float32 sum of $2^{20}$ of them must not overflow; and if the weights themselves are stored as float16, or as float8 (e4m3).
#
# $2^{20} \cdot 2^s < 2^{128}$, the first number that float32 does not have: $s = 107$. With values above 1 in $V$, the other rows of $O^T$ grow larger than the denominator and leave accordingly less. float16 ends at
# 65,504, just below $2^{16}$, and float8 (e4m3) at 448, below $2^9$. bfloat16 has float32's range, and the sum is what bounds it: 8 is far from any edge.

# %%
answer_1 = {"float32 sum": 107, torch.float16: 15, torch.float8_e4m3fn: 8}
for more in (0, 1):
    total = torch.full((2**20,), 2.0 ** (answer_1["float32 sum"] + more)).sum()
    assert bool(total.isfinite()) == (more == 0)
    for dtype in (torch.float16, torch.float8_e4m3fn):
        assert (2.0 ** (answer_1[dtype] + more) <= torch.finfo(dtype).max) == (more == 0)
print({str(name): f"2^{slack}" for name, slack in answer_1.items()})

# %% [markdown]
# **2.** The unit also multiplies 8-bit numbers: rows of 64 bytes are then 64 numbers, and an instruction does twice the work in the same time. Suppose $Q$, $K$, $V$ and the weights could all be 8-bit. How many times fewer instructions does attention
# take at head size $d$, padding and the row of ones included?
#
# For 64 keys and 16 queries: $K Q^T$ is four tiles of keys, each with $\lceil d/64 \rceil$ steps instead of $\lceil d/32 \rceil$; $V^T P^T$ has as many rows as before and one step of 64 keys instead of two. Where $d$ is a multiple of 64 the gain is
# two. At 72 the channels are padded to 128, and more of the gain is lost there than the head's last 8 channels seem worth.


# %%
def eight_bit_gain(d):
    now = 4 * ceil_div(d, 32) + 2 * ceil_div(d + 1, 16)
    return now / (4 * ceil_div(d, 64) + ceil_div(d + 1, 16))


gains = [eight_bit_gain(d) for d in (64, 72, 96, 128)]
assert [round(gain, 2) for gain in gains] == [2.0, 1.69, 1.73, 2.0]
print([round(gain, 2) for gain in gains])
