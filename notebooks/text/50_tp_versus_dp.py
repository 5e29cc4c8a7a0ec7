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
#     question: Should the GPUs of a server share out the images or cut every layer, and what does each way cost?
#     minutes_cpu: 1
#     gpu: optional
#     data: sizes of data/workloads
# ---

# %% [markdown]
# # Tensor parallel or data parallel
#
# [Map of the course](00_start_here.ipynb) · [Glossary](GLOSSARY.md) · [Notation](NOTATION.md) · previous: [40 Packed attention](40_packed_attention.ipynb) · next: [60 Host syncs](60_gpu_syncs.ipynb)
#
# Lessons 00 to 40 encode a batch in one process. This lesson uses several.
#
# ## The question
#
# Should the GPUs of a server share out the images or cut every layer, and what does each way
# cost?
#
# ## You will be able to
#
# - **compute** the bytes that the ranks send in both ways, and confirm them with real processes;
# - **predict** which way is faster, from the sizes of the images, the number of GPUs and their
#   link;
# - **diagnose** a rank that waits: a bad balance, no image, or the wrong group.
#
# ## Needs
#
# Lesson [00](00_start_here.ipynb). Reading and solving takes about 90 minutes. The notebook runs
# in about a minute on a CPU with two cores and starts up to four processes. It uses no GPU;
# `python -m kimivl_lab.bench.parallel` does.
#
# ## Versions and machine

# %% tags=["nbval-ignore-output"]
import warnings

warnings.filterwarnings("ignore", message="IProgress not found")  # about a widget that is not used
from kimivl_lab.measure.provenance import device_name, versions

print(device_name("cpu"))
print(versions())

# %%
import inspect

import matplotlib.pyplot as plt
import torch
import torch.distributed as dist
from torch.nn.functional import gelu

from kimivl_lab import KimiVLConfig, KimiVLEncoder, MoonViTConfig, plots
from kimivl_lab.lessons import tp_versus_dp as lesson
from kimivl_lab.lessons.checks import check, check_function
from kimivl_lab.lessons.guesses import Comparison, compare, guess
from kimivl_lab.measure.ranks import run_ranks
from kimivl_lab.plots import cost_model, parallel

plots.use_style()
_ = torch.set_grad_enabled(False)

# %% [markdown]
# ## Ranks: two ways to share the work
#
# A server often runs one model on several GPUs. It starts one process for each GPU. Each process
# is a [rank](GLOSSARY.md#rank). Each rank has a memory that the others cannot read, so ranks
# exchange tensors by [collectives](GLOSSARY.md#collective). All ranks of a group must call the
# same collective. Rank 0 holds [1, 2] and rank 1 holds [10, 20]:
#
# | collective | rank 0 has afterwards | rank 1 has afterwards |
# |---|---|---|
# | [all-reduce](GLOSSARY.md#all-reduce): the sum | [11, 22] | [11, 22] |
# | [all-gather](GLOSSARY.md#all-gather): all parts, side by side | [1, 2, 10, 20] | [1, 2, 10, 20] |
# | [broadcast](GLOSSARY.md#broadcast): a copy of rank 0's tensor | [1, 2] | [1, 2] |
#
# There are two ways to share the encoder's work:
#
# - **[Data parallel](GLOSSARY.md#data-parallel):** each rank has all weights and encodes some of
#   the images. One all-gather at the end gives every rank the features of all images.
# - **[Tensor parallel](GLOSSARY.md#tensor-parallel):** each rank has a part of each weight matrix
#   and works on all images. Two all-reduces in each block put the parts together.

# %%
full = KimiVLConfig.preset("kimi-vl-a3b").vision_config
title = "Two ranks: a part of each matrix, or all matrices and some of the images"
fig, axes = parallel.who_holds_what(full, 2, title)
plt.show()

# %% [markdown]
# *How to read it:* a colour is a rank, white is the same on both ranks. Above, each matrix
# exists once, cut in two. Below, each matrix exists twice, and the patches are divided.
#
# ## Predict: bytes between the ranks
#
# **Tensor parallel.** Each of the $N$ blocks has two all-reduces. Each sums a tensor of
# $L \times D$ numbers. Take four images of 32 x 32 patches: $L = 4{,}096$. In bfloat16 the
# tensor has $4{,}096 \cdot 1{,}152 \cdot 2$ bytes = 9.437 MB, and $2 \cdot 27 = 54$ tensors are
# summed.
#
# **Data parallel.** The gathered features have the shape $(T, 4, D)$. With $T = L/4$ tokens
# these are $L \times D$ numbers again, 9.437 MB. But there is only one such tensor. (Shorter
# parts are padded to the longest.)
#
# **How a ring sends.** The ranks stand in a ring and cut the tensor into $R$ pieces. In each
# step, each rank sends one piece to its neighbour. After $R - 1$ steps, each piece has been
# summed on one rank. After another $R - 1$ steps, all ranks have all pieces. An all-reduce of 24
# bytes on 4 ranks has pieces of 6 bytes and takes $3 + 3$ steps, so each rank sends
# $6 \cdot 6 = 36$ bytes. An all-gather needs only the second half: 3 steps and 18 bytes.
#
# **Your code.** Write the bytes that one rank sends in an all-reduce of `size` bytes.


