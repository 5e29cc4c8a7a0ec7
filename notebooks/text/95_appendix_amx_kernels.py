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
#     question: How does one write a product and an attention for a CPU's matrix unit, and how much faster do they become?
#     minutes_cpu: 1
#     gpu: optional
#     data: records of data/measurements
# ---

# %% [markdown]
# # Appendix: kernels for a CPU's matrix unit
#
# [Map of the course](00_start_here.ipynb) · [Glossary](GLOSSARY.md) · [Notation](NOTATION.md) · previous: [90 Engines side by side](90_engines_side_by_side.md)
#
# Lesson 40 used attention kernels of others. This appendix writes one, and a product beside it.
#
# ## The question
#
# How does one write a product and an attention for a CPU's matrix unit, and how much faster do
# they become?

# %% [markdown]
# ## You will be able to
#
# - **compute** how many instructions of the matrix unit a product needs, and which share is
#   padding;
# - **explain** why attention is computed on transposed matrices, and when its running maximum
#   rises;
# - **predict** from bytes and caches which loop order keeps the matrix unit busy.
#
# ## Needs
#
# Notebook [40](40_packed_attention.ipynb). About 85 minutes to read and solve, and a minute on a
# CPU. Nothing here runs on a GPU, but the ideas do: padding, lazy rescaling and reuse decide GPU
# kernels too.
#
# The kernels run on Intel processors with AMX, "advanced matrix extensions" (Xeon from 2023 on).
# Without AMX everything up to "Check equality" is computed all the same. The live cells behind it
# then say what they left out, and the recorded run stands beside them.
#
# ## Versions and machine

# %% tags=["nbval-ignore-output"]
import warnings

warnings.filterwarnings("ignore", message="IProgress not found")  # about a widget that is not used
from kimivl_lab.measure.provenance import device_name, versions

print(device_name("cpu"))
print(versions())

# %%
import math

import matplotlib.pyplot as plt
import torch

from kimivl_lab import plots
from kimivl_lab.datasets import data_path
from kimivl_lab.lessons import amx_kernels as lab
from kimivl_lab.lessons.checks import check, check_function
from kimivl_lab.lessons.guesses import Comparison, compare, guess
from kimivl_lab.measure.accuracy import relative_error
from kimivl_lab.measure.records import find_record, read_record
from kimivl_lab.plots import amx, floor
from kimivl_lab.plots.amx import Loop, Operand

plots.use_style()
_ = torch.set_grad_enabled(False), torch.manual_seed(0)

# %% [markdown]
# ## Words: what the unit computes
#
# The matrix unit has eight registers. Each holds a **[tile](GLOSSARY.md#tile)**: 16 rows of 64
# bytes. One **tile instruction** multiplies a first tile of 16 x 32 numbers in
# [bfloat16](GLOSSARY.md#bfloat16) by a second tile of 32 x 16, and adds the result to a third
# tile of 16 x 16 numbers in [float32](GLOSSARY.md#float32). That is
# $2 \cdot 16 \cdot 16 \cdot 32 = 16{,}384$ [FLOPs](GLOSSARY.md#flop), whether the numbers are
# data or [padding](GLOSSARY.md#padding). A core can start one every 16 cycles.
#
# So a kernel writer counts instructions first. A product is cut like this:
#
# - a **step**: 32 of the inputs that are summed over, because the first tile has 32 columns;
# - a **tile block**: 32 x 32 numbers of the result, two tiles by two. It needs four instructions
#   in each step.
#
# ## Predict: how much of the work is padding?
#
# By hand: a linear layer takes 40 rows from 40 inputs to 64 outputs. The rows need 2 tile blocks,
# the outputs 2, and the inputs 2 steps. That makes $4 \cdot 2 \cdot 2 \cdot 2 = 32$ instructions,
# $32 \cdot 16{,}384 = 524{,}288$ FLOPs. $2 \cdot 40 \cdot 40 \cdot 64 = 204{,}800$ of them, 39 %,
# are useful.
#
# **Your code.** Write the number of instructions for any linear layer.


