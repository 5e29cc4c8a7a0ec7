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
#     question: When does it pay to keep position embeddings for the next image, and how much memory may they take?
#     minutes_cpu: 1
#     gpu: optional
#     data: sizes of data/workloads, records of data/measurements
# ---

# %% [markdown]
# # A cache of position embeddings
#
# [Map of the course](00_start_here.ipynb) · [Glossary](GLOSSARY.md) · [Notation](NOTATION.md) · previous: [20 Position embedding](20_position_embedding.ipynb) · next: [30 RoPE in two dimensions](30_rope_2d.ipynb)
#
# Lesson 20 computes a position embedding for each image, also if the last image had the same
# grid.
#
# ## The question
#
# When does it pay to keep position embeddings for the next image, and how much memory may they
# take?

# %% [markdown]
# ## You will be able to
#
# - **compute** the hit rate above which a cache pays, from three measured times;
# - **bound** a cache so that it holds the grids of your traffic and takes no more memory than you
#   allow;
# - **show** that a cache never serves an embedding of an old table.
#
# ## Needs
#
# Notebook [20](20_position_embedding.ipynb), for what is cached. Reading and solving takes about
# 85 minutes. The notebook runs in about a minute on a CPU. A GPU is used by one cell, the live
# measurement.
#
# ## Versions and machine

# %% tags=["nbval-ignore-output"]
import warnings

import torch

warnings.filterwarnings("ignore", message="IProgress not found")  # about a widget that is not used
from kimivl_lab.measure.provenance import device_name, versions

device = "cuda" if torch.cuda.is_available() else "cpu"
print(device_name(device))
print(versions())

# %%
import matplotlib.pyplot as plt

from kimivl_lab import plots
from kimivl_lab.datasets import WORKLOADS, data_path, load_sizes
from kimivl_lab.geometry import image_geometry
from kimivl_lab.lessons.cache_traffic import break_even, draw_grids, hits, mib
from kimivl_lab.lessons.cache_traffic import most_hits, rate_words, replay
from kimivl_lab.lessons.checks import check, check_function
from kimivl_lab.lessons.guesses import Comparison, compare, guess
from kimivl_lab.lessons.resampling import resample
from kimivl_lab.measure.accuracy import relative_error
from kimivl_lab.measure.records import find_record, read_record
from kimivl_lab.measure.timing import time_interleaved
from kimivl_lab.moonvit.position import Learnable2DInterpPosEmb
from kimivl_lab.moonvit.position_cache import PositionCache
from kimivl_lab.plots import cache, floor

plots.use_style()
_ = torch.set_grad_enabled(False)

# %% [markdown]
# ## The cache: grids come again
#
# The [position embedding](GLOSSARY.md#position-embedding) of an image depends on its
# [grid](GLOSSARY.md#grid) and on the [position table](GLOSSARY.md#position-table), and on nothing
# else. Two photographs of the same size get the same embedding. So a server can keep the result
# in a [cache](GLOSSARY.md#cache):
#
# - the **key** is what decides the result: $(h, w)$, the dtype and the device;
# - the **entry** is the embedding: $hw$ vectors of $D = 1{,}152$ numbers. In
#   [bfloat16](GLOSSARY.md#bfloat16) this is 2,304 bytes for each patch. The grid 32 x 46 (rows x
#   columns) of china has 1,472 patches, so its entry has $1{,}472 \cdot 2{,}304$ bytes, 3.2 MiB;
# - a **hit** is a lookup that finds its entry. A **miss** does not: it computes the embedding and
#   keeps it. The **hit rate** is the share of hits;
# - an **eviction** removes an entry, because the cache has reached its bound.
#
# The best possible hit rate follows from the number of different grids. If 2,000 images have 80
# different grids, each of the 80 is missed once: $1 - 80/2{,}000 = 96$ %.
#
# **Your guess.** 2,000 receipt scans are drawn from a real collection of sizes. How many
# different grids do they have?

# %%
distinct_guess = guess("different grids of 2,000 receipts", None)

