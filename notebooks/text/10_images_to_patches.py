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
#     question: How many tokens does an image become, and how many can it be at most?
#     minutes_cpu: 1
#     gpu: optional
#     data: images of data/images, sizes of data/workloads
# ---

# %% [markdown]
# # From images to patches
#
# [Map of the course](00_start_here.ipynb) · [Glossary](GLOSSARY.md) · [Notation](NOTATION.md) · previous: [00 Start here](00_start_here.ipynb) · next: [20 Position embedding](20_position_embedding.ipynb)
#
# Lesson 00 counted the tokens of images below the limit of 4,096 patches. This lesson counts them
# for every image.
#
# ## The question
#
# How many tokens does an image become, and how many can it be at most?

# %% [markdown]
# ## You will be able to
#
# - **compute** the grid, the patches, the tokens and the padding of any image size by hand;
# - **size** a buffer that no image can overflow, although images can pass the published limit;
# - **estimate** what padding costs a workload, and what raw bytes save on the way to the device.
#
# ## Needs
#
# Notebook [00](00_start_here.ipynb). Reading and solving takes about 80 minutes. The notebook
# runs in about a minute on a CPU; nothing here is faster on a GPU.
#
# ## Versions and machine

# %% tags=["nbval-ignore-output"]
import warnings

warnings.filterwarnings("ignore", message="IProgress not found")  # about a widget that is not used
from kimivl_lab.measure.provenance import device_name, versions

print(device_name("cpu"))
print(versions())

# %%
from contextlib import suppress

import matplotlib.pyplot as plt
import numpy as np
import torch
from PIL import Image

from kimivl_lab import KimiVLImageProcessor, MoonViTConfig, MoonVitPretrainedModel
from kimivl_lab import image_geometry, plots
from kimivl_lab.datasets import WORKLOADS, load_sizes, sample_images
from kimivl_lab.lessons.checks import check, check_function
from kimivl_lab.lessons.guesses import Comparison, compare, guess
from kimivl_lab.lessons.image_patches import blank_patches, cut, largest_grid
from kimivl_lab.lessons.image_patches import may_be_reached, plain_patches
from kimivl_lab.measure.accuracy import relative_error
from kimivl_lab.measure.timing import time_interleaved

plots.use_style()
_ = torch.set_grad_enabled(False)

# %% [markdown]
# ## The rule: from pixels to tokens in four steps
#
# Many encoders resize every image to the same square. Kimi-VL keeps the image's own size. Its
# processor does four steps. The right column follows an image of 640 x 480 pixels. Sizes in
# pixels are width x height; [grids](GLOSSARY.md#grid) are rows x columns.
#
# | step | rule | 640 x 480 |
# |---|---|---|
# | 1. Limit | Count the whole [patches](GLOSSARY.md#patch): $\lfloor \text{width}/14 \rfloor \cdot \lfloor \text{height}/14 \rfloor$. If there are more than 4,096, shrink the image. It is never enlarged. | 45 · 34 = 1,530: no change |
# | 2. [Pad](GLOSSARY.md#padding) | Add black pixels at the right and below, up to multiples of 28. | 644 x 504 |
# | 3. Cut | Cut into $h \times w$ patches of 14 x 14 pixels, line by line. A side of 512 patches or more is refused. | grid 36 x 46, 1,656 patches |
# | 4. [Merge](GLOSSARY.md#merge) | Behind the encoder, each 2 x 2 patches become one [token](GLOSSARY.md#token). | 414 tokens |
#
# 28 is two patches of 14: so the patches of a padded image always form whole 2 x 2 squares.
#
# **How much to shrink.** Both sides are multiplied by the same factor, and rounded down to whole
# pixels:
#
# $$\sqrt{\frac{4{,}096}{\lfloor \text{width}/14 \rfloor \cdot \lfloor \text{height}/14 \rfloor}}$$

