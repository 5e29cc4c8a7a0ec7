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
#     question: What does Kimi-VL's vision encoder compute, what should it cost, and where does the time go?
#     minutes_cpu: 1
#     gpu: optional
#     data: three photographs of data/images
# ---

# %% [markdown]
# # Start here: the encoder on one page
#
# [Glossary](GLOSSARY.md) · [Notation](NOTATION.md) · next: [10 From images to patches](10_images_to_patches.ipynb)
#
# ## The question
#
# What does Kimi-VL's vision encoder compute, what should it cost, and where does the time go?

# %% [markdown]
# ## You will be able to
#
# - **name** the shape of every tensor between a photograph and the language model;
# - **predict** the parameters, FLOPs and bytes of the encoder by hand, and confirm them with a
#   counter;
# - **decide** for each stage whether it waits for arithmetic or for memory, on your machine and
#   on four GPUs.
#
# ## Needs
#
# No other notebook. You know PyTorch at the level of `nn.Linear`. Reading and solving takes about
# 90 minutes. The notebook runs in about a minute on a laptop's CPU; with a GPU the same cells run
# there.
#
# Some cells ask for your guess or for your code. They hold `None` or `...`, which you replace. An
# unanswered cell passes and says so. Terms such as [patch](GLOSSARY.md#patch) lead to the
# glossary.
#
# ## Versions and machine
#
# The cell prints the machine, the versions, and one line for each thing that the course needs. A
# line that says FAIL also says what to do.

# %% tags=["nbval-ignore-output"]
import warnings

import torch

warnings.filterwarnings("ignore", message="IProgress not found")  # about a widget that is not used
from kimivl_lab.lessons.environment import print_environment
from kimivl_lab.measure.provenance import device_name, versions

device = "cuda" if torch.cuda.is_available() else "cpu"
print(device_name(device))
print(versions())
print_environment()

# %%
import matplotlib.pyplot as plt
from IPython.display import Markdown
from PIL import Image

from kimivl_lab import EncoderOptions, KimiVLConfig, KimiVLEncoder, KimiVLImageProcessor
from kimivl_lab import image_geometry, plots
from kimivl_lab.datasets import sample_images
from kimivl_lab.lessons.checks import check, check_function
from kimivl_lab.lessons.devices import devices
from kimivl_lab.lessons.guesses import Comparison, Guess, compare, guess
from kimivl_lab.lessons.minutes import course_map
from kimivl_lab.lessons.stages import flops_shares, stage_work, time_stages
from kimivl_lab.measure.accuracy import relative_error
from kimivl_lab.plots.guesses import guess_plot

plots.use_style()
_ = torch.set_grad_enabled(False)

# %% [markdown]
# ## Kimi-VL: what is encoded, and where the tokens go
#
# **Kimi-VL** is a model of Moonshot AI that reads images and text and writes text. It has three
# parts:
#
# 1. **MoonViT**, the [vision tower](GLOSSARY.md#vision-tower), turns each image into features. It
#    is a vision transformer: blocks of attention and MLPs over patches. Its training started from
#    the weights of an older one, SigLIP. It reads an image at its own resolution instead of
#    resizing it to a square.
# 2. The **projector** gives the features the width of the language model.
# 3. The **[language model](GLOSSARY.md#language-model)** reads the image's
#    [tokens](GLOSSARY.md#token) and the text's tokens as one sequence, and writes the answer.
#
# The first two parts together are the **encoder**. The prompt holds one
# [placeholder](GLOSSARY.md#placeholder) for each image token, and the encoder's output is written
# over these placeholders.
#
# MoonViT is a stack of 27 equal **blocks**. A block has two halves, and the input of each half is
# added to its output (the [residual](GLOSSARY.md#residual)). The words in the drawing are in the
# glossary: [norm](GLOSSARY.md#norm), [QKV](GLOSSARY.md#qkv), [RoPE](GLOSSARY.md#rope),
# [attention](GLOSSARY.md#attention), [MLP](GLOSSARY.md#mlp).
#
# ```text
#   x --+-- norm --> QKV --> RoPE --> attention --> output --(+)--+-- norm --> MLP --(+)--> x
#       |                                                     |   |                   |
#       +-----------------------------------------------------+   +-------------------+
#          each patch looks at the patches of its image            each patch alone
# ```
#
# **What serving costs.** The encoder runs once for each image, before the first word of the
# answer. The language model then runs once for every word. So the encoder's time is part of the
# [time to first token](GLOSSARY.md#ttft), and users wait for it.
#
# This is the map of the course. Lessons 10 to 40 follow an image through the encoder. The later
# lessons are about serving. "Minutes to do" are yours, "minutes to run" are the machine's. Three
# photographs lead through the course: **china**, **coffee** and **chelsea**, in lessons 10 to 40,
# 70 and 80.

