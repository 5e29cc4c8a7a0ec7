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
#     question: How many tokens is a picture, and what bounds that number?
#     minutes_cpu: 1
#     gpu: optional
#     data: pictures of data/images, sizes of data/workloads
# ---

# %% [markdown]
# # From images to patches
#
# ## The question
#
# How many tokens is a picture, and what bounds that number?

# %% [markdown]
# ## You will be able to
#
# - **compute** grid, patches, tokens and padding of any image size by hand;
# - **size** a buffer that no picture can overflow, although the published limit can be passed;
# - **estimate** what padding costs a workload, and what raw bytes save on the way to the device.
#
# ## Needs
#
# Notebook [00](00_start_here.ipynb). Less than a minute on a CPU; nothing here is faster on a GPU.
#
# ## Versions and machine

# %% tags=["nbval-ignore-output"]
import warnings

warnings.filterwarnings("ignore", message="IProgress not found")  # about a widget that nothing here uses
from kimivl_lab.measure.provenance import device_name, versions

print(device_name("cpu"))
print(versions())

# %%
from contextlib import suppress

import matplotlib.pyplot as plt
import numpy as np
import torch
from PIL import Image

from kimivl_lab import KimiVLImageProcessor, MoonViTConfig, MoonVitPretrainedModel, image_geometry, plots
from kimivl_lab.datasets import WORKLOADS, load_sizes, sample_images
from kimivl_lab.measure.accuracy import relative_error
from kimivl_lab.measure.timing import time_interleaved

plots.use_style()
_ = torch.set_grad_enabled(False)

# %% [markdown]
# ## Predict
#
# Many encoders bring every picture to one fixed square. Kimi-VL keeps the picture's own size, in four steps:
#
# 1. **Limit.** Count whole patches, $\lfloor w/14 \rfloor \lfloor h/14 \rfloor$. If that exceeds the limit (4,096), shrink both sides by
#    $s = \sqrt{\text{limit} / (\lfloor w/14 \rfloor \lfloor h/14 \rfloor)}$. Nothing is ever enlarged.
# 2. **Pad** right and below, with black, up to multiples of 28 pixels: a patch is 14, and two patches merge.
# 3. **Cut** into a grid of $h \times w$ patches, row by row. A side of 512 patches or more is refused.
# 4. **Merge**, after the encoder: $hw/4$ tokens.
#
# Try 1000 x 1000 by hand before you run the cell. Does it stay below 4,096 patches?

# %%
print("       image    whole patches     resized      padded     grid  patches  tokens")
for w, h in [(640, 480), (896, 896), (1000, 1000), (1920, 1080), (27, 332), (1, 1)]:
    g = image_geometry(w, h)
    whole, resized = f"{w // 14} x {h // 14}", f"{g.resized_width} x {g.resized_height}"
    padded, grid = f"{g.padded_width} x {g.padded_height}", f"{g.grid_h} x {g.grid_w}"
    print(f"{w:6d} x {h:4d} {whole:>13s} {resized:>14s} {padded:>11s} {grid:>8s} {g.patches:8,d} {g.tokens:7,d}")

# %% [markdown]
# 1000 x 1000 has 71 x 71 = 5,041 whole patches, so $s = 64/71$ and the side becomes 901 pixels: 64.4 patches. Padding then rounds it **up** to
# 66. The limit is checked before padding, and 66 x 66 = 4,356 patches exceed it.

