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
#     question: How does attention keep the images of one batch apart, and what does each way cost?
#     minutes_cpu: 1
#     gpu: optional
#     data: images of data/images, sizes of data/workloads
# ---

# %% [markdown]
# # Packed attention: many images in one sequence
#
# [Map of the course](00_start_here.ipynb) · [Glossary](GLOSSARY.md) · [Notation](NOTATION.md) · previous: [30 RoPE in two dimensions](30_rope_2d.ipynb) · next: [50 Tensor parallel or data parallel](50_tp_versus_dp.ipynb)
#
# Lesson 30 turned queries and keys by their positions. Attention now compares them, but only
# inside one image.
#
# ## The question
#
# How does attention keep the images of one batch apart, and what does each way cost?

# %% [markdown]
# ## You will be able to
#
# - **compute** what a mask over a batch costs, in scores and in memory;
# - **diagnose** patches that an attention kernel never computed, from `cu_seqlens` and
#   `max_seqlen`;
# - **place** each operator of a block under a roofline, and say what it waits for.
#
# ## Needs
#
# Lesson [00](00_start_here.ipynb). Reading and solving takes about 90 minutes. The notebook runs
# in about a minute on a CPU. With a GPU the measurements run on it, with real kernels; without
# one, a loop of a dozen lines shows what they do.
#
# ## Versions and machine

# %% tags=["nbval-ignore-output"]
import warnings

import torch

warnings.filterwarnings("ignore", message="IProgress not found")  # about a widget that is not used
from kimivl_lab.measure.provenance import device_name, versions

device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
print(device_name(device))
print(versions())

# %%
from dataclasses import replace
from functools import partial

import matplotlib.pyplot as plt
from PIL import Image

from kimivl_lab import KimiVLImageProcessor, MoonViTConfig, MoonVitPretrainedModel
from kimivl_lab import image_geometry, plots
from kimivl_lab.datasets import sample_images
from kimivl_lab.kernels.packed_attention import attend_packed, attention_unavailable
from kimivl_lab.lessons import varlen
from kimivl_lab.lessons.block_operators import block_work, time_block
from kimivl_lab.lessons.checks import check, check_function
from kimivl_lab.lessons.guesses import Comparison, compare, guess
from kimivl_lab.measure.accuracy import relative_error
from kimivl_lab.measure.memory import peak_memory_mib
from kimivl_lab.measure.timing import time_interleaved
from kimivl_lab.moonvit.attention import ATTENTION_BACKENDS
from kimivl_lab.plots import attention

# %% [markdown]
# ## Mask: the simplest way to keep images apart
#
# [Attention](GLOSSARY.md#attention) is the only step of a block in which patches look at each
# other. Every other step treats each patch alone. So the patches of all images can stand in one
# [packed sequence](GLOSSARY.md#packed-sequence). Only attention must know where an image ends: a
# patch may look only at patches of its own image.
#
# The simplest way is a [mask](GLOSSARY.md#mask). Take two images, the first of 2 patches and the
# second of 3. Together they have $L = 5$ patches, so one head has $5 \cdot 5 = 25$
# [scores](GLOSSARY.md#score). The figures are drawn in `kimivl_lab/plots/attention.py`.

# %%
plots.use_style()
_ = torch.set_grad_enabled(False)
two_images = [2, 3]  # patches of each image
matrices = varlen.mask_matrices(two_images)
fig, axes = attention.mask_steps(matrices, two_images, title="A mask hides computed scores")
plt.show()

# %% [markdown]
# *How to read it:* (1) Each query is multiplied with each key. (2) The mask is 1 where query and
# key are of the same image. (3) Where the mask is 0, the score is replaced by minus infinity. (4)
# The [softmax](GLOSSARY.md#softmax) turns minus infinity into 0, and the weights of each row sum
# to 1. So each patch looks only at its own image. But 12 of the 25 scores were computed for
# nothing.

