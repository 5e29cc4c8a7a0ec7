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
#     question: When does Python wait for the GPU, what does one wait cost, and how does an encoder run without any?
#     minutes_cpu: 1
#     gpu: optional
#     data: sizes of data/workloads, numbers of data/published
# ---

# %% [markdown]
# # Host syncs: when Python waits for the GPU
#
# [Map of the course](00_start_here.ipynb) · [Glossary](GLOSSARY.md) · [Notation](NOTATION.md) · previous: [50 Tensor parallel or data parallel](50_tp_versus_dp.ipynb) · next: [70 CUDA graphs by token budget](70_cuda_graphs.ipynb)
#
# Lesson 50 gave each GPU a Python process. Here we look at one of them.
#
# ## The question
#
# When does Python wait for the GPU, what does one wait cost, and how does an encoder run without
# any?

# %% [markdown]
# ## You will be able to
#
# - **find** the lines of a forward that make Python wait, on a machine that has no GPU;
# - **rewrite** such lines so that they do not wait, and so that no copy takes wrong values;
# - **predict** what a wait costs from three times: of a launch, of a kernel, and of the way back
#   to Python.
#
# ## Needs
#
# Notebooks [00](00_start_here.ipynb) and [40](40_packed_attention.ipynb), for
# [cu_seqlens](GLOSSARY.md#cu_seqlens) and [max_seqlen](GLOSSARY.md#max_seqlen). About 90 minutes
# to read and solve. The notebook runs in about a minute on a CPU. A GPU is optional: without one,
# the waits are counted on a [pretended device](GLOSSARY.md#pretended-device), which gives counts
# and no times.
#
# ## Versions and machine

# %% tags=["nbval-ignore-output"]
import warnings

warnings.filterwarnings("ignore", message="IProgress not found")  # about a widget that is not used
from kimivl_lab.measure.provenance import device_name, versions

print(device_name("cpu"))
print(versions())

# %%
import linecache

import matplotlib.pyplot as plt
import torch
import torch.nn.functional as F

from kimivl_lab import EncoderOptions, MoonViTConfig, MoonVitPretrainedModel
from kimivl_lab import count_host_syncs, plots
from kimivl_lab.kernels.memory import upload
from kimivl_lab.lessons import host_syncs
from kimivl_lab.lessons.checks import check, check_function
from kimivl_lab.lessons.grids_on_device import METADATA_VARIANTS
from kimivl_lab.lessons.guesses import Comparison, compare, guess
from kimivl_lab.plots import syncs
from kimivl_lab.syncs.counter import HostSyncError, on_device
from kimivl_lab.syncs.pretend import PretendDevice

plots.use_style()
_ = torch.set_grad_enabled(False), torch.manual_seed(0)

# %% [markdown]
# ## Waits: launches, a queue, and a host that runs ahead
#
# Python does not compute on a GPU. It [launches](GLOSSARY.md#kernel-launch): it puts a
# [kernel](GLOSSARY.md#kernel) into the GPU's queue, the [stream](GLOSSARY.md#stream), and
# continues at once. So the [host](GLOSSARY.md#host-and-device) runs ahead of the device, and the
# device always finds the next kernel in the queue. This distance is the host's **lead**.
#
# The lead ends when Python needs a number that the device has not computed yet: for an `if`, a
# length, a loop. Python must then wait until every kernel in the queue is done and the number has
# come back. This is a **host sync**, or [sync](GLOSSARY.md#sync); the course also says **wait**.
# When Python continues, the queue is empty.
#
# Which lines wait is a property of the code, so it can be counted without a GPU. Inside
# `PretendDevice`, torch has a CUDA device whose tensors lie in host memory. `WaitOrder` (in
# `kimivl_lab/lessons/host_syncs.py`) notes after how many launches each wait comes.

# %%
with PretendDevice(order := host_syncs.WaitOrder()):
    x = torch.zeros(8, device="cuda")  # the first launch
    for step in range(1, 12):
        x.add_(1)  # one launch in each step
        if step in (3, 7):
            float(x[0])  # Python needs a value of the device: a wait
print(f"{order.launches} launches, waits after {order.waits}")