# %%
def all_reduce_sends(ranks, size):
    return ...


from kimivl_lab.parallel.work import TowerWork, steps_and_bytes

cases = {(R, 24): steps_and_bytes("all_reduce", R, 24)[1] for R in (4, 2, 8)}
hint = "2 (R - 1) steps, and one piece of size / R in each"
check_function("bytes sent", all_reduce_sends, cases, rtol=1e-6, hint=hint)

# %% [markdown]
# **Your guess.** On four ranks: bytes that a rank sends under tensor parallel, over those under
# data parallel?

# %%
sent_guess = guess("bytes sent, tensor over data parallel", None, unit="times")

# %%
N, D, L = full.num_hidden_layers, full.hidden_size, 4 * 32 * 32
size = 2 * L * D  # bytes of the features in bfloat16
print("                 tensors   steps   MB sent by one of 4 ranks")
sent = {}
for words, kind, times in [("tensor", "all_reduce", 2 * N), ("data", "all_gather", 1)]:
    steps, each = steps_and_bytes(kind, 4, size)
    sent[words] = times * each
    print(f"{words:6s} parallel {times:8d} {times * steps:7d} {times * each / 1e6:27.1f}")
compare(Comparison(sent_guess, predicted=sent["tensor"] / sent["data"]))
title = f"{2 * N} all-reduces against one gather, for {L:,} patches"
fig, ax = parallel.bytes_through_layers(N, size / 1e6, size / 1e6, title=title)
plt.show()

# %% [markdown]
# *How to read it:* tensor parallel sums two tensors in each block. Data parallel gathers one
# tensor at the end.
#
# Why cut layers at all? A *single* image then becomes faster, and each rank holds only $1/R$ of
# the blocks' weights.
#
# ## Build: cut one MLP, then the heads
#
# Cut the first matrix of the MLP by **columns**, $W_0 = [W_{00} \,|\, W_{01}]$, and the second by
# **rows**, $W_1 = [W_{10} \,;\, W_{11}]$; the second index is the rank. Then each rank passes
# both matrices without any communication:
#
# $$\mathrm{GELU}(xW_0 + \text{bias}_0)\,W_1 + \text{bias}_1 \;=\; \sum_{r} \underbrace{\mathrm{GELU}(xW_{0r} + \text{bias}_{0r})\,W_{1r}}_{\text{rank } r} \;+\; \text{bias}_1$$
#
# The sum over the ranks is one all-reduce. The bias $\text{bias}_1$ is added once, after the
# sum.
#
# Why columns first? After a cut by columns, each rank has *complete values* of some hidden
# features, and [GELU](GLOSSARY.md#gelu) can be applied. After a cut by rows, each rank has a
# *partial sum* of every feature. Let the partial sums be 2 and -1, so the complete value is 1.
# $\mathrm{GELU}(1) = 0.84$, but $\mathrm{GELU}(2) + \mathrm{GELU}(-1) = 1.95 - 0.16 = 1.79$.
#
# **Your code.** Write what one rank computes, without $\text{bias}_1$.
# (`tensor.chunk(ranks, dim)[rank]` is one part of a tensor.)


# %%
def part_of_mlp(x, W0, bias0, W1, rank, ranks):
    """x (L, D), W0 (D, F), bias0 (F,), W1 (F, D) -> this rank's summand (L, D)."""
    return ...


torch.manual_seed(0)
x, W0, bias0 = (torch.randn(shape).double() for shape in [(6, 8), (8, 12), (12,)])
W1, bias1 = (torch.randn(shape).double() for shape in [(12, 8), (8,)])
arguments = [(x, W0, bias0, W1, rank, ranks) for ranks in (2, 3) for rank in range(ranks)]
cases = [(each, lesson.mlp_summand(*each)) for each in arguments]
hint = "columns of W0 and of bias0 (dim 1 and 0), rows of W1 (dim 0); bias1 comes later"
check_function("one rank's part of the MLP", part_of_mlp, cases, rtol=1e-9, hint=hint)

# %% [markdown]
# Now a Python sum stands for the all-reduce. Two usual mistakes stand beside the right way.

