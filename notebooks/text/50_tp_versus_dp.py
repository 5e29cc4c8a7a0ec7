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
#     question: Should the ranks of a server share out the images, or cut every layer, and what does each cost?
#     minutes_cpu: 1
#     gpu: optional
#     data: sizes of data/workloads
# ---

# %% [markdown]
# # Tensor parallel or data parallel
#
# ## The question
#
# Should the ranks of a server share out the images, or cut every layer, and what does each cost?
#
# ## You will be able to
#
# - **derive** which rows and columns of a weight each rank holds, and why two layers need only one all-reduce;
# - **predict** bytes and time of both ways from nothing but the sizes of the images, and choose between them;
# - **diagnose** a rank that waits: a bad balance, no image to encode, or a group that never comes together.
#
# ## Needs
#
# Notebook [00](00_start_here.ipynb). A minute on a CPU with two cores: it starts up to four processes of one thread each, by torchrun's own launcher. A GPU is not used here; on several, the same
# calls run over NCCL (`python -m kimivl_lab.bench.parallel`).
#
# ## Versions and machine

# %% tags=["nbval-ignore-output"]
import warnings

warnings.filterwarnings("ignore", message="IProgress not found")  # about a widget that nothing here uses
from kimivl_lab.measure.provenance import device_name, versions

print(device_name("cpu"))
print(versions())

# %%
import inspect
import random
from functools import partial
from statistics import mean, median

import matplotlib.pyplot as plt
import torch
import torch.distributed as dist
import torch.nn.functional as F

from kimivl_lab import KimiVLConfig, KimiVLEncoder, MoonViTConfig, image_geometry, plots, split_image_features
from kimivl_lab.lessons.tp_versus_dp import encode_in_halves, encode_in_modes, time_collectives, time_modes
from kimivl_lab.datasets import data_path, draw_sizes
from kimivl_lab.parallel import balance
from kimivl_lab.parallel.work import steps_and_bytes
from kimivl_lab.bench.fit_cost_model import fit_cost_model, prediction_errors
from kimivl_lab.parallel.data_parallel import run_dp_sharded_vision_model
from kimivl_lab.measure.ranks import run_ranks
from kimivl_lab.parallel.cost_model import assumed_cost_model
from kimivl_lab.parallel.cost_model import simulate_scaling
from kimivl_lab.parallel.work import TowerWork
from kimivl_lab.plots import cost_model, floor, parallel

plots.use_style()
_ = torch.set_grad_enabled(False)

# %% [markdown]
# ## Predict
#
# A *rank* is a process with a device and a memory of its own. Ranks exchange tensors by *collectives*, which all ranks of a group call together: an **all-reduce** leaves on every rank the sum of what the ranks bring, an
# **all-gather** leaves all of it side by side, a **broadcast** copies one rank's tensor to the others.
#
# *Data parallel*: each rank has all weights and encodes some of the images. Images do not see each other, so there is nothing to exchange until the end: one all-gather of the features.
#
# *Tensor parallel*: each rank has a part of every matrix and works on all images. Cut the first matrix of the MLP by columns and the second by rows, for two ranks $W_0 = [A_0 \,|\, A_1]$ and
# $W_1 = [B_0 \,;\, B_1]$, and a rank can go through both without a word:
#
# $$\mathrm{GELU}(XW_0 + b_0)\,W_1 + b_1 \;=\; \sum_{r} \underbrace{\mathrm{GELU}(XA_r + a_r)\,B_r}_{\text{rank } r} \;+\; b_1$$
#
# The sum is one all-reduce. Columns come first since GELU needs whole numbers: that of a sum is not the sum of the GELUs. Attention goes the same way: a head is some columns of `wqkv` and some rows of `wo`.

# %%
full = KimiVLConfig.preset("kimi-vl-a3b").vision_config
fig, axes = parallel.who_holds_what(
    full, 2, "Two ranks: each a part of every matrix, or all matrices and some of the images"
)
plt.show()

