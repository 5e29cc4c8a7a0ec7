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
# The guesses, cells and exercises of [50_tp_versus_dp](../50_tp_versus_dp.ipynb), answered with
# their steps. Try them there first.

# %% tags=["nbval-ignore-output"]
import warnings

warnings.filterwarnings("ignore", message="IProgress not found")  # about a widget that is not used
from kimivl_lab.measure.provenance import device_name, versions

print(device_name("cpu"))
print(versions())

# %%
import torch
import torch.nn.functional as F

from kimivl_lab import MoonViTConfig
from kimivl_lab.gpus import find_gpu
from kimivl_lab.lessons import tp_versus_dp as lesson
from kimivl_lab.lessons.checks import check, check_function
from kimivl_lab.lessons.guesses import Comparison, compare, guess
from kimivl_lab.parallel.balance import get_dp_encoder_lb_assignment
from kimivl_lab.parallel.cost_model import MachineRates, cost_model_by_formula
from kimivl_lab.parallel.gpu_rates import cost_model_of_gpu
from kimivl_lab.parallel.work import TowerWork, steps_and_bytes

full = MoonViTConfig.preset("kimi-vl-a3b")
h100, l40s = (cost_model_of_gpu(full, find_gpu(name)) for name in ("H100", "L40S"))
real = lesson.real_batches(4096)[0]

# %% [markdown]
# ## In the text
#
# **Bytes of an all-reduce.** $2(R - 1)$ steps with a piece of size$/R$ in each.


# %%
def all_reduce_sends(ranks, size):
    return 2 * (ranks - 1) * size / ranks


# %%
cases = {(R, 24): steps_and_bytes("all_reduce", R, 24)[1] for R in (4, 2, 8)}
check_function("bytes sent", all_reduce_sends, cases, rtol=1e-6)

# %% [markdown]
# **One rank's part of the MLP.** `chunk` along dimension 1 cuts columns, along dimension 0 rows.


# %%
def part_of_mlp(x, W0, bias0, W1, rank, ranks):
    columns, bias = W0.chunk(ranks, 1)[rank], bias0.chunk(ranks, 0)[rank]
    return F.gelu(x @ columns + bias) @ W1.chunk(ranks, 0)[rank]


# %%
torch.manual_seed(0)
x, W0, bias0, W1 = (torch.randn(shape).double() for shape in [(6, 8), (8, 12), (12,), (12, 8)])
arguments = [(x, W0, bias0, W1, rank, ranks) for ranks in (2, 3) for rank in range(ranks)]
cases = [(each, lesson.mlp_summand(*each)) for each in arguments]
check_function("one rank's part of the MLP", part_of_mlp, cases, rtol=1e-9)

# %% [markdown]
# **The time of tensor parallel.** Two all-reduces in each of 27 blocks are 54.


# %%
def tensor_ms(not_divided, divided, all_reduce, ranks):
    return not_divided + divided / ranks + 54 * all_reduce


# %%
cases = []
for gpu, R in [(h100, 8), (h100, 2), (l40s, 4)]:
    parts, ms = lesson.tensor_parallel_parts(gpu, 4096, R), gpu.predict("tensor", [4096], R)
    cases.append(((*parts, R), 1e3 * ms.seconds))
check_function("ms under tensor parallel", tensor_ms, cases, rtol=1e-6)

# %% [markdown]
# **The guesses.** There are 54 tensors against one, and an all-reduce takes twice the steps of a
# gather: $54 \cdot 2 = 108$. Of the two ranks one is busy for 46.9 and the other for 21.8:
# $25 / 94$ is idle. Two ranks are never more than twice as fast. Under tensor parallel a part is
# not divided, so 1.5 is a good guess; under data parallel ten equal images divide well, so 1.8.
# On a busy machine both come out lower.

# %%
sent_guess = guess("bytes sent, tensor over data parallel", 108, unit="times")
fault = "features wrong, no error"
fault_guess = guess("fault, images in both halves", fault, choices=lesson.OUTCOMES)
idle_guess = guess("idle time of both ranks", 27, unit="%")
tensor_guess = guess("one large image, tensor parallel", 1.5, unit="times as fast")
data_guess = guess("ten small images, data parallel", 1.8, unit="times as fast")
nvlink_guess = guess("one image, 8 H100 over NVLink", "tensor", choices=("tensor", "data"))
pcie_guess = guess("one image, 8 L40S over PCIe", "data", choices=("tensor", "data"))
# %%
panels = lesson.schedules(full, [16384] + 4 * [4096], 2)
idle = lesson.idle_percent(panels["by patches"])
compare(Comparison(sent_guess, predicted=54 * 2), Comparison(idle_guess, predicted=idle))
print(h100.choose([4096], 8), l40s.choose([4096], 8))