# %%
right = gelu(x @ W0 + bias0) @ W1 + bias1
summed = sum(lesson.mlp_summand(x, W0, bias0, W1, rank, 2) for rank in range(2))
rows = [x[:, half] @ W0[half] + bias0 / 2 for half in (slice(0, 4), slice(4, 8))]
tries = {
    "columns, rows, sum, bias once": summed + bias1,
    "each rank adds the bias": summed + 2 * bias1,
    "rows first, GELU of partial sums": sum(map(gelu, rows)) @ W1 + bias1,
}
for way, result in tries.items():
    print(f"{way:33s} equal: {torch.allclose(result, right)}")

# %% [markdown]
# Attention is cut by [heads](GLOSSARY.md#head): each rank computes some heads completely. But
# $W_{qkv}$ holds q, k and v one below the other, so half of its lines is not half of the heads.
# With four heads of two numbers, q is in the lines 0 to 7, k in 8 to 15, v in 16 to 23. Rank 0 of
# 2 needs the lines 0 to 3, 8 to 11 and 16 to 19. A plain half, 0 to 11, would be all of q, half
# of k and no v.
#
# ## Check equality: real processes
#
# The library has these layers (`kimivl_lab/parallel/linear.py`).
# `set_encoder_parallel("data", group)` or `("tensor", group)` picks the way.
# `run_ranks(function, 2, ...)` starts two ranks, calls the function on both, and returns their
# results. The function stands in a module, since another process cannot import a cell:

# %%
print(inspect.getsource(lesson.encode_in_modes))

# %% [markdown]
# Each rank reports the error of its features, the patches that went through its blocks, and its
# collectives. The batch has five images of different sizes, so a wrong order would show. The
# encoder is narrow, but has 27 blocks.
#
# By hand, in float32 (4 bytes a number): tensor parallel sums $2N$ tensors of $4LD$ bytes. Data
# parallel gathers one tensor: two parts, each as long as the longer part, with $4D$ bytes a
# patch. The library's balance places the images; a later section explains it.

# %%
config = KimiVLConfig.preset("tiny")
config.vision_config.num_hidden_layers = N
width, grids = config.vision_config.hidden_size, [(12, 14), (4, 10), (8, 8), (2, 6), (6, 10)]
lengths = [h * w for h, w in grids]
on_two = run_ranks(lesson.encode_in_modes, 2, config, grids, ["data", "tensor"])
longest = max(rank["data"].patches for rank in on_two)
by_hand = {"data": 4 * 2 * longest * width, "tensor": 2 * N * 4 * sum(lengths) * width}
lesson.print_encoded(on_two, by_hand)

# %% [markdown]
# ### One image on many ranks
#
# Under data parallel one rank encodes the image, and the others wait. Four processes show this:

# %%
on_four = run_ranks(lesson.encode_in_modes, 4, config, [(12, 14)], ["data", "tensor"])
lesson.print_encoded(on_four)

# %% [markdown]
# On eight ranks, seven would wait. For one image of 4,096 patches, this library and SGLang
# broadcast 9.4 MB. vLLM, as read, always pads and gathers: $8 \cdot 9.4 = 75$ MB on each rank.
# (With [CUDA graphs](GLOSSARY.md#cuda-graph) vLLM gathers behind the projector, 2,048
# numbers a token instead of $4 \cdot 1{,}152$. Then the ratio of bytes is 243 instead of 108.)
#
# ## Faults: one rank, and the wrong group
#
# **A list instead of a tensor.** Data parallel must also work on *one* rank. As read in SGLang's
# [pull request 30869](https://github.com/sgl-project/sglang/pull/30869), Kimi-VL's encoder on
# one rank returned a list with a tensor for each image. The projector needs one packed tensor,
# so the server failed at the first image. `encode_as_before` repeats this fault with our own
# parts.

# %%
from kimivl_lab.parallel.data_parallel import run_dp_sharded_vision_model

# this process as a world of one rank
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
encoder = KimiVLEncoder(KimiVLConfig.preset("tiny")).eval()
pixels = torch.randn(sum(lengths), 3, 14, 14)
for encode in (lesson.encode_as_before, run_dp_sharded_vision_model):
    features = encode(encoder.vision_tower, pixels, grids, dist.group.WORLD)
    try:
        projected = f"works, {tuple(encoder.multi_modal_projector(features).shape)}"
    except TypeError:
        projected = "TypeError"
    print(f"{encode.__name__:28s} returns a {type(features).__name__}; projector: {projected}")
dist.destroy_process_group()