# %%
def instructions(rows, inputs, outputs):
    return ...


sizes = [(40, 40, 64), (1024, 1152, 3456), (1024, 1152, 4304), (1, 4304, 1152)]
expected = {size: lab.linear_instructions(*size) for size in sizes}
hint = "round rows and outputs up to tile blocks of 32, and inputs up to steps of 32"
check_function("instructions of a linear layer", instructions, expected, hint=hint)

# %%
layers = {"QKV": (1152, 3456), "MLP, first": (1152, 4304), "MLP, second": (4304, 1152)}
for name, (inputs, outputs) in layers.items():
    count = lab.linear_instructions(1024, inputs, outputs)
    useful = 2 * 1024 * inputs * outputs / lab.FLOPS / count
    print(f"{name:12s} {inputs:,} -> {outputs:,}: {count:9,} instructions, {useful:.1%} useful")

# %% [markdown]
# Linear layers lose little. Attention is different, because its matrices have one small side: the
# $d = 72$ features of a [head](GLOSSARY.md#head). Take 32 keys and 16 queries.
#
# - **$K Q^\top$** sums over the 72 features. 72 features are 3 steps (96), and 32 keys are 2
#   tiles. That makes $2 \cdot 3 = 6$ instructions.
# - **$V^\top P^\top$**, the values times the weights, has the 72 features as *rows* of the
#   result, and one more row that is explained below. 73 rows are 5 tiles (80), and the 32 keys
#   are 1 step. That makes 5 instructions.
#
# Without padding each product would be $32 \cdot 16 \cdot 72$ multiplications. An instruction
# does $16 \cdot 16 \cdot 32$, so that is the work of $72 / 16 = 4.5$ instructions.
#
# **Your guess.** Which share of the tile work of attention is useful at $d = 72$, in %?

# %%
share_guess = guess("useful share at head size 72", None, unit="%")

# %%
compare(Comparison(share_guess, predicted=100 * 9 / 11))
print("d     K Q^T   V^T P^T   both")
for d in (64, 72, 80, 96, 128):
    print(f"{d:3d} " + " ".join(f"{share:7.0%}" for share in lab.useful_shares(d)))

# %%
heads = range(48, 129)
scores, sums, both = zip(*map(lab.useful_shares, heads), strict=True)
words = ("K Q$^T$: steps of 32", "V$^T$ P$^T$: tiles of 16", "both")
shares = dict(zip(words, (scores, sums, both), strict=True))
title = "At head size 72, a fifth of the tile work multiplies padding"
fig, ax = amx.useful_share(heads, shares, 72, title=title)
plt.show()

# %% [markdown]
# *How to read it:* just above a multiple of 32, $K Q^\top$ falls, because it pays a whole new
# step. $V^\top P^\top$ falls at each multiple of 16, because the extra row needs a new tile
# there. 72 lies just above 64, so it is a bad size for $K Q^\top$. At 72 the useful share of both
# is $(4.5 + 4.5) / (6 + 5) = 82$ %. No kernel that pads to whole tiles gets above it.
#
# ### The softmax between the two products
#
# Each [score](GLOSSARY.md#score) goes through the [softmax](GLOSSARY.md#softmax) before it weighs
# the values. 16 scores are one vector, and take about nine vector instructions: a maximum, a
# difference, a scaling, five for $2^x$, and one for rounding. A core does at most two in a cycle.
# For 32 keys and 16 queries these are $32 \cdot 9 / 2 = 144$ cycles, beside $11 \cdot 16 = 176$
# cycles of the matrix unit. Of these 176 cycles, $9 \cdot 16 = 144$ are useful; that the softmax
# takes 144 too is chance.
#
# So the useful share of the unit's peak lies between $144 / (176 + 144) = 45$ % (one after the
# other) and $144 / 176 = 82$ % (wholly overlapped).
#
# Five instructions for $2^x$ are few. The kernel splits $x$ into a whole number and a fraction,
# and takes a **cubic polynomial** for the fraction. FlashAttention-4 uses a cubic polynomial on
# GPUs too.