# %% [markdown]
# `torch.zeros` launches a kernel too. So there are $1 + 11 = 12$ launches, and the wait of step 3
# comes after $1 + 3 = 4$ of them.
#
# ## Predict: what does one wait cost?
#
# The price depends on three times. Here the host needs $\tau = 8$ µs for one launch, and the
# device needs $t_{kernel} = 20$ µs for one kernel. The **way back**, $t_{back} = 25$ µs, is the
# time from the end of the last kernel until Python continues.
#
# Without waits, the first kernel ends after $8 + 20 = 28$ µs. Then the device, the slower side,
# sets the pace: 20 µs for each kernel. Twelve kernels take $28 + 11 \cdot 20 = 248$ µs.
#
# At a wait the queue is empty: the device idles for $t_{back}$, and then for one more launch. So
# a wait costs $25 + 8 = 33$ µs here, and two waits give $248 + 66 = 314$ µs.
#
# With kernels of 4 µs the host sets the pace: without waits it launches all the time. At a wait
# it stands still until the running kernel is done, 4 µs, and for $t_{back}$: $4 + 25 = 29$ µs for
# each wait.
#
# **Your code.** Write the price of one wait for any three times.


# %%
def wait_price(launch, kernel, back):
    """µs that one wait adds."""
    return ...


cases = [(8, 20, 25), (8, 4, 25), (5, 3, 20), (5, 300, 40), (6, 6, 10)]
expected = {one: host_syncs.simulated_price(*one) for one in cases}
hint = "the way back, plus the side that is shorter: its work no longer overlaps the other's"
check_function("price of a wait", wait_price, expected, hint=hint)

# %% [markdown]
# The whole formula, for $\ell$ launches:
#
# $$t = \underbrace{\tau + t_{kernel} + (\ell - 1)\max(\tau, t_{kernel})}_{\text{without waits}} + \text{waits} \cdot \underbrace{\left(t_{back} + \min(\tau, t_{kernel})\right)}_{\text{price of one wait}}$$
#
# It does not matter where between the launches a wait stands. `simulate` plays the 12 launches
# that were counted above.

# %%
panels = {}
for kernel, waits in [(20, []), (20, order.waits), (4, order.waits)]:
    played = host_syncs.simulate(12, waits, launch=8, kernel=kernel, back=25)
    by_formula = 8 + kernel + 11 * max(8, kernel) + len(waits) * (25 + min(8, kernel))
    label = f"kernels of {kernel} µs, {len(waits)} waits"
    print(f"{label:26s} formula {by_formula}, played {played.end:.0f}")
    panels[f"{label}: done after {played.end:.0f} µs"] = played
subtitle = "launches and waits counted; times assumed: launch 8 µs, way back 25 µs"
title = "A wait empties the device's queue"
fig, axes = syncs.timelines(panels, axis="time, µs", title=title, subtitle=subtitle)
plt.show()

# %% [markdown]
# *How to read it:* a grey line leads from a launch to its kernel. Above, the host is done long
# before the device: this is its lead. In the middle each wait leaves the same gap on the device.
# Below, the kernels are so short that the device is mostly idle between the waits too.
#
# ## Build: find the waits
#
# Here is a small encoder, all of it on the device. It drops blank patches and returns the mean
# feature of each image. (No image is blank altogether.) Its result is right.


# %%
def mean_features(patches, weight, grid_hws):
    """(L, 588), (588, D), (m, 2), all on the device -> (m, D)."""
    x = patches @ weight  # (L, D)
    if x.abs().max() > 50:
        x = x.clamp(-50, 50)
    x = x - torch.tensor([0.5], device=x.device)
    images = torch.arange(len(grid_hws), device=x.device)
    owner = images.repeat_interleave(grid_hws.prod(1))  # (L,) the image of each patch
    kept = patches.abs().amax(1) > 0
    x, owner = x[kept], owner[kept]
    lengths = owner.bincount().tolist()
    return torch.stack([part.mean(0) for part in x.split(lengths)])


# %% [markdown]
# **Your guess.** How often does Python wait in one call?

# %%
waits_guess = guess("waits of mean_features", None, unit="waits")