# %% [markdown]
# The rule: one packed $(T, 4, D)$ tensor at *every* number of ranks.
#
# **The wrong group.** A server may split its ranks into groups that serve different requests. The
# weights are cut over a group, and the sums must go over **the same** group. As reported in
# [SGLang's issue 34442](https://github.com/sgl-project/sglang/issues/34442), Kimi-VL on four
# ranks in two groups cut its layers over two ranks and summed over all four. The first image
# stopped the server. In our code the fault is one assignment:
#
# ```python
# for layer in encoder.modules():
#     if isinstance(layer, RowParallelLinear):  # the layers that end in an all-reduce
#         layer.group = everyone  # they were cut over half of the ranks
# ```
#
# Ranks 0 and 1 share one encoder, ranks 2 and 3 another one. We run the right way once and the
# fault twice.
#
# **Your guess.** With the fault, and images in *both* halves: what happens?

# %%
fault_guess = guess("fault, images in both halves", None, choices=lesson.OUTCOMES)

# %%
cases = {  # which halves have images, whether the sums go over all ranks, time-out in seconds
    "sum over the half": ((True, False), False, 20.0),
    "sum over all, both halves have images": ((True, True), True, 20.0),
    "sum over all, only one half has images": ((True, False), True, 2.0),
}
small, found = KimiVLConfig.preset("tiny"), {}
for words, case in cases.items():
    found[words] = run_ranks(lesson.encode_in_halves, 4, small, [(8, 8), (4, 6)], *case)
    print(words, *map(lesson.outcome_words, found[words]), sep="\n    ")
print("your guess for the second case:", fault_guess.value)
stuck = found["sum over all, only one half has images"]

# %% [markdown]
# With images in both halves, nothing stops: the sums mix two requests, and no rank reports an
# error. With images in one half, the ranks of this half wait for two ranks without images. Only
# a *finite time-out* ends this wait, here after two seconds. Then the library finds the missing
# ranks, and the error names them.
#
# ## Balance: which rank gets which image
#
# Data parallel is as slow as its slowest rank. The engines balance **by patches**: they take the
# largest image first and give each image to the rank that has the fewest patches so far. But
# attention costs the *square* of an image's patches. A balance **by cost** counts the square too,
# and then moves images away from the slowest rank.
#
# By hand, two ranks: one image of 16,384 patches and four of 4,096. By patches, each rank gets
# 16,384 patches. A patch costs 0.82 GFLOP in the linear maps, and a pair of patches costs
# $4ND = 124{,}416$ FLOP in attention:
#
# | | linear maps | attention | sum |
# |---|---|---|---|
# | rank 0: $1 \cdot 16{,}384$ | 13.5 TFLOP | $16{,}384^2$ pairs: 33.4 TFLOP | 46.9 TFLOP |
# | rank 1: $4 \cdot 4{,}096$ | 13.5 TFLOP | $4 \cdot 4{,}096^2$ pairs: 8.3 TFLOP | 21.8 TFLOP |
#
# **Your guess.** Which part of both ranks' time is idle, in %?

# %%
idle_guess = guess("idle time of both ranks", None, unit="%")

# %%
giant = [16384] + 4 * [4096]
panels = lesson.schedules(full, giant, 2)
compare(Comparison(idle_guess, predicted=lesson.idle_percent(panels["by patches"])))
note = f"one image of 16,384 patches and four of 4,096  ·  {plots.COUNTED}"
words = {"axis": "work of a rank, TFLOP", "title": "Equal in patches is not equal in work"}
fig, axes = parallel.schedule(panels, lesson.bound(full, giant, 2), subtitle=note, **words)
plt.show()

# %% [markdown]
# *How to read it:* a bar is an image; hatched is idle. The number in a bar is its patches. The
# dashed line is the least work that the slowest rank can have. Here no balance is better than
# "by patches", because data parallel cannot divide an image. Tensor parallel can.
#
# Now we take real sizes: batches of 32 photographs, screens, camera files and receipts.
# Kimi-VL's limit is 4,096 patches an image.

# %%
print("slowest rank over the least possible ", "".join(f"{name:>13s}" for name in lesson.BALANCES))
for words, many, ranks in [
    ("40 batches, limit 4,096, 4 ranks", lesson.real_batches(4096), 4),
    ("40 batches, limit 16,384, 4 ranks", lesson.real_batches(16384), 4),
    ("16,384 and 32 of 1,024, 2 ranks", [[16384] + 32 * [1024]], 2),
]:
    excess = lesson.mean_excess(full, many, ranks).values()
    print(f"{words:37s}", "".join(f"{value:13.1%}" for value in excess))
real = lesson.real_batches(4096)[0]
words = {"axis": "work of a rank, TFLOP", "title": "On real sizes the balance by patches is close"}
words["subtitle"] = f"32 images of at most 4,096 patches and padding, 4 ranks  ·  {plots.COUNTED}"
panels, least = lesson.schedules(full, real, 4), lesson.bound(full, real, 4)
fig, axes = parallel.schedule(panels, least, **words)
plt.show()