# %%
fraction = torch.linspace(0, 1, 1001, dtype=torch.float64)
cubic = 0.07802452 * fraction**3 + 0.22606716 * fraction**2 + 0.69583354 * fraction + 0.99992522
error = float((cubic / torch.exp2(fraction) - 1).abs().max())
print(f"largest relative error {error:.1e}; rounding to bfloat16 alone: {2**-8:.1e}")

# %% [markdown]
# ## Build: attention on transposes
#
# ### Why not $Q K^\top$?
#
# The unit takes the second operand **by pairs**: a row of its tile holds the numbers of two
# neighbouring rows of the matrix, interleaved. The rows $[0, 1]$ and $[2, 3]$ become the tile's
# row $[0, 2, 1, 3]$. The next cell brings a weight into this form. Two neighbouring numbers of
# $W$ are one word of 4 bytes, and the form is the transpose of these words.

# %%
W = torch.tensor([[0, 1, 2, 3], [10, 11, 12, 13]], dtype=torch.int16)  # two outputs, four inputs
by_pairs = torch.stack((W.T[0::2], W.T[1::2]), dim=-1).flatten(1)  # W^T by pairs
words = W.view(torch.int32).T.contiguous().view(torch.int16)  # transpose of words of 4 bytes
print("W^T     ", W.T.tolist())
print("by pairs", by_pairs.tolist(), " transposed words of W:", torch.equal(by_pairs, words))


# %%
def tile_product(left, right):
    """(16, 32) and (16, 32) by pairs -> (16, 16): what one instruction adds to the third tile."""
    return torch.einsum("ipt,pjt->ij", left.unflatten(1, (-1, 2)), right.unflatten(1, (-1, 2)))


x = torch.tensor([[1, 2, 3, 4], [0, 1, 0, 1]], dtype=torch.int16)
got = tile_product(x, by_pairs)
print("x W^T   ", got.tolist(), torch.equal(got, x @ W.T))

# %% [markdown]
# The weight $W$ of a layer is brought into this form once. But the softmax makes new attention
# weights $P$ for each image. So it matters whether $P$ already has the form. Compare two ways to
# compute attention:
#
# - The usual way: $S = Q K^\top$, then $O = P V$. Here $P$ is the *first* operand, and $V$ must
#   be brought into pairs. The maximum of a query runs along a row of $S$, across the 16 numbers
#   of a vector. This needs several instructions that move numbers inside vectors.
# - Transposed: $S^\top = K Q^\top$, then $O^\top = V^\top P^\top$. The maximum of a query runs
#   down a column: one instruction for each row, for 16 queries at once. And $P^\top$ is the
#   *second* operand: two neighbouring rows of $P^\top$, interleaved, are exactly a row of its
#   tile.

# %%
first = (
    Operand("K", 32, 72, "rows as they lie"),
    Operand("Q$^T$", 72, 16, "by pairs, once"),
    Operand("S$^T$", 32, 16, "softmax down the columns"),
)
second = (
    Operand("V$^T$ and a row of ones", 73, 32, "transposed once"),
    Operand("P$^T$", 32, 16, "two rows interleaved"),
    Operand("O$^T$, last row: sums", 73, 16, "kept for all keys"),
)
chain = {"1. Scores of 32 keys, 16 queries": first, "2. Weighted values": second}
title = "The softmax's result is the next product's operand, as it stands"
fig, axes = amx.operand_chain(chain, title=title, subtitle="shapes to scale; d = 72")
plt.show()