# %% [markdown]
# *How to read it:* a colour (and hatching) is a rank, white is the same on both; above, each matrix is there once and the two meet twice in a layer; below, each matrix is there twice, and the rows, which are patches, are divided.
#
# ### Bytes
#
# An all-reduce sums activations of $L \times D$ numbers, twice in each of $N$ layers. The all-gather leaves $(L/4) \times 4 \times D$ numbers: as many, but once (and every rank's part is padded to the longest).
# On the wire both go in a ring, and the all-reduce goes round twice: a rank of $R$ sends $2(R-1)/R$ times the tensor's size, against $(R-1)/R$.

# %%
N, D, L = full.num_hidden_layers, full.hidden_size, 4 * 32 * 32  # four images of 32 x 32
one = 2 * L * D  # bytes of an activation in bfloat16
title = f"{2 * N} all-reduces against one gather, for {L:,} patches"
fig, ax = parallel.bytes_through_layers(N, one / 1e6, one / 1e6, title=title)
plt.show()
print("                    tensors summed or gathered   sent by a rank of 4   steps, one after another")
for words, kind, times in [("tensor parallel", "all_reduce", 2 * N), ("data parallel", "all_gather", 1)]:
    steps, sent = steps_and_bytes(kind, 4, one)
    tensors = f"{times:3d} x {one / 1e6:.1f} = {times * one / 1e6:5.1f} MB"
    print(f"{words:18s} {tensors:>27s} {times * sent / 1e6:18.1f} MB {times * steps:22d}")

# %% [markdown]
# *How to read it:* tensor parallel pays at every layer and for every patch, data parallel once. What tensor parallel buys for it: a *single* image becomes faster, and each rank holds $1/R$ of the blocks' weights.
#
# ## Build
#
# The algebra first, with no ranks at all: a Python sum stands for the all-reduce. Two mistakes beside it. Then the rows of `wqkv`, which keeps q, k and v one below the other: a plain half of it is no
# half of the heads, so each of the three is cut. With four heads of two numbers:

# %%
torch.manual_seed(0)
X, W0, b0, W1, b1 = (torch.randn(shape).double() for shape in [(6, 8), (8, 12), (12,), (12, 8), (8,)])
halves = [slice(0, 6), slice(6, 12)]
summed = sum(F.gelu(X @ W0[:, half] + b0[half]) @ W1[half] for half in halves)
partial_sums = [X[:, rows] @ W0[rows] + b0 / 2 for rows in (slice(0, 4), slice(4, 8))]
tries = {
    "columns, rows, sum, bias once": summed + b1,
    "every rank adds the bias": summed + 2 * b1,
    "rows first, GELU of partial sums": sum(map(F.gelu, partial_sums)) @ W1 + b1,
}
for way, result in tries.items():
    equal = torch.allclose(result, F.gelu(X @ W0 + b0) @ W1 + b1)
    print(f"{way:33s} equal: {equal}")
    assert equal == (way == "columns, rows, sum, bias once")

# %%
rows = torch.arange(24).view(3, 4, 2)  # q, k, v; heads; numbers
for rank in range(2):
    print(f"rank {rank} of 2 holds rows", rows[:, 2 * rank : 2 * rank + 2].flatten().tolist())
print("a plain half would be", rows.flatten()[:12].tolist(), "- all of q, half of k, no v")

# %% [markdown]
# The library has these layers (`ColumnParallelLinear`, `QKVParallelLinear`, `RowParallelLinear`), and `KimiVLEncoder.set_encoder_parallel` picks the way: `"data"`, `"tensor"` or `"auto"`. Now with real processes: `run_ranks(worker, 2, ...)` calls a
# worker in two of them and returns what each returned. The workers of this notebook are in a module, since another process cannot import a cell. This one encodes a batch in every mode, and each rank notes
# how far it is from the whole encoder in one process, how many patches went through its blocks, and its collectives:

# %%
print(inspect.getsource(encode_in_modes))

# %% [markdown]
# ## Check equality
#
# Five images of different sizes and contents, so that a wrong order would show. The encoder is narrow but has the published depth, so all its collectives can be counted. By hand: $2N$ tensors of
# $4LD$ bytes in float32, against one of the longest rank's patches, times two ranks.