# %% [markdown]
# ## Predict: an image above the limit
#
# An image has 1,000 x 1,000 pixels. 1,000 / 14 is 71.4, so it has $71 \cdot 71 = 5{,}041$ whole
# patches: too many. The factor is $\sqrt{4{,}096 / 5{,}041} = 64 / 71$.
#
# **Your guess.** How many patches does it have in the end, after step 3?

# %%
square_guess = guess("patches of 1,000 x 1,000", None, unit="patches")

# %% [markdown]
# **Your code.** Write steps 1 to 3 for any size. The result is the grid, rows x columns. (No
# library call is needed; `math.ceil` and `math.sqrt` help.)


# %%
def my_grid(width, height, limit=4096):
    """(rows, columns) of an image, in patches."""
    return ...


# %%
sizes = [(640, 480), (1000, 1000), (1920, 1080), (896, 896), (27, 332), (1, 1)]
cases = {size: tuple(image_geometry(*size).grid_hw) for size in sizes}
hint = "whole patches first, then the factor, then round up to 28; rows come from the height"
check_function("grid of an image", my_grid, cases, hint=hint)

# %%
print("pixels (w x h)  whole   shrunk to (w x h)  padded (w x h)  grid (h x w)  patches tokens")
for w, h in sizes:
    g = image_geometry(w, h)
    shrunk = f"{g.resized_width} x {g.resized_height}"
    padded = f"{g.padded_width} x {g.padded_height}"
    line = f"{w:6d} x {h:4d} {(w // 14) * (h // 14):8,d} {shrunk:>19s} {padded:>15s}"
    print(f"{line} {g.grid_h:7d} x {g.grid_w:3d} {g.patches:9,d} {g.tokens:6,d}")
compare(Comparison(square_guess, predicted=image_geometry(1000, 1000).patches))

# %% [markdown]
# 1,000 x 1,000 shrinks to $1{,}000 \cdot 64/71 = 901$ pixels, 64.4 patches. Padding then rounds
# it **up** to 66: $66 \cdot 66 = 4{,}356$ patches. The limit is checked before padding, so the
# result is above the limit. The last two lines are small images: 27 pixels are padded to 28, and
# a single pixel becomes a whole token.

# %%
coffee = Image.open(sample_images()["coffee"])
geometry = image_geometry(*coffee.size)
print(f"{geometry.patches} patches, {blank_patches(geometry)} of them show only padding")
fig, axes = plots.patch_grid((coffee, geometry))
plt.show()

# %% [markdown]
# *How to read it:* thin lines separate patches. Thick lines separate the 2 x 2 squares that
# become one token. Hatched pixels are padding, which the encoder computes like all others. 600
# pixels are 42.9 patches: 43 columns show a part of the image, and column 44 is only padding. In
# the same way 29 of 30 rows show something. So $44 \cdot 30 - 43 \cdot 29 = 73$ patches are
# blank.

# %% [markdown]
# ## Build: cut an image into patches
#
# A padded image is a tensor of shape (3, height, width). Patch number 0 is the square at the top
# left, number 1 stands to its right, and so on, line by line.
#
# **Your code.** Cut the tensor into patches of shape $(hw, 3, 14, 14)$. Two loops and
# `torch.stack` do it. Without loops: `unflatten` splits a side into (patches, 14), `permute`
# brings the two patch axes to the front, `flatten(0, 1)` joins them.


# %%
def my_cut(pixels):
    """(3, height, width) -> (h * w, 3, 14, 14), line by line."""
    return ...


# %%
wide = torch.arange(3 * 28 * 56).view(3, 28, 56)
tall = wide.view(3, 56, 28)
cases = [((one,), cut(one)) for one in (wide, tall)]
hint = "the rows of patches come first: patch 1 is right of patch 0"
check_function("patches of an image", my_cut, cases, hint=hint)

# %% [markdown]
# The library's processor does all four steps for a whole batch. A panorama, the photograph china,
# a scanned page, an icon and a flag of 6 x 3 pixels go into **one** tensor, the [packed
# sequence](GLOSSARY.md#packed-sequence):