# %% [markdown]
# *How to read it:* each line is one product: first operand, second operand, result. The result of
# the first line becomes $P^\top$ in the second line. Nothing is transposed between them.
#
# The **row of ones** below $V^\top$ makes one more row in $O^\top$: the sum of the weights, which
# is the softmax's denominator. The matrix unit computes it from the same rounded numbers that
# weigh the values. At $d = 72$ it costs nothing: 72 rows need 5 tiles as well, and the row of
# ones takes the place of a row of padding.
#
# ### A maximum that may lag behind
#
# Keys come in **runs** of 128, so that scores and weights stay in the cache. A softmax subtracts
# the largest score, so that no power overflows. With keys in runs, the maximum is known only at
# the end. So the kernel keeps a running maximum `top`. When `top` rises, the kernel must rescale
# the sums of the runs before.
#
# In exact arithmetic any `top` gives the same result, because numerator and denominator contain
# the same factor. The subtraction only prevents overflow. So the kernel raises `top` only if a
# score exceeds it by more than 8 powers of two. This is the **slack**.
#
# By hand, with maxima of four runs 3, 9, 12, 13 (in powers of two) and slack 8: `top` is 3; 9
# exceeds it by 6, so `top` stays; 12 exceeds it by 9, so `top` becomes 12; 13 exceeds it by 1.
# One rescaling instead of three.
#
# **Your code.** Write `top` after each run. The first run sets it.


# %%
def tops(maxima, slack):
    """Maxima of the runs, in powers of two -> list of top after each run."""
    return ...


cases = [((3, 9, 12, 13), 8), ((3, 9, 12, 13), 0), ((5, 1, 13, 14), 8), ((-20, -12, -11), 8)]
expected = {case: lab.tops(*case) for case in cases}
hint = "compare each maximum with top, not with the run before; an equal one is no excess"
check_function("running maximum", tops, expected, hint=hint)


# %% [markdown]
# With this, attention of one head in ten lines. (Scores are multiplied by $\log_2 e / \sqrt d$,
# since the kernel computes $2^x$ and not $e^x$.)


# %%
def attend_runs(q, k, v, slack=8.0, run=128):
    """q (queries, d), k and v (keys, d) of one head -> (queries, d)."""
    scale = q.shape[-1] ** -0.5 * math.log2(math.e)
    values = torch.cat((v.T, v.new_ones(1, len(v))))  # V^T and the row of ones
    out, top = 0.0, torch.full((len(q),), -1e30, dtype=q.dtype)
    for at in range(0, len(k), run):
        scores = k[at : at + run] @ q.T * scale  # S^T, in powers of two
        here = scores.amax(0)
        raised = torch.where(here > top + slack, here, top)
        out = out * torch.exp2(top - raised)  # the rescaling: times 1 where top stays
        out = out + values[:, at : at + run] @ torch.exp2(scores - raised)  # O^T
        top = raised
    return (out[:-1] / out[-1]).T


# %%
q, k, v = torch.randn(3, 240, 72, dtype=torch.float64)  # 240 keys are not a multiple of 128
want = (q @ k.T / 72**0.5).softmax(-1) @ v
print("equal to the softmax written out:", relative_error(attend_runs(q, k, v), want) < 1e-12)

# %% [markdown]
# ### How much slack?
#
# Which scores need rescalings? In the kernel 16 queries act as one: if one of them must rise, all
# 16 are rescaled. Three groups of 16 queries see scores that climb by 0, 80 and 160 powers of two
# from the first of 4,096 keys to the last. The same keys also come shuffled, and in falling
# order. A slack of $10^9$ means that the first run's maximum stays for good.
#
# **Your guess.** With rising keys and slack 8: how many of the 93 possible rescalings (3 groups,
# 31 runs after the first) happen?

# %%
rescaling_guess = guess("rescalings, rising keys, slack 8", None, unit="rescalings")

# %%
found = {}
for order in ("rising", "shuffled", "falling"):
    for slack in (0, 8, 1e9):
        found[order, slack] = maxima, count, verdict = lab.rescalings(order, slack)
        print(f"{order:9s} slack {slack:<12g} {count:3d} rescalings of 93, result {verdict}")
few, many = found["rising", 8][1], found["rising", 0][1]
compare(Comparison(rescaling_guess, measured=few))