# %%
print("workload            different grids   MiB of all entries   best hit rate")
for workload, title in WORKLOADS.items():
    grids = draw_grids(workload, 2000)
    different = set(grids)
    best = 1 - len(different) / len(grids)
    print(f"{title:20s} {len(different):14d} {mib(different):20.0f} {best:15.1%}")
different = set(draw_grids("receipts", 2000))
compare(Comparison(distinct_guess, measured=len(different)))

# %% [markdown]
# Sizes repeat in every workload. But receipts and photographs have about as many grids, and the
# entries of the receipts take four times the memory, because receipts are larger. So two things
# decide the memory: the number of entries and their size.

# %% [markdown]
# ## Predict: what does a bound in entries hold?
#
# SGLang, as read in release 0.5.23, keeps at most 256 entries ([PR
# 30869](https://github.com/sgl-project/sglang/pull/30869)). vLLM, as read in release 0.32, keeps
# none. How much memory can 256 entries take? It depends on the largest grid. Lesson 10 has shown
# that an image can end above the limit of 4,096 patches, because the limit is checked before
# padding: the largest grid found there is 446 x 12, with 5,352 patches. By hand, for exactly
# 4,096 patches: $256 \cdot 4{,}096 \cdot 2{,}304$ bytes, 2.25 GiB.
#
# **Your guess.** And at a limit of 16,384 patches, which some servers set for documents?

# %%
gib_guess = guess("256 entries at a limit of 16,384", None, unit="GiB")

# %%
largest = {
    "exactly 4,096 patches": 4096,
    "446 x 12, limit 4,096": 446 * 12,
    "exactly 16,384 patches": 16384,
    "510 x 510, the largest grid accepted": 510 * 510,
}
gib = {words: 256 * mib([(patches, 1)]) / 1024 for words, patches in largest.items()}
for words, held in gib.items():
    print(f"256 entries of {words:36s} {held:7.2f} GiB")
compare(Comparison(gib_guess, predicted=gib["exactly 16,384 patches"]))

# %% [markdown]
# (The processor refuses a side of 512 patches or more.) So 256 entries are a bound of the memory
# only if the largest grid is known. A bound in bytes needs no such knowledge. The library's
# `PositionCache` has a bound in bytes, 256 MiB by default.

# %% [markdown]
# ## Predict: above which hit rate does a cache pay?
#
# Call the three times $t_{\text{compute}}$ (no cache), $t_{\text{hit}}$ and $t_{\text{miss}}$. A
# hit is not free: the entry is copied into the batch. A miss takes longer than computing without
# a cache: the entry needs new memory too, and is then copied into the batch.
#
# Take 10 ms, 2 ms and 18 ms. At a hit rate of 25 % a lookup takes
# $0.25 \cdot 2 + 0.75 \cdot 18 = 14$ ms on average, more than the 10 ms without a cache. At 75 %
# it takes $0.75 \cdot 2 + 0.25 \cdot 18 = 6$ ms.
#
# **Your guess.** At which hit rate, in %, does a lookup take 10 ms on average?

# %%
even_guess = guess("break-even hit rate for 10, 2 and 18 ms", None, unit="%")

# %% [markdown]
# **Your code.** Write the break-even hit rate, from 0 to 1, for any three times.


# %%
def my_break_even(compute_ms, hit_ms, miss_ms):
    return ...


# %%
times = [(10, 2, 18), (10, 2, 10), (4, 4, 5), (7, 1, 22)]
cases = {three: break_even(*three) for three in times}
hint = "solve rate * hit + (1 - rate) * miss = compute for the rate"
check_function("break-even hit rate", my_break_even, cases, rtol=0.01, hint=hint)

# %%
compare(Comparison(even_guess, predicted=100 * break_even(10, 2, 18)))
title = "Below the break-even rate the cache costs time"
examples = {"hit rate 25 %": 0.25, "75 %": 0.75}
fig, ax = cache.break_even_line(10, 2, 18, examples, title, "an example: 10, 2 and 18 ms")
plt.show()