# %%
files = {"panorama": "moon_phases_panorama", "photograph": "china", "page": "book_page_scan"}
files |= {"icon": "tall_icon", "flag": "tiny_flag"}
images = {name: Image.open(sample_images()[stem]) for name, stem in files.items()}
processor = KimiVLImageProcessor()
batch = processor(list(images.values()))
print("pixel_values", tuple(batch.pixel_values.shape), batch.pixel_values.dtype)
print("image_grid_hws (h x w)", batch.image_grid_hws.tolist())

# %%
pictures = {name: (image, image_geometry(*image.size)) for name, image in images.items()}
rows = [{"panorama": pictures.pop("panorama")}, pictures]
fig, axes = plots.patch_gallery(rows)
plt.show()

# %% [markdown]
# *How to read it:* each image is drawn as large as fits, with its own grid. The smaller the
# image, the larger its hatched part. The flag has 6 x 3 = 18 pixels, and its token has 28 x
# 28 = 784.

# %% [markdown]
# ## Check equality: the processor against plain Python
#
# `plain_patches` in `kimivl_lab/lessons/image_patches.py` is the rule in plain Python, one step a
# line. The processor is faster and must give the same bits. The control takes each image with
# rows and columns swapped: same pixels, wrong order. It must fail.

# %%
expected = torch.cat([plain_patches(image) for image in images.values()])
turned = [image.transpose(Image.Transpose.TRANSPOSE) for image in images.values()]
columns_first = torch.cat([plain_patches(image) for image in turned])
print("bit-equal to plain Python:", torch.equal(batch.pixel_values, expected))
print("bit-equal with rows and columns swapped:", torch.equal(batch.pixel_values, columns_first))

# %% [markdown]
# Counting must agree with cutting. The prompt's [placeholders](GLOSSARY.md#placeholder) and the
# buffers are counted by `image_geometry`, without any pixels. One patch more or less would shift
# every image behind it.

# %%
agree = []
for path in sample_images().values():
    image = Image.open(path)
    one, counted = processor(image), image_geometry(*image.size)
    same_grid = one.image_grid_hws.tolist() == [list(counted.grid_hw)]
    agree.append(same_grid and len(one.pixel_values) == counted.patches)
print(f"counted = cut for {sum(agree)} of {len(agree)} images")

# %% [markdown]
# ### Bytes instead of floats
#
# A pixel is a byte $g$ from 0 to 255. The processor makes a float of it, $(g/255 - 0.5) / 0.5$,
# between $-1$ and 1. There are only 256 different values, so the raw bytes hold the same
# information in a quarter of the space. With `return_uint8=True` the processor sends the bytes.
# The [patch embedding](GLOSSARY.md#patch-embedding), a linear map with
# [weight](GLOSSARY.md#weight) $W$ and a bias, then takes over the arithmetic:
#
# $$W\left(\frac{g/255 - 0.5}{0.5}\right) + \text{bias} = \left(\frac{2}{255} W\right) g + \left(\text{bias} - \textstyle\sum W\right)$$
#
# With one pixel $g = 51$, $W = 3$ and a bias of 1: the float is $-0.6$, and
# $3 \cdot (-0.6) + 1 = -0.8$. With the byte:
# $\frac{2}{255} \cdot 3 \cdot 51 + (1 - 3) = 1.2 - 2 = -0.8$.

# %%
raw = processor(list(images.values()), return_uint8=True)
torch.manual_seed(0)
tower = MoonVitPretrainedModel(MoonViTConfig.preset("tiny")).eval()
from_floats, from_bytes = (tower(one.pixel_values, one.image_grid_hws) for one in (batch, raw))
print("features equal to 1e-5:", relative_error(from_bytes, from_floats) < 1e-5)
print("bytes a patch: float32", batch.pixel_values[0].nbytes, "uint8", raw.pixel_values[0].nbytes)

