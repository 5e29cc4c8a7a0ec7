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
#     question: When does Python wait for the GPU, what does a wait cost, and how does a forward get by without any?
#     minutes_cpu: 1
#     gpu: optional
#     data: sizes of data/workloads, numbers of data/published
# ---

# %% [markdown]
# # Host syncs
#
# ## The question
#
# When does Python wait for the GPU, what does a wait cost, and how does a forward get by without any?
#
# ## You will be able to
#
# - **find** every line of a forward that makes the host wait, on a machine that has no GPU;
# - **rewrite** such lines so that they wait no more, without a pinned buffer that is overwritten too early;
# - **predict** what a wait costs from three times: of a launch, of a kernel, of the way back.
#
# ## Needs
#
# Notebooks [00](00_start_here.ipynb) and [40](40_packed_attention.ipynb), for `cu_seqlens` and `max_seqlen`. A minute on a CPU. A GPU is optional: without one the waits are counted on a
# device that is only pretended. Such numbers are **counts, never times**.
#
# ## Versions and machine

# %% tags=["nbval-ignore-output"]
import warnings

warnings.filterwarnings("ignore", message="IProgress not found")  # about a widget that nothing here uses
from kimivl_lab.measure.provenance import device_name, versions

print(device_name("cpu"))
print(versions())

# %%
import csv
import linecache
import time
from concurrent.futures import ThreadPoolExecutor

import matplotlib.pyplot as plt
import numpy as np
import torch

from kimivl_lab import EncoderOptions, MoonViTConfig, MoonVitPretrainedModel, count_host_syncs, image_geometry, plots
from kimivl_lab.bench.metadata import array_builders, device_builders
from kimivl_lab.bench.syncs import loops, pretended_counts
from kimivl_lab.datasets import data_path, draw_sizes
from kimivl_lab.measure.accuracy import relative_error
from kimivl_lab.syncs.watch import Watcher
from kimivl_lab.syncs.pretend import PretendDevice
from kimivl_lab.measure.roofline import copy_gbps, floor_ms
from kimivl_lab.syncs.counter import HostSyncError, on_device
from kimivl_lab.measure.timing import time_interleaved
from kimivl_lab.lessons.grids_on_device import METADATA_VARIANTS
from kimivl_lab.kernels.memory import upload
from kimivl_lab.plots import syncs

plots.use_style()
_ = torch.set_grad_enabled(False), torch.manual_seed(0)

# %% [markdown]
# ## Predict
#
# Python does not compute on a GPU, it **launches**: it puts a kernel into the device's queue and goes on. So the host runs ahead, and the device always finds work. This ends when Python needs a number that the device has yet to
# compute, for an `if`, a length, a loop. It must wait for everything in the queue, and for the number to come back: a *host sync*. When it goes on, the queue is empty.
#
# Which lines wait is a property of the code, so it can be counted without a GPU. While a `PretendDevice` is entered, torch has a CUDA device: its tensors lie in host memory under another name, and a watcher
# hears of every launch, copy and wait. This one notes after how many launches each wait comes:


# %%
class Order(Watcher):
    def __init__(self):
        super().__init__()
        self.waits = []

    def wait(self, kind):
        self.waits.append(self.launches)


with PretendDevice(order := Order()):
    x = torch.zeros(8, device="cuda")
    for step in range(1, 12):
        x.add_(1)  # a launch
        if step in (3, 7):
            float(x[0])  # the host wants to know
print(f"{order.launches} launches, waits after {order.waits}")
assert (order.launches, order.waits) == (12, [4, 8])

# %% [markdown]
# What do they cost? Three times decide: the host's for a launch, $\ell$; the device's for a kernel, $k$; and the latency $s$ from the end of the last kernel until Python goes on. By hand: between two waits $m$ kernels take
# $\ell + k + (m - 1)\max(\ell, k)$, since the first must be launched before it runs, and from then on the slower side sets the pace. Summed up, $n$ launches with $w$ waits between them take
#
# $$T = \underbrace{\ell + k + (n - 1)\max(\ell, k)}_{\text{no wait}} + w \cdot \underbrace{\left(s + \min(\ell, k)\right)}_{\text{price of a wait}}$$
#
# A price per wait, wherever between launches it stands: the latency, and the overlap that is lost once. Played through, one event after the other:


# %%
def timeline(launches, waits, launch, kernel, latency):
    """Spans of `launches` equal kernels in order, with a wait after as many launches as `waits` says."""
    host = device = 0.0
    launched, waited, ran = [], [], []
    for done in range(launches + 1):
        for _ in range(waits.count(done)):
            waited.append((host, max(host, device) + latency))
            host = waited[-1][1]
        if done < launches:
            launched.append((host, host + launch))
            host += launch
            start = max(host, device)  # not before it is launched, nor before the kernel ahead of it is done
            device = start + kernel
            ran.append((start, device))
    return syncs.Timeline(launched, waited, ran)


# %%
panels = {}
for kernel, waits in [(20, []), (20, order.waits), (4, order.waits)]:
    played = timeline(12, waits, launch=8, kernel=kernel, latency=25)
    assert played.end == 8 + kernel + 11 * max(8, kernel) + len(waits) * (25 + min(8, kernel))
    panels[f"kernels of {kernel} µs, {len(waits)} waits: done after {played.end:.0f} µs"] = played
subtitle = "launches and waits counted; times assumed: launch 8 µs, latency 25 µs"
fig, axes = syncs.timelines(panels, axis="time, µs", title="A wait empties the device's queue", subtitle=subtitle)
plt.show()

# %% [markdown]
# *How to read it:* grey lines lead from a launch to its kernel; above, the host is done long before the device; each wait then costs the same gap on the device, latency and launch, and the host's whole lead; below, the device is never busy, and a wait costs
# latency and kernel.
#
# ## Build
#
# ### Find them
#
# A small encoder, all of it on the device: patches of several pictures in, the mean feature of each picture's patches that are not blank out. It is right, and every line of it can be found in real code. Before you run the next cell: which
# lines wait?


# %%
def mean_features(patches, weight, grid_hws):
    """(L, 588), (588, D), (n, 2), all on the device -> (n, D)."""
    x = patches @ weight  # (L, D)
    if x.abs().max() > 50:
        x = x.clamp(-50, 50)
    x = x - torch.tensor([0.5], device=x.device)
    pictures = torch.arange(len(grid_hws), device=x.device)
    owner = pictures.repeat_interleave(grid_hws.prod(1))  # (L,) the picture of each patch
    kept = patches.abs().amax(1) > 0
    x, owner = x[kept], owner[kept]
    lengths = owner.bincount().tolist()
    return torch.stack([part.mean(0) for part in x.split(lengths)])


# %%
grids, patches, weight = [(4, 6), (10, 4), (2, 2)], torch.randn(68, 588), torch.randn(588, 16)
patches[5:9] = 0  # blank
inputs = on_device([patches, weight, torch.tensor(grids)], pretended=True)
counter = count_host_syncs(mean_features, *inputs, pretended=True)
for event in counter.events:
    print(f"{event.kind:15s} {linecache.getline(event.file, event.line).strip()}")
print(f"{counter.total} waits, {counter.launches} launches, {counter.bytes_to_host} bytes read back")
assert counter.total == 9

# %% [markdown]
# Nine waits on five lines. The `if` and `tolist` one sees. The others wait for a **size**: torch must allocate the result before it launches the kernel that fills it, and how many rows a mask selects, or a `repeat` makes, only the
# device knows. `torch.tensor(..., device=...)` waits for its copy. Removing all nine is the first exercise.
#
# ### Hidden ones, and lines that only look like it
#
# Guess first: how often does each line wait? The number beside each is our prediction.

# %%
counts, x = on_device((torch.tensor([1, 3, 2]), torch.arange(3.0)), pretended=True)
mask, host = x > 0, torch.arange(3)
lines = {
    "[int(n) for n in counts]": (3, lambda: [int(n) for n in counts]),
    "max(counts)": (2, lambda: max(counts)),
    "range(counts[0])": (1, lambda: range(counts[0])),
    "f'{x}'": (1, lambda: f"{x}"),
    "x[mask]": (1, lambda: x[mask]),
    "mask.nonzero()": (1, mask.nonzero),
    "counts.unique()": (1, counts.unique),
    "x.repeat_interleave(counts)": (2, lambda: x.repeat_interleave(counts)),
    "x[[0, 2]]": (1, lambda: x[[0, 2]]),
    "x[0] = 1": (1, lambda: x.__setitem__(0, 1)),
    "host.to('cuda')": (1, lambda: host.to("cuda")),
    "[n * 2 for n in counts]": (0, lambda: [n * 2 for n in counts]),
    "len(x), x.shape, x.numel()": (0, lambda: (len(x), x.shape, x.numel())),
    "x.clamp(max=x.mean())": (0, lambda: x.clamp(max=x.mean())),
    "x[mask] = 0": (0, lambda: x.__setitem__(mask, 0)),
    "x.repeat_interleave(counts, output_size=6)": (0, lambda: x.repeat_interleave(counts, output_size=6)),
    "host[: len(x)].tolist()": (0, lambda: host[: len(x)].tolist()),
}
for line, (predicted, run) in lines.items():
    counted = count_host_syncs(run, pretended=True)
    print(f"{line:46s} predicted {predicted}, counted {counted.total} {' '.join(counted.by_kind)}")
    assert counted.total == predicted

