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
#     question: How does one packed sequence keep pictures apart, and what does each way cost?
#     minutes_cpu: 1
#     gpu: optional
#     data: pictures of data/images, sizes of data/workloads
# ---

# %% [markdown]
# # Packed attention
#
# ## The question
#
# How does one packed sequence keep pictures apart, and what does each way cost?

# %% [markdown]
# ## You will be able to
#
# - **compute** what a mask over a batch costs in memory and in scores that are thrown away;
# - **diagnose** rows that a variable-length kernel never computed, from `cu_seqlens` and `max_seqlen`;
# - **place** each operator of a layer under a roofline, and say what bounds it.
#
# ## Needs
#
# Notebook [00](00_start_here.ipynb). A minute on a CPU. The kernels that this notebook explains run on a GPU only; a loop of a dozen lines stands in for them here.
#
# ## Versions and machine

# %% tags=["nbval-ignore-output"]
import warnings

warnings.filterwarnings("ignore", message="IProgress not found")  # about a widget that nothing here uses
from kimivl_lab.measure.provenance import device_name, versions

print(device_name("cpu"))
print(versions())

# %%
from dataclasses import replace
from itertools import accumulate
from unittest.mock import patch

import matplotlib.pyplot as plt
import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image

from kimivl_lab import EncoderOptions, KimiVLImageProcessor, MoonViTConfig, MoonVitPretrainedModel, image_geometry, plots
from kimivl_lab.datasets import WORKLOADS, draw_sizes, sample_images
from kimivl_lab.measure.accuracy import relative_error
from kimivl_lab.measure.memory import peak_memory_mib
from kimivl_lab.measure.roofline import copy_gbps, matmul_peak_tflops
from kimivl_lab.measure.timing import time_interleaved
from kimivl_lab.moonvit.attention import ATTENTION_BACKENDS, attention_unavailable, packed_attention
from kimivl_lab.moonvit.flops import tower_flops
from kimivl_lab.moonvit.layers import ResolvedOptions
from kimivl_lab.kernels.packed_linear import packed_unavailable
from kimivl_lab.plots import attention

plots.use_style()
_ = torch.set_grad_enabled(False)

# %% [markdown]
# ## Predict
#
# All pictures of a batch are rows of one sequence of $L = \sum n_j$ patches. The linear maps treat each row alone, so packing costs them nothing. Attention is the one place where rows meet, and a
# patch must meet only the $n_j$ patches of its own picture. Of all $L^2$ pairs that is $\sum n_j^2$; a mask computes the rest too, and throws it away:
#
# $$\text{waste} = 1 - \frac{\sum n_j^2}{(\sum n_j)^2} \;\le\; 1 - \frac1m \quad\text{for } m \text{ pictures, with equality when all are of one size.}$$

# %%
names = ["astronaut", "chelsea", "china", "coffee", "tall_icon"]
opened = {name.removeprefix("tall_"): Image.open(sample_images()[name]) for name in names}
pictures = {name: (image, image_geometry(*image.size)) for name, image in opened.items()}
lengths = [geometry.patches for _, geometry in pictures.values()]
L, squares = sum(lengths), sum(n * n for n in lengths)
print(f"{len(lengths)} pictures, {L:,} patches: {L * L:,} scores a head with a mask, {squares:,} without")
print(f"thrown away: {1 - squares / L**2:.1%}, at most {1 - 1 / len(lengths):.0%}")

# %% tags=["headline"]
counts, waste = [1, 2, 4, 8, 16, 32], {}
for workload in ("coco_val2017", "clipart"):
    n = np.array([image_geometry(*size).patches for size in draw_sizes(workload, 40 * 32, seed=1)])
    batches = [n[: 40 * m].reshape(40, m) for m in counts]  # 40 batches of m pictures
    waste[WORKLOADS[workload]] = [(1 - (b**2).sum(1) / b.sum(1) ** 2).mean() for b in batches]