# %% [markdown]
# *How to read it:* the line falls from the time of a miss (hit rate 0) to the time of a hit (100
# %). Where it is above the dashed line, the server is faster without a cache. If a hit takes
# longer than computing, the whole line is above it: the cache never pays.

# %% [markdown]
# ## Build: which entry goes first?
#
# At its bound, a cache must evict an entry. Two policies choose it:
#
# - **first in, first out** (FIFO): the entry that was made first. A hit changes nothing. SGLang
#   0.5.23, as read, does this;
# - **least recently used** (LRU): the entry whose last use is longest ago. A hit makes an entry
#   young again. `PositionCache` does this.
#
# By hand, with room for two entries, and the keys A B A C A:
#
# | key | FIFO | holds then | LRU | holds then |
# |---|---|---|---|---|
# | A | miss | A | miss | A |
# | B | miss | A B | miss | A B |
# | A | hit | A B | hit | B A |
# | C | miss, A goes | B C | miss, B goes | A C |
# | A | miss, B goes | C A | hit | C A |
#
# In the columns "holds then", the entry on the left goes next. FIFO has 1 hit and LRU has 2.
#
# **Your code.** Count the hits of an LRU cache with room for `entries` keys. A list is enough:
# the key used last stands at its end.


# %%
def my_lru_hits(keys, entries):
    return ...


# %%
sequences = ["ABACA", "ABCABCABC", "AABBCCAABB", "ABACADAEAFA"]
cases = {(keys, room): hits(keys, room) for keys in sequences for room in (2, 3)}
hint = "a hit moves its key to the end; a miss appends its key, and may drop the first"
check_function("hits of LRU", my_lru_hits, cases, hint=hint)

# %% [markdown]
# ### Traffic that evicts
#
# On real sizes the policy matters only if something is evicted. 2,000 receipts have fewer than
# 256 grids at the limit of 4,096, so a cache of 256 entries never evicts one. Charts and clip art
# have more grids. Each line below replays 2,000 images with a new cache.
#
# **Your guess.** By how many percentage points is the hit rate of LRU above that of FIFO for the
# charts, with 64 entries?

# %%
points_guess = guess("LRU over FIFO, charts, 64 entries", None, unit="points")

# %%
rates = {}
print("workload    entries   FIFO: hit rate  evictions    LRU: hit rate  evictions")
for workload in ("receipts", "clipart", "pew_charts"):
    grids = draw_grids(workload, 2000)
    for room in (64, 256):
        line = f"{WORKLOADS[workload]:14s} {room:4d}"
        for policy in ("fifo", "lru"):
            one = replay(PositionCache(max_bytes=None, max_entries=room, policy=policy), grids)
            rates[workload, room, policy] = one.hit_rate
            line += f" {one.hit_rate:16.3f} {one.evictions:10d}"
        print(line)
gained = rates["pew_charts", 64, "lru"] - rates["pew_charts", 64, "fifo"]
compare(Comparison(points_guess, measured=100 * gained))

# %% [markdown]
# Without evictions both policies are equal. With evictions LRU is better, because frequent sizes
# stay. It is never worse here, but it can be worse: see exercise 4.

# %% [markdown]
# ## Check equality: an entry and its table
#
# A hit with wrong numbers is worse than a miss. First, a hit must return the same numbers as a
# computation. And a caller may change its result without changing the entry, because the result
# is a copy.

# %%
module = Learnable2DInterpPosEmb(64, 64, 16).eval()
module.weight.normal_(generator=torch.Generator().manual_seed(0))
grid = (36, 46)

# %%
computed = module.get_pos_embeds([grid], implementation="adaptive")
missed = module.get_pos_embeds([grid], implementation="cached")
missed_equal = torch.equal(missed, computed)
missed.zero_()  # a caller may write into its result
hit = module.get_pos_embeds([grid], implementation="cached")
print("the miss equals the computation:", missed_equal)
print("the hit equals the computation:", torch.equal(hit, computed))
print(module.cache.stats)