# %%
grids = [(4, 6), (10, 4), (2, 2)]  # small images; the photographs give the same counts
patches, weight = torch.randn(68, 588), torch.randn(588, 16)
patches[5:9] = 0  # blank
inputs = on_device([patches, weight, torch.tensor(grids)], pretended=True)
counter = count_host_syncs(mean_features, *inputs, pretended=True)
for event in counter.events:
    print(f"{event.kind:15s} {linecache.getline(event.file, event.line).strip()}")
compare(Comparison(waits_guess, measured=counter.total))

# %% [markdown]
# Nine waits on five lines. Two of them are easy to see: the `if` and `tolist`.
# `torch.tensor(..., device=...)` waits for its copy. The other six belong to results whose
# **size** is known only on the device: how many lines a mask selects, or a repeat makes. torch
# needs it to allocate the result. (Repeat and bincount have a second wait: torch checks that no
# number is negative.)
#
# **Your code.** Start with the line that makes `owner`. `counts` lie on the device. Their sum,
# `total`, is known on the host, since the host built the batch. Repeat the number 0 `counts[0]`
# times, the number 1 `counts[1]` times, and so on, without a wait. The check compares [values,
# number of waits].


# %%
def owners(counts, total):
    """(m,) on the device, and their sum as a Python integer -> (total,) on the device."""
    return ...


cases = [(([2, 4, 1], 7), [[0, 0, 1, 1, 1, 1, 2], 0]), (([1, 3], 4), [[0, 1, 1, 1], 0])]
hint = "torch.arange on the same device, then repeat_interleave with one more argument: the size"
check_function("owners, and the waits", host_syncs.with_waits(owners), cases, hint=hint)

# %% [markdown]
# ### Hidden waits, and lines that only look like one
#
# `counts`, `x` and `mask` lie on the device, `host` on the host. `mask` is true for two of the
# three numbers.

# %%
counts, x = on_device((torch.tensor([1, 3, 2]), torch.arange(3.0)), pretended=True)
mask, host = x > 0, torch.arange(3)
lines = {
    "[int(n) for n in counts]": lambda: [int(n) for n in counts],
    "[n * 2 for n in counts]": lambda: [n * 2 for n in counts],
    "f'{x}'": lambda: f"{x}",
    "x.shape[0] > 2": lambda: (x + 1).shape[0] > 2,
    "x[mask]": lambda: x[mask],
    "x[mask] = 0": lambda: x.__setitem__(mask, 0),
    "x[0] = 1": lambda: x.__setitem__(0, 1),
    "x.clamp(max=x.mean())": lambda: x.clamp(max=x.mean()),
    "counts.unique()": lambda: counts.unique(),
    "x.repeat_interleave(counts)": lambda: x.repeat_interleave(counts),
    "host.to('cuda')": lambda: host.to("cuda"),
}
counted = {line: count_host_syncs(run, pretended=True) for line, run in lines.items()}

# %% [markdown]
# **Your answer.** Does the line wait? Write a list of eleven values, `True` (waits) or `False`,
# before you look at the next output.

# %%
line_waits = None  # a list of eleven True or False

expected = [one.total > 0 for one in counted.values()]
hint = "does Python need a value of the device, the size of a result, or a copy from the host?"
check("lines that wait", line_waits, expected, hint=hint)

# %%
for line, one in counted.items():  # how often each line waits
    print(f"{line:28s} {one.total} {' '.join(one.by_kind)}")

# %% [markdown]
# The rule behind the list: **a line waits when Python must know a value of the device, or the
# size of a result, or when it copies from ordinary host memory.** A value that goes from one
# kernel to the next does not wait. `x[mask]` needs the size of its result, `x[mask] = 0` does
# not. Shapes are always on the host, so a loop over `counts` waits only if it reads the numbers.
# `x[0] = 1` copies its number 1 from ordinary host memory.
#
# ### What the counter knows, and what it does not
#
# The counter looks each torch operator up in one table, `kimivl_lab/syncs/rules.py`.
# `python -m kimivl_lab.syncs` prints all of it.
#
# An operator that is not in the table is **unknown**. It is not counted as 0: it stands in
# `counter.unknown`, and `print(counter)` shows it. `torch.linalg.inv` is an example. Its check
# for a singular matrix is one known wait. Its solver is unknown, because torch chooses the
# library by the size of the matrix.

# %%
from kimivl_lab.syncs.rules import known

