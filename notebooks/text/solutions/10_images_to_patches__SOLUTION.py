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
#     question: Solutions to the exercises of From images to patches
#     minutes_cpu: 1
#     gpu: optional
#     data: sizes of data/workloads
# ---

# %% [markdown]
# # From images to patches: solutions
#
# The guesses, cells and exercises of [10_images_to_patches](../10_images_to_patches.ipynb),
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

from kimivl_lab import image_geometry
from kimivl_lab.lessons.checks import check, check_function
from kimivl_lab.lessons.guesses import Comparison, compare, guess
from kimivl_lab.lessons.image_patches import cut, embed, largest_grid

# %% [markdown]
# ## In the text
#
# **The guesses.** $1{,}000 \cdot 64/71 = 901.4$, so 901 pixels. $901/28 = 32.2$ becomes 33
# squares of 28 pixels, 66 patches: $66^2 = 4{,}356$. A photograph of 640 x 480 has about 400
# tokens, and a receipt is at the limit, about 1,050: a factor of 2.6. Padding adds on average
# half a square to each side: a photograph has about 20 squares a side, so about
# $2 \cdot 0.5/20 = 5$ %. After shrinking, the whole patches nearly fill the limit, and padding
# adds more: nearly all sizes end above it.

# %%
square_guess = guess("patches of 1,000 x 1,000", 4356, unit="patches")
receipt_guess = guess("tokens of a receipt over those of a photograph", 2.6, unit="times")
above_guess = guess("shrunk sizes that end above the limit", 95, unit="%")
padding_guess = guess("padding of the photographs", 5, unit="%")
compare(Comparison(square_guess, predicted=image_geometry(1000, 1000).patches))

# %% [markdown]
# **The grid.** The limit is compared with whole patches. Rounding up comes last, and rows come
# from the height.


# %%
def my_grid(width, height, limit=4096):
    whole = (width // 14) * (height // 14)
    if whole > limit:
        factor = math.sqrt(limit / whole)
        width, height = int(width * factor), int(height * factor)
    return 2 * math.ceil(height / 28), 2 * math.ceil(width / 28)


sizes = [(640, 480), (1000, 1000), (1920, 1080), (896, 896), (27, 332), (1, 1)]
cases = {size: tuple(image_geometry(*size).grid_hw) for size in sizes}
check_function("grid of an image", my_grid, cases)

# %% [markdown]
# **The patches.** `unflatten` gives $(3, h, 14, w, 14)$. `permute` brings $h$ and $w$ to the
# front.


# %%
def my_cut(pixels):
    split = pixels.unflatten(1, (-1, 14)).unflatten(3, (-1, 14))  # (3, h, 14, w, 14)
    return split.permute(1, 3, 0, 2, 4).flatten(0, 1)  # (h * w, 3, 14, 14)


wide = torch.arange(3 * 28 * 56).view(3, 28, 56)
tall = wide.view(3, 56, 28)
check_function("patches of an image", my_cut, [((one,), cut(one)) for one in (wide, tall)])

# %% [markdown]
# ## Exercises
#
# ### 1. Thumbnails without padding
#
# The multiples of 28 below 640 and 480 are 616 and 476, 24 and 4 pixels less. Before, the image
# has $23 \cdot 18 = 414$ tokens, and then $22 \cdot 17 = 374$.

# %%
answer_1 = (616, 476, 414 - 374)
cropped, before = image_geometry(640 // 28 * 28, 480 // 28 * 28), image_geometry(640, 480)
expected = (cropped.width, cropped.height, before.tokens - cropped.tokens)
check("width, height, tokens saved", answer_1, expected)

# %% [markdown]
# ### 2. A limit for full resolution
#
# The limit is compared with whole patches:
# $\lfloor 1920/14 \rfloor \cdot \lfloor 1080/14 \rfloor = 137 \cdot 77$. Padding then makes it
# 138 x 78, rows and columns swapped in the grid.

# %%
answer_2 = 137 * 77
check("smallest in_token_limit", answer_2, (1920 // 14) * (1080 // 14))
print("patches then:", image_geometry(1920, 1080, in_token_limit=answer_2).patches)

# %% [markdown]
# ### 3. Far above the limit
#
# A narrow side that lies just above a multiple of 28 after shrinking gains nearly two patches on
# the few that it has. So fix the long side and try all narrow ones.

# %%
found = {width: image_geometry(width, 4000).patches for width in range(150, 400)}
answer_3 = (max(found, key=lambda width: found[width]), 4000)
passing = sum(count > 4700 for count in found.values())
print(answer_3, "has", found[answer_3[0]], "patches;", passing, "widths pass")
check("more than 4,700 patches", found[answer_3[0]] > 4700, True)

# %% [markdown]
# ### 4. A buffer that never overflows (operator)
#
# No image has more than 5,400 patches by the proof: $8 \cdot 5{,}400 \cdot 588$ bytes. The
# largest grid that really occurs, 446 x 12, needs 1 % less.

# %%
answer_4 = 8 * 5400 * 588 / 2**20
check("MiB", answer_4, 8 * largest_grid().patches * 588 / 2**20, rtol=0.004)

# %% [markdown]
# ### 5. ★ Another normalisation
#
# $W (g/255 - \mu)/\sigma = \frac{W}{255\,\sigma} g - \frac{W \mu}{\sigma}$, with $\mu$ and
# $\sigma$ of the weight's colour.


# %%
def fold(weight, bias, mean, std):
    by_colour = weight / std.view(3, 1, 1)  # (D, 3, 14, 14)
    return by_colour / 255, bias - (by_colour * mean.view(3, 1, 1)).sum((1, 2, 3))


generator = torch.Generator().manual_seed(0)
weight, bias = (torch.randn(shape, generator=generator) for shape in [(4, 3, 14, 14), (4,)])
mean, std = torch.tensor([0.48, 0.46, 0.41]), torch.tensor([0.27, 0.26, 0.28])
levels = torch.randint(256, (5, 3, 14, 14), generator=generator)
floats = (levels / 255 - mean.view(3, 1, 1)) / std.view(3, 1, 1)
features = embed(levels.float(), *fold(weight, bias, mean, std))
check("features of bytes", features, embed(floats, weight, bias), rtol=1e-4)