assert all(max(shares) < 1 - 1 / 32 and shares[0] == 0 for shares in waste.values())
m = np.geomspace(1, 32, 60)
bound = ("bound: equal pictures, 1 - 1/m", m, 1 - 1 / m)
title = f"A mask computes {L * L / squares:.1f} times the scores that these pictures need"
fig, axes = attention.packed_mask(pictures, counts, waste, bound=bound, title=title)
plt.show()

# %% [markdown]
# *How to read it:* left, only the coloured squares are attention between patches of one picture, and all that is hatched is computed for nothing; right, each mark the mean of 40 batches, photographs are so similar in size that they follow the bound:
# in a batch of eight, seven scores of eight are thrown away.
#
# Three ways to compute the coloured squares:
#
# | way | here | launches | scores | extra memory |
# |---|---|---|---|---|
# | one call with a mask | `"sdpa_masked"` | 1 | $L^2$ | $L^2$ bytes, and $L^2$ numbers if the kernel wants the mask added to the scores |
# | one call a picture | `"sdpa"` | one a run of equal sizes | $\sum n_j^2$ | grows with the largest run, not with the batch |
# | one variable-length kernel | `"flash_attn"`, `"torch_varlen"` (GPU) | 1 | $\sum n_j^2$ | the offsets: $4(m+1)$ bytes |
#
# ## Build
#
# The last two are one operator, `kimivl_lab::packed_attention`. Instead of a mask it takes the $m + 1$ offsets at which pictures begin and end, `cu_seqlens`, and a bound on the longest picture,
# `max_seqlen`. A batch with room for eight pictures repeats the last offset: three segments of no rows.

# %%
tower = MoonVitPretrainedModel(MoonViTConfig.preset("tiny")).eval()
grids = [geometry.grid_hw for _, geometry in pictures.values()]
metadata = tower.prepare_encoder_metadata(grids, max_images=8)
offsets = metadata.cu_seqlens
print("cu_seqlens", offsets.tolist(), offsets.dtype)
print("max_seqlen", metadata.max_seqlen, "patches")
assert offsets.tolist()[:6] == list(accumulate(lengths, initial=0)) and metadata.max_seqlen == max(lengths)

# %% [markdown]
# Why both? The kernel reads the offsets on the device, while it runs. But how many programs to launch is decided **before**, on the host, which must not wait for the device to ask. So
# the launch covers $m$ pictures times $\lceil \text{max\_seqlen} / \text{tile} \rceil$ tiles of queries, and programs without rows return at once. One after the other instead of in parallel:


# %%
def varlen_kernel(q, k, v, cu_seqlens, max_seqlen, tile=64):
    """(L, heads, d) each -> (L, heads, d); one turn of the inner loop is one program of the launch."""
    out = torch.full_like(q, float("nan"))  # a kernel's output starts as unwritten memory; NaN shows what stays so
    for image in range(len(cu_seqlens) - 1):
        for t in range(-(-max_seqlen // tile)):  # from the bound alone
            start, end = cu_seqlens[image : image + 2].tolist()  # read inside the kernel
            first, last = start + t * tile, min(start + (t + 1) * tile, end)
            if first < end:
                scores = torch.einsum("qhd,khd->hqk", q[first:last], k[start:end]) / q.shape[-1] ** 0.5
                out[first:last] = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v[start:end])
    return out


# %% [markdown]
# ### When the bound is too small
#
# A bound too large launches a few programs that return at once. A bound too small launches no program for a picture's last rows. Nothing fails: they keep what the memory held before.
#
# It is an easy mistake, since an encoder counts in two units, patches before the merge and tokens after it, four patches each. As read in release 0.32 of vLLM, the `max_seqlen` that
# [its CUDA graphs of Kimi-VL](https://github.com/vllm-project/vllm/pull/41992) are captured with is the budget in merged **tokens**, while attention counts **patches**. The same with our own kernel: batches that fill their
# budget exactly, one, two and four pictures.

# %%
torch.manual_seed(0)
batches, missing = {}, {}
for group in (["china"], ["china", "coffee"], ["astronaut", "chelsea", "china", "coffee"]):
    rows = [pictures[name][1].patches for name in group]
    budget = sum(rows) // 4  # merged tokens: not patches
    cu_seqlens = torch.tensor([0, *accumulate(rows)], dtype=torch.int32)
    out = varlen_kernel(*torch.randn(3, sum(rows), 1, 72), cu_seqlens, max_seqlen=budget)
    done = [int((~part.isnan()).all(2).all(1).sum()) for part in out.split(rows)]
    missing[len(group)] = sum(rows) - sum(done)
    shown = {name: (pictures[name], count) for name, count in zip(group, done, strict=True)}
    batches[f"{len(group)} picture{'s' * (len(group) > 1)}: bound {budget:,}"] = shown
print("rows never computed, by pictures in the batch:", missing)
assert missing == {1: 1472 - 384, 2: (1472 - 704) + (1320 - 704), 4: (1444 - 1280) + (1472 - 1280) + (1320 - 1280)}

# %%
one, two, four = batches
lines = [{one: batches[one], two: batches[two]}, {four: batches[four]}]
title = "A bound in tokens: no error, and the lower parts of the pictures are never computed"
subtitle = f"bound: the batch's merged tokens, rounded up to tiles of 64 queries  ·  {plots.COUNTED}"
fig, ax = attention.missing_rows(lines, title=title, subtitle=subtitle)
plt.show()

# %% [markdown]
# *How to read it:* hatched patches got no program and hold whatever was there; a picture that fills the budget alone loses three quarters, and the more pictures share it the less is missing.
#
# From four equal pictures on nothing is missing at all: $n \le mn/4$. So a test with a full batch of small pictures passes, and one large picture in production fails. The test that finds it compares **values**, one
# picture a budget. The library's operator checks on the CPU, where offsets can be read, and its metadata take the bound from the same grids, in the same unit, as the offsets.

# %%
q, k, v = torch.randn(L, 3, 4, 72).unbind(1)
try:
    packed_attention(q, k, v, offsets, L // 4, "sdpa")
except ValueError as error:
    refusal = str(error)
print("refused:", refusal)
assert f"{L // 4}" in refusal and f"{max(lengths)}" in refusal

# %% [markdown]
# ## Check equality
#
# All ways against the softmax written out, `"eager"`. Any larger bound must give the same values; the control is one segment over all rows, which is no separation at all.

# %%
want = ATTENTION_BACKENDS["eager"](q, k, v, metadata)
one_segment, larger = torch.tensor([0, L], dtype=torch.int32), 10 * metadata.max_seqlen
results = {name: ATTENTION_BACKENDS[name](q, k, v, metadata) for name in ("sdpa_masked", "sdpa")}
results["varlen_kernel above"] = varlen_kernel(q, k, v, offsets, metadata.max_seqlen)
results["sdpa, bound 10 times as large"] = packed_attention(q, k, v, offsets, larger, "sdpa")
results["one segment over all rows"] = packed_attention(q, k, v, one_segment, L, "sdpa")

# %%
for name, got in results.items():
    equal = relative_error(got, want) < 1e-6
    print(f"{name:30s} equal: {equal}")
    assert equal == (name != "one segment over all rows")
for name in ("flash_attn", "torch_varlen"):
    print(f"not run: {attention_unavailable(name, torch.device('cpu'), torch.float32)}")

# %% [markdown]
# ### Pictures must not leak
#
# "Close" is not enough between pictures: if a stranger's picture in the same batch changes yours by a rounding, your result depends on who else was served. So the test is for equal bits. The whole
# encoder encodes two pictures, then again with every patch of the second in reverse order.

# %%
first, second = pictures["chelsea"], pictures["icon"]
n, pair = first[1].patches, [first[1].grid_hw, second[1].grid_hw]
pixels = KimiVLImageProcessor()([first[0], second[0]]).pixel_values
changed = torch.cat((pixels[:n], pixels[n:].flip(0)))
right = tower.prepare_encoder_metadata(pair)
open_door = replace(right, cu_seqlens=torch.tensor([0, len(pixels)], dtype=torch.int32), max_seqlen=len(pixels))
for way, name, meta in [("mask", "sdpa_masked", right), ("loop", "sdpa", right), ("nothing", "sdpa", open_door)]:
    tower.set_options(attention=name)
    before, after = (tower(x, encoder_metadata=meta) for x in (pixels, changed))
    same = torch.equal(before[: n // 4], after[: n // 4])
    print(f"{way:8s} features of the first picture bit-equal: {same}")
    assert same == (way != "nothing") and not torch.equal(before[n // 4 :], after[n // 4 :])

# %% [markdown]
# A mask passes, with finite numbers. It keeps a stranger out by a weight of zero, and $0 \cdot \text{NaN} = \text{NaN}$: one bad picture spoils the batch. Ways that do not touch the rows do not have to multiply
# them by zero. Rows past the last offset, which fill up a fixed buffer, are nobody's in every way: not read, and zero in the result.

# %%
poisoned = torch.cat((v[: lengths[0]], torch.full_like(v[lengths[0] :], float("nan"))))  # all pictures but the first
for name in ("sdpa_masked", "sdpa", "eager"):
    attend = ATTENTION_BACKENDS[name]
    clean = not attend(q, k, poisoned, metadata)[: lengths[0]].isnan().any()
    padded = attend(*(torch.cat((x, torch.full_like(x[:9], float("nan")))) for x in (q, k, v)), metadata)
    kept = relative_error(padded[:-9], want) < 1e-6 and not padded[-9:].any()
    print(f"{name:12s} NaN in other pictures stays there: {clean}, NaN in padding rows: {kept}")
    assert clean == (name != "sdpa_masked") and kept

# %% [markdown]
# ### Equal neighbours share a call
#
# The loop turns neighbours of one length into one batched call. So the order of the pictures matters: sorted by size before packing, a batch needs as many calls as it has distinct sizes.

# %%
alternating = [(6, 8), (4, 4)] * 6
by_size = sorted(alternating)
calls = {}
for words, batch in {"alternating": alternating, "sorted": by_size}.items():
    meta = tower.prepare_encoder_metadata(batch)
    with patch.object(F, "scaled_dot_product_attention", wraps=F.scaled_dot_product_attention) as spy:
        out = ATTENTION_BACKENDS["sdpa"](*(x[: meta.num_patches] for x in (q, k, v)), meta)
    calls[words] = spy.call_count
    assert relative_error(out, ATTENTION_BACKENDS["eager"](*(x[: meta.num_patches] for x in (q, k, v)), meta)) < 1e-6
print(f"{len(by_size)} pictures of two sizes, calls: {calls}")
assert calls == {"alternating": 12, "sorted": 2}

# %% [markdown]
# ## Measure
#
# ### Memory and time of the mask
#
# Predicted for float32 on this CPU: one byte a pair for the boolean mask, and four more because the kernel adds its mask to the scores, as numbers: $5L^2$ bytes. In time, $L^2 / \sum n_j^2$.

# %% tags=["nbval-ignore-output"]
masked, looped = ATTENTION_BACKENDS["sdpa_masked"], ATTENTION_BACKENDS["sdpa"]
measured = []
for count in (6, 8, 10):
    meta = tower.prepare_encoder_metadata([(32, 32)] * count)
    tensors = torch.randn(3, meta.num_patches, 1, 72)
    mib = peak_memory_mib(lambda: masked(*tensors, meta))
    if mib is not None:
        measured.append((meta.num_patches, mib))
        predicted = 5 * meta.num_patches**2 / 2**20
        print(f"{meta.num_patches:6,} patches: predicted {predicted:5.0f} MiB, measured {mib:5.0f}, ratio {mib / predicted:.2f}")
runs = {"mask": lambda: masked(q, k, v, metadata), "loop": lambda: looped(q, k, v, metadata)}
took = {name: timing.p50_ms for name, timing in time_interleaved(runs, warmup=1, repeats=3).items()}
print(f"five pictures, 4 heads: mask {took['mask']:.0f} ms, loop {took['loop']:.0f} ms")
print(f"ratio predicted {L * L / squares:.1f}, measured {took['mask'] / took['loop']:.1f}")

# %%
rows = [1024 * 2**step for step in range(9)]
curves = {
    "mask, added in float32": [5 * n * n / 2**20 for n in rows],
    "mask, boolean only": [n * n / 2**20 for n in rows],
    "loop, scores written out": [4 * 1024**2 / 2**20 for n in rows],
    "offsets": [4 * (n // 1024 + 1) / 2**20 for n in rows],
}
mark = (8 * 4096, curves["mask, boolean only"][5], "8 pictures of 64 x 64: 1 GiB")
assert mark[1] == 1024
subtitle = plots.measured_on("cpu", "one head, pictures of 32 x 32; lines by formula")
fig, ax = attention.memory_growth(rows, curves, measured, mark, title="A mask grows with the square of the batch", subtitle=subtitle)
plt.show()

# %% [markdown]
# *How to read it:* twice the pictures are four times the mask, whether they are large or small; dots on the upper line say that the kernel does expand the boolean mask here; a loop needs what its largest
# picture needs, however many there are; the offsets stay near a kilobyte. In time a mask may cost more than the ratio of the scores:
# it is also built, expanded, and read by every head.
#
# ### The roofline of a layer
#
# An operator that does $f$ FLOPs and moves $b$ bytes takes at least $\max(f/\text{peak}, b/\text{bandwidth})$. Bytes are counted once a tensor: inputs, weights, output. All operators of one block of the "lab" preset, every
# one on its own, as the plain implementation runs them:


# %%
def layer_work(config, lengths, itemsize):
    """Operator -> (FLOPs, bytes) of one block; 8 FLOPs a number for a norm, 3 for rope, 9 for GELU, 1 for a sum."""
    L, D, H = sum(lengths), config.hidden_size, config.intermediate_size
    product = lambda i, o: (2 * L * i * o, itemsize * (L * i + L * o + i * o))
    return {
        "norms": (2 * 8 * L * D, itemsize * 4 * L * D),
        "wqkv": product(D, 3 * D),
        "rope": (3 * 2 * L * D, itemsize * 4 * L * D + 4 * L * config.head_dim),
        "attention": (4 * D * sum(n * n for n in lengths), itemsize * 4 * L * D),
        "wo": product(D, D),
        "fc0": product(D, H),
        "gelu": (9 * L * H, itemsize * 2 * L * H),
        "fc1": product(H, D),
        "residuals": (2 * L * D, itemsize * 6 * L * D),
    }


# %%
lab, published = MoonViTConfig.preset("lab"), MoonViTConfig.preset("kimi-vl-a3b")
work, work_published = layer_work(lab, lengths, 4), layer_work(published, lengths, 2)
print("            FLOP a byte: lab, float32   published, bfloat16")
for name, (flops, moved) in work.items():
    print(f"{name:10s} {flops / moved:26.1f} {work_published[name][0] / work_published[name][1]:23.1f}")
block_flops = [sum(work[name][0] for name in ("wqkv", "wo", "fc0", "fc1")), work["attention"][0]]
formula = tower_flops(lab, grids)
assert [lab.num_hidden_layers * flops for flops in block_flops] == [formula["linear"], formula["attention"]]

# %% [markdown]
# The gap in the table is what matters: products and attention do tens to hundreds of FLOPs a byte, everything else about one. A machine whose ridge (peak over bandwidth) lies in the gap waits for arithmetic in the one
# group and for memory in the other. Now every operator in turn, and
# before and after them this machine's own peak and bandwidth, of which the better counts.

# %%
torch.manual_seed(0)
encoder = MoonVitPretrainedModel(lab, EncoderOptions(linear="plain")).eval()
block, meta = encoder.encoder.blocks[0], encoder.prepare_encoder_metadata(grids)
plain = ResolvedOptions.resolve(encoder.options, torch.device("cpu"), torch.float32)
x = torch.randn(L, lab.hidden_size)
qkv, hidden = block.wqkv(x).unflatten(-1, (3, 4, 72)), block.mlp.fc0(x)
stages = {
    "norms": lambda: (block.norm0(x), block.norm1(x)),
    "wqkv": lambda: block.wqkv(x),
    "rope": lambda: plain.rotate(qkv[:, :2], meta.rope_cos_sin),
    "attention": lambda: plain.attend(*qkv.unbind(1), meta),
    "wo": lambda: block.wo(x),
    "fc0": lambda: block.mlp.fc0(x),
    "gelu": lambda: F.gelu(hidden, approximate="tanh"),
    "fc1": lambda: block.mlp.fc1(hidden),
    "residuals": lambda: (x + x, x + x),
}
yardsticks = lambda: (1e3 * matmul_peak_tflops(torch.float32, size=1024), copy_gbps(mib=64))
before, timed, after = yardsticks(), time_interleaved(stages, warmup=2, repeats=7), yardsticks()
peak, gbps = map(max, before, after)
operators = {name: attention.Operator(*work[name], timed[name]) for name in stages}

# %% tags=["nbval-ignore-output"]
print(f"peak {peak:.0f} GFLOP/s, copy {gbps:.1f} GB/s, ridge {peak / gbps:.0f} FLOP a byte")
print("operator    bound by     predicted ms   measured ms (p20 to p80)  ratio")
for name, one in operators.items():
    compute, memory = one.flops / peak / 1e6, one.bytes / gbps / 1e6
    t, least = one.time, max(compute, memory)
    spread = f"{t.p50_ms:7.2f} ({t.p20_ms:.2f} to {t.p80_ms:.2f})"
    print(f"{name:11s} {'arithmetic' if compute > memory else 'bytes':12s} {least:11.2f}   {spread:25s} {t.p50_ms / least:5.1f}")

# %%
subtitle = plots.measured_on("cpu", f"one lab block, {L:,} patches, float32, threads: {torch.get_num_threads()}")
title = "One block: products hang under the flat roof, the passes between them under the slope"
fig, axes = attention.roofline(operators, peak, gbps, title=title, subtitle=subtitle)
plt.show()
intensity = {name: one.flops / one.bytes for name, one in operators.items()}
assert max(intensity[name] for name in ("norms", "rope", "gelu", "residuals")) < 2
assert min(intensity[name] for name in ("wqkv", "attention", "wo", "fc0", "fc1")) > 50

# %% [markdown]
# *How to read it:* the light line from a mark up to the roof is what a better implementation could win, and no more; a square above the slope worked in a cache that is faster than the memory which the copy measured. A square far
# below it, as GELU may be, is bound by something that neither roof shows: its tanh is much work that a count of FLOPs takes for one.
#
# ### The passes that can vanish
#
# GELU and the residuals read what a product has just written. `fused_linear` lets the CPU's library (oneDNN) apply them to each tile of the product while it is at hand, with the weight in the library's own blocked layout, made once.
# The
# whole encoder, both ways:

# %%
names = ["plain"] + ["prepacked"] * (packed_unavailable("prepacked", torch.device("cpu"), torch.float32) is None)
features = {}
for name in names:
    encoder.set_options(linear=name)
    features[name] = encoder(pixels, pair)
equal = all(relative_error(one, features["plain"]) < 1e-5 for one in features.values())
print("equal to 1e-5:", equal)
assert equal

# %% tags=["nbval-ignore-output"]
kernels = {n: ResolvedOptions.resolve(EncoderOptions(linear=n), torch.device("cpu"), torch.float32) for n in names}
blocks = {name: lambda name=name: block(x, meta, kernels[name]) for name in names}
for name, t in (timing := time_interleaved(blocks, warmup=2, repeats=7)).items():
    ratio = timing["plain"].p50_ms / t.p50_ms
    print(f"{name:10s} {t.p50_ms:6.1f} ms (p20 {t.p20_ms:.1f}, p80 {t.p80_ms:.1f})  plain / this {ratio:.2f}")
saved = work["gelu"][1] + work["residuals"][1] - 2 * 4 * L * lab.hidden_size  # a residual itself is still read
print(f"bytes that are not moved any more: {saved / sum(moved for _, moved in work.values()):.0%} of the block's")

# %% [markdown]
# ## What to remember
#
# - A mask over a batch of $m$ pictures wastes up to $1 - 1/m$ of its scores, and $L^2$ bytes or more. Offsets say the same in $4(m+1)$ bytes.
# - `cu_seqlens` is data that the kernel reads; `max_seqlen` sizes its launch. Larger than needed is harmless, smaller leaves rows unwritten without an error. Both count **patches**.
# - Separation is tested for equal bits, with NaN in the neighbour; only ways that never touch a row keep its NaN out.
# - Products and attention are bound by arithmetic, the rest by bytes; fuse the rest into the products.

# %% tags=["result"]
print(f"Five photographs under one mask: {1 - squares / L**2:.0%} of the scores thrown away; 8 pictures of 64 x 64: a mask of 1 GiB.")
print(f"Bound in tokens for patches: a picture that fills its budget loses {missing[1]:,} of {lengths[2]:,} rows, without an error.")

# %% [markdown]
# ## Exercises
#
# Solved in [solutions/40_packed_attention__SOLUTION.ipynb](solutions/40_packed_attention__SOLUTION.ipynb).
#
# **1.** A bound in merged tokens loses no row if there are enough pictures of one size in the batch. From how many on?

# %%
answer_1 = None  # a number of pictures

if answer_1 is None:
    print("not answered yet")
else:
    for count in (answer_1 - 1, answer_1):
        out = varlen_kernel(*torch.randn(3, 256 * count, 1, 72), 256 * torch.arange(count + 1), max_seqlen=64 * count)
        assert bool(out.isnan().any()) == (count < answer_1)

# %% [markdown]
# **2.** Write the packing that needs the fewest calls: from the lengths of the pictures in the order in which they came, the order in which to pack them, and the order that brings the results back.


# %%
def packing_order(lengths):
    return None  # (order, back): lists of picture numbers


if packing_order([5, 3, 5]) is None:
    print("not answered yet")
else:
    order, back = packing_order([48, 16, 48, 32, 16, 48])
    packed = [[48, 16, 48, 32, 16, 48][index] for index in order]
    assert sorted(order) == list(range(6)) and [order[index] for index in back] == list(range(6))
    assert sum(a != b for a, b in zip(packed, packed[1:], strict=False)) == 2

# %% [markdown]
# ## References
#
# - [FlashAttention-2](https://arxiv.org/abs/2307.08691): tiles of queries, keys in a loop, no score matrix in memory; [its repository](https://github.com/Dao-AILab/flash-attention) holds `flash_attn_varlen_func`.
# - [torch.nn.attention.varlen](https://docs.pytorch.org/docs/stable/nn.attention.varlen.html): the same interface inside torch.
# - [NaViT, Patch n' Pack](https://arxiv.org/abs/2307.06304): pictures of any size packed into one sequence.
# - [vLLM pull request 41992](https://github.com/vllm-project/vllm/pull/41992), as read in release 0.32: CUDA graphs of Kimi-VL's encoder.
# - [Roofline, Williams, Waterman and Patterson, 2009](https://doi.org/10.1145/1498765.1498785).