# %% [markdown]
# ## Measure: what real images cost
#
# The sizes of real collections: photographs of COCO, camera files, charts, receipts, documents,
# screens of phones and tablets, clip art. The default limit of 4,096 patches corresponds to 1,024
# tokens.
#
# **Your guess.** How many times more tokens has a receipt scan than a photograph (medians)?

# %%
receipt_guess = guess("tokens of a receipt over those of a photograph", None, unit="times")

# %%
geometries = {}
for workload, title in WORKLOADS.items():
    each = [(image_geometry(w, h), count) for w, h, count in load_sizes(workload)]
    geometries[title] = [one for one, count in each for _ in range(count)]
tokens = {title: [one.tokens for one in group] for title, group in geometries.items()}
medians = {title: float(np.median(counts)) for title, counts in tokens.items()}
ratio = medians["receipt scans"] / medians["photographs (COCO)"]
compare(Comparison(receipt_guess, measured=ratio))

# %%
title = f"A receipt costs {ratio:.1f} times as many tokens as a photograph"
fig, ax = plots.token_distribution(tokens, 1024, title)
plt.show()

# %% [markdown]
# *How to read it:* one line for each collection; a tall bin holds many images. The orange mark is
# the median. The dashed line is 1,024 tokens, a quarter of the limit. Photographs lie below it,
# where tokens follow the pixels. Documents and screens lie just **above** it.
#
# Is an image above 1,024 tokens always one that was shrunk?

# %%
print("collection            images   shrunk   above 1,024   above without being shrunk")
for title, group in geometries.items():
    shrunk = np.array([one.resized_width < one.width for one in group])
    above = np.array(tokens[title]) > 1024
    shares = f"{shrunk.mean():8.1%} {above.mean():13.1%} {(above & ~shrunk).mean():14.1%}"
    print(f"{title:20s} {len(group):7,d} {shares}")

# %% [markdown]
# No. All document photographs are shrunk, and most screens and receipts. But some images pass
# 1,024 tokens without being shrunk: they have up to 4,096 *whole* patches, and padding adds the
# rest. So "not shrunk" does not mean "at most 1,024 tokens", and no buffer may be sized as if it
# did.

# %% [markdown]
# ## Measure: the limit is no hard cap
#
# How far above the limit can an image be? First count: many widths and heights from 16 to 16,384
# pixels.
#
# **Your guess.** Of the sizes that the processor shrinks to meet the limit, how many are above
# the limit in the end, in %?

# %%
above_guess = guess("shrunk sizes that end above the limit", None, unit="%")

# %%
limit = 4096
sides = np.unique(np.geomspace(16, 16384, 180).astype(int)).tolist()
patches = np.zeros((len(sides), len(sides)), dtype=int)  # heights x widths
shrinks = np.zeros_like(patches, dtype=bool)
for row, height in enumerate(sides):
    for column, width in enumerate(sides):
        with suppress(ValueError):  # a side of 512 patches or more is refused: stays 0
            one = image_geometry(width, height)
            patches[row, column], shrinks[row, column] = one.patches, one.resized_width < width
compare(Comparison(above_guess, measured=100 * (patches > limit)[shrinks].mean()))
print(f"most patches of {patches.size:,} sizes: {patches.max():,}")