for operator in ("nonzero", "repeat_interleave", "segment_reduce", "topk"):
    print(f"{operator:18s} {known()[operator]}")
matrix = on_device(torch.eye(3), pretended=True)
inverse = count_host_syncs(torch.linalg.inv, matrix, pretended=True)
print("torch.linalg.inv:", inverse.by_kind, "unknown:", [event.kind for event in inverse.unknown])

# %% [markdown]
# ## Encoder: as it was served, and without waits
#
# The tower needs the grids four times: for position, [RoPE](GLOSSARY.md#rope), the
# [merge](GLOSSARY.md#merge), and the longest image, which sizes the launch of attention (lesson
# 40).
#
# In SGLang before its [pull request 30869](https://github.com/sgl-project/sglang/pull/30869) the
# grids lie on the device. Position, RoPE and merge read them back once each. The longest image is
# read **in every block** (`per_layer` below). SGLang now reads it once (`per_forward`). vLLM 0.32
# without CUDA graphs reads only the longest image, in every block. The library reads nothing
# (`host`). All three ways have the same weights and kernels
# (`kimivl_lab/lessons/grids_on_device.py`).
#
# **Your guess.** How many waits does `per_layer` make with $N = 27$ blocks?

# %%
tower_guess = guess("per_layer, 27 blocks", None, unit="waits")

# %%
config = MoonViTConfig.preset("tiny", num_hidden_layers=27)
tower = MoonVitPretrainedModel(config, EncoderOptions(rope="complex")).eval()
pixels, grid_hws = torch.randn(68, 3, 14, 14), torch.tensor(grids)
away, away_hws = on_device((tower, grid_hws), pretended=True)
forwards = {}
for name, encode in METADATA_VARIANTS.items():
    hws = grid_hws if name == "host" else away_hws
    forwards[name] = count_host_syncs(encode, away, pixels, hws, pretended=True)
    print(f"{name:12s} {forwards[name].total:2d} waits {forwards[name].by_kind}")
compare(Comparison(tower_guess, predicted=27 + 3, measured=forwards["per_layer"].total))

# %% [markdown]
# `per_layer` makes one wait for each block and three for the grids, $27 + 3 = 30$. If the grids
# stay on the host, as integers, nothing is read at all.
#
# ### The race that can replace a wait
#
# The grids that the host keeps must still reach the device. There are three kinds of copy:
#
# - An ordinary one, `x.to("cuda")`: the host waits until the copy is done.
# - `non_blocking=True` from [pinned memory](GLOSSARY.md#pinned-memory): the copy joins the queue.
#   It reads its source later, when its turn comes.
# - `non_blocking=True` from [pageable memory](GLOSSARY.md#pageable-memory): the copy is
#   **staged**. The driver first copies the values to a second buffer, and may wait before that.
#   torch's debug mode does not report this.
#
# The copy from pinned memory does not wait. But its source must not change until the copy has
# run. A program may keep one pinned buffer, to save the allocation, and write the next batch into
# it too early. Here are the cu_seqlens of three batches A, B and C under three policies
# (`fill_buffers`).

# %%
panels = {}
for policy in host_syncs.POLICIES:
    panels[policy], right = host_syncs.fill_buffers(policy)
    print(f"{policy:34s} right: {right}")
title = "A buffer written again before its copy has run: no error, wrong offsets"
fig, axes = syncs.pinned_buffers(panels, title=title)
plt.show()

# %% [markdown]
# *How to read it:* a coloured band is what a buffer holds, and the colour is the batch. A copy
# takes what lies there when it runs. Above, the batches A and B run with the offsets of C. All of
# these are valid numbers, so nothing fails.
#
# The third policy puts an event, a mark, into the queue behind the copy, and waits for it. This
# is right, but it is a wait. A fresh buffer is right too, and waits for nothing. torch reuses
# freed pinned memory after its copy has run. `upload` does this. The three kinds of copy,
# counted:

# %%
ways = {
    "pageable, .to('cuda')": lambda: host.to("cuda"),
    "pageable, non_blocking": lambda: host.to("cuda", non_blocking=True),
    "upload, fresh pinned": lambda: upload(host, "cuda"),
}
for way, run in ways.items():
    one = count_host_syncs(run, pretended=True)
    print(f"{way:26s} {one.total} waits, {len(one.staged)} staged, {one.bytes_to_device:5,} bytes")

