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
#     question: Where the library's own products and attention leave the hardware idle, what does a kernel of one's own do differently, and what does it win?
#     minutes_cpu: 1
#     gpu: optional
#     data: records of data/measurements
# ---

# %% [markdown]
# # Appendix: kernels of one's own
#
# ## The question
#
# Where the library's own products and attention leave the hardware idle, what does a kernel of one's own do differently, and what does it win?

# %% [markdown]
# ## You will be able to
#
# - **compute** how many tile instructions a product or an attention takes, and what share of the unit's peak padding leaves;
# - **explain** attention on transposes: where the softmax runs, where its denominator comes from, and when its maximum is raised;
# - **predict** from bytes and caches how rows and weights must be cut, and which operand is read how often from where.
#
# ## Needs
#
# Notebook [40](40_packed_attention.ipynb). A minute on a CPU; nothing here runs on a GPU. The kernels run on processors with Intel's matrix extensions (AMX). Without one, everything up to "Check equality" is
# computed all the same, the live cells say what they left out, and the recorded run stands beside them.
#
# ## Versions and machine

# %% tags=["nbval-ignore-output"]
import warnings

warnings.filterwarnings("ignore", message="IProgress not found")  # about a widget that nothing here uses
from kimivl_lab.measure.provenance import device_name, versions

print(device_name("cpu"))
print(versions())

# %%
import math
import re
from importlib.resources import files

import matplotlib.pyplot as plt
import torch
import torch.nn.functional as F

from kimivl_lab import MoonViTConfig, MoonVitPretrainedModel, plots
from kimivl_lab.kernels.amx.library import amx_unavailable
from kimivl_lab.datasets import data_path
from kimivl_lab.measure.accuracy import relative_error
from kimivl_lab.measure.records import find_record, read_record
from kimivl_lab.measure.roofline import matmul
from kimivl_lab.measure.timing import time_interleaved
from kimivl_lab.moonvit.attention import ATTENTION_BACKENDS
from kimivl_lab.kernels.packed_linear import PACKED_KERNELS, packed_unavailable
from kimivl_lab.plots import amx, floor

plots.use_style()
_ = torch.set_grad_enabled(False)
CPU, BF16 = torch.device("cpu"), torch.bfloat16

# %% [markdown]
# ## Predict
#
# ### What one instruction does
#
# The unit has eight registers, each a **tile** of 16 rows of 64 bytes. One instruction adds to a tile $C$ of 16 x 16 float32 numbers the product of a tile $A$ of 16 x 32 bfloat16 numbers and a tile $B$ of
# 32 x 16: 16 · 16 · 32 multiplications and additions, $16{,}384$ FLOPs, whether the numbers are data or padding. A core can start one every 16 cycles. So count instructions first.
#
# A linear layer pads rows and outputs to 32 (blocks of two tiles by two) and inputs to 32. A head of $d$ channels is padded twice, and not alike: in $K Q^T$ the channels are what is summed over, in steps of 32; in
# $V^T P^T$ they are the rows of the result, in tiles of 16, with one more row that will be explained below.