# %%
panels = {f"slack {slack}": found["rising", slack][0] for slack in (0, 8)}
queries = [f"rises by {rise}" for rise in lab.RISES]
title = f"A slack of $\\mathbf{{2^8}}$: {few} rescalings instead of {many}, and the same result"
fig, axes = amx.running_maxima(panels, queries, 128, title=title, slack=[0, 8])
plt.show()

# %% [markdown]
# *How to read it:* a line is `top`, a mark is a rescaling, a dot is the maximum of one run. With
# slack, the dots may stand in the shaded band above the line, and nothing happens until one
# leaves the band.
#
# Why slack is safe:
#
# - No overflow. A weight is at most $2^8$, so a sum of $n$ weights is at most $2^8 n$. float32
#   ends at $2^{128}$.
# - No loss of accuracy. Floating-point numbers have the same relative error at $2^8$ as at 1.
# - Without a limit, a rise of more than 128 powers of two gives infinity over infinity: NaN. The
#   table shows it.
#
# A rescaling loads, multiplies and stores the 80 rows of $O^\top$. Slack avoids most rescalings
# where scores climb, and all of them where the keys come in no particular order.
#
# ## Blocks: where the operands lie
#
# For linear layers the question is whether the tiles arrive in time. A tile block needs four
# tiles in each step, two of $x$ and two of $W$: 4 KiB for four instructions, or 64 cycles. That
# is **64 bytes in each cycle**.
#
# | level | size, in one core | bytes in a cycle, at most |
# |---|---|---|
# | first-level cache | 48 KiB | 128 |
# | second-level cache | 2 MiB | 64, often less |
# | memory | GiB | a few |
#
# `linear.c` nests its loops so that most reads are served by the first level. The words: a
# **task** is some rows of $x$; a **panel** is 32 outputs, a strip of $W$; a **chunk** is some
# steps of a panel.

# %%
task, chunk, steps = lab.task_rows(1152), lab.constants()["CHUNK"], 36
loops = [
    Loop(f"for each task of {task} rows", "W, read once a task", 2 * 1152 * 4304, "memory"),
    Loop("for each panel of 32 outputs", "x of the task", 64 * steps * task, "second"),
    Loop(f"for each chunk of {chunk} steps", "chunk of W", 2048 * chunk, "first"),
    Loop("for each tile block of 32 rows", "x of block and chunk", 2048 * chunk, "first"),
    Loop("for each step: 4 instructions", "4 tiles of sums", 4096, "registers"),
]
title = "Each loop keeps one operand in the smallest level that holds it"
subtitle = "first linear map of the MLP, 1,152 -> 4,304; bfloat16, sums in float32"
fig, ax = amx.loop_nest(loops, title=title, subtitle=subtitle)
plt.show()

# %% [markdown]
# *How to read it:* the boxes are loops, the outermost at the top. The text at the right is what
# stays in place while the loop inside it runs, with its size; the colour is the level that holds
# it.
#
# The rule of the model: **an operand is read again from the smallest level that holds everything
# touched in between.** By hand, for a task of 256 rows: 256 rows of $x$ with 36 steps of 64 bytes
# are $256 \cdot 36 \cdot 64 = 589{,}824$ bytes, 576 KiB. That fits the second level. So when the
# next panel reads $x$ again, it comes from there.
#
# **Your answer.** A chunk of 9 steps of one panel, and the same steps of 32 rows of $x$, lie side
# by side in the first level. How many KiB are they together? (A step of either is 32 x 32 numbers
# of 2 bytes.)

# %%
chunk_kib = None  # KiB

near = {18: "that is W alone; the rows of x are as large", 9: "a number has 2 bytes"}
check("KiB of a chunk", chunk_kib, 4 * chunk, hint="9 steps of 2,048 bytes, twice", near=near)

# %% [markdown]
# Four ways to nest the loops for 1,024 rows, by this model (`bytes_read` in
# `kimivl_lab/lessons/amx_kernels.py`):