# %% [markdown]
# Second, the table can change, by training or by loading other weights. Then all entries are
# wrong. So before each lookup, the library compares the table with its state at the last call:
#
# - torch counts the changes that it makes itself: optimisers, `load_state_dict`, in-place
#   operators. The count is compared.
# - torch does not count a write through `weight.data`, through numpy or by another library. On a
#   CPU the library keeps a copy of the table and compares the values, so it sees these writes
#   too.
# - On a GPU this comparison would be a [sync](GLOSSARY.md#sync): the host would wait. There such
#   a write must be announced with **`tower.weights_changed()`**. Packed weights and captured
#   graphs follow the same rule.
#
# The control is a bare `PositionCache` without this check: it must fail.

# %%
changes = {
    "in place": lambda weight: weight.neg_(),
    "copy of a checkpoint": lambda weight: weight.copy_(weight.flip(0)),
    "through weight.data": lambda weight: weight.data.mul_(3),
}
print("change of the table      bare cache: error   the library's: error below 1e-6")
for words, change in changes.items():
    bare = PositionCache()
    compute = lambda: module.get_pos_embeds([grid], implementation="adaptive")
    bare.get(grid, compute)
    change(module.weight)
    right = resample(module.weight, grid).flatten(0, 1)
    stale = relative_error(bare.get(grid, compute), right)
    seen = relative_error(module.get_pos_embeds([grid], implementation="cached"), right) < 1e-6
    print(f"{words:22s} {stale:19.2f}   {seen}")

# %% [markdown]
# The bare cache serves the embedding of the old table each time. Its error is 0.67 to 2. For
# comparison: two random embeddings that have nothing to do with each other differ by about 1.4.

# %% [markdown]
# ## Measure: what a hit and a miss cost
#
# First your machine, with the published size of the table in float32. The column "check" is the
# time of the comparison of the table alone. On a CPU it reads the table and its copy, 19 MB each,
# once in each call, whatever the grid. A hit and a miss contain it.
#
# **Your guess.** The grid 4 x 40 has 160 patches. Above which hit rate does a cache pay for this
# grid on a CPU?

# %%
ranges = ("below 50 %", "above 50 %", "never")
strip_guess = guess("break-even rate of 4 x 40", None, choices=ranges)

# %%
full = Learnable2DInterpPosEmb(64, 64, 1152).to(device).eval()
_ = full.weight.normal_()
missing = Learnable2DInterpPosEmb(64, 64, 1152).to(device).eval()
missing.weight = full.weight
missing.cache = PositionCache(max_bytes=0)  # it keeps nothing, so each lookup is a miss

# %% tags=["nbval-ignore-output"]
print(f"{device_name(device)}: ms p50")
print("grid (h x w)   no cache      hit     miss    check   break-even hit rate")
for one in [(4, 40), (36, 46), (66, 66)]:
    runs = {
        "no cache": lambda one=one: full.get_pos_embeds([one], implementation="adaptive"),
        "hit": lambda one=one: full.get_pos_embeds([one], implementation="cached"),
        "miss": lambda one=one: missing.get_pos_embeds([one], implementation="cached"),
        "check": lambda: full.cache.watch(full.weight),
    }
    ms = {name: t.p50_ms for name, t in time_interleaved(runs, device=device, repeats=9).items()}
    rate = break_even(ms["no cache"], ms["hit"], ms["miss"])
    print(f"{one[0]:4d} x {one[1]:3d} {''.join(f'{ms[name]:10.2f}' for name in runs)}", end="   ")
    print(rate_words(rate))
print("your guess for 4 x 40:", strip_guess.value)

# %% [markdown]
# The four columns are timed in random order. So other data was used between two hits, and the
# entry is not always in a cache of the processor (a small fast memory). This is also so on a
# server. Next comes the kept [record](GLOSSARY.md#record), with batches of eight real images.

# %%
folder = data_path("measurements")
rows, origin = read_record(find_record("position", folder, device="cpu-*", dtype="float32"))
time_ms = {(row["case"], row["variant"]): row["latency_ms_p50"] for row in rows}
needed = {
    case: break_even(*(time_ms[case, name] for name in ("adaptive", "cache_hit", "cache_miss")))
    for case in dict.fromkeys(row["case"] for row in rows)
}