# %% [markdown]
# The rule behind the list: a line waits when **Python** must know a value of the device, or the **size** of a result. Values that go from one kernel to the next do not come by the host: a loop over a tensor
# is a loop over views, a mask that is written through needs no size, and shapes were never on the device.
#
# ### The encoder, as it was served
#
# The tower needs the grids four times: for position, rope, merge order, and the longest picture, which sizes the launch of attention. As read in [SGLang](https://github.com/sgl-project/sglang) before its
# [pull request 30869](https://github.com/sgl-project/sglang/pull/30869), and in the eager path of [vLLM](https://github.com/vllm-project/vllm) 0.32, the grids lie on the device: three reads a forward, and the longest picture once in
# every layer. Since then SGLang reads it once. The library keeps both handlings beside its own, with the same weights and kernels. Predicted for $N$ layers: $N + 3$, $4$, $0$.

# %%
tower = MoonVitPretrainedModel(MoonViTConfig.preset("tiny", num_hidden_layers=27), EncoderOptions(rope="complex")).eval()
pixels, grid_hws = torch.randn(68, 3, 14, 14), torch.tensor(grids)
away, away_hws = on_device((tower, grid_hws), pretended=True)
counted = {}
for name, encode in METADATA_VARIANTS.items():
    counted[name] = count_host_syncs(encode, away, pixels, grid_hws if name == "host" else away_hws, pretended=True)
    print(f"{name:12s} {counted[name].total:2d} waits {counted[name].by_kind}")
assert [one.total for one in counted.values()] == [30, 4, 0]

# %% [markdown]
# ### The race that replaces a wait
#
# What the host knows must still get to the device. An ordinary copy waits. A `non_blocking` one from **pinned** memory does not: it is queued, and reads its source when its turn comes. So the source must not change until then. A pinned buffer that is
# kept, to save the allocation, and written again for the next batch, does change. Here with our own queue, of three batches' `cu_seqlens`:

# %%
batches = {name: torch.tensor([0, *ends]) for name, ends in {"A": (24, 64), "B": (40, 44), "C": (4, 68)}.items()}
panels, arrived = {}, {}
for policy in ("one buffer, written again at once", "a fresh buffer a batch", "one buffer, and the host waits for an event"):
    buffers, queue, steps, arrived[policy] = [torch.zeros(3, dtype=torch.int64)], [], [], {}
    for name in (*batches, None):  # None: the host is done, the device gets to the rest
        while queue and (name is None or "event" in policy):
            wanted, number = queue.pop(0)
            arrived[policy][wanted] = buffers[number].clone()  # the device reads what lies there by now
            held = next(one for one in batches if torch.equal(batches[one], buffers[number]))
            steps.append(syncs.BufferStep("device", wanted, number, held))
        if name is not None:
            if queue and "fresh" in policy:
                buffers.append(torch.zeros(3, dtype=torch.int64))
            buffers[-1].copy_(batches[name])  # the host writes now
            queue.append((name, len(buffers) - 1))
            steps.append(syncs.BufferStep("host", name, len(buffers) - 1, name))
    panels[policy] = steps

# %%
for policy, got in arrived.items():
    right = {name: torch.equal(got[name], offsets) for name, offsets in batches.items()}
    print(f"{policy:44s} right: {right}")
    assert all(right.values()) == ("at once" not in policy) and right["C"]
fig, axes = syncs.pinned_buffers(panels, title="A buffer written again before its copy has run: no error, wrong offsets")
plt.show()

