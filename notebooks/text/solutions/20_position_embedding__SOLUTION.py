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
#     question: Solutions to the exercises of Position embedding
#     minutes_cpu: 1
#     gpu: optional
#     data: sizes of data/workloads, records of data/measurements
# ---

# %% [markdown]
# # Position embedding: solutions
#
# The exercises of [20_position_embedding](../20_position_embedding.ipynb), solved. Try them there first.

# %% tags=["nbval-ignore-output"]
import warnings

warnings.filterwarnings("ignore", message="IProgress not found")  # about a widget that nothing here uses
from kimivl_lab.measure.provenance import device_name, versions

print(device_name("cpu"))
print(versions())

# %%
import torch

from kimivl_lab import image_geometry
from kimivl_lab.datasets import data_path, load_sizes
from kimivl_lab.measure.records import find_record, read_record
from kimivl_lab.moonvit.position import Learnable2DInterpPosEmb
from kimivl_lab.moonvit.position_cache import PositionCache

_ = torch.set_grad_enabled(False)
emb = Learnable2DInterpPosEmb(64, 64, 16).eval()
_ = emb.weight.normal_(generator=torch.Generator().manual_seed(0))

# %% [markdown]
# **1.** From which longest side on is `separable` chosen?
#
# When $8\,(\min(64h, 64w) + hw) < 20hw$. Divide by $hw$: $64/\max(h, w) < 1.5$, so $\max(h, w) > 42\tfrac23$, whatever the other side.

# %%
answer_1 = next(side for side in range(1, 512) if 8 * (64 / side + 1) < 20)
for one, chosen in {(2, answer_1 - 1): "gather", (answer_1, 2): "separable"}.items():
    assert torch.equal(*(emb.get_pos_embeds([one], implementation=name) for name in ("adaptive", chosen)))
print(f"from {answer_1} patches on")

# %% [markdown]
# **2.** From which hit rate on does a cache pay?
#
# At hit rate $r$ a lookup costs $r \cdot \text{hit} + (1 - r) \cdot \text{miss}$ on average. Set it equal to computing, and solve for $r$.


# %%
def break_even(compute, hit, miss):
    return (miss - compute) / (miss - hit)


assert break_even(10, 2, 10) == 0 and break_even(10, 2, 18) == 0.5 and break_even(4, 4, 5) == 1

# %% [markdown]
# With the recorded times, in float32: traffic that hits less often than this is served faster without a cache.

# %%
rows, _ = read_record(find_record("position", data_path("measurements"), device="cpu-*", dtype="float32"))
time_ms = {(row["case"], row["variant"]): row["latency_ms_p50"] for row in rows}
for case in dict.fromkeys(row["case"] for row in rows):
    compute, hit, miss = (time_ms[case, name] for name in ("adaptive", "cache_hit", "cache_miss"))
    print(f"{case:20s} pays from a hit rate of {max(0.0, break_even(compute, hit, miss)):.0%}")

# %% [markdown]
# **3.** Which bound in bytes holds every grid of the receipt scans at once, and not a byte more?
#
# The sum over the **distinct** grids: several sizes share one.

# %%
scans = [image_geometry(w, h).grid_hw for w, h, _ in load_sizes("receipts")]
answer_3 = sum(h * w * 1152 * 2 for h, w in set(scans))
enough, short = PositionCache(max_bytes=answer_3), PositionCache(max_bytes=answer_3 - 1)
for h, w in scans:
    for one in (enough, short):
        one.get((h, w), lambda h=h, w=w: torch.empty(h * w, 1152, dtype=torch.bfloat16, device="meta"))
assert enough.stats.evictions == 0 < short.stats.evictions
print(f"{len(scans)} sizes, {len(set(scans))} grids, {answer_3:,} bytes")