# %%
paying = [rate for rate in needed.values() if rate <= 1]
title = f"A cache needs a hit rate of {rate_words(min(paying))} to {rate_words(max(paying))}"
title += f"; in {len(needed) - len(paying)} cases none pays" if len(paying) < len(needed) else ""
note = floor.recorded_on(origin, "float32, D = 1,152, p50 and p20 to p80")
fig, ax = cache.hit_and_miss(rows, title=title, subtitle=note)
plt.show()

# %% [markdown]
# *How to read it:* one line for each batch: one image of the grid h x w, or eight images of a
# workload. The upright tick is the byte floor of the hit: reading the entries and writing the
# result. Hits are above their floor for two reasons. The result is a new tensor, and the system
# has to provide its memory. And the table is compared with its copy, which is most of the time
# for a small grid. At the right is the hit rate that the cache needs. It is
# high where the square (miss) is far to the right of the triangle (no cache).

# %%
print(f"{'case':17s} {'no cache':>9s} {'hit':>9s} {'miss':>9s}   ms; break-even hit rate")
for case, rate in needed.items():
    times = [time_ms[case, name] for name in ("adaptive", "cache_hit", "cache_miss")]
    print(f"{case:17s} {''.join(f'{ms:9.2f} ' for ms in times)}  {rate_words(rate)}")

# %% [markdown]
# Hits and misses contain the check of the table's values, which a CPU does once in a call: 19 MB
# of table and 19 MB of copy are read. For the smallest grids this check alone takes longer than
# computing, so there no hit rate is high enough. It matters little for a batch of eight images.

# %% [markdown]
# ## Measure: how much memory a good hit rate needs
#
# A second record is about the bound. It replays 20,000 images of each traffic with each policy
# and many bounds. "Hot and cold" is a mix: four images of five have one of eight sizes, the rest
# is clip art. "300 sizes, round and round" is a data set that is read in order, again and again.

# %% tags=["headline"]
replayed, _ = read_record(find_record("position_cache", folder))
cases = {"coco_val2017": "photographs", "pew_charts": "charts", "receipts": "receipt scans"}
cases |= {"clipart": "clip art", "hot_cold": "hot and cold sizes"}
cases |= {"cyclic": "300 sizes, round and round"}
by_entries = [row for row in replayed if row["variant"] == "fifo by entries"]
held = [row["largest_mib"] for row in by_entries if row["bound_entries"] == 256]
title = f"A bound of 256 entries held {min(held):,.0f} to {max(held):,.0f} MiB"
note = f"{replayed[0]['images']:,.0f} images each, limit 4,096, bfloat16  ·  {plots.COUNTED}"
fig, axes = cache.hit_rates(replayed, cases, entries=256, mib=256, title=title, subtitle=note)
plt.show()

# %% [markdown]
# *How to read it:* compare policies at the same memory, on the same upright line. The dark
# dots, LRU bounded in bytes, are highest or equal. First in, first out is lowest. The dotted
# line is the best possible rate, and the dashed line is the library's default of 256 MiB. The
# ring is a bound of 256 entries: the memory that it takes depends on the traffic. If 300 sizes
# come round and round, both policies evict each entry before it is needed again, until the
# bound holds all 300.

# %% [markdown]
# ### When the default is too small
#
# 256 MiB is enough for the photographs, and not for large images. At a limit of 16,384 patches
# one entry of a receipt can take $16{,}384 \cdot 2{,}304$ bytes, 36 MiB, so 256 MiB hold seven.

# %%
print("receipts, 2,000 images     bound     hit rate   evictions   needed")
near = {4096: "66x66", 16384: "128x128"}  # the recorded grid nearest to a full-size receipt
for limit, case in near.items():
    grids = draw_grids("receipts", 2000, in_token_limit=limit)
    working_set = mib(set(grids))
    for bound in (256, 1024, 4096):
        one = replay(PositionCache(max_bytes=bound * 2**20), grids)
        verdict = "pays" if one.hit_rate > needed[case] else "slower than no cache"
        print(
            f"limit {limit:6d}, all {working_set:5.0f} MiB {bound:6d} MiB {one.hit_rate:9.3f} "
            f"{one.evictions:11d}   {rate_words(needed[case]):>6s}: {verdict}"
        )