# %% [markdown]
# *How to read it:* the bands are what a buffer holds; the copy takes what is there when it runs, not when it was asked for. Above, batches A and B run with the offsets of C, all of them valid numbers, and nothing fails.
#
# An event is right, and makes the host wait, for that copy alone. A fresh buffer is right and waits for nothing. It costs little, for torch keeps freed pinned memory and gives it out again, after the event that it records behind the copy. `upload` does that, and
# the metadata of a batch go in **one** buffer: offsets, merge order, and each patch's column and row. Three ways for a small tensor, then the two builders:

# %%
ways = {
    "pageable, .to('cuda')": lambda: host.to("cuda"),
    "pageable, non_blocking": lambda: host.to("cuda", non_blocking=True),
    "upload, fresh pinned": lambda: upload(host, "cuda"),
} | {f"metadata, {name} builder": build for name, build in device_builders(grids, "cuda").items()}
for way, run in ways.items():
    one = count_host_syncs(run, pretended=True)
    print(f"{way:26s} {one.total} waits, {len(one.staged)} staged, {one.bytes_to_device:5,} bytes")

# %% [markdown]
# "Staged" is the trap in between: asked not to block, the driver copies pageable memory through a buffer of its own, and may wait for the stream before. torch's debug mode does not see it.
#
# ## Check equality
#
# A wait changes no value, so taking it away must not either: the features of all three handlings, bit for bit. Where there is a GPU, torch's own debug mode counts too, and must say the same. And a test must find the wait that comes
# back next month: `error=True` raises at the first. The control is a look for infinities, planted in the twelfth block.

# %%
want = counted["host"].value.cpu()
assert relative_error(want, tower(pixels, grid_hws)) < 1e-6
print("bit-equal to host:", {name: torch.equal(one.value.cpu(), want) for name, one in counted.items()})
for pretended in {True, not torch.cuda.is_available()}:
    there, hws = on_device((tower, grid_hws), pretended=pretended)
    for name, encode in METADATA_VARIANTS.items():
        again = count_host_syncs(encode, there, pixels, grid_hws if name == "host" else hws, pretended=pretended)
        assert again.total == counted[name].total and relative_error(again.value.cpu(), want) < 1e-4

# %%
blocks = away.encoder.blocks
hook = blocks[11].register_forward_hook(lambda block, x, y: y if y.isfinite().all() else None)
try:
    count_host_syncs(away, pixels, grid_hws, error=True, pretended=True)
except HostSyncError as error:
    found = linecache.getline(error.event.file, error.event.line).strip()
    print(f"found: {error.event.kind} in `{found}`")
hook.remove()
count_host_syncs(away, pixels, grid_hws, error=True, pretended=True)
assert found.startswith("hook =")

# %% [markdown]
# ## Measure
#
# ### Counts do not depend on the batch
#
# Towers of 2, 9, 18 and 27 layers, batches of one picture, four, and twelve.

# %%
depths, images = (2, 9, 18, 27), (1, 4, 12)
every = {(layers, n): pretended_counts(layers, n) for layers in depths for n in images}
words = {
    "per_layer": "grids read back,\nlongest in every layer: N + 3",
    "per_forward": "longest once a forward: 4",
    "host": "host integers: 0",
}
table = {words[v]: {n: [every[layers, n][v].total for layers in depths] for n in images} for v in words}
predicted = {"per_layer": [layers + 3 for layers in depths], "per_forward": [4] * 4, "host": [0] * 4}
for variant, waits in predicted.items():
    by_batch = [*table[words[variant]].values()]
    print(f"{variant:12s} predicted {waits}, counted {by_batch}")
    assert by_batch == [waits] * 3
fig, ax = syncs.waits_by_depth(depths, table, title="Thirty waits a forward, four, none, whatever the batch")
plt.show()

# %% [markdown]
# *How to read it:* filled marks are one picture, rings four and twelve; they coincide, for a read brings back all pictures at once; only one handling grows with the layers, and none is free but the one that never put the grids on the device.
#
# ### On one clock
#
# The counted orders through the model. The times are assumed, those of the first picture but for shorter kernels: what counts is where the waits stand.

# %% tags=["headline"]
assumed, orders, panels = {"launch": 8, "kernel": 12, "latency": 25}, {}, {}
for name, encode in METADATA_VARIANTS.items():
    with PretendDevice(order := Order()):
        encode(away, pixels, grid_hws if name == "host" else away_hws)
    orders[name], forward = order, timeline(order.launches, order.waits, **assumed)
    panels[f"{name}: {len(order.waits)} waits, {order.launches} launches"] = forward