# %% [markdown]
# ## Predict: how many scores does a mask throw away?
#
# By hand: the two images need $2^2 + 3^2 = 13$ scores, and the mask computes $(2 + 3)^2 = 25$.
# The wasted part is $1 - 13/25 = 48\,\%$. In general, where each image has its own $n$:
#
# $$\text{waste} = 1 - \frac{\sum n^2}{(\sum n)^2}$$
#
# If all $m$ images have the same $n$, this is $1 - mn^2 / (mn)^2 = 1 - 1/m$. Four equal images
# waste 75 %.
#
# **Your code.** Write the waste as a number from 0 to 1.


# %%
def waste(lengths):
    """lengths: patches of each image."""
    return ...


check_function(
    "waste of a mask",
    waste,
    [((n,), varlen.mask_waste(n)) for n in ([2, 3], [7], [4, 4, 4, 4], [1, 9])],
    rtol=1e-6,
    hint="square each length and add; then add the lengths and square",
)

# %% [markdown]
# **Your guess.** A batch holds the three photographs of lesson 00, a fourth one and a thin icon.
# Which part of the scores does a mask throw away, in %? Estimate; do not compute.

# %%
names = ["astronaut", "chelsea", "china", "coffee", "tall_icon"]
opened = {name.removeprefix("tall_"): Image.open(sample_images()[name]) for name in names}
pictures = {name: (image, image_geometry(*image.size)) for name, image in opened.items()}
sizes = {name: geometry.patches for name, (_, geometry) in pictures.items()}
print(sizes)
waste_guess = guess("scores thrown away", None, unit="%")

# %% tags=["headline"]
lengths = list(sizes.values())
L, needed = sum(lengths), sum(n * n for n in lengths)
print(f"with a mask {L * L:,} scores in each head, needed {needed:,}")
compare(Comparison(waste_guess, predicted=100 * (1 - needed / L**2)))
counts = [1, 2, 4, 8, 16, 32]
workloads = {"photographs (COCO)": "coco_val2017", "clip art": "clipart"}
wasted = {words: varlen.mean_waste(name, counts) for words, name in workloads.items()}
m = torch.logspace(0, 5, 60, base=2)
bound = ("equal images: 1 - 1/m", m, 1 - 1 / m)
title = f"A mask computes {L * L / needed:.1f} times the scores that these images need"
fig, axes = attention.packed_mask(pictures, counts, wasted, bound=bound, title=title)
plt.show()

# %% [markdown]
# *How to read it:* left, the scores of the five images, to scale. The coloured squares are
# needed; the hatched area is computed for nothing. Right, the mean waste of 40 random batches.
# Photographs are so similar in size that they follow $1 - 1/m$: with eight, seven eighths of the
# scores are thrown away. The sizes of clip art differ more, so a mask wastes less.

# %% [markdown]
# ## Predict: how much memory does a mask take?
#
# A mask has one byte for each pair of patches: $L^2$ bytes, 25 for the two images above. Some
# kernels need numbers to add to the scores (0 or minus infinity). For them torch makes a second
# matrix, with 4 bytes a pair in [float32](GLOSSARY.md#float32) or 2 in
# [bfloat16](GLOSSARY.md#bfloat16).
#
# By hand: 8 images of $32 \times 32$ patches have $L = 8 \cdot 1{,}024 = 8{,}192$. The mask takes
# $8{,}192^2 = 67$ million bytes, 64 MiB. In float32 both matrices take 320 MiB, 5 times as much.
# For 8 images of $64 \times 64$ patches $L$ is 4 times as large, and the mask 16 times: 1 GiB.
#
# Three ways compute the needed scores. A **run** is a series of neighbours in the batch with the
# same number of patches.
#
# | way | name in the library | calls | scores | memory beyond the result |
# |---|---|---|---|---|
# | one call with a mask | `"sdpa_masked"` | 1 | $L^2$ | $L^2$ bytes, or $(1 + s) L^2$ |
# | a loop over the images | `"sdpa"` | one for each run | $\sum n^2$ | the result of each call, until all are joined |
# | one variable-length kernel | `"flash_attn"`, `"torch_varlen"` (GPU); `"simd"`, `"amx"` (CPU) | 1 | $\sum n^2$ | offsets, $4(m + 1)$ bytes |
#
# Here $s$ is the number of bytes of one number. The fast kernels never store all the scores. In
# the loop, twelve images in the order large, small, large, small, ... need 12 calls; sorted by
# size they need 2. On a GPU each call is a launch, so the order of the images matters (exercise
# 3).