# %% [markdown]
# ### A bound for all sizes
#
# Why so many? Shrinking leaves pixels for nearly 4,096 patches, and padding adds to them. The
# count has a maximum, but not all sizes were counted. A proof covers the rest. For a grid
# $h \times w$ it shows in three steps that no image can end on it. The numbers test the grid 68
# x 68.
#
# 1. *What the grid needs.* Padding adds less than 28 pixels, two patches. So after shrinking the
#    image still has at least $14(h - 2) + 1$ by $14(w - 2) + 1$ pixels. For 68 x 68:
#    $925 \cdot 925 = 855{,}625$ pixels.
# 2. *What shrinking leaves.* Before shrinking, the image has $\alpha$ rows and $\beta$ columns of
#    whole patches, and less than one more of each. A patch has 196 pixels, so the image has fewer
#    than $196\,(\alpha + 1)(\beta + 1)$. Shrinking multiplies the pixels by
#    $4{,}096/(\alpha\beta)$. This leaves fewer than
#    $196 \cdot 4{,}096 \cdot (1 + 1/\alpha)(1 + 1/\beta)$ pixels.
# 3. *Together.* Shrinking enlarges nothing, so $\alpha \ge h - 2$ and $\beta \ge w - 2$. For 68 x
#    68 both are at least 66, so fewer than $196 \cdot 4{,}096 \cdot (67/66)^2 = 827{,}328$ pixels
#    are left. But 855,625 are needed: impossible.
#
# An image that is not shrunk has at least $(h - 2)(w - 2)$ whole patches, and at most 4,096. So a
# grid with $(h - 2)(w - 2) \le 4{,}096$ is possible too. The bound is the number of patches of
# the largest grid that is possible in one of the two cases.

# %%
for grid in [(66, 66), (68, 68), (446, 12)]:
    print(f"{grid[0]} x {grid[1]}: may be reached: {may_be_reached(grid)}")
bound = largest_grid(limit).patches
print(f"no image has more than {bound:,} patches")

# %% tags=["headline"]
marked = [(1000, 1000), (153, 6731), (3200, 427)]  # width x height
points = [(w, h, image_geometry(w, h).patches) for w, h in marked]
title = f"in_token_limit = {limit:,} is no hard cap"
fig, axes = plots.limit_map(sides, patches, limit, bound, points, title)
plt.show()

# %% [markdown]
# *How to read it:* left, each point is an image size. On the dashed line the image has as many
# pixels as 4,096 patches. Orange sizes end above the limit; beyond the line nearly every size
# does. Right, the same orange sizes by their shape. On a steep streak all images have the same
# narrow side, such as 12 patches, and only the long side changes. Padding adds up to two patches
# to a side. Two patches are much for a side of 12 and little for a side of 64: so narrow images
# end highest. The streaks end at the right, because a long side of 512 patches is refused.

# %% [markdown]
# ## Measure: what padding costs
#
# Every [block](GLOSSARY.md#block) of the encoder computes padding like the rest. By hand: a
# square of 29 x 29 pixels is padded to 56 x 56, so $1 - 29^2/56^2 = 73$ % of it is padding. That
# is the worst square of 2 x 2 tokens: its last column of tokens shows one column of pixels, and
# its last row one row. For the worst square of $i \times i$ tokens the share is
#
# $$1 - \left(1 - \frac{27}{28\,i}\right)^2 \le \frac{2}{i}$$
#
# **Your guess.** Which share of the pixels of the *photographs* (COCO) is padding, in %?

# %%
padding_guess = guess("padding of the photographs", None, unit="%")

# %%
blank, partly = {}, {}
for title, group in geometries.items():
    total = sum(one.patches for one in group)
    padding = sum(one.padding_share * one.patches for one in group)
    blank[title] = sum(blank_patches(one) for one in group) / total
    partly[title] = padding / total - blank[title]
    print(f"{title:20s} padding {padding / total:5.1%}, in blank patches {blank[title]:5.1%}")
photographs = blank["photographs (COCO)"] + partly["photographs (COCO)"]
compare(Comparison(padding_guess, measured=100 * photographs))

# %%
different = {(one.width, one.height): one for group in geometries.values() for one in group}
single = [(one.tokens, one.padding_share) for one in different.values()]
worst = [(n * n, 1 - (1 - 27 / (28 * n)) ** 2) for n in range(1, 34)]
title = "Padding: a few percent of a workload, most of a tiny image"
fig, axes = plots.padding_cost(blank, partly, single, worst, title)
plt.show()

# %% [markdown]
# *How to read it:* left, the dark part is padding in blank patches, which exist only because two
# patches must merge. The hatched part completes patches that show something. Right, one dot for
# each size. The line is the worst square; only narrow images are above it.