# %% tags=["nbval-ignore-output"]
Markdown(course_map())

# %% [markdown]
# ### From pixels to tokens, with numbers
#
# An image becomes a [grid](GLOSSARY.md#grid) of patches of 14 x 14 pixels, and 2 x 2 patches
# become one token. So each side must be a multiple of 28 pixels. The photograph china.jpg has 640
# x 427 pixels (width x height):
#
# | | width | height |
# |---|---|---|
# | pixels | 640 | 427 |
# | rounded up to a multiple of 28 | 644 | 448 |
# | divided by 14: patches | 46 | 32 |
#
# The grid is written rows x columns: $h \times w = 32 \times 46$. The image has
# $n = 32 \cdot 46 = 1{,}472$ patches and $1{,}472 / 4 = 368$ tokens.
#
# **Your code.** Write the same steps for any image that is below the limit of 4,096 patches.


# %%
def tokens_of(width, height):
    return ...


sizes = [(640, 427), (600, 400), (28, 28), (29, 28), (1, 1), (700, 28)]
check_function(
    "tokens of an image",
    tokens_of,
    {size: image_geometry(*size).tokens for size in sizes},
    hint="round each side up to a multiple of 28 first; every 28 x 28 pixels are one token",
)

# %% [markdown]
# The patches of all images of a [batch](GLOSSARY.md#batch) stand in one list, the [packed
# sequence](GLOSSARY.md#packed-sequence). It has $L = \sum n$ lines. There is no filler between
# the images, so they need not have the same size. (Inside an image there can be filler: china.jpg
# grows from 640 x 427 to 644 x 448 pixels. The figure below hatches it.)

# %%
images = {name: Image.open(sample_images()[name]) for name in ("china", "coffee", "chelsea")}
geometries = {name: image_geometry(*image.size) for name, image in images.items()}
lengths = [geometry.patches for geometry in geometries.values()]
for name, one in geometries.items():
    print(f"{name:8s} grid (h x w) {one.grid_h} x {one.grid_w} = {one.patches:,} patches")
print(f"L = {sum(lengths):,} patches, T = {sum(lengths) // 4:,} tokens")

# %%
full = KimiVLConfig.preset("kimi-vl-a3b")
pictures = {name: (image, geometries[name]) for name, image in images.items()}
fig, ax = plots.encoder_diagram(pictures, full)
plt.show()

# %% [markdown]
# *How to read it:* a rectangle is a tensor, drawn to scale. Its height is the number of patches
# or tokens, its width the number of features. The merge puts four patches side by side, so its
# rectangle is four times wider and a quarter as tall. The squares below "attention" show that
# each image attends only to itself.

# %% [markdown]
# ## Predict: how many parameters?
#
# The parameters are the learned numbers, the [weights](GLOSSARY.md#weight). A linear map from $D$
# to $F$ features has $D \cdot F$ weights and $F$ biases. With $D = 1{,}152$ features, an MLP of
# width $F = 4{,}304$ and $N = 27$ blocks:
#
# | part | formula | numbers |
# |---|---|---|
# | QKV: $D$ to $3D$, and output: $D$ to $D$ | $4D^2$ | 5,308,416 |
# | MLP: $D$ to $F$ and back | $2DF$ | 9,916,416 |
# | biases and two norms | $9D + F$ | 14,672 |
# | **one block** | | 15,239,504 |
#
# Before the blocks, the patch embedding maps the $588 = 3 \cdot 14 \cdot 14$ numbers of a patch
# to $D$ features, and a table holds $64 \cdot 64$ learned position vectors. After them comes one
# norm.
#
# **Your guess.** How many parameters does the whole tower have, in millions?