# %% [markdown]
# ## Build: offsets instead of a mask
#
# The variable-length kernel takes two things instead of a mask:
#
# - [`cu_seqlens`](GLOSSARY.md#cu_seqlens), the offsets at which the images begin and end. For the
#   images of 2 and 3 patches they are 0, 2, 5: image 1 has the patches 0 and 1, image 2 has the
#   patches 2, 3 and 4.
# - [`max_seqlen`](GLOSSARY.md#max_seqlen), a bound: no image has more patches. Here it is 3.
#
# A batch can have more slots than images. Unused slots repeat the last offset: 0, 2, 5, 5 has a
# third slot without patches. The library makes the offsets and the bound from the images' grids:

# %%
tower = MoonVitPretrainedModel(MoonViTConfig.preset("tiny")).eval()
grids = [geometry.grid_hw for _, geometry in pictures.values()]
metadata = tower.prepare_encoder_metadata(grids, max_images=8)
print("cu_seqlens", metadata.cu_seqlens.tolist())
print("max_seqlen", metadata.max_seqlen, "patches")

# %% [markdown]
# **Why is `max_seqlen` needed, if the offsets say everything?** A GPU kernel runs as many small
# **programs** side by side. Here each program computes one **tile**: the results of up to 64
# queries of one image. At the [launch](GLOSSARY.md#kernel-launch) the host says how many programs
# there are. But the offsets are on the [device](GLOSSARY.md#host-and-device), and reading them
# would make the host wait. So the host launches, for every slot, enough programs for the longest
# image: $\lceil \text{max\_seqlen} / 64 \rceil$. The symbols $\lceil\;\rceil$ mean: rounded up.
#
# By hand: max_seqlen is 1,472, so each slot gets $1{,}472 / 64 = 23$ programs, and 8 slots get
# 184 programs. The icon has 444 patches and needs 7 of its 23. The other 16 read the offsets,
# find that their tile begins behind the image, and return at once.

# %%
slots = sizes | {f"empty slot {number}": 0 for number in (6, 7, 8)}
panels = {
    "bound 1,472, in patches: 23 tiles": (slots, 1472),
    "bound 698, too small: 11 tiles": ({"china": 1472, "coffee": 1320}, 698),
}
title = "The bound decides how many programs run, the offsets decide which have work"
fig, axes = attention.launch_grid(panels, 64, title=title)
plt.show()

# %% [markdown]
# *How to read it:* each line is a slot, and each square is one program. A dark square computes 64
# queries of its image. An empty square has no work and returns at once. In the lower part the
# bound is too small: the launch ends at tile 11, and nothing computes the crossed tiles.
#
# **Your code.** List the programs that have work, as (first query, query after the last), image
# by image. For the offsets 0, 5, 7, the bound 5 and tiles of 4 queries, each image gets
# $\lceil 5/4 \rceil = 2$ programs, and the list is `[(0, 4), (4, 5), (5, 7)]`.


# %%
def programs_with_work(cu_seqlens, max_seqlen, tile):
    return ...


cases = [([0, 5, 7], 5, 4), ([0, 5, 7], 8, 4), ([0, 2, 5, 5], 3, 2), ([0, 5, 7], 4, 4)]
check_function(
    "programs that have work",
    programs_with_work,
    [(case, varlen.programs(*case)) for case in cases],
    hint="for each image and tile number t: from start + t * tile to the next tile or the end",
)

# %% [markdown]
# In the last case the bound is too small: the second tile of the first image is missing.
#
# The complete kernel follows, with a loop in place of programs that run side by side. Its result
# begins as NaN, "not a number", because a GPU kernel's result begins as memory that nobody has
# written.


