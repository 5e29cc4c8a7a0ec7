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
#     question: Solutions to the exercises of Tensor parallel or data parallel
#     minutes_cpu: 1
#     gpu: optional
#     data: sizes of data/workloads
# ---

# %% [markdown]
# # Tensor parallel or data parallel: solutions
#
# The exercises of [50_tp_versus_dp](../50_tp_versus_dp.ipynb), solved. Try them there first.

# %% tags=["nbval-ignore-output"]
import warnings

warnings.filterwarnings("ignore", message="IProgress not found")  # about a widget that nothing here uses
from kimivl_lab.measure.provenance import device_name, versions

print(device_name("cpu"))
print(versions())

# %%
import torch

from kimivl_lab import MoonViTConfig, image_geometry
from kimivl_lab.datasets import draw_sizes
from kimivl_lab.parallel import balance
from kimivl_lab.parallel.cost_model import assumed_cost_model
from kimivl_lab.parallel.work import TowerWork

# %% [markdown]
# **1.** Write the engines' balance: largest image first, each to the rank with the fewest patches so far, the lowest rank if several have as few.
#
# Sorting by size keeps equal images in their order, and `index` finds the first of several equal loads: so every rank that runs this gets the same answer, and none has to be told.


# %%
def largest_first(sizes, ranks):
    images, loads = [[] for _ in range(ranks)], [0] * ranks
    for image in sorted(range(len(sizes)), key=lambda image: -sizes[image]):
        rank = loads.index(min(loads))
        images[rank].append(image)
        loads[rank] += sizes[image]
    return images


assert largest_first([1000, 100, 200, 50], 2) == [[0], [2, 1, 3]]
for seed in range(40):
    sizes = [image_geometry(*size).patches for size in draw_sizes("device_screens", 32, seed)]
    assert largest_first(sizes, 4) == balance.get_dp_encoder_lb_assignment(sizes, 4).by_rank
print("images of the ranks:", largest_first([1000, 100, 200, 50], 2))

# %% [markdown]
# **2.** Another encoder has 32 blocks of width 1,280 and runs in bfloat16. How many bytes do the all-reduces of one forward sum, for one image of 4,096 patches?
#
# Two a block, each of $L \times D$ numbers of two bytes; the MLP's width and the heads play no part.

# %%
answer_2 = 2 * 32 * 4096 * 1280 * 2
other = MoonViTConfig.preset("kimi-vl-a3b", num_hidden_layers=32, hidden_size=1280, num_attention_heads=16)
assert answer_2 == TowerWork.of(other, torch.bfloat16).tensor_parallel_bytes([4096])
print(f"{answer_2:,} bytes")

# %% [markdown]
# **3.** A server of four ranks gets batches of equal images. From how many images on is data parallel the choice, for this number and every larger one (up to 64)? Ask `model.choose(sizes, ranks)`. Why does the answer for two ranks and images
# of 16,384 patches exceed the number of ranks?
#
# The largest number for which tensor parallel is chosen, and one more. On two ranks three images take as long as four: one rank has two of them and the other waits half of the time. While that is so, tensor parallel, which divides all three, wins
# once more.


# %%
def crossover_count(model, patches, ranks):
    tensor = [count for count in range(1, 65) if model.choose([patches] * count, ranks) == "tensor"]
    return max(tensor, default=0) + 1


assumed = assumed_cost_model(MoonViTConfig.preset("kimi-vl-a3b"), torch.bfloat16, "cuda")
for patches, ranks in [(1024, 4), (4096, 4), (16384, 4), (16384, 2)]:
    count = crossover_count(assumed, patches, ranks)
    print(f"{ranks} ranks, images of {patches:6,} patches: data parallel from {count} on")
    assert all(assumed.choose([patches] * more, ranks) == "data" for more in range(count, 65))
    assert count == 1 or assumed.choose([patches] * (count - 1), ranks) == "tensor"