# %%
parameters_guess = guess("parameters of the tower", None, unit="million")

# %%
vision, H = full.vision_config, full.text_config.hidden_size
D, F, N = vision.hidden_size, vision.intermediate_size, vision.num_hidden_layers
block_parameters = 4 * D * D + 2 * D * F + 9 * D + F
tower_parameters = (588 * D + D) + 64 * 64 * D + N * block_parameters + 2 * D
projector_parameters = 2 * D + (4 * D) ** 2 + 4 * D + 4 * D * H + H
print(f"D = {D:,}  F = {F:,}  N = {N}  H = {H:,}")
print(f"block {block_parameters:,}, tower {tower_parameters:,}, projector {projector_parameters:,}")
compare(Comparison(parameters_guess, predicted=tower_parameters / 1e6))

# %% [markdown]
# ## Predict: how many FLOPs and bytes?
#
# A [FLOP](GLOSSARY.md#flop) is one addition or multiplication. Take a product of a (2, 3) and a
# (3, 2) matrix. It has 4 results, and each result needs 3 multiplications and 3 additions: 24
# FLOPs in all. In general a product needs 2 · rows · shared size · columns, here
# $2 \cdot 2 \cdot 3 \cdot 2 = 24$.
#
# - A linear map from $D$ to $F$ costs $2DF$ FLOPs for each patch, whatever the image.
# - Attention multiplies twice, $QK^\top$ and scores times $V$. For $n$ patches of one image each
#   product costs $2n^2D$ FLOPs. This is the only cost that grows with the *square* of the image.
#
# A stage also moves **bytes**: it reads its input and its weights, and it writes its output. For
# example, QKV reads $L \cdot D$ numbers, reads $3D^2$ weights and writes $3 \cdot L \cdot D$
# numbers. For $L = 3{,}540$ in [bfloat16](GLOSSARY.md#bfloat16), at 2 bytes a number, this is
# $2 \cdot (4.08 + 3.98 + 12.23)$ million, 41 MB in each block.
#
# | stage, in one block | FLOPs | numbers read and written | weights |
# |---|---|---|---|
# | QKV and output | $2L \cdot 4D^2$ | $(1 + 3)LD + (1 + 1)LD$ | $4D^2$ |
# | attention | $4D \sum n^2$ | $(3 + 1)LD$ | |
# | norm (two of them) | | $(1 + 1)LD$ each | |
# | RoPE, on queries and keys | | $(2 + 2)LD$ | |
# | MLP | **yours** | **yours** | $2DF$ |
#
# The scores of attention are not in the table: a good [kernel](GLOSSARY.md#kernel) never writes
# them to memory. Residual additions and biases are left out. "FLOPs" here are those of matrix
# products; a norm or a GELU computes too, but little for each byte that it moves.
#
# **Your code.** The MLP has two maps: $D$ to $F$, then $F$ to $D$. Each reads its input, reads
# its weights and writes its output. Write the FLOPs and the bytes of the MLPs of all $N$ blocks.


# %%
def mlp_work(L, D, F, N, bytes_a_number):
    """FLOPs and bytes of all MLPs in one forward."""
    flops = ...
    moved = ...
    return None if flops is ... or moved is ... else (flops, moved)


lab = KimiVLConfig.preset("lab")
cases = [
    ((3540, 1152, 4304, 27, 2), stage_work(full, [3540], 2)["MLP"]),
    ((100, 288, 1076, 6, 4), stage_work(lab, [100], 4)["MLP"]),
]
hint = "two maps; each reads, multiplies and writes"
check_function("work of the MLPs", mlp_work, cases, hint=hint)

# %% [markdown]
# The formulas of the other stages are in `kimivl_lab/lessons/stages.py`. Here is the work of one
# forward over the three photographs. The last column is the [arithmetic
# intensity](GLOSSARY.md#arithmetic-intensity), FLOPs for each byte.

# %%
work = stage_work(full, lengths, itemsize=2)
print("stage             GFLOP       MB   FLOP/byte")
for stage, one in work.items():
    print(f"{stage:15s} {one.flops / 1e9:7.1f} {one.moved / 1e6:8.1f} {one.intensity:11.1f}")