# %%
config = KimiVLConfig.preset("tiny")
config.vision_config.num_hidden_layers = N
width, grids = config.vision_config.hidden_size, [(12, 14), (4, 10), (8, 8), (2, 6), (6, 10)]
lengths = [h * w for h, w in grids]
shares = balance.balance_by_cost(lengths, 2, balance.QuadraticCost.of_flops(config.vision_config)).by_rank
longest = max(sum(lengths[image] for image in share) for share in shares)
by_hand = {"data": (1, 4 * 2 * longest * width), "tensor": (2 * N, 2 * N * 4 * sum(lengths) * width)}
print("images of each rank:", shares, "patches:", [sum(lengths[image] for image in share) for share in shares])

# %%
on_two = run_ranks(encode_in_modes, 2, config, grids, ["data", "tensor"])
for mode, (count, size) in by_hand.items():
    first, second = (rank[mode] for rank in on_two)
    counted = [(len(one.collectives), sum(each.bytes for each in one.collectives)) for one in (first, second)]
    print(f"{mode}: equal to one process on both ranks: {max(first.error, second.error) < 1e-5}")
    print(f"    patches through the blocks of rank 0 and 1: {first.patches} and {second.patches}")
    print(f"    {counted[0][0]} {first.collectives[0].kind}, bytes by hand {size:,}, counted {counted[0][1]:,}")
    assert counted == 2 * [(count, size)] and max(first.error, second.error) < 1e-5

# %% [markdown]
# ### One image on many ranks
#
# What does one image cost, data parallel? One rank encodes it; the others wait, and then receive the features by a broadcast. Four processes show it, the plan for eight follows from the same integers.

# %%
on_four = run_ranks(encode_in_modes, 4, config, [(12, 14)], ["data", "tensor"])
for mode in ("data", "tensor"):
    patches, kinds = [rank[mode].patches for rank in on_four], [one.kind for one in on_four[0][mode].collectives]
    print(f"{mode:6s} patches through the blocks of ranks 0 to 3: {patches}, {len(kinds)} {kinds[0]}")
    assert max(rank[mode].error for rank in on_four) < 1e-5
counts = balance.get_dp_encoder_lb_assignment([4096], 8).counts
print(f"one image on 8 ranks: {counts}, {counts.count(0) / 8:.1%} of the ranks' time is lost")
print(f"    and each of the other 7 receives {one / 1e6:.1f} MB; tensor parallel sums {2 * N} times as much")

# %% [markdown]
# ### A list for a tensor
#
# World size 1 is the case that everybody runs and few test in data-parallel mode. As read in SGLang's [pull request 30869](https://github.com/sgl-project/sglang/pull/30869), Kimi-VL's encoder in data-parallel mode once returned, on one rank, a *list* with a
# tensor for each image, where the projector needs one packed tensor: the server failed at the first image. The same with our own parts:


# %%
def encode_as_before(tower, pixel_values, grids, group):
    """Data parallel with a short cut for one rank that returns another type than the long way."""
    if group.size() == 1:
        return split_image_features(tower(pixel_values, grids), grids)
    return run_dp_sharded_vision_model(tower, pixel_values, grids, group)


dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # this process is a world of one rank
encoder = KimiVLEncoder(KimiVLConfig.preset("tiny")).eval()
for encode in (encode_as_before, run_dp_sharded_vision_model):
    features = encode(encoder.vision_tower, torch.randn(sum(lengths), 3, 14, 14), grids, dist.group.WORLD)
    try:
        projected = f"features {tuple(encoder.multi_modal_projector(features).shape)}"
    except TypeError:
        projected = "TypeError"
    print(f"{encode.__name__:28s} returns a {type(features).__name__}, the projector: {projected}")
    assert (projected == "TypeError") == (encode is encode_as_before)
dist.destroy_process_group()

# %% [markdown]
# The fix is a promise: one packed `(T, 4, D)` tensor at *every* world size, for any number of images; the tests hold 1, 2, 3 and 4 ranks and 0, 1, 3, 5 and 9 images to it.
#
# ### The wrong group
#
# Servers often split their ranks into groups that serve different requests. Then weights are cut over a group, and the sum must go over **the same** group. As reported in
# [SGLang's issue 34442](https://github.com/sgl-project/sglang/issues/34442), Kimi-VL on four ranks in two groups cut its layers over two and reduced over four: the first image stopped the server. With our layers, whose group is an explicit argument, the fault
# is one line: `layer.group = everyone`. Ranks 0 and 1 share an encoder, ranks 2 and 3 another.