# %%
cycles = 16 * lab.linear_instructions(1024, 1152, 4304)
ways = {
    "one tile block of rows after another": (32, steps),
    "panel after panel, all rows": (1024, steps),
    f"tasks of {task} rows": (task, steps),
    f"tasks of {task} rows, chunks of {chunk}": (task, chunk),
}
print(f"{'bytes in each cycle of the unit from':38s} memory  second   first")
for way, (rows, length) in ways.items():
    read = lab.bytes_read(1024, 1152, 4304, rows, length)
    print(f"{way:38s}" + "".join(f"{n / cycles:7.1f} " for n in read.values()))

# %% [markdown]
# Line by line:
#
# 1. One tile block of rows after another: all of $W$ comes from memory for every 32 rows. Memory
#    cannot give 32 bytes in a cycle.
# 2. Panel after panel: $x$, all rows of it, does not fit a cache, and comes from memory for every
#    32 outputs.
# 3. A task's rows fit the second level, and $W$ comes from memory once in a task. But a panel of
#    $W$ with its rows of $x$ is larger than the first level. So the second level must give nearly
#    64 bytes in each cycle, all that it has.
# 4. A **chunk** of the panel fits the first level beside the rows of a tile block. This takes
#    half of the reads away from the second level. The price: unfinished sums wait in float32
#    between the chunks.
#
# What the model does not decide: all chunks of up to 12 steps fit, and 9 is not the best of them
# by these bytes (exercise 5). The source gives another reason: while one chunk is multiplied, the
# next one is fetched from memory. The same holds for the limit of 256 rows: the source says that
# more rows do not help. Neither claim has a record here.
#
# ## Check equality: the kernels in C
#
# The kernels are compared with float64, where they run. torch's own results in bfloat16 are held
# to the same bound, the scale of bfloat16's rounding. The cell names each variant that was
# checked, and each that was left out.

# %% tags=["nbval-ignore-output"]
lab.check_kernels()

# %% [markdown]
# ## Measure: your machine, and the recorded one
#
# First live: one linear layer and one attention, in random order. Without AMX, torch computes
# products in bfloat16 without the unit, so the speeds say nothing about the question. Sizes are
# then smaller.

# %% tags=["nbval-ignore-output"]
lab.time_kernels()

# %% [markdown]
# The recorded run has AMX. It holds attention on larger grids and on a batch of real sizes, and
# whole encoders of the published size. The other two encoders are built from the same weights:
# "transformers" is the Kimi-K2.5 tower of the library transformers, and "open-moonvit" is a
# public package with another MoonViT. (This project no longer installs or tests it; its rows are
# from the record.)

# %% tags=["headline"]
folder = data_path("measurements")
names = {"device": "cpu-intel-*", "dtype": "bfloat16"}
rows, origin = read_record(find_record("attention", folder, **names))
forwards, _ = read_record(find_record("encoder", folder, **names))
forwards = [row for row in forwards if row["phase"] == "forward"]
attention_gain = [row["speedup_ratio"] for row in rows if row["variant"] == "amx"]
encoder_gain = [row["speedup_ratio"] for row in forwards if row["variant"] == "kimivl_lab"]
title = "Attention at {:.1f} to {:.1f} times sdpa's speed, the encoder at {:.1f} to {:.1f} times"
title = title.format(min(attention_gain), max(attention_gain), min(encoder_gain), max(encoder_gain))
note = floor.recorded_on(origin, f"bfloat16, {origin['threads']} threads, median, p20 to p80")
towers = {"open-moonvit": "open-moonvit", "transformers": "transformers", "kimivl_lab": "ours"}
backends = {"sdpa": "sdpa", "amx": "ours"}
fig, axes = amx.recorded_wins(rows, forwards, backends, towers, title=title, subtitle=note)
plt.show()