# %% [markdown]
# ## Check equality: the same features without waits
#
# A wait changes no value. So the features of all three ways must be equal, bit for bit.

# %%
want = forwards["host"].value.cpu()
equal = {name: torch.equal(one.value.cpu(), want) for name, one in forwards.items()}
print("bit-equal to host:", equal)

# %% [markdown]
# A test must also find new waits. With `error=True` the first wait raises an error that names its
# line. To try this, we add a check for infinite values to the twelfth block.

# %%
hook = away.encoder.blocks[11].register_forward_hook(
    lambda block, x, y: y if y.isfinite().all() else None
)
try:
    count_host_syncs(away, pixels, grid_hws, error=True, pretended=True)
except HostSyncError as error:
    print(f"{error.event.kind}: {linecache.getline(error.event.file, error.event.line).strip()}")
hook.remove()
clean = count_host_syncs(away, pixels, grid_hws, error=True, pretended=True)
print(f"without the hook: {clean.total} waits")

# %% [markdown]
# ## Measure: counts, published savings, and your machine
#
# ### Counts do not depend on the batch

# %%
depths = (2, 9, 18, 27)
table = host_syncs.counts_by_depth(depths, images=(1, 4, 12))
for words, by_images in table.items():
    print(f"{words.splitlines()[-1]:36s}", by_images)
fig, ax = syncs.waits_by_depth(depths, table, title="N + 3 waits a forward, or 4, or none")
plt.show()

# %% [markdown]
# *How to read it:* the size of a marker is the number of images. All sizes lie on one point,
# because one read brings back the grids of all images. Only `per_layer` grows with the blocks.
#
# ### Three forwards on one clock
#
# `simulate` plays the counted launches and waits of all three ways. The times are assumed: launch
# 8 µs, kernel 12 µs, way back 25 µs.

# %% tags=["headline"]
assumed, panels = {"launch": 8, "kernel": 12, "back": 25}, {}
for name, encode in METADATA_VARIANTS.items():
    with PretendDevice(order := host_syncs.WaitOrder()):
        encode(away, pixels, grid_hws if name == "host" else away_hws)
    label = f"{name}: {len(order.waits)} waits, {order.launches} launches"
    panels[label] = host_syncs.simulate(order.launches, order.waits, **assumed)
title = "The same forward, three ways: waits take the host's lead, then the device's time"
subtitle = "27 blocks, 3 images; launches and waits counted; times assumed: 8, 12 and 25 µs"
fig, axes = syncs.timelines(panels, axis="time, µs", title=title, subtitle=subtitle)
plt.show()

# %% [markdown]
# *How to read it:* above, each block has a wait and a gap on the device, and the host loses its
# lead each time. In the middle there is one late wait, in the merge: the device loses little, but
# the host stands still until the tower is done. Below, the host is free early and can prepare the
# next batch.
#
# ### When do waits hurt?
#
# How long does one read take on a real GPU? Three numbers are
# [published](../data/published/host_syncs.csv). Two of them were **measured** with nothing else
# on the GPU: 32 and 45 µs. The third, 10 µs, was *estimated* from training steps whose time did
# not change, so we leave it out.
#
# With launches of 5 µs, one wait then costs between $32 + 5 = 37$ and $45 + 5 = 50$ µs if kernels
# are long. Take 26 waits and a forward of 31 ms: they cost 1.0 to 1.3 ms, 3 to 4 %. With kernels
# ten times as fast the forward takes 3 ms, and the same waits add 30 to 40 %.

# %%
curves = host_syncs.price_curves(order.launches)
title = "Waits hurt where kernels are short: small images, fast GPUs"
subtitle = f"model of {order.launches} launches; way back 32 to 45 µs; right: launches of 5 µs"
fig, axes = syncs.price_of_waits(*curves, title=title, subtitle=subtitle)
plt.show()

# %% [markdown]
# *How to read it:* left, the price of one wait, for the middle of 32 and 45 µs. Right, what waits
# add to the whole forward; a band goes from 32 to 45 µs for the way back. The circle is a
# published measurement: a tower with the same number of blocks, before and after 26 waits were
# removed.
#
# ### Predicted against published
#
# Other projects removed waits and published what they saved, with the number of waits before and
# after. The prediction is one multiplication: waits removed, times one read alone on another GPU.
# (The launch behind a wait is left out.) For 26 waits it is $26 \cdot 0.0322 = 0.84$ to
# $26 \cdot 0.0454 = 1.18$ ms.

