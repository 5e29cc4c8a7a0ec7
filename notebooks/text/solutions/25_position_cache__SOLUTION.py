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
#     question: Solutions to the exercises of A cache of position embeddings
#     minutes_cpu: 1
#     gpu: optional
#     data: sizes of data/workloads, records of data/measurements
# ---

# %% [markdown]
# # A cache of position embeddings: solutions
#
# The guesses, cells and exercises of [25_position_cache](../25_position_cache.ipynb), answered
# with their steps. Try them there first.

# %% tags=["nbval-ignore-output"]
import warnings

warnings.filterwarnings("ignore", message="IProgress not found")  # about a widget that is not used
from kimivl_lab.measure.provenance import device_name, versions

print(device_name("cpu"))
print(versions())

# %%
from kimivl_lab.datasets import data_path, load_sizes
from kimivl_lab.geometry import image_geometry
from kimivl_lab.lessons.cache_traffic import break_even, draw_grids, hits, mib, most_hits
from kimivl_lab.lessons.checks import check, check_function
from kimivl_lab.lessons.guesses import Comparison, compare, guess
from kimivl_lab.measure.records import find_record, read_record

# %% [markdown]
# ## In the text
#
# **The guesses.** Receipts come from a few scanners, so their sizes repeat: some tens of grids.
# 16,384 patches are four times 4,096, so 256 entries take four times 2.25 GiB. 10 ms lies halfway
# between 2 and 18 ms: 50 %. For the policies, a few points. For 4 x 40: computing 160 patches is
# cheap, and the check of the table reads 38 MB, more than the computation moves: never.

# %%
distinct_guess = guess("different grids of 2,000 receipts", 60)
gib_guess = guess("256 entries at a limit of 16,384", 9, unit="GiB")
even_guess = guess("break-even hit rate for 10, 2 and 18 ms", 50, unit="%")
points_guess = guess("LRU over FIFO, charts, 64 entries", 5, unit="points")
ranges = ("below 50 %", "above 50 %", "never")
strip_guess = guess("break-even rate of 4 x 40", "never", choices=ranges)
compare(
    Comparison(distinct_guess, measured=len(set(draw_grids("receipts", 2000)))),
    Comparison(gib_guess, predicted=256 * mib([(16384, 1)]) / 1024),
    Comparison(even_guess, predicted=100 * break_even(10, 2, 18)),
)

# %% [markdown]
# **The break-even hit rate.** A lookup takes
# $\text{rate} \cdot t_{\text{hit}} + (1 - \text{rate})\, t_{\text{miss}}$ on average. Set it
# equal to $t_{\text{compute}}$ and solve for the rate.


# %%
def my_break_even(compute_ms, hit_ms, miss_ms):
    return (miss_ms - compute_ms) / (miss_ms - hit_ms)


times = [(10, 2, 18), (10, 2, 10), (4, 4, 5), (7, 1, 22)]
cases = {three: break_even(*three) for three in times}
check_function("break-even hit rate", my_break_even, cases, rtol=0.01)

# %% [markdown]
# **Hits of LRU.** The list is in the order of the last use.


# %%
def my_lru_hits(keys, entries):
    held, found = [], 0
    for key in keys:
        if key in held:
            held.remove(key)
            found += 1
        held.append(key)
        held = held[-entries:]
    return found


sequences = ["ABACA", "ABCABCABC", "AABBCCAABB", "ABACADAEAFA"]
cases = {(keys, room): hits(keys, room) for keys in sequences for room in (2, 3)}
check_function("hits of LRU", my_lru_hits, cases)

# %% [markdown]
# ## Exercises
#
# ### 1. An entry by hand
#
# 1,920 becomes $69 \cdot 28 = 1{,}932$ pixels, 138 patches; 1,088 becomes
# $39 \cdot 28 = 1{,}092$, 78 patches. $138 \cdot 78 = 10{,}764$ patches with 4,608 bytes each.

# %%
answer_1 = 138 * 78 * 4608 / 2**20
patches = image_geometry(1920, 1088, in_token_limit=16384).patches
check("MiB of the entry", answer_1, patches * 1152 * 4 / 2**20, rtol=0.01)

# %% [markdown]
# ### 2. A bound that holds everything
#
# The sum over the **different** grids: several sizes share one.

# %%
scans = [image_geometry(width, height).grid_hw for width, height, _ in load_sizes("receipts")]
answer_2 = sum(h * w * 1152 * 2 for h, w in set(scans))
print(f"{len(scans)} sizes, {len(set(scans))} grids")
check("max_bytes", answer_2, round(mib(set(scans)) * 2**20))

# %% [markdown]
# ### 3. The smallest bound that pays (operator)
#
# The break-even rate is $(12 - 8) / (12 - 1) = 36$ %. The recorded hit rates grow with the bound;
# take the first above it.

# %%
replayed, _ = read_record(find_record("position_cache", data_path("measurements")))
charts = [
    (row["bound_mib"], row["hit_rate"])
    for row in replayed
    if row["case"] == "pew_charts" and row["variant"] == "lru by bytes"
]
for bound, rate in charts:
    print(f"{bound:6.0f} MiB  hit rate {rate:.3f}")
answer_3 = 128
expected = min(bound for bound, rate in charts if rate > break_even(8, 1, 12))
check("smallest bound, MiB", answer_3, expected)

# %% [markdown]
# ### 4. When FIFO wins
#
# `ABACB`: at C, LRU drops B, because A was used later, and FIFO drops A, because it came first.
# Then B comes: a hit for FIFO, a miss for LRU.

# %%
answer_4 = "ABACB"
print("FIFO", hits(answer_4, 2, "fifo"), "LRU", hits(answer_4, 2))
check("FIFO has more hits", hits(answer_4, 2, "fifo") > hits(answer_4, 2), True)

# %% [markdown]
# ### 5. ★ The best that any policy can do
#
# The next use of a key is its first place in the rest of the sequence; a key that never comes
# again is the first to go.


# %%
def best_hits(keys, entries):
    held, found = set(), 0
    for now, key in enumerate(keys):
        found += key in held
        held.add(key)
        if len(held) > entries:
            rest = list(keys[now + 1 :])
            held.remove(max(held, key=lambda k: rest.index(k) if k in rest else len(rest)))
    return found


cases = {(keys, 2): most_hits(keys, 2) for keys in ("ABCABCABC", "ABACADABAC", "AABBCC")}
check_function("hits of the best policy", best_hits, cases)
some = draw_grids("pew_charts", 600)
print(f"charts, 600 images, 64 entries: LRU {hits(some, 64)} hits, at best {best_hits(some, 64)}")