# %% [markdown]
# ## Measure: floats and bytes
#
# On your machine: the processor with floats and with bytes, in random order. The files are
# decoded already; both variants resize, pad and cut. Floats are four times as many bytes, to
# write here and to copy to the device later.

# %% tags=["nbval-ignore-output"]
inputs = list(images.values())
variants = {
    "float32": lambda: processor(inputs),
    "uint8": lambda: processor(inputs, return_uint8=True),
}
for name, t in time_interleaved(variants, warmup=1, repeats=9).items():
    print(f"{name:8s} {t.p50_ms:6.1f} ms (p20 {t.p20_ms:.1f}, p80 {t.p80_ms:.1f})")

# %% [markdown]
# ## What to remember
#
# - Below the limit, tokens follow the pixels: about width · height / 784. Above it an image costs
#   about limit / 4 tokens, and up to a third more if it is narrow.
# - The limit is checked before padding. Nearly every image that is shrunk ends above it. Size
#   buffers by `image_geometry(...).patches`, or by the bound.
# - Padding is a few percent of ordinary workloads. It matters for images of a few tokens: at most
#   $2/i$ for a square of $i \times i$ tokens.
# - Raw bytes are a quarter of the floats and give the same features.

# %% tags=["result"]
square, strip = points[0][2], points[1][2]
shares = [blank[title] + partly[title] for title in blank]
print(f"Limit 4,096: 1000 x 1000 (w x h) has {square:,} patches, 153 x 6731 has {strip:,},")
print(f"and none has more than {bound:,}. Padding is {min(shares):.1%} to {max(shares):.1%} of")
print("a workload's pixels; raw bytes are a quarter of the floats.")

# %% [markdown]
# ## On Monday
#
# - **Decide** how many tokens your images may cost. Run `image_geometry` over the sizes of one
#   day of traffic and look at the median and the maximum. Reserve room for the maximum in the
#   context, not for limit / 4.
# - **Flag:** `in_token_limit`, default 4,096, is an argument of the processor. In vLLM, as read
#   in its configuration: `--mm-processor-kwargs '{"in_token_limit": 2048}'`, and
#   `--limit-mm-per-prompt` bounds the images of a prompt (default 999). In SGLang, as read in its
#   documentation: `--mm-process-config` (default `{}`) and `--limit-mm-data-per-request` (no
#   limit). Look at `--help` of your version.
# - **Check:** send one image and read `usage.prompt_tokens` of the answer; send the same text
#   without the image. The difference is the image's tokens, and a few for the markers around
#   them. Compare it with `image_geometry(width, height).tokens`.

# %% [markdown]
# ## Exercises
#
# Solutions, with the steps:
# [solutions/10_images_to_patches__SOLUTION.ipynb](solutions/10_images_to_patches__SOLUTION.ipynb).
#
# ### 1. Thumbnails without padding
#
# A client sends thumbnails of 640 x 480 pixels (width x height). It may cut off at most 27 pixels
# of the width and at most 27 of the height, in all. After which cut is there no padding, and how
# many tokens does that save?

# %%
answer_1 = None  # (width, height, tokens saved)