title = "The same forward, three ways: waits take the host's lead, then the device's time"
subtitle = "27 layers, 3 pictures; launches and waits counted; times assumed: launch 8 µs, kernel 12 µs, latency 25 µs"
fig, axes = syncs.timelines(panels, axis="time, µs", title=title, subtitle=subtitle)
plt.show()

# %% [markdown]
# *How to read it:* above, one wait a layer, a gap in the device's row after each, and a host that never gets ahead. In the middle one late wait, for the merge order: the device hardly notices, the host stands still until the tower is done. Below the host is free
# to prepare the next batch.
#
# What the formula says of these three orders, where a read is also kernels of its own (differences, a maximum, a copy); and then, for a tower of as many launches, of any launch rate. There $s$ is what one read alone took
# on an idle GPU in three [published measurements](../data/published/host_syncs.csv), 10 to 45 µs.

# %%
n, (launch, kernel, s) = orders["host"].launches, assumed.values()
for (name, order), forward in zip(orders.items(), panels.values(), strict=True):
    between = {after for after in order.waits if 0 < after < order.launches}  # a second wait at once finds nothing to do
    price, more = len(order.waits) * s + len(between) * min(launch, kernel), (order.launches - n) * kernel
    added, lost = forward.end - [*panels.values()][-1].end, sum(end - start for start, end in forward.waits)
    print(f"{name:12s} {added:5.0f} µs longer: waits {price:4.0f}, kernels of the reads {more:4.0f}; the host waits {lost:5.0f} µs")
    assert added == price + more

# %%
with data_path("published", "host_syncs.csv").open(newline="") as file:
    published = list(csv.DictReader(file))
alone = sorted(float(row["before"]) for row in published if row["metric"] == "one read alone")
k, s = np.geomspace(1, 300, 100), np.array([alone[0], alone[-1]])
free = lambda launch: launch + k + (n - 1) * np.maximum(launch, k)
prices = {f"{launch} µs": s.mean() + np.minimum(launch, k) for launch in (10, 5, 2)}
slower = {f"{w} waits": [w * (one + np.minimum(5, k)) / free(5) for one in s] for w in (30, 4)}
assert np.allclose([timeline(n, range(9, 39), 5, one, s[1]).end for one in k] / free(5), 1 + slower["30 waits"][1])

# %%
tower_alone = next(row for row in published if row["metric"] == "tower median")
before, after = float(tower_alone["before"]), float(tower_alone["after"])
removed = int(tower_alone["waits_before"]) - int(tower_alone["waits_after"])
marks = {f"published: {removed} waits less, {tower_alone['gpu']}": (1e3 * after / n, before / after - 1)}
title = "Waits hurt where kernels are short: small pictures, wide GPUs"
subtitle = f"model of {n} launches; left latency {s.mean():.0f} µs; right launches of 5 µs, latency {s[0]:.0f} to {s[1]:.0f} µs"
fig, axes = syncs.price_of_waits(k, prices, slower, marks=marks, title=title, subtitle=subtitle)
plt.show()

# %% [markdown]
# *How to read it:* left, a wait costs its latency and the shorter of launch and kernel; right, thirty waits add up to two thirds to a forward of short kernels, and next to nothing to one of long kernels, so a faster GPU makes the
# same waits hurt more. The circle lies in the upper band: 26 of 27 waits removed from a tower of the same layers, at the time that its kernels took on average.
#
# ### Predicted against published
#
# Others removed waits and published what they saved, with the number of waits before and after: `data/published/host_syncs.csv`. The prediction is made of a count and of *one read alone*, measured by third parties on other GPUs.

# %%
savings = {}
for row in published:
    if row["unit"] == "ms":
        waits, saved = int(row["waits_before"]) - int(row["waits_after"]), float(row["before"]) - float(row["after"])
        low, high = waits * s / 1e3
        savings[f"{row['source']}, {row['metric']}, {row['gpu']}"] = (low, high, saved)
        print(f"{row['source']:14s} {row['metric']:15s} {waits:2d} waits: predicted {low:.2f} to {high:.2f} ms, published {saved:5.2f}, ratio {saved / high:6.2f}")