# %%
found = host_syncs.savings()
for one in found:
    inside = one.low <= one.published <= one.high
    numbers = f"predicted {one.low:.2f} to {one.high:.2f} ms, published {one.published:5.2f} ms"
    print(f"{one.row['source']:14s} {one.row['metric']:15s} {numbers}, inside: {inside}")
title = "A count and one number predict one tower of two, and no server under load"
subtitle = "published by the projects named; the sources are in data/published/host_syncs.csv"
rows = {one.words: (one.low, one.high, one.published) for one in found}
fig, ax = syncs.published_savings(rows, title=title, subtitle=subtitle)
plt.show()

# %% [markdown]
# *How to read it:* a bar is the prediction, a dot is the published saving. Read the rows one by
# one:
#
# - The first row is a tower alone, and the dot lies in the bar.
# - The next two are one profile of another encoder. The GPU's gaps shrank by three times the
#   prediction. The tower's wall time shrank by about a fifth of it; the authors say that this is
#   within the variation between runs. So neither row confirms the prediction.
# - The last two are servers under load. There a wait lasts until **everything in the queue** is
#   done. In the last row the read waited for the whole forward of the step before.
#
# A count can be checked exactly. [SGLang's pull request
# 31637](https://github.com/sgl-project/sglang/pull/31637) found 12 copies to the host in a
# profile of four forwards: 3 in each, the reads of the grids that we count too. After the change
# there were none. The throughput rose by 0.8 %, which its authors call noise.
#
# ### On your machine, in slow motion
#
# A thread can play the device: it takes submitted work in order. With launches of 0.4 ms and
# kernels of 1 ms Python can time each event. `slow_motion` runs 0, 2 and 5 waits in a random
# order, seven times each. $\tau$ and $t_{kernel}$ come from the runs without waits, $t_{back}$
# from empty round trips.

# %% tags=["nbval-ignore-output"]
slow = host_syncs.slow_motion()
print(slow)
shown = {f"{count} waits": group[3] for count, group in slow.runs.items()}
subtitle = plots.measured_on("cpu", "a thread is the device; the median of 7 runs in random order")
title = "Measured: the same gaps, on a queue in slow motion"
fig, axes = syncs.timelines(shown, axis="time, ms", title=title, subtitle=subtitle)
plt.show()

# %% [markdown]
# *How to read it:* as in the first figure, but each span was measured. Each gap on the device is
# one launch and a short way back.

# %% [markdown]
# ## In your server: how to see waits
#
# Three tools show the waits of a real GPU.
#
# 1. `torch.cuda.set_sync_debug_mode("warn")` prints a warning with the line for each wait that
#    torch causes. It does not see staged copies, or waits inside a C++ extension. Set it in the
#    worker process, around the encoder.
# 2. `torch.profiler` counts the calls of CUDA. A `.item()` is one `cudaMemcpyAsync` to the host
#    and one `cudaStreamSynchronize` behind it.
# 3. `nsys profile -t cuda,nvtx -o encoder vllm serve ...` records a whole server (SGLang:
#    `python -m sglang.launch_server ...`). `nsys stats --report cuda_api_sum encoder.nsys-rep`
#    lists the calls. On the time line, search for `cudaStreamSynchronize` and for copies "DtoH"
#    between the encoder's kernels. The gap in the row of kernels behind such a call is the price.
#
# With a GPU, the next cell does 1 and 2.


# %% tags=["nbval-ignore-output"]
def show_waits(run):
    torch.cuda.set_sync_debug_mode("warn")
    with torch.profiler.profile() as profile:
        run()
    torch.cuda.set_sync_debug_mode("default")
    for event in profile.key_averages():
        if event.key.startswith(("cudaMemcpy", "cudaStreamSync", "cudaEventSync")):
            print(f"{event.key:28s} {event.count} times")