# %%
cases = {  # which halves have images, whether the sums go over all ranks, time-out in seconds
    "reduce over the half": ((True, False), False, 20.0),
    "reduce over all, both halves have images": ((True, True), True, 20.0),
    "reduce over all, one half has images": ((True, False), True, 2.0),
}
small = KimiVLConfig.preset("tiny")
outcomes = [run_ranks(encode_in_halves, 4, small, [(8, 8), (4, 6)], *case) for case in cases.values()]
for words, ranks in zip(cases, outcomes, strict=True):
    print(words)
    for rank, outcome in enumerate(ranks):
        if isinstance(outcome, float):
            outcome = "features right" if outcome < 1e-5 else "features WRONG, and no error"
        print(f"    rank {rank}: {getattr(outcome, 'words', outcome) or 'no images'}")
right, mixed, stuck = outcomes
assert max(right[:2]) < 1e-5 and min(mixed) > 0.01
assert [outcome.missing for outcome in stuck[:2]] == [[2, 3], [2, 3]] and stuck[2:] == [None, None]

# %% [markdown]
# With images in both halves nothing stops, and that is worse: the sums mix two requests. With images in one half its ranks wait for others that have nothing to encode and never come. A group with a finite time-out ends the wait, here after
# two seconds. gloo does not say who was missing, so the ranks that are there hold a roll call, and the error names the others: with two names the cause is found, without them somebody searches four
# logs.
#
# ## Measure
#
# ### Who gets which image
#
# Data parallel is as slow as its slowest rank. The engines balance by patches: largest image first, each to the rank with the fewest patches so far. But attention costs the square of an image's patches. Three balances, and the work
# of the published tower in FLOPs: round robin; by patches; and by cost, which knows the square and then moves and swaps images away from the slowest rank.

# %%
cost = balance.QuadraticCost.of_flops(full)
balances = {
    "round robin": balance.round_robin_assignment,
    "by patches": balance.get_dp_encoder_lb_assignment,
    "by cost": partial(balance.balance_by_cost, cost=cost),
}
workloads = ("coco_val2017", "device_screens", "cameras", "receipts")
drawn = [size for workload in workloads for size in draw_sizes(workload, 8 * 40, seed=0)]
real = [image_geometry(*size, in_token_limit=16384).patches for size in drawn]
random.Random(0).shuffle(real)
real = [real[start : start + 32] for start in range(0, len(real), 32)]  # 40 batches
panels, bounds = {}, {}
for words, sizes, ranks in [("giant", [16384] + 4 * [4096], 2), ("real", real[0], 4)]:
    bounds[words] = balance.lower_bound([cost(n) for n in sizes], ranks) / 1e12
    panels[words] = {
        name: [[(sizes[image], cost(sizes[image]) / 1e12) for image in rank] for rank in place(sizes, ranks).by_rank]
        for name, place in balances.items()
    }

# %%
words = {"axis": "work of a rank, TFLOP", "title": "Equal in patches is not equal in work"}
words["subtitle"] = f"one image of 16,384 patches and four of 4,096, published tower  ·  {plots.COUNTED}"
fig, axes = parallel.schedule(panels["giant"], bounds["giant"], **words)
plt.show()

# %% [markdown]
# *How to read it:* a bar is an image, hatched is waiting. By patches both ranks get 16,384, but not the same work, since one square is four times four small ones. Yet no balance does better: sharing out images divides no image.
# Cutting the layers does.
#
# Real sizes next: four ranks, 32 images, under a limit of 16,384 patches. Below the picture 40 such batches, and the worst that a giant among small images can do.