total = sum(one.flops for one in work.values())
print(f"{'all':15s} {total / 1e9:7.1f} {sum(one.moved for one in work.values()) / 1e6:8.1f}")

# %% [markdown]
# ## Predict: what does a stage wait for?
#
# A device does $p$ FLOPs in a second and moves $b$ bytes in a second. A stage cannot finish
# before its FLOPs are done and its bytes are moved:
#
# $$t \ge \max\left(\frac{\text{FLOPs}}{p}, \frac{\text{bytes}}{b}\right)$$
#
# This bound is the [roofline](GLOSSARY.md#roofline). An H100 has $p = 989 \cdot 10^{12}$ and
# $b = 3{,}350 \cdot 10^9$. For the MLPs above, the arithmetic takes at least
# $1{,}895.6 / 989{,}000$ s = 1.92 ms, and the bytes take at least $2{,}621 / 3{,}350{,}000$ s =
# 0.78 ms. So the MLPs wait for arithmetic.
#
# The quick test: compare the intensity with $p / b$, the FLOPs that the device can do while one
# byte moves. Above $p / b$ a stage waits for arithmetic, below it for memory.
#
# **Your guess.** How large is $p / b$ for an H100, and for the machine that runs this notebook?

# %%
h100_guess = guess("p/b of an H100", None, unit="FLOP/byte")
here_guess = guess("p/b of this machine", None, unit="FLOP/byte")

# %%
print("data sheet, bfloat16   p, TFLOP/s   b, GB/s    p/b   wait for arithmetic")
for one in devices():
    busy = sum(of.intensity > one.flops_per_byte for of in work.values())
    speeds = f"{one.flops_per_s / 1e12:11.0f} {one.bytes_per_s / 1e9:10,.0f}"
    print(f"{one.name:22s} {speeds} {one.flops_per_byte:6.0f}   {busy} of {len(work)} stages")
h100 = next(one for one in devices() if one.name.startswith("H100"))
compare(Comparison(h100_guess, predicted=h100.flops_per_byte))

# %% [markdown]
# The MLP, attention, QKV and output, and the projector do more than 600 FLOPs for each byte. They
# wait for arithmetic on all four GPUs. The patch embedding does 220: it waits for arithmetic on
# the A100 and the H200, and for memory on the other two. Position, norms, RoPE and merge do no
# matrix products: they wait for memory everywhere.
#
# ### The batch pays for the weights
#
# Look at the weights alone. A linear map from $D$ to $F$ does $2DFL$ FLOPs for a batch of $L$
# patches and reads $2DF$ bytes of bfloat16 weights. That is $L$ FLOPs for each byte. With 3,540
# patches it is far above every $p / b$ of the table.
#
# A language model that writes one word at a time is the opposite case. It reads all its weights
# for **one** token, and does 1 FLOP for each byte. So writing waits for memory, and encoding
# waits for arithmetic. Storing the weights in fewer bytes makes writing faster; it does not make
# encoding faster.
#
# The features are moved too, and their bytes grow with $L$. So the intensity of a very large
# batch has a limit. For QKV and output it is $2L \cdot 4D^2 / (2 \cdot 6LD) = 2D/3 = 768$.

# %% [markdown]
# ## Predict: when does the square of attention matter?
#
# Attention costs $4n^2D$ in each block, and the MLP costs $4nDF$. They are equal when $n = F$.
#
# **Your guess.** How many patches must one image have, so that attention costs as much as *all*
# linear maps of a block, $2n(4D^2 + 2DF)$?

# %%
crossing_guess = guess("patches where attention equals the linear maps", None, unit="patches")

# %%
crossing = 2 * D + F  # 4 n^2 D = 2 n (4 D^2 + 2 D F)
compare(Comparison(crossing_guess, predicted=crossing))
patches = [4 * round(4 * 2 ** (step / 10)) for step in range(101)]
marks = {"limit 4,096": 4096, f"n = 2D + F = {crossing:,}": crossing, "limit 16,384": 16384}
title = "The MLP leads until attention's square catches up"
fig, ax = plots.flops_by_size(patches, flops_shares(full, patches), marks, title)
plt.show()