cropped, before = image_geometry(640 // 28 * 28, 480 // 28 * 28), image_geometry(640, 480)
expected = (cropped.width, cropped.height, before.tokens - cropped.tokens)
hint = "each side must be a multiple of 28; the token counts are h times w over 4"
check("width, height, tokens saved", answer_1, expected, hint=hint)

# %% [markdown]
# ### 2. A limit for full resolution
#
# What is the smallest `in_token_limit` that leaves a screenshot of 1920 x 1080 pixels at its full
# resolution?

# %%
answer_2 = None  # patches

smallest = (1920 // 14) * (1080 // 14)
near = {image_geometry(1920, 1080, in_token_limit=16384).patches: "these are counted after padding"}
hint = "the limit is compared with whole patches"
check("smallest in_token_limit", answer_2, smallest, hint=hint, near=near)

# %% [markdown]
# ### 3. Far above the limit
#
# Find a size, with no side above 4,000 pixels, that has more than 4,700 patches at the default
# limit. (The right half of the map shows which shape to try. Fix the long side near 4,000 and try
# narrow sides in a loop.)

# %%
answer_3 = None  # (width, height)

passes = None
if answer_3 is not None:
    passes = max(answer_3) <= 4000 and image_geometry(*answer_3).patches > 4700
hint = "most narrow sides fail: walk them one pixel at a time, from 150 to 400"
check("more than 4,700 patches", passes, True, hint=hint)

# %% [markdown]
# ### 4. A buffer that never overflows (operator)
#
# A server copies the patches of up to 8 images to the GPU, as bytes, through one fixed buffer.
# How many MiB must it have at least at the default limit, so that the bound excludes an overflow?
# (One digit after the point; 3 · 14 · 14 bytes a patch; 1 MiB is $2^{20}$ bytes.)

# %%
answer_4 = None  # MiB

patch_mib = 588 / 2**20
near = {8 * 4096 * patch_mib: "images can pass the limit: see the bound"}
near |= {8 * strip * patch_mib: "153 x 6731 is one size; only the bound holds for all"}
hint = "8 images with the most patches that any image can have"
check("MiB", answer_4, 8 * bound * patch_mib, rtol=0.004, hint=hint, near=near)

# %% [markdown]
# ### 5. ★ Another normalisation
#
# Other models normalise each colour with its own mean $\mu$ and deviation $\sigma$:
# $(g/255 - \mu) / \sigma$. Write weight and bias for raw bytes. `weight` has the shape
# $(D, 3, 14, 14)$, `bias` $(D)$, `mean` and `std` $(3)$.


# %%
def fold(weight, bias, mean, std):
    """(weight, bias) for normalised floats -> (weight, bias) for bytes."""
    return ...


# %%
from kimivl_lab.lessons.image_patches import embed

generator = torch.Generator().manual_seed(0)
weight, bias = (torch.randn(shape, generator=generator) for shape in [(4, 3, 14, 14), (4,)])
mean, std = torch.tensor([0.48, 0.46, 0.41]), torch.tensor([0.27, 0.26, 0.28])
levels = torch.randint(256, (5, 3, 14, 14), generator=generator)
floats = (levels / 255 - mean.view(3, 1, 1)) / std.view(3, 1, 1)
folded = fold(weight, bias, mean, std)
features = None if folded is ... or folded is None else embed(levels.float(), *folded)
hint = "per colour: divide W by 255 sigma; subtract the sum of W mu / sigma from the bias"
check("features of bytes", features, embed(floats, weight, bias), rtol=1e-4, hint=hint)

# %% [markdown]
# ## References
#
# - [Kimi-VL technical report](https://arxiv.org/abs/2504.07491): native resolution, and the merge
#   before the projector.
# - [Kimi-VL-A3B-Instruct, image
#   processor](https://huggingface.co/moonshotai/Kimi-VL-A3B-Instruct/blob/main/image_processing_kimi_vl.py):
#   the rule, as published.
# - [torchtitan issue 4093](https://github.com/pytorch/torchtitan/issues/4093): 4,356 patches at a
#   limit of 4,096, found in a training library. Its documentation now says that the limit is one
#   before padding.
# - Workloads: COCO val2017, OpenCQA's charts, ICDAR-2019 SROIE, and others; sources and licences
#   are in the repository's `data/README.md`.
#
# **Next:** a patch does not say where in the image it was. Lesson 20 adds this to its features.
#
# [Map of the course](00_start_here.ipynb) · [Glossary](GLOSSARY.md) · [Notation](NOTATION.md) · previous: [00 Start here](00_start_here.ipynb) · next: [20 Position embedding](20_position_embedding.ipynb)