# %%
words = {"axis": "work of a rank, TFLOP", "title": "Real sizes: by patches is close, by cost is there"}
words["subtitle"] = f"32 images on 4 ranks: photographs, screens, camera files, receipts  ·  {plots.COUNTED}"
fig, axes = parallel.schedule(panels["real"], bounds["real"], **words)
plt.show()
print("slowest rank over the bound   ", "".join(f"{name:>12s}" for name in balances))
for words, many, ranks in [
    ("40 batches of real sizes", real, 4),
    ("16,384 and 32 of 1,024", [[16384] + 32 * [1024]], 2),
]:
    over = {name: [] for name in balances}
    for sizes in many:
        costs = [cost(n) for n in sizes]
        for name, place in balances.items():
            loads = [sum(costs[image] for image in rank) for rank in place(sizes, ranks).by_rank]
            over[name].append(max(loads) / balance.lower_bound(costs, ranks) - 1)
    print(f"{words:30s}", "".join(f"{mean(values):12.1%}" for values in over.values()))
    assert all(c <= p + 1e-9 for c, p in zip(over["by cost"], over["by patches"], strict=True))

# %% [markdown]
# *How to read it:* the dashed line is the least that the slowest rank can do, whatever the balance. Round robin misses it by far; by patches the ends are a little ragged, since most of these images are alike; by cost they are straight.
#
# ### A model of the time
#
# Everything that a batch costs follows from its images' patches $n_j$, so a few rates are enough:
#
# $$t_\text{data} = c + \max_r \sum_{j \in r} \left(i + (p + l)\,n_j + a\,n_j^2\right) + \text{gather} \qquad t_\text{tensor} = c + \sum_j \left(i + p\,n_j + \frac{l\,n_j + a\,n_j^2}{R}\right) + 2N \cdot \text{all-reduce}$$
#
# $l$ and $a$, linear layers and attention, are divided by tensor parallel; $p$, what every rank does for every patch (norms, residuals, embedding), is not. A collective takes a latency a step, a time a byte, and the wait
# for ranks that never come quite together. All are fitted on some batches, measured now on two ranks, and must then predict *others*, among them one that is placed by all three balances.

# %%
tiny, modes = MoonViTConfig.preset("tiny"), ["single", "data", "tensor"]
fit_on = [[(8, 8)], [(16, 16)], [(32, 32)], [(40, 40)], [(8, 8)] * 16, [(16, 16)] * 8, [(28, 28)] * 3]
check_on = [[(24, 24)], [(46, 46)], [(12, 12)] * 10, [(28, 32), (20, 24), (12, 16)]]
uneven = [[(24, 24), (8, 8)] * 4]
collectives = run_ranks(time_collectives, 2, [2**power for power in range(12, 23)], 5)[0]
fitted = run_ranks(time_modes, 2, tiny, fit_on, modes, 3)[0]
checked = run_ranks(time_modes, 2, tiny, check_on, modes, 3)[0]
checked += run_ranks(time_modes, 2, tiny, uneven, ["data, round robin", "data, by patches", "data"], 3)[0]
points = [point for batch in fitted for point, _ in batch.values()]
source = plots.measured_on("cpu", "tiny preset, float32, 2 ranks of 1 thread")
model = fit_cost_model(tiny, torch.float32, points, collectives, source=source)

# %% tags=["nbval-ignore-output"]
print("batch (patches)          way               predicted ms   measured ms (p20 to p80)   ratio")
for batch in checked:
    for way, (point, t) in batch.items():
        predicted = 1e3 * model.predict(point.mode, point.sizes, point.ranks, point.by_rank).seconds
        sizes = ", ".join(map(str, point.sizes[:3])) + ", .." * (len(point.sizes) > 3)
        spread = f"{t.p50_ms:9.1f} ({t.p20_ms:.1f} to {t.p80_ms:.1f})"
        print(f"{sizes:24s} {way:17s} {predicted:10.1f}     {spread:26s} {predicted / t.p50_ms:5.2f}")
errors = [abs(error) for error in prediction_errors(model, [point for batch in checked for point, _ in batch.values()])]
faster = [min(("data", "tensor"), key=lambda mode: batch[mode][0].seconds) for batch in checked[:-1]]
chosen = [model.choose(batch["data"][0].sizes, 2) for batch in checked[:-1]]
print(f"median error {median(errors):.0%}; faster as measured: {faster}, as the model chooses: {chosen}")