# %% [markdown]
# *How to read it:* for one image of the size on the lower axis, the height of a colour is that
# part's share of all FLOPs. At the published limit of 4,096 patches attention is still smaller
# than the MLP. At a limit of 16,384 patches it is more than twice all linear maps.

# %% [markdown]
# ## Build: the encoder in a dozen lines
#
# First, the published size is built on the [meta device](GLOSSARY.md#meta-device), which knows
# shapes and holds no values. torch's counter sees every matrix product.

# %%
from torch.utils.flop_counter import FlopCounterMode

with torch.device("meta"):
    skeleton = KimiVLEncoder(full, EncoderOptions(attention="sdpa"))
grids = [geometry.grid_hw for geometry in geometries.values()]
with FlopCounterMode(display=False) as counter:
    skeleton(torch.empty(sum(lengths), 3, 14, 14, device="meta"), grids)
print(f"{counter.get_total_flops():,} FLOPs for {len(grids)} images")

# %% [markdown]
# Then the [lab preset](GLOSSARY.md#lab-preset) is built. It is the same code with fewer and
# narrower blocks and random weights, so that a laptop runs it. The options select the plain
# reference of position and RoPE, which lessons 20 and 30 make faster.

# %%
torch.manual_seed(0)
options = EncoderOptions(position="interpolate", rope="complex")
encoder = KimiVLEncoder(lab, options).eval().to(device)
batch = KimiVLImageProcessor()(list(images.values()))
pixels, grid_hws = batch.pixel_values.to(device), batch.image_grid_hws
c = lab.vision_config
print(f"lab preset: D = {c.hidden_size}, F = {c.intermediate_size:,}, N = {c.num_hidden_layers}")
print("pixel_values", tuple(pixels.shape), " grids (h x w)", grid_hws.tolist())

# %% [markdown]
# **Your code: attention, one image at a time.** Queries, keys and values have the shape
# $(L, \text{heads}, d)$. For each image and head: scores $QK^\top / \sqrt{d}$, a
# [softmax](GLOSSARY.md#softmax) over the keys, then times $V$. The result has the shape of `q`.
# Use a loop over the images; `lengths` holds the number of patches of each. (`torch.split`,
# `transpose(0, 1)` and `torch.cat` are enough.)


# %%
def attend_each(q, k, v, lengths):
    """(L, heads, d) three times, and the patches of each image -> (L, heads, d)."""
    return ...


# %%
from kimivl_lab.kernels.packed_attention import sdpa_runs

torch.manual_seed(1)
q, k, v = torch.randn(3, 28, 2, 4)
two_images = (q, k, v, [24, 4])
one_image = (q[:4], k[:4], v[:4], [4])
check_function(
    "attention of each image",
    attend_each,
    [(two_images, sdpa_runs(*two_images)), (one_image, sdpa_runs(*one_image))],
    rtol=1e-5,
    hint="split all three by lengths; the softmax runs over the keys of the same image",
)

# %% [markdown]
# And this is the whole encoder. Everything that depends on the grids is built once, before the
# first block, by `prepare_encoder_metadata`: position embeddings, RoPE's angles, where each image
# begins, and the order of the merge. The grids stay on the [host](GLOSSARY.md#host-and-device).

# %%
from kimivl_lab.kernels.rotation import rotate_complex
from kimivl_lab.moonvit.attention import resolve_attention
from kimivl_lab.moonvit.merger import patch_merger_packed

tower, projector = encoder.vision_tower, encoder.multi_modal_projector
attend = resolve_attention("auto")
metadata = tower.prepare_encoder_metadata(grid_hws)
x = tower.patch_embed(pixels, metadata.pos_embeds)  # (L, D)
for block in tower.encoder.blocks:
    qkv = block.wqkv(block.norm0(x)).unflatten(-1, (3, block.num_heads, -1))  # (L, 3, heads, d)
    q, k = rotate_complex(qkv[:, :2], metadata.rope_cos_sin).unbind(1)  # (L, heads, d) each
    x = x + block.wo(attend(q, k, qkv[:, 2], metadata).flatten(1))  # (L, D)
    x = x + block.mlp(block.norm1(x))  # (L, D)
x = tower.encoder.final_layernorm(x)  # (L, D)
merged = patch_merger_packed(x, metadata.merge_gather_idx)  # (T, 4, D)
written_out = projector(merged)  # (T, H)
print(tuple(x.shape), tuple(merged.shape), tuple(written_out.shape))