# %% [markdown]
# With 256 MiB the hit rate is 0.754 at the default limit and only 0.216 at 16,384 patches. The
# last column compares it with the break-even rate of one full-size image on the recorded CPU; use
# the rate of your server. A cache that evicts many entries before they are used again can make
# the server slower. There are two answers: give the cache the **working set**, the memory of all
# grids that come again (650 MiB and 3.8 GiB here), or turn it off with `position="adaptive"`.

# %% [markdown]
# ## What to remember
#
# - Keep entries by grid, dtype and device. The number of different grids gives the best hit rate,
#   and the sum of their entries is the working set.
# - A cache pays above the hit rate
#   $(t_{\text{miss}} - t_{\text{compute}}) / (t_{\text{miss}} - t_{\text{hit}})$, and never if a
#   hit takes longer than computing.
# - Bound a cache in bytes. A number of entries is a bound of the memory only if the largest entry
#   is known.
# - LRU keeps frequent sizes. If the sizes come round and round and are too large for the bound
#   together, neither LRU nor FIFO has a hit.
# - Before each lookup, check that the table is still the one that the entries were made from. On
#   a CPU this check can take longer than computing a small grid. On a GPU, announce uncounted
#   changes with `tower.weights_changed()`.

# %% tags=["result"]
small, large = (draw_grids("receipts", 2000, in_token_limit=limit) for limit in near)
default = [replay(PositionCache(), grids).hit_rate for grids in (small, large)]
most = gib["exactly 16,384 patches"]
print(f"Receipts, 256 MiB: hit rate {default[0]:.3f} at a limit of 4,096 patches,")
print(f"{default[1]:.3f} at 16,384. The working sets are {mib(set(small)):,.0f} and", end=" ")
print(f"{mib(set(large)):,.0f} MiB. 256 entries could take {most:.0f} GiB.")

# %% [markdown]
# ## On Monday
#
# - **Decide** by two numbers of your server. Count the different grids of one day of traffic, and
#   sum their patches times 2,304 bytes: the working set. If the working set is more than you can
#   spare, choose a smaller bound, and compare its hit rate with your break-even rate.
# - **Flag:** SGLang 0.5.23, as read, has no flag for its 256 entries; set `in_token_limit` with
#   the memory in mind, on each GPU of the server. vLLM 0.32, as read, has no cache of position
#   embeddings. Both keep other things: vLLM the processed pixels (`--mm-processor-cache-gb`,
#   default 4 GiB for each process), and SGLang the output of the encoder
#   (`SGLANG_VLM_CACHE_SIZE_MB`, default 100), as read in copies of their source. These help only
#   if the same *image* comes again; a position cache helps if the same *size* does.
# - **In this library:** `EncoderOptions(position="cached")` is the default. Another bound:
#   `EncoderOptions(position_cache_bytes=2**30)`.
# - **Check:** print `tower.patch_embed.pos_emb.cache.stats` after an hour. Is the hit rate above
#   your break-even? Do evictions still grow? And after a weight update, encode one image again
#   and compare with a server that was started with the new weights.

# %% [markdown]
# ## Exercises
#
# Solutions, with the steps:
# [solutions/25_position_cache__SOLUTION.ipynb](solutions/25_position_cache__SOLUTION.ipynb).
#
# ### 1. An entry by hand
#
# How many MiB does the entry of a 1,920 x 1,088 image (width x height) take in **float32**, at a
# limit of 16,384 patches? 1 MiB is $2^{20}$ bytes.

# %%
answer_1 = None  # MiB