if torch.cuda.is_available():
    real_tower, real_hws = tower.cuda(), grid_hws.cuda()
    show_waits(lambda: METADATA_VARIANTS["per_layer"](real_tower, pixels, real_hws))
    print(f"one read among short kernels: {host_syncs.time_one_read('cuda'):.1f} µs")
else:
    print("no GPU here: nothing to show")

# %% [markdown]
# ## What to remember
#
# - A line waits when Python must know a value of the device or the size of a result, and when it
#   copies from ordinary host memory. The count needs no GPU, for operators that the table knows.
# - A wait costs the way back plus the shorter of launch and kernel. Under load it lasts until
#   everything in the queue is done.
# - Waits weigh most where kernels are short: small images, fast GPUs.
# - The host knows the grids as integers from the start. If it keeps them, $N + 3$ waits become
#   none.
# - A copy that does not wait reads its source later. Take fresh pinned memory for each batch, or
#   wait for an event before the next write.

# %% tags=["result"]
alone = found[0]
each = ", ".join(f"{name} {one.total} waits" for name, one in forwards.items())
print(f"One forward of 27 blocks, whatever its images: {each}.")
print(f"26 waits less: predicted {alone.low:.2f} to {alone.high:.2f} ms,")
print(f"published for a tower on an {alone.row['gpu']}: {alone.published:.2f} ms.")

# %% [markdown]
# ## On Monday
#
# - **Flags.** vLLM has no flag against the read in every block. In release 0.32 its eager encoder
#   still has it. A [CUDA graph](GLOSSARY.md#cuda-graph) does not have it, but each replay reads
#   the grids back (`"cudagraph_mm_encoder": true` in `--compilation-config`; the default is
#   `false`). For SGLang take a release that contains 30869 and 30878. Leave
#   `SGLANG_VIT_ENABLE_VECTORIZED_POS_EMBED` at `1`, the default in the source that we read: it
#   avoids one wait for each image.
# - **Decide** by a profile. Count the waits of one encoder forward, multiply them by 50 µs, and
#   compare with your [TTFT](GLOSSARY.md#ttft). Below one percent, wait for the next regular
#   update.
# - **Check on your server:** record one request with `nsys` as above and count the
#   `cudaStreamSynchronize` between the first and the last kernel of the encoder. About 30 mean a
#   read in every block; 3 or 4 mean that only the grids are read.

# %% [markdown]
# ## Exercises
#
# Solutions, with the steps:
# [solutions/60_gpu_syncs__SOLUTION.ipynb](solutions/60_gpu_syncs__SOLUTION.ipynb).
#
# ### 1. Nine waits, one after the other
#
# Take the nine waits out of `mean_features`, with the same values. The grids now come as a list
# of integers too. The check prints how many waits are left, and refuses staged copies and unknown
# operators.


# %%
def mine(patches, weight, grid_hws, grids):
    """(L, 588), (588, D), (m, 2) on the device, the same grids on the host -> (m, D)."""
    return mean_features(patches, weight, grid_hws)  # copy its lines to here, then change them


left = host_syncs.waits_left(mine, *inputs, grids, right=counter.value.cpu(), start=9)
check("waits left", left, 0, hint="the host knows the grids; blank patches can stay with weight 0")

# %% [markdown]
# ### 2. What an upgrade saves
#
# Launches of 5 µs, kernels of 3 µs, a way back of 20 µs. A tower of 27 blocks reads its longest
# image in every block. After the upgrade it reads it once in a forward. How many µs do the waits
# save?

# %%
answer_2 = None  # µs

times = {"launch": 5, "kernel": 3, "back": 20}
in_every, once = ([14 * block for block in range(1, w + 1)] for w in (27, 1))
ends = [host_syncs.simulate(400, waits, **times).end for waits in (in_every, once)]
near = {27 * 23: "one wait is left", 26 * 25: "the shorter of launch and kernel counts"}
hint = "how many waits less, times the price of one"
check("µs saved", answer_2, ends[0] - ends[1], hint=hint, near=near)

# %% [markdown]
# ### 3. A profile of your server (operator)
#
# `nsys` shows this for one forward of the encoder. (The numbers are made up.)
#
# - `cudaLaunchKernel`: 410 times, 5 µs each on the host; a kernel takes 90 µs on average
# - `cudaMemcpyAsync` DtoH, pageable: 31 times
# - `cudaMemcpyAsync` HtoD, pageable: 4 times
# - `cudaStreamSynchronize`: 35 times
#
# One read alone takes 40 µs on this GPU.
#
# The TTFT is 180 ms. How many waits does the forward have? If the GPU has no other work, how many
# **ms** does their removal save? Is it worth a change of the engine today?