# %% [markdown]
# *How to read it:* as above. Round robin gives image $i$ to rank $i$ modulo $R$. The engines'
# balance loses 2 to 3 % on real sizes, so leave it as it is. It loses 16.6 % when one giant
# image comes with many small ones.
#
# ## Model: the time of a batch
#
# The time of a batch follows from the patches $n$ of each image and a few rates. One image costs
# the rank that encodes it
#
# $$t_\text{one}(n) = t_\text{image} + (t_\text{patch} + t_\text{linear})\,n + t_\text{pair}\,n^2$$
#
# Tensor parallel divides $t_\text{linear}$ (the linear maps) and $t_\text{pair}$ (attention) by
# $R$. It does not divide $t_\text{patch}$: norms, residuals and the patch embedding run in full
# on each rank. Then
#
# $$t_\text{data} = t_\text{call} + \max_r \sum_{\text{images of } r} t_\text{one}(n) + t_\text{gather}$$
#
# $$t_\text{tensor} = t_\text{call} + \sum_{\text{all images}} \left(t_\text{image} + t_\text{patch}\,n + \frac{t_\text{linear}\,n + t_\text{pair}\,n^2}{R}\right) + 2N\,t_\text{all-reduce}$$
#
# Each collective costs
#
# $$t_\text{collective} = \text{steps} \cdot t_\text{step} + \text{bytes sent} \cdot t_\text{byte} + t_\text{wait}$$
#
# where $t_\text{wait}$ is the wait for the last rank. $t_\text{call}$ is a fixed time per batch.
#
# **By hand.** One image of 4,096 patches on 8 H100, with rates from the data sheet (the section
# on GPUs prints them). A forward on one GPU takes 12.1 ms: 2.9 ms that are not divided, and 9.2
# ms that are. One all-reduce takes 0.059 ms. So tensor parallel takes
# $2.9 + 9.2/8 + 54 \cdot 0.059 = 7.2$ ms. Data parallel takes 12.1 ms and a broadcast: seven GPUs
# wait.
#
# **Your code.** Write the time of tensor parallel for any number of ranks, with 27 blocks.


# %%
def tensor_ms(not_divided, divided, all_reduce, ranks):
    """All in ms."""
    return ...


from kimivl_lab.gpus import find_gpu
from kimivl_lab.parallel.gpu_rates import cost_model_of_gpu

h100, l40s = (cost_model_of_gpu(full, find_gpu(name)) for name in ("H100", "L40S"))
cases = []
for gpu, R in [(h100, 8), (h100, 2), (l40s, 4)]:
    parts, ms = lesson.tensor_parallel_parts(gpu, 4096, R), gpu.predict("tensor", [4096], R)
    cases.append(((*parts, R), 1e3 * ms.seconds))
hint = "two all-reduces in each of 27 blocks; only the second argument is divided"
check_function("ms under tensor parallel", tensor_ms, cases, rtol=1e-6, hint=hint)

# %% [markdown]
# ## Measure: two ranks on this machine
#
# The rates of this machine come from a fit: some batches are timed on two ranks, and the rates
# are chosen so that the formula comes close. Then the formula must predict *other* batches.
#
# **Your guesses.** How many times as fast as one rank are two ranks, with a small tower? Guess
# for one image of 46 x 46 patches under tensor parallel, and for ten of 12 x 12 under data
# parallel.

# %%
tensor_guess = guess("one large image, tensor parallel", None, unit="times as fast")
data_guess = guess("ten small images, data parallel", None, unit="times as fast")

# %%
tiny = MoonViTConfig.preset("tiny")
fit_on = [[(side, side)] for side in (8, 16, 32, 40)]
fit_on += [[(8, 8)] * 16, [(16, 16)] * 8, [(28, 28)] * 3]
check_on = [[(46, 46)], [(12, 12)] * 10, [(24, 24)], [(28, 32), (20, 24), (12, 16)]]
uneven = [(24, 24), (8, 8)] * 4
model, fitted, checked = lesson.measure_two_ranks(tiny, fit_on, check_on, uneven)

# %% tags=["nbval-ignore-output"]
lesson.print_rates(model, h100)

# %% tags=["nbval-ignore-output"]
lesson.print_predictions(model, checked)
print()
for guessed, batch, mode in [(tensor_guess, 0, "tensor"), (data_guess, 1, "data")]:
    compare(Comparison(guessed, *lesson.gains(model, checked[batch], mode)))

# %%
errors = lesson.median_errors(model, checked)
source = plots.measured_on("cpu", "tiny preset, float32, 2 ranks of 1 thread")
words = ", ".join(f"{errors[mode]:.0%} for {mode}" for mode in ("tensor", "data"))
title = f"Batches that were not in the fit: median error {words} parallel"
pairs = (lesson.timed_pairs(model, measured) for measured in (checked, fitted))
fig, axes = cost_model.predicted_against_measured(*pairs, band=0.15, title=title, subtitle=source)
plt.show()