# %%
ceil_div = lambda a, b: -(-a // b)
linear_instructions = lambda rows, inputs, outputs: 4 * ceil_div(rows, 32) * ceil_div(outputs, 32) * ceil_div(inputs, 32)
# (K Q^T, V^T P^T) for 32 keys and 16 queries; of each, d / 16 instructions' worth is useful
attention_instructions = lambda d: (2 * ceil_div(d, 32), ceil_div(d + 1, 16))

# %%
rows, layers = 1024, {"wqkv": (1152, 3456), "fc0": (1152, 4304), "fc1": (4304, 1152)}
for name, (inputs, outputs) in layers.items():
    count = linear_instructions(rows, inputs, outputs)
    useful = 2 * rows * inputs * outputs / 16384 / count
    print(f"{name:5s} {inputs:,} -> {outputs:,}: {count:9,} instructions, {useful:.1%} of the work useful")
scores, sums = attention_instructions(72)
print(f"attention, 16 heads of 72: {16 * 32 * 64 * (scores + sums):9,} instructions, {2 * 72 / 16 / (scores + sums):.1%} useful")
assert (scores, sums) == (6, 5)

# %%
print("head size   padded: K Q^T, V^T P^T   useful: K Q^T  V^T P^T  both   the row of ones costs a tile")
for d in (64, 72, 80, 88, 96, 112, 128):
    scores, sums = attention_instructions(d)
    words = f"{d / 16 / scores:15.0%} {d / 16 / sums:8.0%} {d / 8 / (scores + sums):5.0%}"
    print(f"{d:9d} {16 * scores:16d} {16 * sums:8d} {words}   {'yes' if d % 16 == 0 else 'no'}")

# %%
sizes = range(48, 129)
scores, sums = zip(*map(attention_instructions, sizes), strict=True)
share = lambda counts, products=1: [products * d / 16 / count for d, count in zip(sizes, counts, strict=True)]
shares = {"$K\\,Q^T$: channels are summed over, steps of 32": share(scores), "$V^T P^T$: channels are rows, tiles of 16": share(sums)}
shares["both"] = share([sum(pair) for pair in zip(scores, sums, strict=True)], products=2)
fig, ax = amx.useful_share(sizes, shares, 72, title="At head size 72, a fifth of the tile work multiplies padding")
plt.show()

# %% [markdown]
# *How to read it:* a head size just above a multiple of 32 is dear for $K Q^T$, one just above a multiple of 16 is less so for $V^T P^T$; 72 is
# the first kind, and no kernel that pads to whole tiles gets above 82%.
#
# ### What the vectors add
#
# Between the two products every score goes through the softmax. Counted in `attention.c`, 16 scores are one vector and take about nine vector instructions: a maximum, a difference, a scaling, five for
# the exponential, one for rounding and placing. A core does at most two a cycle. For 32 keys and 16 queries:

# %%
tile_cycles = 16 * sum(attention_instructions(72))
vector_cycles = 32 * 9 / 2
useful_cycles = 16 * 2 * 72 / 16
bounds = useful_cycles / (tile_cycles + vector_cycles), useful_cycles / max(tile_cycles, vector_cycles)
print(f"tiles {tile_cycles} cycles, softmax at least {vector_cycles:.0f}")
print(f"share of the unit's peak: {bounds[0]:.0%} one after the other, {bounds[1]:.0%} wholly overlapped")

# %% [markdown]
# Linear layers have no such middle part: for them the question is only whether the tiles arrive in time. So expect products near the unit's rate, attention between two and four fifths of it, and whatever a
# library's attention adds in transposes, conversions and passes over scores on top.
#
# ## Build
#
# ### Pairs
#
# $B$ is stored by **pairs** of its rows: row $p$ of the tile holds $B_{2p,0}, B_{2p+1,0}, B_{2p,1}, B_{2p+1,1}, \dots$, so that the two numbers that are multiplied by neighbours of $A$ lie in one word of 4 bytes. The same with a
# tile of 2 rows of 4 numbers:

# %%
W = torch.tensor([[0, 1, 2, 3], [10, 11, 12, 13]], dtype=torch.int16)  # two outputs, four inputs
by_pairs = torch.stack((W.T[0::2], W.T[1::2]), dim=-1).flatten(1)  # B = W^T, as the unit wants it
words = W.view(torch.int32).T.contiguous().view(torch.int16)  # transpose of 4-byte words
print("W       ", W.tolist())
print("W^T     ", W.T.tolist())
print("by pairs", by_pairs.tolist(), " transposed words of W:", torch.equal(by_pairs, words))
assert torch.equal(by_pairs, words)


# %%
def tile_product(A, B):
    """A (16, 32), B by pairs -> (16, 16): what one instruction adds."""
    return torch.einsum("ipt,pjt->ij", A.unflatten(1, (-1, 2)), B.unflatten(1, (-1, 2)))


# %%
x = torch.tensor([[1, 2, 3, 4], [0, 1, 0, 1]], dtype=torch.int16)
print("x W^T   ", tile_product(x, words).tolist(), " equal:", torch.equal(tile_product(x, words), x @ W.T))
even, odd = torch.tensor([[1, 2]]), torch.tensor([[3, 4]])  # two keys' weights for two queries: rows of P^T
print("P^T     ", torch.cat((even, odd)).tolist(), "by pairs", torch.stack((even, odd), -1).flatten(1).tolist())

# %% [markdown]
# Rows of $x$ are an $A$ as they lie. A weight becomes a $B$ by a transpose of words, once, when it is packed. The last line is the one that attention is built on: two neighbouring rows of a matrix, taken by turns, are a
# row of its $B$. No transpose at all, if the softmax leaves rows of $P^T$.
#
# ### Attention on transposes
#
# So the kernel computes $S^T = K Q^T$ and then $O^T = V^T P^T$, for 32 queries at a time:
#
# | step | operands | where they come from |
# |---|---|---|
# | $S^T = K Q^T$ | $A$: rows of $K$; $B$: $Q^T$ by pairs | $K$'s rows as they lie, only padded; $Q$'s words transposed once for 32 queries |
# | maximum of a query | down the rows of $S^T$ | a vector holds 16 queries, so it is one instruction a row, and nothing is moved across a vector |
# | $P^T = 2^{(S^T - \text{top}) \log_2 e / \sqrt d}$ | two rows, by turns | is the $B$ that the next product wants |
# | $O^T = V^T P^T$ | $A$: rows of $V^T$ | transposed once for all queries of an image and head |
#
# Below $V^T$ lies **a row of ones**. It makes a row of $O^T$ that is the sum of the weights: the softmax's denominator, summed by the matrix unit from exactly the rounded numbers that weigh $V$. At 72 it lies in
# rows that padding has paid for already.
#
# Keys come in runs of 128, so that scores and weights stay in the first-level cache. Each query keeps a running maximum, `top`. In exact arithmetic any `top` gives the same result, since numerator and denominator are divided by the
# same $2^{\text{top}}$: it is there only against overflow. So it is raised, and $O^T$ rescaled, only when a run exceeds it by more than $2^8$, the **slack**. The factor $\log_2 e / \sqrt d$ multiplies the difference, not the scores: a large score times
# a factor is rounded by more than the exponential bears. All in one place:


# %%
def attend_runs(q, k, v, slack=8.0, run=128):
    """q (n, d), k and v (m, d) of one head -> (n, d), and run by run (its maxima, top, whether it was raised)."""
    scale = q.shape[-1] ** -0.5 * math.log2(math.e)
    values = torch.cat((v.T, v.new_ones(1, len(v))))  # V^T and the row of ones: (d + 1, m)
    out, top, history = q.new_zeros(len(values), len(q)), q.new_full((len(q),), torch.finfo(q.dtype).min), []
    for at in range(0, len(k), run):
        scores = k[at : at + run] @ q.T  # S^T: (run, n)
        here = scores.amax(0)  # down the rows
        exceeds = (here > top + slack / scale).view(-1, 16).any(1).repeat_interleave(16)  # a vector of queries acts as one
        raised = torch.where(exceeds, here.maximum(top), top)
        out *= torch.exp2((top - raised) * scale)  # the rescaling; by 1 where nothing was raised, which the kernel leaves out
        out += values[:, at : at + run] @ torch.exp2((scores - raised) * scale)  # O^T: (d + 1, n)
        top = raised
        history.append((here * scale, top * scale, exceeds))
    return (out[:-1] / out[-1]).T, [torch.stack(column) for column in zip(*history, strict=True)]


# %%
torch.manual_seed(0)
tower = MoonVitPretrainedModel(MoonViTConfig.preset("tiny")).eval()
metadata = tower.prepare_encoder_metadata([(32, 32), (12, 20)])  # 240 patches are not a multiple of 128
qkv = torch.randn(3, 1264, 1, 72, dtype=torch.float64)
got = torch.cat([attend_runs(*image)[0] for image in qkv[:, :, 0].split(metadata.seqlens, dim=1)])[:, None]
equal = relative_error(got, ATTENTION_BACKENDS["eager"](*qkv, metadata)) < 1e-12
print("equal to the softmax written out, float64:", equal)
assert equal

# %% [markdown]
# ### How much slack
#
# Slack 0 is the usual running maximum. Without limit, the first run's maximum stays for good. To tell them apart, scores that rise: one channel lets each group of 16 queries climb by 0, 40, 80 or 160 powers of two
# from the first key to the last, in float32; the same keys shuffled and in falling order.

# %%
torch.manual_seed(0)
rise, place = torch.tensor([0.0, 40, 80, 160]).repeat_interleave(16), torch.linspace(0, 1, 4096)
q, k, v = torch.randn(64, 72), torch.randn(4096, 72), torch.randn(4096, 72)
q[:, 0], k[:, 0] = rise / (72**-0.5 * math.log2(math.e)), place
want = (q.double() @ k.double().T / 72**0.5).softmax(-1) @ v.double()
orders = {"rising": torch.arange(4096), "shuffled": torch.randperm(4096), "falling": torch.arange(4096).flip(0)}

# %%
histories, rescalings = {}, {}
for order, index in orders.items():
    for slack, words in {0: "0", 8: "8", 1e9: "no limit"}.items():
        got, (here, top, raised) = attend_runs(q, k[index], v[index], slack)
        histories[order, words] = here[:, ::16], top[:, ::16], raised[:, ::16].index_fill(0, torch.tensor(0), False)
        rescalings[order, words] = count = int(histories[order, words][2].sum())
        verdict = f"equal: {relative_error(got, want) < 1e-4}" if got.isfinite().all() else "NaN"
        print(f"{order:9s} slack {words:9s} rescalings {count:3d} of {4 * 31}   {verdict}")
        assert (verdict == "equal: True") == (order != "rising" or slack <= 8)
assert rescalings["rising", "8"] < rescalings["rising", "0"] / 3 and rescalings["shuffled", "8"] == 0

# %%
chosen, panels = [0, 2, 3], {}  # three of the four groups
for words in ("0", "8"):
    panels[f"slack {words}"] = amx.Maxima(*(x[:, chosen].tolist() for x in histories["rising", words]))
queries = [f"rises by {int(rise[16 * group])}" for group in chosen]
many, few = (sum(map(sum, panel.raised)) for panel in panels.values())
title = f"A slack of $\\mathbf{{2^8}}$: {few} rescalings instead of {many}, and the same result"
fig, axes = amx.running_maxima(panels, queries, 128, title=title, slack=[0, 8])
plt.show()

# %% [markdown]
# *How to read it:* keys in rising order; a step is the running maximum, a mark a rescaling, a dot what the run itself reached; with slack the dots may stand above the step, in the shaded band, and nothing is done until one leaves it.
#
# Why it is safe: a weight is at most $2^8$, a sum of $n$ of them at most $2^8 n$, and float32 ends at $2^{128}$. Rounding does not see the factor: bfloat16 and float32 have the same relative error at $2^8$ as at 1. At the lower end, weights
# vanish below $2^{-126}$ under `top`, which never lies above the true maximum: beside the largest weight, what is lost is smaller still. Without a limit a rise of more than 128 powers of two is infinity over infinity: NaN.
#
# What a rescaling costs: $O^T$ has 80 rows, each loaded, multiplied and stored, beside the exponentials of 128 rows of scores. Slack takes most of that away where scores climb from run to run, and all of it where
# the keys come in no particular order.
#
# ### Blocking a linear layer
#
# Each step of a block takes two tiles of $x$ and two of $W$, 4 KiB, for four instructions or 64 cycles: 64 bytes a cycle, 32 from each operand. The first-level cache gives two lines of 64 bytes a cycle, the second at most one, memory a few
# bytes. So where must they lie? An operand is read again from the smallest cache that holds everything touched in between. `linear.c` cuts $x$ into tasks of rows, and $W$ into panels of 32 outputs and chunks of steps:

# %%
sources = "".join(files("kimivl_lab.kernels.amx").joinpath(name).read_text() for name in ("linear.c", "attention.c", "tiles.h"))
constants = {name: int(value) for name, value in re.findall(r"^#define (\w+) (\d+)", sources, re.MULTILINE)}
for name in ("CHUNK", "ROW_BYTES", "MOST_ROWS", "RUN", "SLACK"):
    print(f"{name:9s} {constants[name]:9,}")
FIRST, SECOND = 48 * 2**10, 2 * 2**20  # bytes of the caches of a core that has AMX
KEYS = 4 * 32 * constants["RUN"] + 2 * 32 * constants["RUN"]
print(f"attention: scores and weights of a run take {KEYS // 1024} of {FIRST // 1024} KiB")
assert constants["CHUNK"] * 2 * 2048 < FIRST and constants["ROW_BYTES"] < SECOND and KEYS < FIRST


# %%
def bytes_read(rows, inputs, outputs, task_rows, chunk):
    """Level -> bytes read into tiles. Loops from outside: tasks, panels, chunks of `chunk` steps, blocks of 32 rows."""
    steps, panels, blocks = ceil_div(inputs, 32), ceil_div(outputs, 32), ceil_div(rows, 32)
    level = lambda nbytes: "first" if nbytes <= FIRST else "second" if nbytes <= SECOND else "memory"
    all_tiles = 2048 * steps * panels * blocks  # of x, and as many of W
    x_once, w_once = 64 * steps * rows, 2048 * steps * panels
    w_anew = w_once * ceil_div(rows, task_rows)  # by every task
    read = {"memory": x_once + w_anew, "second": 0, "first": 0}
    read[level(64 * steps * task_rows)] += all_tiles - x_once  # between two panels lie all rows of the task
    read[level(2 * 2048 * chunk)] += all_tiles - w_anew  # between two blocks a chunk of W and of a block's rows
    sums = 4096 * panels * blocks * (ceil_div(steps, chunk) - 1)  # float32, between the chunks of a panel
    read[level(128 * task_rows + 2048 * chunk)] += sums
    return read


# %%
inputs, outputs = layers["fc0"]
steps, cycles = ceil_div(inputs, 32), 16 * linear_instructions(rows, inputs, outputs)
held = min(constants["MOST_ROWS"], constants["ROW_BYTES"] // (64 * steps) // 32 * 32)
ways = {"a block of rows after another": (32, steps), "panel after panel, all rows": (rows, steps)}
ways |= {f"tasks of {held} rows": (held, steps), f"and chunks of {constants['CHUNK']} steps": (held, constants["CHUNK"])}
print("                                  MB read from              bytes a cycle of the unit")
print("                               memory  second   first     memory  second   first")
for words, (task_rows, chunk) in ways.items():
    read = bytes_read(rows, inputs, outputs, task_rows, chunk)
    columns = "".join(f"{n / 1e6:8.0f}" for n in read.values()), "".join(f"{n / cycles:8.1f}" for n in read.values())
    print(f"{words:29s}{columns[0]}   {columns[1]}")
assert read["memory"] < 5e7 and 30 < read["second"] / cycles < 40 < 64

# %% [markdown]
# Row by row:
#
# - rows of one block first: all of $W$ streams from memory for every 32 rows, half of all tiles;
# - all rows past one panel: now $x$ is what does not fit, and streams for every 32 outputs;
# - a task's rows fit the second level, and $W$ comes from memory once a task. But a panel of $W$ is larger than the first level, and the second would have to give 64 bytes a cycle: all that it has;
# - a **chunk** of a panel fits the first level beside a block's rows. That takes $W$'s half off the second, at the price of sums that wait in float32 between
#   the chunks. Longer chunks would not fit, shorter ones make the sums travel more often.
#
# What is left for memory, a few bytes a cycle, is fetched ahead: while one chunk is multiplied, the next is on its way.
#
# ## Check equality
#
# The kernels in C against float64, where they run: attention over two images and on the rising scores from above, a linear layer with its activation and with a residual. torch's own results in bfloat16 are
# held to the same bound: it is the scale of bfloat16's rounding.

# %% tags=["nbval-ignore-output"]
reason = amx_unavailable(CPU, BF16)
with_amx = ["amx"] * (reason is None)
print("the kernels run here" if with_amx else f"left out: {reason}")

# %%
qkv = torch.randn(1264, 3, 16, 72).to(BF16)
want = ATTENTION_BACKENDS["eager"](*qkv.double().unbind(1), metadata)
errors = {name: relative_error(ATTENTION_BACKENDS[name](*qkv.unbind(1), metadata), want) for name in ["sdpa", *with_amx]}
climbing, one = [x.to(BF16)[:, None] for x in (q.repeat(64, 1), k, v)], tower.prepare_encoder_metadata([(64, 64)])
want = ATTENTION_BACKENDS["eager"](*(x.double() for x in climbing), one)
errors |= {f"rising, {name}": relative_error(ATTENTION_BACKENDS[name](*climbing, one), want) for name in with_amx}
print("attention equal to float64 within 2^-7:", max(errors.values()) < 2**-7)
assert max(errors.values()) < 2**-7

# %%
x, weight, bias, residual = torch.randn(1000, 1152), torch.randn(4304, 1152) / 34, torch.randn(4304), torch.randn(1000, 4304)
x, weight, bias, residual = (tensor.to(BF16) for tensor in (x, weight, bias, residual))
y = F.linear(*(tensor.double() for tensor in (x, weight, bias)))
errors = {"F.linear": relative_error(F.linear(x, weight, bias), y)}
for name in with_amx:
    kernel, packed = PACKED_KERNELS[name], PACKED_KERNELS[name].pack(weight)
    got = kernel.multiply(x, packed, 4304, bias, None, True), kernel.multiply(x, packed, 4304, bias, residual, False)
    errors |= {"gelu": relative_error(got[0], F.gelu(y, approximate="tanh")), "sum": relative_error(got[1], y + residual.double())}
print("linear layers equal to float64 within 2^-7:", max(errors.values()) < 2**-7)
assert max(errors.values()) < 2**-7

# %% [markdown]
# ## Measure
#
# First a linear layer, interleaved: `F.linear`, oneDNN's product from a prepacked weight, ours; beside them a large square product of torch and ours. The fastest of all is this machine's rate. Then attention of one layer. Predicted: linear
# layers near that rate, attention between two and four fifths of the unit's peak. A rate is no peak: a large product waits for its operands too, and its share of the peak is not known here.

# %% tags=["nbval-ignore-output"]
x, (inputs, outputs) = torch.randn(1024, 1152).to(BF16), layers["fc0"]
runs, flops = {"F.linear": lambda: F.linear(x, weight, bias)}, {"F.linear": 2 * 1024 * inputs * outputs}
for name, kernel in PACKED_KERNELS.items():
    if why := packed_unavailable(name, CPU, BF16):
        print(f"left out: {name}: {why}")
        continue
    runs[name] = lambda kernel=kernel, packed=kernel.pack(weight): kernel.multiply(x, packed, outputs, bias, None, False)
    flops[name] = flops["F.linear"]
size = 1024 if packed_unavailable("prepacked", CPU, BF16) else 2048  # smaller where bfloat16 is slow
runs["square, torch"], flops["square, torch"] = matmul(BF16, size=size), 2 * size**3
for name in with_amx:
    square, packed = torch.randn(size, size).to(BF16), PACKED_KERNELS[name].pack(torch.randn(size, size).to(BF16))
    runs["square, amx"] = lambda: PACKED_KERNELS[name].multiply(square, packed, size, None, None, False)
    flops["square, amx"] = flops["square, torch"]
timed = time_interleaved(runs, warmup=2, repeats=9)
rate = max(flops[name] / timed[name].p20_ms for name in runs)
print(f"{device_name('cpu')}, threads: {torch.get_num_threads()}; 1,024 rows, {inputs:,} -> {outputs:,}")
for name, t in timed.items():
    speed = flops[name] / t.p50_ms
    print(f"{name:14s} {t.p50_ms:7.2f} ms (p20 {t.p20_ms:.2f}, p80 {t.p80_ms:.2f}) {speed / 1e9:6.2f} TFLOP/s, {speed / rate:4.0%} of the rate")

# %% tags=["nbval-ignore-output"]
grid = tower.prepare_encoder_metadata([(32, 32)])
qkv = torch.randn(1024, 3, 16, 72).to(BF16).unbind(1)
runs = {name: lambda attend=ATTENTION_BACKENDS[name]: attend(*qkv, grid) for name in ["sdpa", *with_amx]}
for name, t in (timed := time_interleaved(runs, warmup=2, repeats=9)).items():
    speed = 4 * 16 * 72 * 1024**2 / t.p50_ms
    print(f"{name:5s} {t.p50_ms:7.2f} ms (p20 {t.p20_ms:.2f}, p80 {t.p80_ms:.2f}) {speed / 1e9:6.2f} TFLOP/s, {speed / rate:4.0%} of the rate")
print(f"predicted, of the unit's peak: {bounds[0]:.0%} to {bounds[1]:.0%}")
print(*(f"sdpa / ours: {timed['sdpa'].p50_ms / timed[name].p50_ms:.2f}" for name in with_amx))

# %% [markdown]
# The recorded run, with larger grids, a batch of real sizes, and whole encoders of the published size beside two others with the same weights:

# %% tags=["headline"]
records = {name: read_record(find_record(name, data_path("measurements"), device="cpu-*", dtype="bfloat16")) for name in ("attention", "encoder")}
attention_rows, origin = records["attention"]
forwards = [row for row in records["encoder"][0] if row["phase"] == "forward"]
ours = [row for row in attention_rows if row["variant"] == "amx"]
gains = [row["speedup_ratio"] for row in ours], [row["speedup_ratio"] for row in forwards if row["variant"] == "kimivl_lab"]
assert min(map(min, gains)) > 1 and max(row["relative_error"] for row in ours) < 2**-8
words = "Attention at {:.1f} to {:.1f} times sdpa's speed, the encoder at {:.1f} to {:.1f} times transformers'"
title = words.format(*(pick(values) for values in gains for pick in (min, max)))
note = floor.recorded_on(origin, f"bfloat16, {origin['threads']} threads, median and p20 to p80")
towers = {"open-moonvit": "open-moonvit", "transformers": "transformers", "kimivl_lab": "ours"}
fig, axes = amx.recorded_wins(attention_rows, forwards, {"sdpa": "sdpa", "amx": "ours"}, towers, title=title, subtitle=note)
plt.show()

# %% [markdown]
# *How to read it:* left, a line is a batch, its mark further left is faster, the ratio stands at the end; right, the useful FLOPs of a whole forward against those of a
# large square product in the same rounds, with the forward's seconds. What is missing to 100% is padding, the softmax, and all that is no product.

# %% [markdown]
# ## What to remember
#
# - Count tile instructions before writing any: padding is paid in full, and a head size just above a multiple of 32 or 16 sets a bound that whole tiles cannot pass.
# - Choose the orientation in which every result is already the next operand. For units with paired rows that is $S^T = K Q^T$, $O^T = V^T P^T$, with a row of ones for the denominator where padding has room for it.
# - A running maximum guards against overflow, not against rounding: with floating-point weights it may lag by any slack that the sums' range allows, and where scores do not climb from run to run nothing is ever rescaled.
# - A product is as fast as its slowest level: rows for the second-level cache, chunks of weights for the first, each weight from memory once a task. That needs rows enough to share a weight, and wins more over a product that
#   lays its weight out anew at every call than over one that keeps it packed: attention is where one's own kernel has most to win.

# %% tags=["result"]
print(f"Head size 72: {9 / 11:.0%} of the tile work is useful. Slack of 2^8 on rising scores: {few} rescalings instead of {many}; on shuffled keys none.")
print(f"fc0 of 1,024 rows: {read['second'] / cycles:.0f} bytes a cycle from the second level, {read['memory'] / cycles:.0f} from memory.")

# %% [markdown]
# ## Exercises
#
# Solved in [solutions/95_appendix_amx_kernels__SOLUTION.ipynb](solutions/95_appendix_amx_kernels__SOLUTION.ipynb).
#
# **1.** How much slack is legal? The largest whole power of two that a weight may reach, if a float32 sum of $2^{20}$ of them must not overflow; and if the weights themselves are stored as float16, or as float8 (e4m3).

# %%
answer_1 = None  # {"float32 sum": .., torch.float16: .., torch.float8_e4m3fn: ..}

if answer_1 is None:
    print("not answered yet")
else:
    for more in (0, 1):
        total = torch.full((2**20,), 2.0 ** (answer_1["float32 sum"] + more)).sum()
        assert bool(total.isfinite()) == (more == 0)
        for dtype in (torch.float16, torch.float8_e4m3fn):
            assert (2.0 ** (answer_1[dtype] + more) <= torch.finfo(dtype).max) == (more == 0)

# %% [markdown]
# **2.** The unit also multiplies 8-bit numbers: rows of 64 bytes are then 64 numbers, and an instruction does twice the work in the same time. Suppose $Q$, $K$, $V$ and the weights could all be 8-bit. How many times fewer instructions does attention
# take at head size $d$, padding and the row of ones included?


# %%
def eight_bit_gain(d):
    return None  # instructions in bfloat16 / instructions in 8 bits, for 64 keys and 16 queries


if eight_bit_gain(72) is None:
    print("not answered yet")
else:
    assert [round(eight_bit_gain(d), 2) for d in (64, 72, 96, 128)] == [2.0, 1.69, 1.73, 2.0]

# %% [markdown]
# ## References
#
# - [Intel intrinsics guide, AMX](https://www.intel.com/content/www/us/en/docs/intrinsics-guide/index.html#techs=AMX): what `_tile_dpbf16ps` does, and its layout by pairs.
# - [Intel 64 and IA-32 architectures optimization reference manual](https://www.intel.com/content/www/us/en/developer/articles/technical/intel64-and-ia32-architectures-optimization.html): its chapter on AMX has the cycles, blocking and
#   prefetching of such kernels.
# - [FlashAttention-2](https://arxiv.org/abs/2307.08691): keys in a loop, a running maximum, no score matrix in memory.
# - [Reverse engineering FlashAttention-4](https://modal.com/blog/reverse-engineer-flash-attention-4): the same conditional rescaling on a GPU.
# - [oneDNN](https://github.com/uxlfoundation/oneDNN): the library behind torch's products on CPUs.