# %%
answer_3 = None  # (waits, ms)

waits, price = 35, host_syncs.simulated_price(5, 90, 40)
check(
    "(waits, ms)",
    answer_3,
    (waits, waits * price / 1e3),
    rtol=0.01,
    hint="each blocking copy ends in one cudaStreamSynchronize, in both directions",
    near={
        (31, 31 * price / 1e3): "the four copies to the device wait too",
        (70, 70 * price / 1e3): "a copy and the synchronize behind it are one wait",
        (35, 35 * 40 / 1e3): "after a wait the device also idles for the next launch",
    },
)

# %% [markdown]
# ### 4. Six more lines
#
# `x`, `owner` and `mask` lie on the device. How often does each line wait? Answer with six
# numbers.

# %%
owner = on_device(torch.tensor([0, 0, 1]), pretended=True)
six_lines = {
    "F.one_hot(owner, num_classes=2)": lambda: F.one_hot(owner, num_classes=2),
    "F.one_hot(owner)": lambda: F.one_hot(owner),
    "torch.where(mask, x, 0)": lambda: torch.where(mask, x, 0),
    "torch.where(mask)": lambda: torch.where(mask),
    "x.sum().sqrt()": lambda: x.sum().sqrt(),
    "x[x.argmax()]": lambda: x[x.argmax()],
}
answer_4 = None  # six numbers

waits = [count_host_syncs(run, pretended=True).total for run in six_lines.values()]
hint = "does torch need a size that the device knows, or a Python number for an index?"
check("waits of six lines", answer_4, waits, hint=hint)

# %% [markdown]
# ### 5. ★ How many buffers are enough?
#
# A program keeps a ring of pinned buffers and writes batch after batch into the next one, and
# does not wait. The string `events` says what happened, in order: `w` is a write of the host; `c`
# is a copy of the device, always of the oldest batch that is not copied yet. Return the smallest
# number of buffers with which no batch is overwritten before its copy. For `"wwcwcc"` it is 2.


# %%
def buffers_needed(events):
    return ...


orders_of_events = ["wcwcwc", "wwcwcc", "wwwccc", "wcwwcwwccc", "w"]
check_function(
    "buffers",
    buffers_needed,
    {(events,): host_syncs.buffers_needed(events) for events in orders_of_events},
    hint="how many batches are written and not copied yet, at each moment?",
)

# %% [markdown]
# ## References
#
# - [torch.cuda.set_sync_debug_mode](https://docs.pytorch.org/docs/stable/generated/torch.cuda.set_sync_debug_mode.html),
#   [pinned memory in torch](https://docs.pytorch.org/docs/stable/notes/cuda.html), [what waits in
#   CUDA](https://docs.nvidia.com/cuda/cuda-runtime-api/api-sync-behavior.html), [launches in
#   Nsight
#   Systems](https://developer.nvidia.com/blog/understanding-the-visualization-of-overhead-and-latency-in-nsight-systems/).
# - Reads of the longest image or of the grids: [SGLang
#   30878](https://github.com/sgl-project/sglang/pull/30878),
#   [24013](https://github.com/sgl-project/sglang/pull/24013), [vLLM
#   37139](https://github.com/vllm-project/vllm/pull/37139), [transformers
#   47703](https://github.com/huggingface/transformers/pull/47703).
# - A pinned buffer written again too early: [TensorRT-LLM
#   15546](https://github.com/NVIDIA/TensorRT-LLM/pull/15546), [vLLM
#   32799](https://github.com/vllm-project/vllm/pull/32799).
#
# **Next:** without waits Python still starts every kernel alone. Lesson 70 starts all of them at
# once.
#
# [Map of the course](00_start_here.ipynb) · [Glossary](GLOSSARY.md) · [Notation](NOTATION.md) · previous: [50 Tensor parallel or data parallel](50_tp_versus_dp.ipynb) · next: [70 CUDA graphs by token budget](70_cuda_graphs.ipynb)