# %% [markdown]
# *How to read it:* left, a line is a batch; further left is faster, and the ratio stands at the
# end. Right, the useful FLOPs of a whole forward in each second, as a share of the speed of a
# large square product in the same rounds. The seconds at the end are in the order of the legend.
# In the title, the encoder is compared with transformers. What is missing to 100 % is padding,
# the softmax, and all that is no product.
#
# **Predicted and not tested.** We predicted 45 to 82 % of the unit's *peak* for attention. The
# record has no peak: it knows neither the clock nor whether two cores are two threads of one. At
# 3 GHz the peak of two cores is $2 \cdot 1.024 \cdot 3 = 6.1$ TFLOP/s. The largest image reaches
# 1.38, which is 22 %; at 1.5 GHz it would be 45 %. So the prediction may well fail. A loop of
# tile instructions on registers would measure the peak.
#
# The library has a third kernel, for RoPE. It moves bytes and multiplies no matrices; lesson
# [30](30_rope_2d.ipynb) is about it.

# %% [markdown]
# ## What to remember
#
# - Count the instructions before you write any. Padding is paid in full: a head size just above a
#   multiple of 32 sets a bound that no loop order can pass.
# - Choose the orientation in which each result is already the next operand. For a unit that takes
#   pairs it is $K Q^\top$ and $V^\top P^\top$.
# - A running maximum guards against overflow, not against rounding. So it may lag by some powers
#   of two, and then rescalings are rare.
# - An operand comes from the smallest level that holds everything touched since its last use.
#   Nest loops so that the innermost operands fit the first level.

# %% tags=["result"]
print(f"Head size 72: {9 / 11:.0%} of attention's tile work is useful.")
print(f"Slack of 2^8 on rising scores: {few} rescalings instead of {many}; on shuffled keys none.")
print(f"Recorded: attention {min(attention_gain):.1f} to {max(attention_gain):.1f} times sdpa.")

# %% [markdown]
# ## On Monday
#
# - **Decide** where the encoder runs. On a server with AMX (`lscpu | grep amx_bf16`) this library
#   uses these kernels by default, in bfloat16; with AVX2 or AVX-512 it has another attention
#   kernel, for float32. `kimivl-lab info` prints which kernels run.
#   `EncoderOptions(attention="sdpa")` takes torch's attention, to compare.
# - **On GPUs** the same question is which head size the attention kernel is compiled for. Flags,
#   as read in vLLM 0.32's and SGLang's documentation: `--mm-encoder-attn-backend` (vLLM) and
#   `--mm-attention-backend` (SGLang). The default of both is `None`: the platform chooses.
# - **Check** with one request of a large image: compare the time to first token under two
#   backends. A kernel that pads the head from 72 to 128 takes longer than one that pads to 96.

# %% [markdown]
# ## Exercises
#
# Solutions, with the steps:
# [solutions/95_appendix_amx_kernels__SOLUTION.ipynb](solutions/95_appendix_amx_kernels__SOLUTION.ipynb).
#
# ### 1. How much slack is allowed?
#
# Write the largest whole **exponent** of 2 up to which weights are allowed, in three cases. A
# float32 sum of $2^{20}$ weights must stay finite (float32 ends just below $2^{128}$). Weights
# are stored as float16 (largest 65,504). Weights are stored as float8 e4m3 (largest 448).

# %%
answer_1 = None  # three exponents: float32 sum, float16, float8

largest = [torch.finfo(one).max for one in (torch.float32, torch.float16, torch.float8_e4m3fn)]
expected = [int(math.log2(largest[0] / 2**20)), *(int(math.log2(one)) for one in largest[1:])]
near = {(108, 15, 8): "2^20 weights of 2^108 sum to 2^128, which float32 does not have"}
check("exponents", answer_1, expected, hint="answer with exponents, not with powers", near=near)

# %% [markdown]
# ### 2. Eight bits
#
# The unit also multiplies 8-bit numbers. A row of 64 bytes then holds 64 numbers, and an
# instruction does twice the work in the same time. Suppose that all operands of attention have 8
# bits. How many times fewer instructions does attention take at head size $d$? Count 64 keys and
# 16 queries, with padding and the row of ones.