# %% [markdown]
# ## Check equality: by hand, counted, and each image alone
#
# First, the numbers that were predicted by hand are compared with those that torch counts.

# %%
counted_tower = sum(p.numel() for p in skeleton.vision_tower.parameters())
counted_projector = sum(p.numel() for p in skeleton.multi_modal_projector.parameters())
pairs = {
    "tower parameters": (tower_parameters, counted_tower),
    "projector parameters": (projector_parameters, counted_projector),
    "FLOPs": (total, counter.get_total_flops()),
}
for name, (by_hand, counted) in pairs.items():
    print(f"{name:21s} by hand {by_hand:17,}   counted {counted:17,}   equal {by_hand == counted}")

# %% [markdown]
# Then two comparisons: the encoder that is written out above with the library's, and each image
# alone with the same image in the batch. The third line is a control, which must fail: it swaps
# rows and columns of every grid, so the patches get wrong places.

# %%
features = encoder.get_image_features(pixels, grid_hws)
parts = pixels.split(lengths)
alone = torch.cat([encoder(part, [grid]) for part, grid in zip(parts, grids, strict=True)])
swapped = encoder(pixels, [(w, h) for h, w in grids])
for name, other in {"written out": written_out, "alone": alone, "swapped": swapped}.items():
    equal = relative_error(other, features) < 1e-5
    print(f"{name:12s} equal to the library's encoder: {equal}")

# %% [markdown]
# ## Measure: where does the time go?
#
# Each stage is timed alone, on the tensors of the three photographs, in random order with the
# others. A stage that runs in every block is timed in one block and multiplied. A large matrix
# product and a large copy give this machine's own $p$ and $b$. The code is `time_stages` in
# `kimivl_lab/lessons/stages.py`.
#
# **Your guesses.** How long does one forward over the three photographs take on this machine,
# with the lab preset? Which stage takes the longest? Which part of the time, in %, do the four
# stages without matrix products take together (position, norms, RoPE, merge)?

# %%
time_guess = guess("one forward", None, unit="ms")
stage_guess = guess("slowest stage", None, choices=tuple(work))
share_guess = guess("time of the four stages", None, unit="%")

# %% tags=["nbval-ignore-output"]
times = time_stages(encoder, pixels, grid_hws, repeats=5)
lab_work = stage_work(lab, lengths, itemsize=4)
flops = sum(one.flops for one in lab_work.values())
p, b = times.flops_per_s, times.bytes_per_s
print(f"this machine: p = {p / 1e9:,.0f} GFLOP/s, b = {b / 1e9:.1f} GB/s, p/b = {p / b:.1f}")
print("stage           FLOPs   time   ms p50   roofline ms   ratio   waits for")
bound_ms = {stage: 1e3 * one.seconds(p, b) for stage, one in lab_work.items()}
for stage, one in lab_work.items():
    ms = times.stages[stage].p50_ms
    shares = f"{one.flops / flops:6.1%} {times.shares[stage]:6.1%}"
    waits = "arithmetic" if one.intensity > p / b else "memory"
    bound = bound_ms[stage]
    print(f"{stage:15s}{shares} {ms:8.1f} {bound:12.1f} {ms / bound:8.1f}   {waits}")

# %% tags=["nbval-ignore-output"]
no_products = sum(times.shares[stage] for stage, one in lab_work.items() if one.flops == 0)
slowest = max(times.shares, key=lambda stage: times.shares[stage])
print(f"slowest stage: {slowest}, your guess: {stage_guess.value}")
compare(Comparison(here_guess, measured=p / b), Comparison(share_guess, measured=100 * no_products))

# %%
rows = [Comparison(time_guess, sum(bound_ms.values()), times.whole.p50_ms)]
for stage in ("attention", "MLP", "QKV and output"):
    rows.append(Comparison(Guess(stage, None, "ms"), bound_ms[stage], times.stages[stage].p50_ms))
note = plots.measured_on(device, f"lab preset, {len(lengths)} photographs, float32")
fig, ax = guess_plot(rows, title="Your guess, the roofline, and the time", subtitle=note)
plt.show()