# %%
pairs = [{mode: [] for mode in modes} for _ in range(2)]
for group, timed in zip((checked, fitted), pairs, strict=True):
    for point, timing in (measured for batch in group for measured in batch.values()):
        predicted = model.predict(point.mode, point.sizes, point.ranks, point.by_rank).seconds
        timed[point.mode].append((timing, 1e3 * predicted))
title = f"Batches that the model has not seen: half are predicted to within {median(errors):.0%}"
fig, axes = cost_model.predicted_against_measured(*pairs, band=0.15, title=title, subtitle=source)
plt.show()

# %% [markdown]
# *How to read it:* on the line the prediction is right, in the band it is off by less than 15 %; an upright line is the spread of the measurement; grey marks were used for the fit. A mark far off is a batch that something
# else on this machine disturbed, or that the formula does not understand: repeat it to know which. Where data and tensor parallel are nearly equal the
# choice may not be the clock's, and loses nearly nothing.
#
# ### Where they cross

# %% tags=["headline"]
sizes, counts = [64, 256, 576, 1024, 1600, 2304, 4096, 8192], [1, 2, 3, 4, 5, 6, 8, 16]
ratios = {
    "2 ranks, as fitted": model.crossover(sizes, counts, 2),
    "4 ranks, simulated": model.crossover(sizes, counts, 4),
}
title = "One large image: cut the layers; several images: share them out"
fig, axes = cost_model.crossover_map(ratios, sizes, counts, title=title, subtitle=source)
plt.show()

# %% [markdown]
# *How to read it:* below and to the right of the line tensor parallel is predicted to be faster. One small image is not worth an all-reduce a layer; one large image is; as soon as every rank has images of its own, sharing them out wins. A count just
# above a multiple of the ranks leaves some idle, and the line bulges there. A batch can go either way if the weights are there once and tensor parallel works on views of them: that is `encoder_parallel="auto"`, which asks this model on
# every rank, about the same integers, so that all choose alike.
#
# ### Recorded: a deeper tower, and auto
#
# The project's record holds `auto` beside the modes, on batches that the model was not fitted to.

# %%
from kimivl_lab.bench.parallel import summary
from kimivl_lab.measure.records import find_record, read_record

records, origin = read_record(find_record("parallel", data_path("measurements"), device="cpu-*", dtype="float32"))
swept, auto = [row for row in records if row["phase"] == "sweep"], summary(records)["auto_over_best"].values()
title = f"Auto within 5% of the better mode in {sum(ratio < 1.05 for ratio in auto)} of {len(auto)} recorded batches"
note = floor.recorded_on(origin, f"{origin['preset']} preset, float32, {swept[0]['ranks_count']:.0f} ranks of one thread, median and p20 to p80")
fig, ax = parallel.recorded_modes(swept, title=title, subtitle=note)
plt.show()

# %% [markdown]
# *How to read it:* further left is faster, from the batches that cutting helps most down to those that sharing out does; on the line at 1 a second rank is worth nothing, on the dashed one nothing of it is lost, and a hollow mark is what the model said.
# Auto runs one of the two modes, so what separates it from its own choice is the clock, and the views it works on; where the modes' spreads meet, a wrong choice costs little.
#
# ### More ranks, by simulation
#
# The published tower in bfloat16, on ranks with assumed rates: round numbers for a data-centre GPU and its links (`kimivl_lab.parallel.cost_model`). They give the shape, not the milliseconds.

# %%
assumed = assumed_cost_model(full, torch.bfloat16, "cuda")
batches = {"1 image of 4,096 patches": [4096], "1 image of 16,384": [16384], "32 images of 1,024": [1024] * 32}
curves = {words: simulate_scaling(assumed, sizes) for words, sizes in batches.items()}
fig, axes = cost_model.scaling(curves, title="Simulated: many images fill the ranks", subtitle=assumed.source)
maps = {f"{ranks} ranks, simulated": assumed.crossover([*sizes, 16384], counts, ranks) for ranks in (2, 8, 16)}
title = "Simulated: the more ranks, the larger an image must be to be cut"
fig, axes = cost_model.crossover_map(maps, [*sizes, 16384], counts, title=title, subtitle=assumed.source)
plt.show()