patches = image_geometry(1920, 1088, in_token_limit=16384).patches
size = patches * 1152 * 4 / 2**20
hint = "pad both sides to multiples of 28, divide by 14, multiply; 4,608 bytes for each patch"
near = {size / 2: "that is the entry in bfloat16"}
check("MiB of the entry", answer_1, size, rtol=0.01, hint=hint, near=near)

# %% [markdown]
# ### 2. A bound that holds everything
#
# Which `max_bytes` holds every grid of the receipt scans at once, and not a byte more? (bfloat16,
# default limit, all sizes of `load_sizes("receipts")`.) The cell shows how to get the sizes.

# %%
answer_2 = None  # bytes

scans = [image_geometry(width, height).grid_hw for width, height, _ in load_sizes("receipts")]
print(f"{len(scans)} sizes, the first has the grid {scans[0]}")
near = {round(mib(scans) * 2**20): "grids that come twice have one entry"}
hint = "several sizes can share one grid"
check("max_bytes", answer_2, round(mib(set(scans)) * 2**20), hint=hint, near=near)

# %% [markdown]
# ### 3. The smallest bound that pays (operator)
#
# Your traffic is like the **charts** of the record `replayed`. On your server, computing takes 8
# ms, a hit 1 ms and a miss 12 ms. Which is the smallest recorded bound in MiB with which the
# cache pays? (Look at the lines with `row["case"] == "pew_charts"` and
# `row["variant"] == "lru by bytes"`; they hold `bound_mib` and `hit_rate`.)

# %%
answer_3 = None  # MiB

charts = [
    (row["bound_mib"], row["hit_rate"])
    for row in replayed
    if row["case"] == "pew_charts" and row["variant"] == "lru by bytes"
]
least = min(bound for bound, rate in charts if rate > break_even(8, 1, 12))
hint = "break-even first; then the first bound above it"
check("smallest bound, MiB", answer_3, least, hint=hint)

# %% [markdown]
# ### 4. When FIFO wins
#
# With room for 2 entries, find a sequence of at most 8 letters for which FIFO has more hits than
# LRU. Write it as a string.

# %%
answer_4 = None  # a string such as "ABACA"

fifo_wins = None
if answer_4 is not None:
    fifo_wins = len(answer_4) <= 8 and hits(answer_4, 2, "fifo") > hits(answer_4, 2)
hint = "LRU drops what was not used lately: use it right after that"
check("FIFO has more hits", fifo_wins, True, hint=hint)

# %% [markdown]
# ### 5. ★ The best that any policy can do
#
# A policy that knows the future evicts the entry whose next use is farthest away (or never
# comes). The new entry itself may be the one that goes: then nothing else is evicted. Count the
# hits of this policy. The cell also prints how far LRU is from it on the charts.


# %%
def best_hits(keys, entries):
    return ...


cases = {(keys, 2): most_hits(keys, 2) for keys in ("ABCABCABC", "ABACADABAC", "AABBCC")}
hint = "add the new entry first; if there are too many, the one with the farthest next use goes"
check_function("hits of the best policy", best_hits, cases, hint=hint)
some = draw_grids("pew_charts", 600)
print(f"charts, 600 images, 64 entries: LRU {hits(some, 64)} hits, at best {most_hits(some, 64)}")

# %% [markdown]
# ## References
#
# - [SGLang PR 30869](https://github.com/sgl-project/sglang/pull/30869): the cache of 256 entries,
#   as read in release 0.5.23.
# - L. Belady, [A study of replacement algorithms](https://doi.org/10.1147/sj.52.0078), 1966: the
#   best policy, and how to compare others with it.
# - Sizes of the workloads: COCO val2017, OpenCQA's charts, ICDAR-2019 SROIE and others. Sources
#   and licences are in the repository's `data/README.md`.
#
# **Next:** this position is added once, before the first block. Lesson 30 uses the position again
# in every block.
#
# [Map of the course](00_start_here.ipynb) · [Glossary](GLOSSARY.md) · [Notation](NOTATION.md) · previous: [20 Position embedding](20_position_embedding.ipynb) · next: [30 RoPE in two dimensions](30_rope_2d.ipynb)