# %% [markdown]
# *How to read it:* "predicted" is the roofline with this machine's own $p$ and $b$. The forward
# and its three largest stages take one to about two times as long. Less than the roofline is
# possible, because $p$ and $b$ are measured too, at another moment. Your guess gets a mark once
# you have written it.

# %% tags=["headline"]
products = [stage for stage, one in lab_work.items() if one.flops]
largest = sorted(products, key=lambda stage: times.shares[stage])[-3:]
title = f"Three stages take {sum(times.shares[stage] for stage in largest):.0%} of the time"
note = f"lab preset, {len(lengths)} photographs, {sum(lengths):,} patches, float32"
fig, axes = plots.stage_profile(
    {stage: one.flops / flops for stage, one in lab_work.items()},
    times.stages,
    bound_ms,
    title=title,
    subtitle=plots.measured_on(device, note),
)
plt.show()

# %% [markdown]
# *How to read it:* left, a stage's share of the FLOPs (hatched) above its share of the time
# (plain). Right, its time divided by its roofline; 1 means that this machine allows no faster
# code. A ratio a little under 1 is again possible.
#
# **The answer to the question of this lesson.** The time goes where the FLOPs are. Attention, the
# MLP, and QKV and output have more than nine tenths of the FLOPs, and they take most of the time.
# The stages without matrix products still take a part of it. The roofline says what can be won
# there. A stage at ratio 1 gets faster only if it moves fewer bytes. A stage at a large ratio,
# such as position, takes much longer than the bytes of the table need: a better implementation
# can make it faster. Lesson 20 does this for position, and lesson 30 for RoPE.
#
# The lab preset is narrow: attention weighs more in it than in the published encoder (exercise
# 1).

# %% [markdown]
# ## What to remember
#
# - One [packed sequence](GLOSSARY.md#packed-sequence): $L = \sum n$ patches in, $L/4$ tokens out,
#   no filler between images.
# - A patch costs $2N(4D^2 + 2DF)$ FLOPs, plus $4NnD$ for the attention to its own image. The two
#   are equal at $n = 2D + F$, 6,608 patches for Kimi-VL.
# - A stage with more than $p/b$ FLOPs for each byte waits for arithmetic. In a batch of a few
#   thousand patches the large stages of the encoder do so on all four GPUs above; a single
#   thumbnail stays below $p/b$.
# - A stage without matrix products is bounded by its bytes. If it takes longer than its bytes
#   need, the implementation is the reason.

# %% tags=["result"]
idle_bytes = sum(one.moved for one in work.values() if not one.flops)
idle_share = idle_bytes / sum(one.moved for one in work.values())
print(f"By hand = counted: {tower_parameters:,} + {projector_parameters:,} parameters,")
print(f"{total / 1e12:.2f} TFLOPs for three photographs. Position, norms, RoPE and merge:")
print(f"none of the matrix products, {idle_share:.0%} of the bytes.")

# %% [markdown]
# ## On Monday
#
# You operate a server with Kimi-VL. What do you do differently after this lesson?
#
# - **Decide** whether the encoder matters for you. Take the median size of your images, count
#   their patches, and compute the FLOPs. Divide them by half of your GPU's $p$. (Half is an
#   assumption; the check below replaces it by your own number.) If this time is under a tenth of
#   your time to first token, optimise something else first.
# - **Flag:** `in_token_limit` bounds the patches of one image. Its default is 4,096 patches,
#   counted before padding. For a server:
#   `vllm serve ... --mm-processor-kwargs '{"in_token_limit": 2048}'`. An image of 4,096 patches
#   or more then has about half as many, and takes less than half the encoder's time. Images below
#   2,048 patches do not change. The model gets fewer details.
# - **Check:** send one prompt with the image and one without it, one request at a time. The
#   difference of the two times to first token is the encoder plus the prefill of the image's
#   tokens. `usage.prompt_tokens` of the two answers differs by
#   `image_geometry(width, height).tokens` and a few tokens that mark where the image begins and
#   ends.

# %% [markdown]
# ## Exercises
#
# Solutions, with the steps:
# [solutions/00_start_here__SOLUTION.ipynb](solutions/00_start_here__SOLUTION.ipynb).
#
# ### 1. When attention is as large as the rest
#
# At which number of patches of one image does attention cost exactly as many FLOPs as all linear
# maps of the blocks in the **lab** preset? Its $D$ and $F$ are printed above.