copies = next(row for row in published if row["unit"] == "count")
assert int(copies["waits_before"]) == 4 * 3  # four forwards, three reads each: what per_forward counts without the bound
low, high, saved = next(iter(savings.values()))
assert low < saved < high
title = "One number and a count predict the tower, not a server under load"
subtitle = "published by the projects named, see data/published; waits removed: 26, 27, 27, 27, 1"
fig, ax = syncs.published_savings(savings, title=title, subtitle=subtitle)
plt.show()

# %% [markdown]
# *How to read it:* a bar is the prediction, a dot what was published. The tower alone, on top, is predicted; in a profile with other work around it only the order of magnitude is. Under load waits can cost far more than their price, since
# a wait is for **everything in the queue**: the read of the last row waited for the whole forward of the step before, and what it cost was, as its authors found, the length of that forward.
#
# A count alone can be checked to the last digit: [SGLang's pull request 31637](https://github.com/sgl-project/sglang/pull/31637) profiled 12 copies to the host in four forwards, three reads each as counted here, and none after.
# At our price they are half a millisecond over eight requests, and indeed its throughput moved by no more than noise.
#
# ### In slow motion, on your machine
#
# A thread that takes what is submitted, in order, **is** a device with a queue. With launches of 0.4 ms and kernels of 1 ms everything can be timed from Python. Predicted by the formula, with $\ell$ and $k$ from the runs without waits
# and $s$ from empty round trips.