# %% [markdown]
# *How to read it:* every mark is simulated. Above: one image on eight ranks gains nothing from data parallel, seven wait; tensor parallel helps until the all-reduces, which grow with the ranks, eat what the division saves, and a larger image carries
# it further; many images follow the dotted line until they run out. Below: with more ranks the corner of tensor parallel shrinks, since a rank's share of one image is too little work to pay for the all-reduces.
#
# ## What to remember
#
# - Columns, then rows: a column cut keeps whole numbers for GELU and attention, a row cut leaves one sum. Two all-reduces a layer; the bias once, after the sum; `wqkv` by heads.
# - $2N$ all-reduces of $L \times D$ against one gather of as much: 54 to 1 in tensors, 108 to 1 on the wire.
# - As many images as ranks, or many more: share them out, by cost. One large image: cut the layers. One small image: nothing helps.
# - One type at every world size; one group for cutting and for summing; a finite time-out, and an error that names who is missing.

# %% tags=["result"]
summed, gathered = by_hand["tensor"][1], by_hand["data"][1]
print(f"Bytes by hand = counted: {2 * N} all-reduces of {summed:,} together, one gather of {gathered:,}.")
print(f"Cut over two ranks, summed over four: they wait in vain, and the error names ranks {stuck[0].missing}.")

# %% [markdown]
# ## Exercises
#
# Solved in [solutions/50_tp_versus_dp__SOLUTION.ipynb](solutions/50_tp_versus_dp__SOLUTION.ipynb).
#
# **1.** Write the engines' balance: largest image first, each to the rank with the fewest patches so far, the lowest rank if several have as few.


# %%
def largest_first(sizes, ranks):
    return None  # for each rank the numbers of its images


if largest_first([5, 3], 2) is None:
    print("not answered yet")
else:
    assert largest_first([1000, 100, 200, 50], 2) == [[0], [2, 1, 3]]
    for sizes in real:
        assert largest_first(sizes, 4) == balance.get_dp_encoder_lb_assignment(sizes, 4).by_rank

# %% [markdown]
# **2.** Another encoder has 32 blocks of width 1,280 and runs in bfloat16. How many bytes do the all-reduces of one forward sum, for one image of 4,096 patches?

# %%
answer_2 = None  # bytes

if answer_2 is None:
    print("not answered yet")
else:
    other = MoonViTConfig.preset("kimi-vl-a3b", num_hidden_layers=32, hidden_size=1280, num_attention_heads=16)
    assert answer_2 == TowerWork.of(other, torch.bfloat16).tensor_parallel_bytes([4096])

# %% [markdown]
# **3.** A server of four ranks gets batches of equal images. From how many images on is data parallel the choice, for this number and every larger one (up to 64)? Ask `model.choose(sizes, ranks)`. Why does the answer for two ranks and images
# of 16,384 patches exceed the number of ranks?


# %%
def crossover_count(model, patches, ranks):
    return None  # a number of images


if crossover_count(assumed, 4096, 4) is None:
    print("not answered yet")
else:
    for patches, ranks in [(1024, 4), (4096, 4), (16384, 4), (16384, 2)]:
        count = crossover_count(assumed, patches, ranks)
        print(f"{ranks} ranks, images of {patches:6,} patches: data parallel from {count} on")
        assert all(assumed.choose([patches] * more, ranks) == "data" for more in range(count, 65))
        assert count == 1 or assumed.choose([patches] * (count - 1), ranks) == "tensor"

# %% [markdown]
# ## References
#
# - [Megatron-LM, Shoeybi et al., 2019](https://arxiv.org/abs/1909.08053): column- and row-parallel layers.
# - [SGLang pull request 30869](https://github.com/sgl-project/sglang/pull/30869): data and tensor parallelism of Kimi-VL's encoder; [issue 34442](https://github.com/sgl-project/sglang/issues/34442): the wrong group.
# - [vLLM pull request 31738](https://github.com/vllm-project/vllm/pull/31738): data parallelism for MoonViT there.
# - [torchrun](https://docs.pytorch.org/docs/stable/elastic/run.html) and [torch.distributed](https://docs.pytorch.org/docs/stable/distributed.html): processes, groups, collectives.
# - [Graham, Bounds on multiprocessing timing anomalies, 1969](https://doi.org/10.1137/0117039): largest first is at most a third above the optimum.