# %%
def varlen_kernel(q, k, v, cu_seqlens, max_seqlen, tile=64):
    """(L, heads, d) each -> (L, heads, d). One turn of the inner loop is one program."""
    out = torch.full_like(q, float("nan"))
    for image in range(len(cu_seqlens) - 1):
        for t in range(-(-max_seqlen // tile)):  # from the bound alone, rounded up
            start, end = cu_seqlens[image : image + 2].tolist()  # read inside the kernel
            first, last = start + t * tile, min(start + (t + 1) * tile, end)
            if first < end:
                scores = torch.einsum("qhd,khd->hqk", q[first:last], k[start:end])
                weights = (scores / q.shape[-1] ** 0.5).softmax(-1)
                out[first:last] = torch.einsum("hqk,khd->qhd", weights, v[start:end])
    return out


# %% [markdown]
# ## Build: what a bound that is too small leaves out
#
# A bound that is too large launches programs without work. A bound that is too small launches no
# program for the last patches of a long image. There is no error: their results are what the
# memory held before.
#
# The mistake is easy, because the encoder counts in two units: patches, and
# [tokens](GLOSSARY.md#token) of four patches. vLLM 0.32, as read, captures its [CUDA graphs of
# Kimi-VL](https://github.com/vllm-project/vllm/pull/41992). Their `max_seqlen` is the
# [budget](GLOSSARY.md#budget) in **tokens**, but attention counts **patches**.
#
# By hand: the photograph china has 1,472 patches, 368 tokens. The bound 368 gives
# $\lceil 368 / 64 \rceil = 6$ tiles, and these are 384 patches. The other
# $1{,}472 - 384 = 1{,}088$ patches are left out, 74 %.
#
# **Your guess.** Now four photographs share the batch, and the bound is the tokens of all four
# together, 1,246. Which part of all patches is left out, in %?

# %%
lost_guess = guess("patches left out of four images", None, unit="%")

# %%
torch.manual_seed(0)
batches, left_out = {}, {}
for group in (["china"], ["china", "coffee"], ["astronaut", "chelsea", "china", "coffee"]):
    n = [sizes[name] for name in group]
    tokens = sum(n) // 4
    x = torch.randn(3, sum(n), 1, 72)
    lost = varlen.lost_patches(varlen_kernel, *x, n, max_seqlen=tokens)
    left_out[len(group)] = sum(lost) / sum(n)
    print(f"bound {tokens:,}: left out {dict(zip(group, lost, strict=True))}")
    shown = zip(group, n, lost, strict=True)
    batches[f"bound {tokens:,}"] = {name: (pictures[name], a - gone) for name, a, gone in shown}
compare(Comparison(lost_guess, predicted=100 * left_out[4]))

# %%
(one, two, four) = batches.items()
title = "No error, and the lower parts of the images are never computed"
subtitle = f"bound: the tokens of the batch, rounded up to tiles of 64  ·  {plots.COUNTED}"
lines = [dict([one, two]), dict([four])]
fig, ax = attention.missing_rows(lines, title=title, subtitle=subtitle)
plt.show()

# %% [markdown]
# *How to read it:* the results of the hatched patches are whatever the memory held before. With
# more images the bound grows, so less is missing.
#
# Nothing is missing if the batch has at least four times as many patches as its longest image.
# So a test with many small images passes, and one large photograph in production fails. The test
# that finds the mistake sends **one** image that fills the budget, and compares the **values**
# with those without a graph.
#
# The library makes the bound from the same grids as the offsets, in patches. Where it can read
# the offsets, it refuses a bound that is too small:

# %%
torch.manual_seed(0)
q, k, v = torch.randn(L, 3, 4, 72).unbind(1)
try:
    attend_packed(q, k, v, metadata.cu_seqlens, L // 4, "sdpa")
except ValueError as error:
    print("refused:", error)

# %% [markdown]
# ## Check equality: every way gives the same values
#
# All ways are compared with `"eager"`, which computes one image after another by the formula. The
# last line is a control that must fail: one segment over all patches, as if the batch were a
# single image.

# %%
want = ATTENTION_BACKENDS["eager"](q, k, v, metadata)
offsets, one_segment = metadata.cu_seqlens, torch.tensor([0, L], dtype=torch.int32)
results = {name: ATTENTION_BACKENDS[name](q, k, v, metadata) for name in ("sdpa_masked", "sdpa")}
results["varlen_kernel"] = varlen_kernel(q, k, v, offsets, metadata.max_seqlen)
results["a bound 10 times as large"] = varlen_kernel(q, k, v, offsets, 14720)
results["control: one segment"] = varlen_kernel(q, k, v, one_segment, L)
for name, got in results.items():
    print(f"{name:26s} equal: {relative_error(got, want) < 1e-6}")

# %% [markdown]
# ## Check equality: no image changes another
#
# Your result must not depend on who else is served at the same moment, not even by a rounding
# error. So this test compares bits. The encoder encodes two images, and then again with the
# patches of the second image in reverse order. The control is again one segment over both images.

# %%
first, second = pictures["chelsea"], pictures["icon"]
n, pair = first[1].patches, [first[1].grid_hw, second[1].grid_hw]
pixels = KimiVLImageProcessor()([first[0], second[0]]).pixel_values
changed = torch.cat((pixels[:n], pixels[n:].flip(0)))
apart = tower.prepare_encoder_metadata(pair)
total = len(pixels)
together = replace(apart, cu_seqlens=offsets.new_tensor([0, total]), max_seqlen=total)
cases = {"mask": ("sdpa_masked", apart), "loop": ("sdpa", apart), "control": ("sdpa", together)}
for name, (way, case) in cases.items():
    tower.set_options(attention=way)
    before, after = (tower(x, encoder_metadata=case)[: n // 4] for x in (pixels, changed))
    print(f"{name:8s} the first image has equal bits: {torch.equal(before, after)}")

# %% [markdown]
# The mask passes, but only with finite numbers. It multiplies the other image by a weight of 0,
# and $0 \cdot \text{NaN} = \text{NaN}$. Here every value of all images but the first is NaN:

# %%
broken = v.clone()
broken[lengths[0] :] = float("nan")
for way in ("sdpa_masked", "sdpa", "eager"):
    clean = ATTENTION_BACKENDS[way](q, k, broken, metadata)[: lengths[0]].isfinite().all()
    print(f"{way:12s} the first image stays finite: {bool(clean)}")

# %% [markdown]
# With a mask, one broken image spoils the whole batch. The other two ways, and a variable-length
# kernel, take one image at a time. They never touch another image's values.

# %% [markdown]
# ## Measure: mask, loop and kernel
#
# **Your guess.** For the five images the mask computes 4.4 times the scores. How many times
# longer does it take than the loop?

# %%
slower_guess = guess("time of the mask over time of the loop", None)
dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
kernels = ["flash_attn", "torch_varlen", "simd"]
kernels = [way for way in kernels if not attention_unavailable(way, device, dtype)]
ways = ["sdpa_masked", "sdpa", *kernels]

# %% tags=["nbval-ignore-output"]
x, there = [one.to(device, dtype) for one in (q, k, v)], metadata.to(device)
runs = {way: partial(ATTENTION_BACKENDS[way], *x, there) for way in ways}
timed = time_interleaved(runs, device=device, warmup=1, repeats=5)
for way, t in timed.items():
    right = relative_error(runs[way]().float().cpu(), want) < 1e-2
    print(f"{way:12s} {t.p50_ms:8.2f} ms ({t.p20_ms:.2f} to {t.p80_ms:.2f}), right: {right}")
ratio = timed["sdpa_masked"].p50_ms / timed["sdpa"].p50_ms
compare(Comparison(slower_guess, predicted=L * L / needed, measured=ratio))

memory = {f"{way}, measured": [] for way in ways[:3]}
for count in (4, 6, 8, 10):
    there = tower.prepare_encoder_metadata([(32, 32), (32, 30)] * (count // 2)).to(device)
    x = torch.randn(3, there.num_patches, 1, 72).to(device, dtype)
    for points, way in zip(memory.values(), ways, strict=False):
        mib = peak_memory_mib(partial(ATTENTION_BACKENDS[way], *x, there), device)
        points += [] if mib is None else [(there.num_patches, mib)]

# %% [markdown]
# The ratio is not exactly that of the scores: the mask is also built, turned into numbers, and
# read by every head. On a CPU with AVX2 or AVX-512 the third line is the library's own kernel,
# its default there. The same cell measured memory. Its batches alternate between two sizes, so
# each image is a run.

# %%
patches = [1024 * 2**step for step in range(9)]
curves = varlen.memory_curves(patches, dtype.itemsize)
mark = (8 * 4096, (8 * 4096) ** 2 / 2**20, "8 images of 64 x 64: 1 GiB")
subtitle = plots.measured_on(device, "one head, images of about 1,000 patches; lines by formula")
title = "A mask grows with the square of the batch, a loop with the batch"
fig, ax = attention.memory_growth(patches, curves, memory, mark, title=title, subtitle=subtitle)
plt.show()

# %% [markdown]
# *How to read it:* twice the patches are four times the mask, but only twice the loop. Marks on
# the upper line say that torch makes the second matrix on this machine. The loop holds the
# results of its calls, then the joined result, and some buffers: a few MiB. A kernel's mark is
# its result; offsets take some bytes.

# %% [markdown]
# ## Measure: the real kernel on a GPU
#
# On a GPU this cell gives the bound in tokens to the kernels that engines use. `lost_patches` (in
# `kimivl_lab/lessons/varlen.py`) fills memory with NaN, frees it, runs the kernel and counts the
# patches whose result is wrong. Real kernels may have larger tiles and lose fewer patches.
# Without a GPU only the kernel of this lesson runs.

# %% tags=["nbval-ignore-output"]
real = {name: partial(attend_packed, backend=name) for name in kernels if name != "simd"}
for name, attend in ({"varlen_kernel": varlen_kernel} | real).items():
    for n in ([1472], [1472, 1320], [1444, 748, 1472, 1320]):
        x = torch.randn(3, sum(n), 4, 72).to(device, dtype)
        lost, right = (varlen.lost_patches(attend, *x, n, bound) for bound in (sum(n) // 4, max(n)))
        print(f"{name:14s} bound in tokens: {sum(lost):5,} lost, in patches: {sum(right)} lost")
if not real:
    print("no real kernel here:", attention_unavailable("torch_varlen", device, dtype))

# %% [markdown]
# **What a head of 72 features costs.** FlashAttention-2 rounds the size of a head up to a
# multiple of 32 (up to 128). A head of $d = 72$ features runs in the kernel for 96, and zeros
# fill the other 24. So the kernel does $96 / 72 = 1.33$ times the FLOPs that the formula counts.
# A head of 64 or 96 features would waste nothing.

# %% [markdown]
# ## Measure: one block under the roofline
#
# Attention is one of nine operators of a block. By hand, for one image of $n = 1{,}472$ patches
# in float32: attention does $4n^2D$ FLOPs and moves $4nD$ numbers of 4 bytes. That is
# $n / 4 = 368$ FLOPs for each byte. A residual adds two numbers: 1 FLOP for 12 bytes (two numbers
# read, one written), or 0.08 FLOPs for each byte. The formulas of all nine are in
# `kimivl_lab/lessons/block_operators.py`.

# %%
lab, published = MoonViTConfig.preset("lab"), MoonViTConfig.preset("kimi-vl-a3b")
work_published = block_work(published, lengths, 2)
print("FLOPs for each byte   lab, float32   published, bfloat16")
for name, (flops, moved) in block_work(lab, lengths, 4).items():
    flops_published, moved_published = work_published[name]
    print(f"{name:19s} {flops / moved:14.1f} {flops_published / moved_published:21.1f}")

# %% [markdown]
# The [ridge](GLOSSARY.md#ridge) of a machine is $p/b$, the FLOPs that it does while one byte
# moves. An operator with fewer FLOPs for each byte waits for memory. The ridge of a CPU is about
# 2 to 50, that of an H100 is 295.
#
# **Your guesses.** How many of the nine operators wait for memory on this machine? Which of them
# is furthest from its [roofline](GLOSSARY.md#roofline)?

# %%
memory_guess = guess("operators that wait for memory", None)
furthest_guess = guess("furthest from its roofline", None, choices=tuple(work_published))

# %% tags=["nbval-ignore-output"]
times = time_block(lab, grids, device=device, dtype=dtype)
p, b, work = times.gflops, times.gbps, block_work(lab, lengths, dtype.itemsize)
print(f"p = {p:,.0f} GFLOP/s, b = {b:,.1f} GB/s, ridge {p / b:.0f} FLOPs for each byte")
roofs = {name: max(flops / p, moved / b) / 1e6 for name, (flops, moved) in work.items()}  # ms
ratios = {name: times.operators[name].p50_ms / roof for name, roof in roofs.items()}
waiting = sum(flops / moved < p / b for flops, moved in work.values())
compare(Comparison(memory_guess, measured=waiting))
print(f"furthest: {max(ratios, key=ratios.get)}, your guess: {furthest_guess.value}")

# %%
operators = {name: attention.Operator(*work[name], t) for name, t in times.operators.items()}
note = f"one block, lab preset, {L:,} patches, {str(dtype).removeprefix('torch.')}"
subtitle = plots.measured_on(device, note)
title = "Products and attention wait for arithmetic, the rest for memory"
fig, axes = attention.roofline(operators, p, b, title=title, subtitle=subtitle)
plt.show()

# %% [markdown]
# *How to read it:* left, the roof is what this machine allows. The light line from a mark up to
# the roof is what a better implementation can win. A mark above the roof found its data in a
# cache, which is faster than memory. Right, the same operators as times. A mark far below the
# slope is slowed by something that neither roof shows, such as GELU's tanh: the count takes its
# many operations for a few.
#
# GELU and the residuals read what a product has just written. A kernel can apply them to each
# tile of the product before it is written. This is called **fusing**; on a CPU
# `EncoderOptions(linear="prepacked")` does it. Exercise 4 bounds what it wins.

# %% [markdown]
# ## What to remember
#
# - A mask over $m$ images of similar size wastes $1 - 1/m$ of its scores, and takes $L^2$ bytes
#   or more. Offsets say the same in $4(m + 1)$ bytes.
# - The kernel reads `cu_seqlens` while it runs. `max_seqlen` decides how many programs are
#   launched. A too large bound is harmless. A too small bound leaves patches uncomputed, without
#   an error. Offsets and bound count **patches**.
# - Separation is tested for equal bits, with a control that must fail, and with NaN in another
#   image. A mask does not stop NaN.
# - The matrix products and attention wait for arithmetic, and the other operators for memory, on
#   a machine whose ridge is between 1.2 and 70 FLOPs for each byte (lab preset, float32).

# %% tags=["result"]
print(f"Five images under one mask: {1 - needed / L**2:.0%} of the scores are thrown away.")
print(f"A bound in tokens: an image that fills its budget loses {left_out[1]:.0%} of its patches.")

# %% [markdown]
# ## On Monday
#
# - **Decide** which attention the encoder uses. You want a variable-length kernel. The
#   alternatives are a loop over the images (vLLM's SDPA path, as read in release 0.32) or a mask
#   (SGLang's, as read in release 0.5.23).
# - **Flags:** vLLM `--mm-encoder-attn-backend`, SGLang `--mm-attention-backend`. Both have the
#   default `None`: the server chooses by platform. Set the flag if the start-up log shows SDPA on
#   a GPU that has flash-attn.
# - **Check the choice:** send 8 photographs in one request and watch the GPU's memory peak. With
#   a mask the peak grows by about $3L^2$ bytes in bfloat16: 0.4 GB for 8 photographs of 1,472
#   patches, and four times as much for 16.
# - **Check the bound** if encoder CUDA graphs are on (vLLM `cudagraph_mm_encoder`, default
#   `false`): ask about the lower part of one large image, at temperature 0, with graphs and
#   without. If the answers differ, suspect `max_seqlen` (exercise 2).

# %% [markdown]
# ## Exercises
#
# Solutions, with the steps:
# [solutions/40_packed_attention__SOLUTION.ipynb](solutions/40_packed_attention__SOLUTION.ipynb).
#
# ### 1. The memory of a mask
#
# A batch has 16 photographs of $32 \times 46$ patches (h x w). A kernel in bfloat16 makes both
# matrices of the mask. How many GiB do they take?

# %%
answer_1 = None  # GiB

batch = 16 * image_geometry(640, 427).patches
check(
    "GiB of both matrices",
    answer_1,
    3 * batch**2 / 2**30,
    rtol=0.02,
    hint="L first; a pair takes 1 byte for yes or no, and one number of bfloat16",
    near={batch**2 / 2**30: "the first matrix alone", 5 * batch**2 / 2**30: "float32"},
)

# %% [markdown]
# ### 2. The image that shows the mistake (operator)
#
# A server has captured graphs for the budgets 64, 128, 256, 512 and 1,024 tokens. It replays the
# smallest budget that holds a batch. By mistake each graph has its budget in tokens as
# `max_seqlen`. The kernel has tiles of 128 queries. You send one image of 640 x 480 pixels (width
# x height). How many of its patches are never computed?

# %%
answer_2 = None  # patches

one = image_geometry(640, 480)
budget = next(size for size in (64, 128, 256, 512, 1024) if size >= one.tokens)
check(
    "patches never computed",
    answer_2,
    one.patches - sum(b - a for a, b in varlen.programs([0, one.patches], budget, 128)),
    hint="patches and tokens of the image; the budget that holds them; the tiles of that bound",
    near={one.patches - one.tokens: "the bound is the budget, not the tokens of the image"},
)

# %% [markdown]
# ### 3. The order of packing
#
# Write the packing that needs the fewest calls of the loop. Given the patches of each image,
# return two lists of image numbers: `order`, in which to pack them, and `back`, which brings the
# results back: `results[back[0]]` is the result of the image that came first.


# %%
def packing_order(lengths):
    return ...


came = [48, 16, 48, 32, 16, 48]
check(
    "calls, and whether back restores the order",
    varlen.packing_result(came, packing_order(came)),
    (len(set(came)), True),
    hint="sort the image numbers by length; back is the order that sorts this order",
)

# %% [markdown]
# ### 4. What fusing can win
#
# On one machine the operators of a block take 88.5 ms together. GELU takes 6.4 ms, the
# residuals 1.2 ms. A fused kernel would make both disappear, and with them 27 % of the bytes
# that a block moves. By which factor does the block become faster at most?

# %%
answer_4 = None  # a factor, above 1

check(
    "largest gain of fusing",
    answer_4,
    88.5 / (88.5 - 6.4 - 1.2),
    rtol=0.01,
    hint="time before over time after; which times disappear?",
    near={1 / (1 - 0.27): "bytes are not time: most of the block waits for arithmetic"},
)

# %% [markdown]
# ### 5. ★ Attention without all the scores
#
# A fast kernel never holds all scores of a query. It takes the keys in pieces. For each query it
# keeps the largest score so far, the sum of the exponentials, and the weighted sum of the
# values. When a later piece has a larger score, it scales both sums down. Write this attention:
# `q` is $(n, d)$; `keys` and `values` are lists of pieces, each (keys of the piece, $d$); the
# scale is $d^{-1/2}$. The second case has scores above 100. Their `exp` overflows unless the
# largest score is subtracted first.


# %%
def attend_in_pieces(q, keys, values):
    return ...


check_function(
    "attention in pieces",
    attend_in_pieces,
    varlen.pieces_cases(),
    rtol=1e-5,
    hint="new = maximum(old, largest of the piece); multiply both sums by exp(old - new)",
)

# %% [markdown]
# ## References
#
# - [FlashAttention-2](https://arxiv.org/abs/2307.08691) and
#   [its code](https://github.com/Dao-AILab/flash-attention), with `flash_attn_varlen_func`.
# - [torch.nn.attention.varlen](https://docs.pytorch.org/docs/stable/nn.attention.varlen.html):
#   the same in torch.
# - [NaViT, Patch n' Pack](https://arxiv.org/abs/2307.06304): images of any size in one sequence.
# - [vLLM pull request 41992](https://github.com/vllm-project/vllm/pull/41992): CUDA graphs of
#   Kimi-VL's encoder.
# - [Roofline](https://doi.org/10.1145/1498765.1498785), Williams, Waterman and Patterson, 2009.
#
# **Next:** up to here one process encodes a batch. Lesson 50 shares it among the GPUs of a
# server.
#
# [Map of the course](00_start_here.ipynb) · [Glossary](GLOSSARY.md) · [Notation](NOTATION.md) · previous: [30 RoPE in two dimensions](30_rope_2d.ipynb) · next: [50 Tensor parallel or data parallel](50_tp_versus_dp.ipynb)