# %% [markdown]
# *How to read it:* on the line the prediction is right, in the band it is off by less than 15 %.
# Hollow grey marks were used for the fit. An upright line is the spread. A long line, or a mark
# far off, can mean that the machine was busy: run the cells again. Where both ways are nearly
# equal, the model may choose the slower one, and that costs little.
#
# `set_encoder_parallel("auto", group)` of this library computes the model before each batch and
# runs the faster way. (The engines run one way for all batches.) A record of a deeper tower on an
# idle machine shows how well it chooses.

# %%
from kimivl_lab.plots.floor import recorded_on

swept, origin, close = lesson.recorded_sweep()
title = f"Auto is within 5 % of the faster way in {close} recorded batches"
note = recorded_on(origin, f"{origin['preset']} preset, float32, median and p20 to p80")
fig, ax = parallel.recorded_modes(swept, title=title, subtitle=note)
plt.show()

# %% [markdown]
# *How to read it:* further left is faster. At the line at 1, a second rank gains nothing; at the
# dashed line it halves the time. The first batches gain most from tensor parallel, the last from
# data parallel. The triangle is auto: it stands near the way that it chose (right column).
#
# ## GPUs: NVLink, PCIe, and your own server
#
# The next maps are *predicted*, not measured: from data sheets, assumed latencies, and assumed
# shares of the data sheets' rates. Read these rates first:

# %%
lesson.print_gpu_rates(("H100", "A100", "L40S"), patches=4096, counts=(2, 4, 8))

# %% [markdown]
# Two links, and two kinds of all-reduce:
#
# - **NVLink** connects every GPU of a server with every other one. vLLM and SGLang have an
#   all-reduce for it that takes **two steps for any number of ranks** ("two-shot": each rank sums
#   one part of the tensor, then all fetch all parts). For 8 H100: $2 \cdot 5$ µs and
#   $1.75 \cdot 9.44$ MB at 337.5 GB/s are $10 + 49 = 59$ µs.
# - **PCIe** is shared, and GPUs send in a **ring of $2(R - 1)$ steps**. For 8 L40S: $14 \cdot 10$
#   µs and $1.75 \cdot 9.44$ MB at 19.2 GB/s are $140 + 860 = 1{,}000$ µs. A forward has 54
#   all-reduces.
#
# **Your rates.** Type your rates into the cell below the guesses. Run `all_reduce_perf` of
# `nccl-tests`: `link_bytes_per_s` is its bus bandwidth (`busbw`) at a large size, `link_s` is
# the time of a small size divided by $2(R - 1)$. The start values describe fast GPUs with a slow
# ring.
#
# **Your guesses.** One image of 4,096 patches on 8 GPUs: which way is faster, over NVLink and
# over PCIe?

# %%
nvlink_guess = guess("one image, 8 H100 over NVLink", None, choices=("tensor", "data"))
pcie_guess = guess("one image, 8 L40S over PCIe", None, choices=("tensor", "data"))

# %%
from kimivl_lab.parallel.cost_model import MachineRates, cost_model_by_formula

my_rates = MachineRates(
    flops_per_s=3e14, bytes_per_s=2e12, launch_s=6e-6, link_s=1e-5, link_bytes_per_s=1e11
)
mine = cost_model_by_formula(full, torch.bfloat16, my_rates, "typed in")

# %% tags=["headline"]
sizes, counts = [256, 1024, 4096, 9216, 16384], [1, 2, 3, 4, 6, 8, 16]
ratios = {
    "8 H100, NVLink": h100.crossover(sizes, counts, 8),
    "8 L40S, PCIe": l40s.crossover(sizes, counts, 8),
    "8 of yours": mine.crossover(sizes, counts, 8),
}
title = "One large image gains from tensor parallel over NVLink, and not over PCIe"
note = "published tower, bfloat16; predicted from data sheets and the assumptions above"
fig, axes = cost_model.crossover_map(ratios, sizes, counts, title=title, subtitle=note)
plt.show()
for guessed, gpu in ((nvlink_guess, h100), (pcie_guess, l40s)):
    print(f"{guessed.quantity}: predicted {gpu.choose([4096], 8)}, your guess {guessed.value}")

# %% [markdown]
# *How to read it:* the number in a cell is the time of tensor parallel divided by the time of
# data parallel. 0.59 means 59 % of the time; 2.00 means twice the time. Inside the thick line
# tensor parallel is faster.
#
# Over NVLink, one or two images of 4,096 patches are faster with tensor parallel. One image of
# 256 patches is not: 54 all-reduces cost more than the division saves. Over PCIe, data parallel
# wins by up to 14 times, with one tie (0.99). With the start values of "yours" (14 slow steps)
# one image of 4,096 patches gains nothing. So the link decides: measure your link. (MoonViT has
# 16 heads, and a head is not cut, so tensor parallel ends at 16 ranks.)
#
# ## Published: what others measured
#
# Some published benchmarks compare both ways. A prediction needs the GPU, the encoder and the
# number of patches; the figure shows the cases that state all three.

