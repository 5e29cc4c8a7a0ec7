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
#     data: none
# ---

# %% [markdown]
# # From images to patches: solutions
#
# The exercises of [10_images_to_patches](../10_images_to_patches.ipynb), solved. Try them there first.

# %% tags=["nbval-ignore-output"]
import warnings

warnings.filterwarnings("ignore", message="IProgress not found")  # about a widget that nothing here uses
from kimivl_lab.measure.provenance import device_name, versions

print(device_name("cpu"))
print(versions())

# %%
from kimivl_lab import image_geometry

# %% [markdown]
# **1.** A client sends thumbnails of 640 x 480 and may crop up to 27 pixels of each side. Which size leaves no padding, and how many tokens does that save?
#
# The multiples of 28 below: a row and a column of tokens go, $23 \cdot 18 - 22 \cdot 17$.

# %%
width, height = 640 // 28 * 28, 480 // 28 * 28
answer_1 = (width, height, 23 * 18 - width // 28 * (height // 28))
cropped, before = image_geometry(*answer_1[:2]), image_geometry(640, 480)
assert cropped.padding_share == 0 and cropped.width > 640 - 28 and cropped.height > 480 - 28
assert before.tokens - cropped.tokens == answer_1[2]
print(answer_1)

# %% [markdown]
# **2.** What is the least `in_token_limit` that leaves a 1920 x 1080 screenshot its full resolution?
#
# The limit is compared with whole patches, so it is their number, not the padded grid's.

# %%
answer_2 = (1920 // 14) * (1080 // 14)
assert image_geometry(1920, 1080, in_token_limit=answer_2).resized_width == 1920
assert image_geometry(1920, 1080, in_token_limit=answer_2 - 1).resized_width < 1920
print(f"{answer_2:,}, and then the grid has {image_geometry(1920, 1080, in_token_limit=answer_2).patches:,} patches")

# %% [markdown]
# **3.** Find a size no longer than 4,000 pixels that needs more than 4,800 patches at the default limit.
#
# A narrow side that after shrinking lies just above a multiple of 28 gains almost two patches on the few it has. So hold the long side and walk the
# narrow one.

# %%
found = {width: image_geometry(width, 3985).patches for width in range(150, 400)}
answer_3 = (max(found, key=found.__getitem__), 3985)
assert max(answer_3) <= 4000 and image_geometry(*answer_3).patches > 4800
print(answer_3, found[answer_3[0]], "patches, grid", image_geometry(*answer_3).grid_hw)