# %% tags=["nbval-ignore-output"]
clock, stream, runs = time.perf_counter, ThreadPoolExecutor(max_workers=1), {0: [], 2: [], 5: []}
trips = [-clock() + (stream.submit(time.sleep, 0).result(), clock())[1] for _ in range(50)]
for count in [*runs] * 7:
    zero, launched, waited, queued = clock(), [], [], []
    for done in range(1, 13):
        began = clock()
        time.sleep(0.4e-3)  # the host prepares a launch
        queued.append(stream.submit(lambda: (clock(), time.sleep(1e-3), clock())))
        launched.append((began, clock()))
        if done < 12 and count and done % (12 // (count + 1)) == 0:
            queued[-1].result()
            waited.append((launched[-1][1], clock()))
    ran = [(start, end) for start, _, end in (one.result() for one in queued)]
    spans = [[(1e3 * (a - zero), 1e3 * (b - zero)) for a, b in part] for part in (launched, waited, ran)]
    runs[count].append(syncs.Timeline(*spans))
runs = {count: sorted(group, key=lambda one: one.end) for count, group in runs.items()}
launch, kernel = (np.median(np.diff(part)) for part in (runs[0][3].launches, runs[0][3].kernels))
for count, group in runs.items():
    predicted = launch + kernel + 11 * max(launch, kernel) + count * (1e3 * np.median(trips) + min(launch, kernel))
    low, middle, high = (group[at].end for at in (1, 3, 5))
    print(f"{count} waits: predicted {predicted:.1f} ms, measured {middle:.1f} ({low:.1f} to {high:.1f}), ratio {middle / predicted:.2f}")

# %%
slow = {f"{count} waits: the host is done at {group[3].launches[-1][1]:.1f} ms": group[3] for count, group in runs.items()}
subtitle = plots.measured_on("cpu", "a thread is the device: launch 0.4 ms, kernel 1 ms; the median of 7 runs")
title = "Measured: the same gaps, on a queue in slow motion"
fig, axes = syncs.timelines(slow, axis="time, ms", title=title, subtitle=subtitle)
plt.show()

# %% [markdown]
# *How to read it:* as the first picture, but every span was timed; the host's lead is gone after the first wait, and each gap in the device's row is one launch and a little latency.
#
# What one read costs among short kernels, on the device that is here. On a CPU nothing is queued: the number is the call of `.item()` alone. And the metadata on the host, for twenty photographs: both builders, over the time to write their 16 bytes a patch once.

# %% tags=["nbval-ignore-output"]
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
spent = time_interleaved(loops(device, quick=True)["short kernel"], device=device, repeats=21)
print(f"{device_name(device)}: one read {(spent[64].p50_ms - spent[0].p50_ms) / 64 * 1e3:.1f} µs")
photographs = [image_geometry(*size).grid_hw for size in draw_sizes("coco_val2017", 20)]
builders, gbps = array_builders(photographs), copy_gbps(mib=64)
floor = floor_ms(sum(tensor.nbytes for tensor in builders["plain"]().values()), gbps)
for name, t in time_interleaved(builders, repeats=31).items():
    print(f"{name:6s} {t.p50_ms:6.3f} ms (p20 {t.p20_ms:.3f}, p80 {t.p80_ms:.3f}), predicted at least {floor:.3f}, ratio {t.p50_ms / floor:4.1f}")

# %% [markdown]
# ## What to remember
#
# - A line waits when Python must know a value that is on the device, or the size of a result. Count them on any machine; a guard with `error=True` keeps the count at zero.
# - A wait costs its latency plus the shorter of launch and kernel on an empty stream, and all that is queued on a full one. It hurts most where kernels are short, and takes the host's lead everywhere.
# - Grids are integers that the host had all along: kept there, $N + 3$ waits become none.
# - An asynchronous copy reads its source later. Fresh pinned memory a call, or an event before the next write.

# %% tags=["result"]
each = {name: f"{one.total} waits" for name, one in counted.items()}
print(f"One forward of 27 layers, whatever its pictures: {', '.join(f'{name} {words}' for name, words in each.items())}.")
low, high, saved = next(iter(savings.values()))
print(f"Predicted for {removed} waits less: {low:.2f} to {high:.2f} ms; published on an {tower_alone['gpu']}: {saved:.2f} ms.")

# %% [markdown]
# ## Exercises
#
# Solved in [solutions/60_gpu_syncs__SOLUTION.ipynb](solutions/60_gpu_syncs__SOLUTION.ipynb).
#
# **1.** Take the nine waits out, one line after the other, with the same values. What the host knows anyway, the grids, now comes as host integers too.


# %%
def mine(patches, weight, grid_hws, grids):
    """(L, 588), (588, D), (n, 2) on the device, the same grids as a list on the host -> (n, D)."""
    x = patches @ weight  # (L, D)
    if x.abs().max() > 50:
        x = x.clamp(-50, 50)
    x = x - torch.tensor([0.5], device=x.device)
    pictures = torch.arange(len(grid_hws), device=x.device)
    owner = pictures.repeat_interleave(grid_hws.prod(1))  # (L,)
    kept = patches.abs().amax(1) > 0
    x, owner = x[kept], owner[kept]
    lengths = owner.bincount().tolist()
    return torch.stack([part.mean(0) for part in x.split(lengths)])


left = count_host_syncs(mine, *inputs, grids, pretended=True)
assert relative_error(left.value.cpu(), counter.value.cpu()) < 1e-6, "the values have changed"
print(f"{left.total} waits left: {left.by_kind}")
if left.total == 0:
    assert not left.staged, "a copy from pageable memory may wait although it was asked not to"

# %% [markdown]
# **2.** Launches of 5 µs, kernels of 3 µs, a latency of 20 µs. A tower of 27 layers reads its longest picture in every layer, and from tomorrow on once. How many µs are saved, of the waits alone?

# %%
answer_2 = None  # µs

if answer_2 is None:
    print("not answered yet")
else:
    every, once = (timeline(400, [14 * layer for layer in range(1, w + 1)], 5, 3, 20).end for w in (27, 1))
    assert answer_2 == every - once

# %% [markdown]
# ## References
#
# - [torch.cuda.set_sync_debug_mode](https://docs.pytorch.org/docs/stable/generated/torch.cuda.set_sync_debug_mode.html): what counts on a real GPU, and what it does not cover.
# - [CUDA semantics, asynchronous execution and pinned memory](https://docs.pytorch.org/docs/stable/notes/cuda.html), in torch's documentation; [API synchronization behaviour](https://docs.nvidia.com/cuda/cuda-runtime-api/api-sync-behavior.html) in CUDA's.
# - [Overhead and latency in Nsight Systems](https://developer.nvidia.com/blog/understanding-the-visualization-of-overhead-and-latency-in-nsight-systems/): launches and their latency on a real timeline.
# - The longest picture read in every layer and no more: [SGLang 30878](https://github.com/sgl-project/sglang/pull/30878), [24013](https://github.com/sgl-project/sglang/pull/24013), [vLLM 37139](https://github.com/vllm-project/vllm/pull/37139);
#   grids read back: [transformers 47703](https://github.com/huggingface/transformers/pull/47703), [SGLang 31637](https://github.com/sgl-project/sglang/pull/31637).
# - A pinned buffer written again too early: [TensorRT-LLM 15546](https://github.com/NVIDIA/TensorRT-LLM/pull/15546), [vLLM 32799](https://github.com/vllm-project/vllm/pull/32799).