# %%
coffee = Image.open(sample_images()["coffee"])
geometry = image_geometry(*coffee.size)
blank = geometry.patches - -(-coffee.width // 14) * -(-coffee.height // 14)
print(f"{geometry.patches} patches, {blank} of them show nothing but padding")
assert (geometry.grid_hw, blank) == ((30, 44), 73)
fig, axes = plots.patch_grid((coffee, geometry))
plt.show()

# %% [markdown]
# *How to read it:* thin lines part patches, thick lines the 2 x 2 windows that become one token; the hatched pixels are padding, which the encoder
# computes like any other.
#
# ## Build
#
# The processor does the four steps for pictures of any mode and any shape. A panorama, a photograph, a scanned page, an icon and a flag of 6 x 3
# pixels go into **one** tensor:

# %%
files = {
    "panorama": "moon_phases_panorama",
    "photograph": "china",
    "page": "book_page_scan",
    "icon": "tall_icon",
    "flag": "tiny_flag",
}
images = {name: Image.open(sample_images()[stem]) for name, stem in files.items()}
processor = KimiVLImageProcessor()
batch = processor(list(images.values()))
print("pixel_values", tuple(batch.pixel_values.shape), batch.pixel_values.dtype)
print("image_grid_hws", batch.image_grid_hws.tolist())

# %%
pictures = {name: (image, image_geometry(*image.size)) for name, image in images.items()}
rows = [{"panorama": pictures.pop("panorama")}, pictures]
fig, axes = plots.patch_gallery(rows)
plt.show()

# %% [markdown]
# *How to read it:* each picture is drawn as large as fits, with its own grid; the smaller the picture, the larger the hatched part: of the flag only 18
# pixels in 784 are picture.
#
# ## Check equality
#
# The same in plain Python, one step a line, without any of the library's speed:


# %%
def reference(image):
    """One PIL image -> (h * w, 3, 14, 14) float32."""
    w, h = image.size
    if (whole := (w // 14) * (h // 14)) > 4096:
        s = (4096 / whole) ** 0.5
        w, h = int(w * s), int(h * s)
    resized = image.resize((w, h), Image.Resampling.BICUBIC).convert("RGB")
    canvas = Image.new("RGB", (-(-w // 28) * 28, -(-h // 28) * 28))  # black
    canvas.paste(resized, (0, 0))
    x = torch.from_numpy(np.array(canvas)).permute(2, 0, 1) / 255  # (3, H, W)
    x = (x - 0.5) / 0.5
    patches = x.unflatten(1, (-1, 14)).unflatten(3, (-1, 14))  # (3, h, 14, w, 14)
    return patches.permute(1, 3, 0, 2, 4).flatten(0, 1)  # (h * w, 3, 14, 14)


# %%
expected = torch.cat([reference(image) for image in images.values()])
columns_first = torch.cat([reference(image.transpose(Image.Transpose.TRANSPOSE)) for image in images.values()])
print("bit-equal to the reference:", torch.equal(batch.pixel_values, expected))
print("bit-equal with rows and columns swapped:", torch.equal(batch.pixel_values, columns_first))
assert torch.equal(batch.pixel_values, expected) and not torch.equal(batch.pixel_values, columns_first)

# %% [markdown]
# Counting and cutting must agree too: buffers, placeholders in the prompt and the encoder all rely on `image_geometry`, and a single patch more or
# less shifts every picture behind it.

# %%
for path in sample_images().values():
    image = Image.open(path)
    one = processor(image)
    assert one.image_grid_hws.tolist() == [list(image_geometry(*image.size).grid_hw)]
    assert len(one.pixel_values) == image_geometry(*image.size).patches
print(f"{len(sample_images())} pictures: counted = cut")

# %% [markdown]
# The normalised floats are a function of 256 levels, so the raw bytes carry the same information in a quarter of the space. `return_uint8=True` sends
# those, and the patch embedding absorbs the normalisation into its weights:
#
# $$W\left(\frac{u/255 - 0.5}{0.5}\right) + b = \frac{2}{255} W u + \left(b - \textstyle\sum W\right)$$

# %%
raw = processor(list(images.values()), return_uint8=True)
torch.manual_seed(0)
tower = MoonVitPretrainedModel(MoonViTConfig.preset("tiny")).eval()
from_floats, from_bytes = (tower(b.pixel_values, b.image_grid_hws) for b in (batch, raw))
error = relative_error(from_bytes, from_floats)
print("features equal to 1e-5:", error < 1e-5)
print(f"bytes a patch: float32 {batch.pixel_values[0].nbytes}, uint8 {raw.pixel_values[0].nbytes}")
assert error < 1e-5 and batch.pixel_values.nbytes == 4 * raw.pixel_values.nbytes

# %% [markdown]
# ## Measure
#
# ### What real pictures cost
#
# Sizes of real collections, one entry a picture: photographs of COCO, camera files, charts, receipts, documents, screens of phones and tablets, clip art.

# %%
sizes = {title: load_sizes(workload) for workload, title in WORKLOADS.items()}
geometries = {
    title: [image for w, h, count in rows for image in [image_geometry(w, h)] * count] for title, rows in sizes.items()
}
tokens = {title: [image.tokens for image in group] for title, group in geometries.items()}
fig, ax = plots.token_distribution(tokens, 1024, "A document costs nearly three photographs")
plt.show()

# %% [markdown]
# *How to read it:* photographs spread below the limit, where tokens follow the pixels; documents and screens are all larger than the limit allows,
# and pile up just **above** it.

# %%
for title, counts in tokens.items():
    median, over = np.median(counts), np.mean(np.array(counts) > 1024)
    print(f"{title:19s} {len(counts):5d} pictures   median {median:6.0f}   max {max(counts):5d}   over {over:6.1%}")
shrunk = [i.tokens for group in geometries.values() for i in group if i.resized_width < i.width]
print(f"pictures that the limit shrinks: {min(shrunk)} to {max(shrunk)} tokens")
assert 2.8 < np.median(tokens["receipt scans"]) / np.median(tokens["photographs (COCO)"]) < 3

# %% [markdown]
# ### The limit is no hard cap
#
# How far above? Count every size on a grid of widths and heights; then bound it on paper. Padding rounds a side of $a$ patches and a
# bit up to fewer than $a + 2$. So to end on a grid $h \times w$ a picture needs at least $14(h-2)+1$ by $14(w-2)+1$ pixels after
# shrinking; and shrinking leaves at most $14^2 \cdot \text{limit} \cdot (1 + \frac1a)(1 + \frac1b)$ pixels, since whole patches $a
# \times b$ overlook less than a row and a column. A grid that asks for more cannot be reached.

# %%
limit = 4096
sides = np.unique(np.geomspace(16, 16384, 180).astype(int)).tolist()
patches = np.zeros((len(sides), len(sides)), dtype=int)
shrinks = np.zeros_like(patches, dtype=bool)
for row, h in enumerate(sides):
    for column, w in enumerate(sides):
        with suppress(ValueError):  # a side of 512 patches or more is refused: stays 0
            image = image_geometry(w, h)
            patches[row, column], shrinks[row, column] = image.patches, image.resized_width < w

# %%
bound = 0
for h in range(2, 512, 2):
    for w in range(2, 512, 2):
        a, b = h - 2, w - 2  # whole patches that this grid needs at least
        if a * b <= limit or (a + 1 / 14) * (b + 1 / 14) < limit * (1 + 1 / a) * (1 + 1 / b):
            bound = max(bound, h * w)
assert patches.max() <= bound
print(f"most patches: {patches.max():,} on the grid of sizes, {bound:,} by the bound")

# %% tags=["headline"]
points = [(w, h, image_geometry(w, h).patches) for w, h in [(1000, 1000), (153, 6731), (3200, 427)]]
title = f"in_token_limit = {limit:,} is no hard cap"
fig, axes = plots.limit_map(sides, patches, limit, bound, points, title)
plt.show()

# %% [markdown]
# *How to read it:* left, the dashed line is as many pixels as 4,096 patches hold, and orange is above the limit: nearly every larger picture; right,
# the slimmer the picture, the more its narrow side can be rounded up, until the long side meets the 512 patches that are refused.

# %%
assert points == [(1000, 1000, 4356), (153, 6731, 5352), (3200, 427, 4272)]
passing = (patches > limit)[shrinks].mean()
print(f"of the sizes that are shrunk to meet the limit, {passing:.1%} end above it")

# %% [markdown]
# ### What padding costs
#
# Padding is computed by every block. Part of it completes the last patches of a row or a column; the rest are whole patches that show nothing, there
# because two patches merge.

# %%
blank, partly = {}, {}
for title, group in geometries.items():
    pixels = sum(196 * image.patches for image in group)
    padding = sum(image.padding_share * 196 * image.patches for image in group)
    touched = sum(-(-image.content_width // 14) * -(-image.content_height // 14) for image in group)
    blank[title] = 1 - 196 * touched / pixels
    partly[title] = padding / pixels - blank[title]

distinct = {(image.width, image.height): image for group in geometries.values() for image in group}.values()
single = [(image.tokens, image.padding_share) for image in distinct]
worst = [(n * n, 1 - ((28 * n - 27) / (28 * n)) ** 2) for n in range(1, 34)]  # one pixel into the last window
title = "Padding: a few percent of a workload, most of a tiny picture"
fig, axes = plots.padding_cost(blank, partly, single, worst, title)
plt.show()

# %% [markdown]
# *How to read it:* left, about half of all padding is in patches that are nothing else; right, a square of $n^2$ tokens wastes at most $1 -
# (1 - 27/28n)^2 \approx 2/n$, and only slim strips waste more.

# %%
for title in blank:
    print(f"{title:19s} padding {blank[title] + partly[title]:5.1%} of the pixels, blank patches {blank[title]:5.1%}")
assert all(0.02 < blank[title] + partly[title] < 0.06 for title in blank)
assert max(share for _, share in single) < 1

# %% [markdown]
# ### Bytes
#
# On your machine: the processor with floats and with bytes, in turn. Both decode, resize and cut alike; floats are four times as much to write, and
# then to copy to the device.

# %% tags=["nbval-ignore-output"]
inputs = list(images.values())
variants = {"float32": lambda: processor(inputs), "uint8": lambda: processor(inputs, return_uint8=True)}
for name, t in time_interleaved(variants, warmup=1, repeats=9).items():
    print(f"{name:8s} {t.p50_ms:6.1f} ms (p20 {t.p20_ms:.1f}, p80 {t.p80_ms:.1f})")
print(device_name("cpu"))

# %% [markdown]
# ## What to remember
#
# - Below the limit tokens follow the pixels: about $wh/784$. Above it a picture costs about limit/4, whatever its size.
# - The limit is checked before padding. Nearly every picture that it shrinks ends above it: size buffers by `ImageGeometry.patches`, or by the bound.
# - Padding is a few percent of ordinary workloads. It matters for pictures of a few tokens, by about $2/n$ for $n \times n$ tokens.
# - Raw bytes are a quarter of the floats and give the same features.

# %% tags=["result"]
square, strip = points[0][2], points[1][2]
low, high = (pick(blank[title] + partly[title] for title in blank) for pick in (min, max))
print(
    f"in_token_limit 4,096: 1000 x 1000 needs {square:,} patches, 153 x 6731 needs {strip:,}, none more than {bound:,}."
)
print(f"Padding is {low:.1%} to {high:.1%} of a workload's pixels; raw bytes are a quarter of the floats.")

# %% [markdown]
# ## Exercises
#
# Solved in [solutions/10_images_to_patches__SOLUTION.ipynb](solutions/10_images_to_patches__SOLUTION.ipynb).
#
# **1.** A client sends thumbnails of 640 x 480 and may crop up to 27 pixels of each side. Which size leaves no padding, and how many tokens does that save?

# %%
answer_1 = None  # (width, height, tokens saved)

if answer_1 is None:
    print("not answered yet")
else:
    cropped, before = image_geometry(*answer_1[:2]), image_geometry(640, 480)
    assert cropped.padding_share == 0 and cropped.width > 640 - 28 and cropped.height > 480 - 28
    assert before.tokens - cropped.tokens == answer_1[2]

# %% [markdown]
# **2.** What is the least `in_token_limit` that leaves a 1920 x 1080 screenshot its full resolution?

# %%
answer_2 = None  # in patches

if answer_2 is None:
    print("not answered yet")
else:
    assert image_geometry(1920, 1080, in_token_limit=answer_2).resized_width == 1920
    assert image_geometry(1920, 1080, in_token_limit=answer_2 - 1).resized_width < 1920

# %% [markdown]
# **3.** Find a size no longer than 4,000 pixels that needs more than 4,800 patches at the default limit. (The picture above says which shape to try.)

# %%
answer_3 = None  # (width, height)

if answer_3 is None:
    print("not answered yet")
else:
    assert max(answer_3) <= 4000 and image_geometry(*answer_3).patches > 4800

# %% [markdown]
# ## References
#
# - [Kimi-VL technical report](https://arxiv.org/abs/2504.07491): native resolution, the pixel shuffle before the projector.
# - [Kimi-VL-A3B-Instruct, image processor](https://huggingface.co/moonshotai/Kimi-VL-A3B-Instruct/blob/main/image_processing_kimi_vl.py): the rule, as published.
# - [torchtitan issue 4093](https://github.com/pytorch/torchtitan/issues/4093): 4,356 patches at a limit of 4,096, met in a training library, which
#   then documented its limit as one before padding.
# - Workloads: COCO val2017, OpenCQA's charts, ICDAR-2019 SROIE, and others; sources and licences in `data/README.md`.