# %%
def eight_bit_gain(d):
    return ...


cases = {(d,): lab.eight_bit_gain(d) for d in (64, 72, 80, 96, 112, 128, 200)}
hint = "a step is then 64 numbers, in both products; a tile still has 16 rows"
check_function("gain of 8 bits", eight_bit_gain, cases, rtol=0.01, hint=hint)

# %% [markdown]
# ### 3. A product in tiles
#
# Multiply `x` (32 x 64) by `W` transposed (`W` is 32 x 64) with `tile_product` only: cut both
# into tiles, bring each tile of $W^\top$ into pairs, and add up.


# %%
def product_in_tiles(x, W):
    """(32, 64), (32, 64) -> (32, 32), from eight calls of tile_product."""
    return ...


numbers = torch.arange(4096, dtype=torch.float64).reshape(2, 32, 64).sin()
cases = [((numbers[0], numbers[1]), numbers[0] @ numbers[1].T)]
hint = "two tiles of rows, two of outputs, two steps of 32; by pairs as in the cell on W"
check_function("product in tiles", product_in_tiles, cases, rtol=1e-9, hint=hint)

# %% [markdown]
# ### 4. Which kernel for your server? (operator)
#
# On your GPU there are attention kernels compiled for the head sizes 64, 96 and 128. A head of 72
# is padded to the next one. The two products of attention take 30 % of your encoder's time, and
# the time of a product grows with the padded size. Which % of the encoder's time multiplies
# padding, and which % would the encoder be slower with the kernel for 128?

# %%
answer_4 = None  # (% of the time on padding, % slower)

check(
    "(% on padding, % slower)",
    answer_4,
    (30 * (1 - 72 / 96), 30 * (128 / 96 - 1)),
    rtol=0.01,
    hint="72 of 96 are useful; the other 70 % of the time do not change",
    near={(25, 100 * (128 / 96 - 1)): "that is of attention, not of the encoder"},
)

# %% [markdown]
# ### 5. ★ The best chunk of the model
#
# Which length of a chunk, from 1 to 36 steps, reads the **fewest bytes from the second level**,
# for 1,024 rows from 1,152 to 4,304 features in tasks of 256 rows? Use `lab.bytes_read`. If
# several are equal, name the longest. Then explain why a chunk of 9 reads more.

# %%
answer_5 = None  # steps


def second(length):
    return lab.bytes_read(1024, 1152, 4304, 256, length)["second"]


best = max(range(1, 37), key=lambda length: (-second(length), length))
near = {12: "that fits, but the unfinished sums then wait in the second level"}
check("steps of a chunk", answer_5, best, hint="where do the unfinished sums wait?", near=near)

# %% [markdown]
# ## References
#
# - [Intel intrinsics guide,
#   AMX](https://www.intel.com/content/www/us/en/docs/intrinsics-guide/index.html#techs=AMX): what
#   `_tile_dpbf16ps` does, and its layout by pairs.
# - [Intel's optimization reference
#   manual](https://www.intel.com/content/www/us/en/developer/articles/technical/intel64-and-ia32-architectures-optimization.html):
#   its chapter on AMX has the cycles, blocking and prefetching of such kernels.
# - [FlashAttention-2](https://arxiv.org/abs/2307.08691): keys in a loop, a running maximum, no
#   score matrix in memory.
# - [Reverse engineering
#   FlashAttention-4](https://modal.com/blog/reverse-engineer-flash-attention-4): lazy rescaling
#   and a cubic exponential on a GPU.
# - [oneDNN](https://github.com/uxlfoundation/oneDNN): the library behind torch's products on
#   CPUs.
#
# **Next:** this is the last lesson. Choose one claim of the course and measure it on your own
# machine.
#
# [Map of the course](00_start_here.ipynb) · [Glossary](GLOSSARY.md) · [Notation](NOTATION.md) · previous: [90 Engines side by side](90_engines_side_by_side.md)