# %%
from kimivl_lab.measure.published import parallel_cases
from kimivl_lab.plots.published import predicted_against_published

cases = parallel_cases()
verdicts = [case.verdict for case in cases]
title = f"The direction is right in {verdicts.count('right')} of {len(cases)} published cases"
note = f"{verdicts.count('open')} open, {verdicts.count('miss')} misses; three encoders on 8 MI300X"
panel = {"Data parallel over tensor parallel": ("predicted: encoder, times as fast", cases)}
fig, axes = predicted_against_published(panel, title=title, subtitle=note)
plt.show()

# %% [markdown]
# *How to read it:* the horizontal axis is the predicted range for the encoder, the vertical axis
# is the published gain. In a shaded area the direction is right. The published numbers are those
# of a *whole server*, of which the encoder is a part: the encoder's predicted 1 to 4 times
# became 1.0 to 1.4 times the throughput.
#
# The misses are Qwen3-VL with several small images: data parallel changed nothing. Perhaps the
# encoder is a small part of that server's time; this was not measured. In no published case was
# tensor parallel clearly ahead. Without a prediction: 1.4 times (vLLM 23909), about 3 times for
# the encoder alone (18368).
#
# ## What to remember
#
# - Columns, then rows: complete values for GELU and heads, then one sum. Two all-reduces a block.
#   The bias once, after the sum.
# - 54 all-reduces against one gather of the same size: 108 times the bytes sent.
# - Several images in a call: share them out. One large image: cut the layers, if the GPUs have a
#   fast link such as NVLink. Over PCIe: share out (predicted).
# - One packed tensor at every number of ranks. One group for cutting and for summing. A finite
#   time-out, and an error that names the missing ranks.

# %% tags=["result"]
print(f"Bytes by hand = counted: {2 * N} all-reduces of {by_hand['tensor']:,} together,")
print(f"one gather of {by_hand['data']:,}. Cut over two ranks and summed over four:")
print(f"they wait in vain, and the error names ranks {stuck[0].missing}.")

# %% [markdown]
# ## On Monday
#
# As read in vLLM 0.32 and SGLang 0.5.23:
#
# | decision | vLLM | SGLang | default |
# |---|---|---|---|
# | share out images | `--mm-encoder-tp-mode data` | `--mm-enable-dp-encoder` | both cut layers (`weights`; off) |
# | balance | nothing to set | nothing to set | by patches: leave it |
# | limit of a wait | `--distributed-timeout-seconds` | `--dist-timeout` | release not read: `--help` |
#
# - **PCIe, or several images a call:** set the first line. **NVLink and one large image at a
#   time:** measure both, or run `kimivl-lab advise` with a record of your GPUs (`--rates`).
# - **Memory:** data parallel keeps the whole tower on each GPU, $417$ million weights of 2
#   bytes = 0.83 GB, instead of $1/R$ of it. That room is taken from the KV cache.
# - vLLM's `data` falls back to `weights` where a model lacks support. A [pull
#   request](https://github.com/vllm-project/vllm/pull/53735), open when read, makes `data` the
#   default: check your release.
#
# **Check on your server.** Start it once with the flag and once without, and compare the mean
# [time to first token](GLOSSARY.md#ttft), for 1 and for 8 images a request:
#
# ```text
# vllm serve moonshotai/Kimi-VL-A3B-Instruct --trust-remote-code --tensor-parallel-size 4 \
#   --mm-encoder-tp-mode data
# vllm bench serve --model moonshotai/Kimi-VL-A3B-Instruct --trust-remote-code \
#   --backend openai-chat --endpoint /v1/chat/completions --dataset-name random-mm \
#   --random-mm-base-items-per-request 8 --random-mm-bucket-config '{(896, 896, 1): 1.0}' \
#   --random-mm-limit-mm-per-prompt '{"image": 8, "video": 0}' --random-output-len 1 \
#   --num-prompts 100 --max-concurrency 1
# ```
#
# ## Exercises
#
# Solutions, with the steps:
# [solutions/50_tp_versus_dp__SOLUTION.ipynb](solutions/50_tp_versus_dp__SOLUTION.ipynb).
#
# ### 1. The engines' balance
#
# Place the largest image first. Each image goes to the rank that has the fewest patches so far.
# Of equal images the one with the lower number comes first, and of equal ranks the lower one
# gets it. Return the image numbers of each rank, in the order in which they were placed.


# %%
def largest_first(sizes, ranks):
    return ...