# %%
answer_1 = None  # patches

check(
    "patches",
    answer_1,
    2 * c.hidden_size + c.intermediate_size,
    hint="set 4 n^2 D = 2 n (4 D^2 + 2 D F) and solve for n",
    near={c.intermediate_size: "that is where attention equals the MLP alone"},
)

# %% [markdown]
# ### 2. One mask over everything
#
# Suppose that attention were computed over all $L$ patches of the batch, with a mask that removes
# pairs of different images afterwards. By which factor does the work of attention grow for the
# three photographs?

# %%
answer_2 = None  # a factor

apart, together = stage_work(full, lengths, 2), stage_work(full, [sum(lengths)], 2)
check(
    "factor",
    answer_2,
    together["attention"].flops / apart["attention"].flops,
    rtol=0.01,
    hint="attention costs the square of each length; the lengths are printed above",
    near={3: "that holds only if the three images have equal sizes"},
)

# %% [markdown]
# ### 3. How many patches keep a GPU busy?
#
# Look at the weights alone, as in "The batch pays for the weights". Write the least number of
# patches in a batch for which the blocks' linear maps wait for arithmetic. `p` is in FLOP/s, `b`
# in byte/s.


# %%
def patches_to_saturate(p, b, bytes_a_weight):
    return ...


check_function(
    "patches to saturate",
    patches_to_saturate,
    {(1e15, 4e12, 2): 250, (1e15, 4e12, 1): 125, (3e14, 2e12, 4): 300},
    rtol=1e-6,
    hint="time of 2 D F L FLOPs = time of reading D F weights; D F cancels",
)

# %% [markdown]
# ### 4. GPUs for a stream of images (operator)
#
# Your server receives 20 images a second, each of 1,008 x 784 pixels (width x height). Assume
# that the encoder reaches half of an H100's $p$. Which part of one H100 does the encoder need, as
# a number from 0 to 1? Leave out the stages without matrix products.

# %%
answer_4 = None  # part of one H100

one_image = stage_work(full, [image_geometry(1008, 784).patches], 2)
seconds = sum(of.flops for of in one_image.values()) / (h100.flops_per_s / 2)
check(
    "part of one H100",
    answer_4,
    20 * seconds,
    rtol=0.02,
    hint="patches first, 2N(4D^2 + 2DF) + 4NnD for each, then patch embedding and projector",
    near={10 * seconds: "you used all of p, but only half of it is reached"},
)

# %% [markdown]
# ### 5. ★ The order of the merge
#
# The patches of an image lie in the packed sequence line by line. The merge needs the four
# patches of each 2 x 2 square one after another: for the grid 2 x 4 the order 0, 1, 4, 5, 2, 3,
# 6, 7. Write that order for any grid, as a list of patch numbers.


# %%
def merge_order(h, w):
    return ...


from kimivl_lab import build_merge_gather_idx

check_function(
    "merge order",
    merge_order,
    {grid: build_merge_gather_idx([grid]).tolist() for grid in ((2, 4), (4, 2), (4, 6), (2, 2))},
    hint="four loops: rows of squares, squares in a row, then the two rows and columns of a square",
)

# %% [markdown]
# ## References
#
# - Kimi-VL technical report: [arXiv 2504.07491](https://arxiv.org/abs/2504.07491); its published
#   configuration is `kimivl_lab/published/config.json`.
# - Packing images of any size: [Patch n' Pack, arXiv
#   2307.06304](https://arxiv.org/abs/2307.06304).
# - SigLIP: [arXiv 2303.15343](https://arxiv.org/abs/2303.15343).
# - The roofline: Williams, Waterman, Patterson, [doi
#   10.1145/1498765.1498785](https://doi.org/10.1145/1498765.1498785).
# - Data sheets: `data/published/devices.csv` holds the numbers and their addresses.
#
# **Next:** the rule above stops at 4,096 patches. Lesson 10 says what happens to larger images.
#
# [Glossary](GLOSSARY.md) · [Notation](NOTATION.md) · next: [10 From images to patches](10_images_to_patches.ipynb)
