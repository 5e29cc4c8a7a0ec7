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
# The exercises of [40_packed_attention](../40_packed_attention.ipynb), solved. Try them there first.

# %% tags=["nbval-ignore-output"]
import warnings

warnings.filterwarnings("ignore", message="IProgress not found")  # about a widget that nothing here uses
from kimivl_lab.measure.provenance import device_name, versions

print(device_name("cpu"))
print(versions())

# %%
import torch


# %%
def varlen_kernel(q, k, v, cu_seqlens, max_seqlen, tile=64):
    """The notebook's teaching kernel."""
    out = torch.full_like(q, float("nan"))
    for image in range(len(cu_seqlens) - 1):
        for t in range(-(-max_seqlen // tile)):
            start, end = cu_seqlens[image : image + 2].tolist()
            first, last = start + t * tile, min(start + (t + 1) * tile, end)
            if first < end:
                scores = torch.einsum("qhd,khd->hqk", q[first:last], k[start:end]) / q.shape[-1] ** 0.5
                out[first:last] = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v[start:end])
    return out


# %% [markdown]
# **1.** A bound in merged tokens loses no row if there are enough pictures of one size in the batch. From how many on?
#
# $m$ pictures of $n$ patches are $mn/4$ tokens, and the bound suffices when $mn/4 \ge n$: from four on, whatever the size. Rounding up to a tile can only help.

# %%
answer_1 = 4
for count in (answer_1 - 1, answer_1):
    out = varlen_kernel(*torch.randn(3, 256 * count, 1, 72), 256 * torch.arange(count + 1), max_seqlen=64 * count)
    assert bool(out.isnan().any()) == (count < answer_1)
    print(f"{count} pictures: {int(out.isnan().any(2).any(1).sum())} of {len(out)} rows missing")

# %% [markdown]
# **2.** Write the packing that needs the fewest calls: from the lengths of the pictures in the order in which they came, the order in which to pack them, and the order that brings the results back.
#
# Sort the numbers of the pictures by length; where picture `index` went is the inverse permutation, which is the order that sorts the order.


# %%
def packing_order(lengths):
    order = sorted(range(len(lengths)), key=lengths.__getitem__)
    return order, sorted(range(len(order)), key=order.__getitem__)


order, back = packing_order([48, 16, 48, 32, 16, 48])
packed = [[48, 16, 48, 32, 16, 48][index] for index in order]
assert sorted(order) == list(range(6)) and [order[index] for index in back] == list(range(6))
assert sum(a != b for a, b in zip(packed, packed[1:], strict=False)) == 2
print("order", order, "back", back, "lengths as packed", packed)