from kimivl_lab.parallel.balance import get_dp_encoder_lb_assignment

batches_1 = [((1000, 100, 200, 50), 2), ((5, 5, 5), 2), (tuple(real[:9]), 4), ((7,), 3)]
check_function(
    "images of the ranks",
    largest_first,
    {each: get_dp_encoder_lb_assignment(*each).by_rank for each in batches_1},
    hint="sort the image numbers by size and keep the order of equals; then find the least load",
)

# %% [markdown]
# ### 2. Bytes of another encoder
#
# Another encoder has 32 blocks, 1,280 features and 16 heads, and runs in bfloat16. How many bytes
# do all the all-reduces of one forward sum, for one image of 4,096 patches? (Count the tensors,
# not what a ring sends.)

# %%
answer_2 = None  # bytes

other = MoonViTConfig.preset("kimi-vl-a3b", num_hidden_layers=32, hidden_size=1280)
expected = TowerWork.of(other, torch.bfloat16).tensor_parallel_bytes([4096])
check("bytes", answer_2, expected, hint="all-reduces (two a block) x patches x features x 2")

# %% [markdown]
# ### 3. From how many images on?
#
# A server gets batches of equal images. From how many images on is data parallel faster, for this
# number and every larger one up to 64? Use `mine.choose([patches] * images, ranks)`, with your
# own rates.
#
# The answer can be larger than the number of ranks. To see why: two ranks share three equal
# images by data parallel. Which part of both ranks' time is idle?


# %%
def data_parallel_from(patches, ranks):
    return ...


idle_part = None  # a number from 0 to 1

pairs = [(1024, 4), (4096, 4), (16384, 4), (16384, 2)]
expected = {pair: lesson.data_parallel_from(mine, *pair) for pair in pairs}
hint = "find the largest number for which tensor is chosen, and add one"
check_function("images", data_parallel_from, expected, hint=hint)
hint = "one rank has two images, the other has one"
check("idle part", idle_part, lesson.idle_percent([[(1, 1)], [(1, 1)] * 2]) / 100, hint=hint)

# %% [markdown]
# ### 4. Three servers (operator)
#
# Which value of `--mm-encoder-tp-mode` do you set, "data" or "weights"? Use the maps and the
# rates above.
#
# - **A:** 4 L40S over PCIe; each call has one scan of 4,096 patches.
# - **B:** 8 H100 over NVLink; one user, one image of 4,096 patches a call.
# - **C:** 8 H100 over NVLink; many users, 16 images of 1,024 patches a call.

# %%
answer_4 = None  # three words, for A, B and C

calls = [(l40s, [4096], 4), (h100, [4096], 8), (h100, [1024] * 16, 8)]
expected = tuple(lesson.tp_mode(gpu, patches, ranks) for gpu, patches, ranks in calls)
hint = "A: what do 54 all-reduces take over PCIe? B: how many GPUs would wait? C: see the map"
check("modes of the servers", answer_4, expected, hint=hint)

# %% [markdown]
# ### 5. ★ A batch that fools the balance by patches
#
# Find a batch for two ranks: at most 64 images of 4 to 16,384 patches each. Under "by patches"
# the slowest rank must have at least 1.25 times its work under "by cost".

# %%
batch_5 = None  # a list of patches

check(
    "by patches has 1.25 times the work, or more",
    lesson.fools_patches(full, batch_5),
    True,
    hint="by cost, one giant image should be as much work as all the other images together",
)

# %% [markdown]
# ## References
#
# - Column and row cuts: [Megatron-LM](https://arxiv.org/abs/1909.08053).
# - Kimi-VL's encoder in SGLang: [pull request
#   30869](https://github.com/sgl-project/sglang/pull/30869); the wrong group: [issue
#   34442](https://github.com/sgl-project/sglang/issues/34442).
# - In vLLM: [pull request 31738](https://github.com/vllm-project/vllm/pull/31738) (data parallel
#   for MoonViT), [23817](https://github.com/vllm-project/vllm/pull/23817) (Kimi-VL, measured),
#   [optimization guide](https://docs.vllm.ai/en/latest/configuration/optimization/).
# - `data/published/encoder_parallel.csv`, from [vLLM on
#   MI300X](https://rocm.blogs.amd.com/software-tools-optimization/vllm-dp-vision/README.html).
# - Largest first is at most a third above the optimum: [Graham
#   1969](https://doi.org/10.1137/0117039).
#
# **Next:** a Python process drives each GPU. Lesson 60 finds out when it waits.
#
# [Map of the course](00_start_here.ipynb) · [Glossary](GLOSSARY.md) · [Notation](NOTATION.md) · previous: [40 Packed attention](40_packed_attention.ipynb) · next: [60 Host syncs](60_gpu_syncs.ipynb)