# %% [markdown]
# ## Exercises
#
# ### 1. The engines' balance
#
# `sorted` keeps equal images in their order, and `index` finds the first of several equal loads.
# So every rank that runs this gets the same answer, without a message.


# %%
def largest_first(sizes, ranks):
    images, loads = [[] for _ in range(ranks)], [0] * ranks
    for image in sorted(range(len(sizes)), key=lambda image: -sizes[image]):
        rank = loads.index(min(loads))
        images[rank].append(image)
        loads[rank] += sizes[image]
    return images


# %%
batches_1 = [((1000, 100, 200, 50), 2), ((5, 5, 5), 2), (tuple(real[:9]), 4), ((7,), 3)]
cases = {each: get_dp_encoder_lb_assignment(*each).by_rank for each in batches_1}
check_function("images of the ranks", largest_first, cases)

# %% [markdown]
# ### 2. Bytes of another encoder
#
# Two all-reduces in each block, each of $L \times D$ numbers of two bytes. The heads do not
# matter.

# %%
answer_2 = 2 * 32 * 4096 * 1280 * 2
other = MoonViTConfig.preset("kimi-vl-a3b", num_hidden_layers=32, hidden_size=1280)
check("bytes", answer_2, TowerWork.of(other, torch.bfloat16).tensor_parallel_bytes([4096]))

# %% [markdown]
# ### 3. From how many images on?
#
# The largest number for which tensor parallel is chosen, and one more. (The rates are the start
# values of the notebook.)
#
# Two ranks that share three equal images take the time of four: one has two images, and the other
# is idle for half of the time. That is a quarter of both ranks' time. Five images leave a sixth
# idle. While that is more than tensor parallel loses by its all-reduces, tensor parallel is
# faster, even with more images than ranks.


# %%
my_rates = MachineRates(
    flops_per_s=3e14, bytes_per_s=2e12, launch_s=6e-6, link_s=1e-5, link_bytes_per_s=1e11
)
mine = cost_model_by_formula(full, torch.bfloat16, my_rates, "typed in")


def data_parallel_from(patches, ranks):
    counts = range(1, 65)
    tensor = [count for count in counts if mine.choose([patches] * count, ranks) == "tensor"]
    return max(tensor, default=0) + 1


# %%
idle_part = 1 - 3 / 4
pairs = [(1024, 4), (4096, 4), (16384, 4), (16384, 2)]
expected = {pair: lesson.data_parallel_from(mine, *pair) for pair in pairs}
check_function("images", data_parallel_from, expected)
check("idle part", idle_part, lesson.idle_percent([[(1, 1)], [(1, 1)] * 2]) / 100)
print("data parallel from:", expected)

# %% [markdown]
# ### 4. Three servers (operator)
#
# **A:** 54 all-reduces of 0.8 ms are 43 ms, and the whole image takes 32 ms on one L40S. One GPU
# alone is faster, so "data". **B:** under data parallel seven of eight GPUs wait; tensor parallel
# takes 7.2 instead of 12.1 ms: "weights". **C:** two images for each GPU: "data", about 3.5 times
# as fast.

# %%
answer_4 = ("data", "weights", "data")
calls = [(l40s, [4096], 4), (h100, [4096], 8), (h100, [1024] * 16, 8)]
expected = tuple(lesson.tp_mode(gpu, patches, ranks) for gpu, patches, ranks in calls)
check("modes of the servers", answer_4, expected)

# %% [markdown]
# ### 5. ★ A batch that fools the balance by patches
#
# An image of 16,384 patches is 46.9 TFLOP. An image of 1,024 patches is 0.97 TFLOP, so 48 of them
# are as much work as the giant. By cost, one rank gets the giant and the other rank the 48. By
# patches, the batch has 65,536 patches, so each rank gets 32,768: the giant's rank gets 16 small
# images too.

# %%
batch_5 = [16384] + 48 * [1024]
check("by patches has 1.25 times the work, or more", lesson.fools_patches(full, batch_5), True)
