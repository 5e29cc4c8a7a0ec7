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
#     question: How do queries and keys learn in which row and column a patch stands, and what does it cost to turn them?
#     minutes_cpu: 1
#     gpu: optional
#     data: records of data/measurements
# ---

# %% [markdown]
# # RoPE in two dimensions
#
# [Map of the course](00_start_here.ipynb) · [Glossary](GLOSSARY.md) · [Notation](NOTATION.md) · previous: [25 A cache of position embeddings](25_position_cache.ipynb) · next: [40 Packed attention](40_packed_attention.ipynb)
#
# The position embedding of lessons 20 and 25 is added once, before the first block. In every
# block, attention uses the position again.
#
# ## The question
#
# How do queries and keys learn in which row and column a patch stands, and what does it cost to
# turn them?

# %% [markdown]
# ## You will be able to
#
# - **name** the axis and the wavelength of every pair of features, and write a test that refuses
#   exchanged axes;
# - **show** that scores depend only on differences of places, and what bfloat16 does to angles;
# - **predict** the bytes that each implementation moves, and say why its time differs from them.
#
# ## Needs
#
# Lesson [00](00_start_here.ipynb); lesson [20](20_position_embedding.ipynb) helps, because it is
# the first place where positions enter. Reading and solving takes about 90 minutes. The notebook
# runs in half a minute on a CPU. With a GPU the live measurement runs on it.
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
import math

import matplotlib.pyplot as plt

from kimivl_lab import MoonViTConfig, MoonVitPretrainedModel, plots
from kimivl_lab.datasets import data_path
from kimivl_lab.kernels.rotation import ROPE_IMPLEMENTATIONS, rotate_complex
from kimivl_lab.lessons import rope_2d as lesson
from kimivl_lab.lessons.checks import check, check_function
from kimivl_lab.lessons.guesses import Comparison, compare, guess
from kimivl_lab.measure.accuracy import relative_error
from kimivl_lab.measure.records import find_record, read_record
from kimivl_lab.measure.timing import time_interleaved
from kimivl_lab.moonvit.rope import Rope2DPosEmb
from kimivl_lab.plots import floor, rope

plots.use_style()
_ = torch.set_grad_enabled(False)
library = Rope2DPosEmb(72)  # for heads of 72 features

# %% [markdown]
# ## RoPE: a position becomes an angle
#
# [Attention](GLOSSARY.md#attention) is blind to places: a [score](GLOSSARY.md#score) is the
# product of two vectors, whatever their order in the sequence. [RoPE](GLOSSARY.md#rope) turns
# each query and each key by an angle that grows with its position.
#
# Two features are a point in a plane. The product of two points is the product of their lengths
# times the cosine of the angle between their directions.
#
# By hand, with $\theta = 0.1$: a query in direction 0.3 at position 5 is turned to
# $0.3 + 5\theta = 0.8$. A key in direction 0.2 at position 3 is turned to $0.2 + 3\theta = 0.5$.
# The angle between them is $0.8 - 0.5 = 0.3$. Now move both by 100 positions: the directions
# become 10.8 and 10.5, and the angle is still 0.3. In general:
#
# $$(\text{direction}_q + \text{position}_q\,\theta) - (\text{direction}_k + \text{position}_k\,\theta) = \text{direction}_q - \text{direction}_k + (\text{position}_q - \text{position}_k)\,\theta$$
#
# So a score depends on the **difference** of the two positions, and not on the positions
# themselves.

# %% [markdown]
# ### Why two positions
#
# One could number the patches of an image row by row, and take the number as the position. Here
# are the numbers of a grid of 3 x 4 patches (h x w):
#
# | | column 0 | column 1 | column 2 | column 3 |
# |---|---|---|---|---|
# | row 0 | 0 | 1 | 2 | 3 |
# | row 1 | 4 | 5 | 6 | 7 |
# | row 2 | 8 | 9 | 10 | 11 |
#
# "One row below" is a difference of 4 here, and of 46 in china, which is 46 patches wide. Patches
# 3 and 4 look like neighbours, but they are at opposite ends. So RoPE in two dimensions gives
# each patch two positions, its column and its row, and each gets half of the features.
#
# A [head](GLOSSARY.md#head) has $d = 72$ features, 36 pairs of neighbours. A pair is called a
# **slot**. The rule is:
# **even slots use the column, odd slots use the row.**
#
# | slot | features | angle |
# |---|---|---|
# | $2i$ | $4i$ and $4i + 1$ | column $\cdot\,\theta_i$ |
# | $2i + 1$ | $4i + 2$ and $4i + 3$ | row $\cdot\,\theta_i$ |
#
# Here $i$ goes from 0 to 17, and $\theta_i = 10000^{-4i/d}$. By hand, for the patch in row 3 and
# column 5: $\theta_0 = 1$, so slot 0 has the angle 5 and slot 1 the angle 3.
# $\theta_1 = 10000^{-4/72} = 0.599$, so slot 2 has $5 \cdot 0.599 = 3.00$ and slot 3 has
# $3 \cdot 0.599 = 1.80$. Angles are in radians: a full circle is $2\pi = 6.28$.
#
# **Your code.** Write the $d/2$ angles of one patch, slot by slot, for any head of $d$ features.


# %%
def angles_of(row, column, d):
    """A list of d / 2 angles."""
    return ...


check_function(
    "angles of a patch",
    angles_of,
    [(case, lesson.angles(*case)) for case in [(3, 5, 8), (0, 4, 72), (7, 0, 72), (9, 2, 24)]],
    rtol=1e-6,
    hint="for each i: first column times theta, then row times theta",
)

# %% [markdown]
# Docstrings of two serving engines name the axes the other way round, as read in SGLang 0.5.23
# and vLLM 0.32. Their code does what is written here, and the weights were trained with the code.

# %%
h, w = 32, 46  # the grid of china.jpg
cos = library.get_cos_sin([(h, w)])[..., 0].view(h, w, 36).numpy()
maps = {}
for odd, axis in enumerate(("column", "row")):
    slots = {f"slot {2 * i + odd} (i = {i})": cos[..., 2 * i + odd] for i in (0, 2, 4, 8)}
    maps[f"{axis} slots"] = list(slots.items())
fig, axes = rope.phase_maps(maps, "Even slots use the column, odd slots use the row")
plt.show()

# %% [markdown]
# *How to read it:* each map is the grid of the photograph china, and the shade is the cosine of
# the angle. Above, the angle depends on the column only, so all rows are alike. Below, it depends
# on the row only, so all columns are alike. The larger $i$, the slower the angle grows. The
# drawing code is in `kimivl_lab/plots/rope.py`.

# %% [markdown]
# ## Predict: how fast does a slot turn?
#
# A slot is back at its first direction after $2\pi/\theta_i$ patches; this is its **wavelength**.
# By hand: slot 0 has $\theta_0 = 1$ and turns once in 6.28 patches. On a grid that is 64 patches
# wide, it turns ten times. A slot makes half a turn on 64 patches if its wavelength is 128 or
# less.
#
# **Your guess.** How many of the 18 values of $i$ make at least half a turn on 64 patches?

# %%
turn_guess = guess("values of i with half a turn on 64 patches", None)

# %%
theta = [10000 ** (-4 * i / 72) for i in range(18)]
wavelength = [2 * math.pi / one for one in theta]
print(f"wavelengths from {wavelength[0]:.1f} to {wavelength[-1]:,.0f} patches")
compare(Comparison(turn_guess, predicted=sum(length <= 128 for length in wavelength)))
for i in (6, 10, 17):
    print(f"i = {i}: {math.degrees(64 * theta[i]):.1f} degrees on 64 patches")

# %%
title = "Each axis has 18 wavelengths, from 6 patches to 38,000"
fig, ax = rope.wavelengths(wavelength, {"longest side of a grid: 510": 510}, 64, title)
plt.show()

# %% [markdown]
# *How to read it:* a filled mark makes half a turn or more on 64 patches, so its slots tell near
# from far. Hollow marks turn less: $i = 6$ still turns by 170 degrees, but from $i = 10$ on it is
# 22 degrees or less. Those slots are almost the same everywhere, and their features are free for
# what the patch shows. (510 is the longest side because the image processor refuses sides of 512
# patches; see [lesson 10](10_images_to_patches.ipynb).)

# %% [markdown]
# ## Predict: how many bytes does it cost?
#
# Turning is little arithmetic, so it waits for [memory](GLOSSARY.md#bandwidth). In
# [bfloat16](GLOSSARY.md#bfloat16) a number has 2 bytes, and the arithmetic is done on a float32
# copy of 4 bytes. Count what each operator reads and writes, for **one** number of the queries
# and keys:
#
# | `complex`: a slot is one complex number | reads | writes | sum |
# |---|---|---|---|
# | copy to float32 | 2 | 4 | 6 |
# | one product with (cos, sin) | 4 | 4 | 8 |
# | copy back | 4 | 2 | 6 |
# | **all** | | | **20** |
#
# | `in_place`: blocks of 128 patches, whose float32 copy stays in the cache | reads | writes | sum |
# |---|---|---|---|
# | only the numbers themselves pass through memory | 2 | 2 | **4** |
#
# 4 bytes are the **floor**: each number must be read and written once. The third way, `real`,
# turns the slot's two numbers $x_0, x_1$ with real products: $x_0\cos - x_1\sin$ and
# $x_0\sin + x_1\cos$. Its operators are
#
# - the copy to float32 and the copy back, as above;
# - four products ($x_0\cos$, $x_1\sin$, $x_0\sin$, $x_1\cos$). Each works on *half* of the
#   numbers;
# - a difference and a sum. Each reads two such products and writes half of the numbers;
# - a stack, which reads all results and writes them as pairs.
#
# **Your count.** How many bytes does `real` read and write for one number?

# %%
real_bytes = None  # bytes for one number

check(
    "bytes of real for one number",
    real_bytes,
    lesson.bytes_a_number("real"),
    hint="half of the numbers: 2 bytes read and 2 written for one number, in float32",
    near={
        64: "the four products work on half of the numbers",
        36: "the difference and the sum move bytes too",
        40: "the stack moves bytes too",
    },
)

# %% [markdown]
# Now the same for both dtypes. In float32 the complex product needs queries and keys in one piece,
# apart from the values, and that is a copy too.

# %%
print("bytes for one number    complex   real   in_place (the floor)")
for dtype, itemsize in {"bfloat16": 2, "float32": 4}.items():
    each = [lesson.bytes_a_number(way, itemsize) for way in ("complex", "real", "in_place")]
    print(f"{dtype:20s} {each[0]:10d} {each[1]:6d} {each[2]:10d}")
moved = {way: lesson.bytes_moved(way, 36 * 46) for way in ("complex", "real", "in_place")}
over = {way: count / moved["in_place"] for way, count in moved.items()}
print("36 x 46 patches:", {way: f"{count / 1e6:.1f} MB" for way, count in moved.items()})
print("over the floor: ", {way: f"{ratio:.1f}" for way, ratio in over.items()})

# %% [markdown]
# ## Build: the rule in ten lines
#
# The rule once more, in float64 and without library code. The line of `places` makes both
# positions of each patch, column first.


# %%
def turn(x, h, w):
    """(h*w, heads, d) of one image -> the same shape, turned, float64."""
    d = x.shape[-1]
    theta = 10000.0 ** (-torch.arange(0, d, 4, dtype=torch.float64) / d)  # (d/4,)
    row, column = torch.meshgrid(torch.arange(h), torch.arange(w), indexing="ij")
    places = torch.stack((column, row), dim=-1).view(h * w, 1, 2)  # even slots: column
    angles = (places * theta[:, None]).flatten(1)  # (h*w, d/2)
    x0, x1 = x.double().unflatten(-1, (-1, 2)).unbind(-1)  # (h*w, heads, d/2) each
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    return torch.stack((x0 * cos - x1 * sin, x0 * sin + x1 * cos), dim=-1).flatten(-2)


# %% [markdown]
# Now the property that RoPE exists for. One query stands at three places, and one key at every
# place. The key is the query plus noise, so that the largest score is where both stand at the
# same place.

# %%
torch.manual_seed(3)
query = torch.randn(72, dtype=torch.float64)
key = query + 0.5 * torch.randn(72, dtype=torch.float64)
h, w = 24, 36
queries, keys = (turn(x.expand(h * w, 1, 72), h, w).view(h, w, 72) for x in (query, key))
maps = {at: (keys @ queries[at] / 72**0.5).numpy() for at in [(4, 6), (12, 18), (18, 28)]}
fig, axes = rope.score_maps(maps, "The pattern of scores moves with the query")
plt.show()

# %% [markdown]
# *How to read it:* a shade is the score of the key at that place. It is one pattern that moves
# with the query. It has stripes in two directions, because a score is a function of the
# difference in columns plus a function of the difference in rows. The next cell tests both. It
# also shows that equal *distances* do not give equal scores.

# %%
first, second = maps[4, 6], maps[12, 18]
moved_along = abs(second[8:, 12:] - first[:-8, :-12]).max() < 1e-12
in_parts = abs(second - second[12:13] - second[:, 18:19] + second[12, 18]).max() < 1e-12
print("equal differences give equal scores:", bool(moved_along))
print("a row part plus a column part:      ", bool(in_parts))
right, below = second[12, 18 + 3], second[12 + 3, 18]
print(f"three columns right {right:.2f}, three rows below {below:.2f}")

# %% [markdown]
# ## Check equality: exchanged axes
#
# The most frequent fault of a port exchanges rows and columns. Three tests are tried on it:
#
# - **shape:** the factors (cos and sin of all patches) have the right shape;
# - **set:** each patch's right factors appear somewhere, and no others;
# - **each patch:** the factors of each patch are right.
#
# **Your guess.** How many of the three see the fault on a square grid of 6 x 6? And on 2 x 6?

# %%
square_guess = guess("tests that see exchanged axes on 6 x 6", None)
flat_guess = guess("tests that see exchanged axes on 2 x 6", None)

# %%
pictures, seen = {}, {}
for h, w in [(6, 6), (2, 6)]:
    right = lesson.right_factors((h, w)).view(h, w, 36)
    swapped, transposed = lesson.swap_axes(right), right.transpose(0, 1)
    shown = {"right": right, "axes exchanged": swapped, "right, grid transposed": transposed}
    pictures[f"{h} x {w}"] = [(name, one[..., 0].real.numpy()) for name, one in shown.items()]
    kinds = [set(map(tuple, one.flatten(0, 1).tolist())) for one in (right, swapped)]
    holds = {
        "shape": right.shape == swapped.shape,
        "set": kinds[0] == kinds[1],
        "each patch": torch.equal(right, swapped),
    }
    seen[h, w] = sum(not one for one in holds.values())
    print(f"{h} x {w}: the fault is seen by", [name for name, one in holds.items() if not one])
pairs = {square_guess: seen[6, 6], flat_guess: seen[2, 6]}
compare(*(Comparison(one, predicted=count) for one, count in pairs.items()))

# %%
title = "A square grid hides exchanged axes (slot 0, cosine of the angle)"
fig, axes = rope.swapped_axes(pictures, title)
plt.show()

# %% [markdown]
# *How to read it:* above, the second map equals the third. So the fault gives every patch the
# right factors of *another* patch. Below, the values of columns 2 to 5 appear
# nowhere. So the set differs, too.
#
# | a square grid hides the fault from tests of | it does not hide it from a test of |
# |---|---|
# | shapes, norms, sums, histograms, times | the value at one patch off the diagonal |
# | images that equal their own transpose, such as one colour | (if the contents differ from patch to patch) |
# | tests that transpose the image and the result | |

# %% [markdown]
# ## Check equality: the library against the rule
#
# Three grids in one call, in float32. The control exchanges the axes.

# %%
grids = [(4, 6), (2, 12), (20, 8)]
sizes = [h * w for h, w in grids]
torch.manual_seed(0)
qkv, cos_sin = torch.randn(sum(sizes), 3, 16, 72), library.get_cos_sin(grids)
parts = zip(qkv[:, :2].flatten(1, 2).split(sizes), grids, strict=True)
want = torch.cat([turn(x, h, w) for x, (h, w) in parts]).unflatten(1, (2, 16))
for name in ("complex", "real", "in_place"):
    error = relative_error(ROPE_IMPLEMENTATIONS[name](qkv[:, :2].clone(), cos_sin), want)
    print(f"{name:9s} equal: {error < 1e-6}")
exchanged = torch.view_as_real(lesson.swap_axes(torch.view_as_complex(cos_sin)))
print("control   equal:", relative_error(rotate_complex(qkv[:, :2], exchanged), want) < 1e-6)

# %% [markdown]
# In bfloat16, `in_place` gives the same bits as `complex`, although it writes into the queries
# and keys themselves:

# %%
packed, v = qkv.bfloat16(), qkv[:, 2].bfloat16()
reference = rotate_complex(packed[:, :2], cos_sin)
_ = ROPE_IMPLEMENTATIONS["in_place"](packed[:, :2], cos_sin)  # writes into packed (L, 3, heads, d)
print("bits equal to complex:", torch.equal(packed[:, :2], reference))
print("values untouched:     ", torch.equal(packed[:, 2], v))

# %% [markdown]
# ## Float32: angles must not be rounded
#
# bfloat16 keeps 8 significant bits. So a number can be wrong by a part in $2^9 = 512$, which is
# 0.2 %. By hand: at column 500, slot 0 has the angle 500. An error of 0.2 % is 1 radian, 57
# degrees: the direction is lost. The cosine itself can be rounded to bfloat16 without harm: it is
# at most 1, so its error is at most 0.2 % of 1.

# %%
x, low = torch.arange(1, 511), torch.tensor(theta).bfloat16()
exact = x.double()[:, None] * torch.tensor(theta, dtype=torch.float64)
angles = {
    "all in bfloat16": x.bfloat16()[:, None] * low,
    "theta cast to bfloat16": x[:, None] * low.float(),
}
factors = {name: torch.stack((one.cos(), one.sin()), dim=-1) for name, one in angles.items()}
here = library.get_cos_sin([(1, 511)])[1:, 0::2]  # column slots of columns 1 to 510
factors |= {"cos and sin cast to bfloat16": here.bfloat16(), "float32, as here": here}
want = torch.stack((exact.cos(), exact.sin()), dim=-1)
differences = {name: (one - want).abs().amax((1, 2)) for name, one in factors.items()}
errors = {name: one.cummax(0).values.tolist() for name, one in differences.items()}
title = "Casting theta ruins far patches; casting cos and sin rounds them"
fig, ax = rope.angle_errors(x.tolist(), errors, title)
plt.show()

# %% [markdown]
# *How to read it:* up to each position, the largest error of any factor. The two upper lines: the
# error becomes as large as the number itself within one long image. The dashed line: an error
# that does not grow. The lowest line: float32. Its error grows too, but from $2^{-24}$.
#
# **Who casts an angle?** `module.to(torch.bfloat16)` casts every floating-point buffer. A buffer
# of complex factors even loses its imaginary part, the sines. The library keeps no angles in a
# module. It makes the factors in float32 when the grids are known, so there is nothing to cast:

# %%
holder = torch.nn.Module()
holder.register_buffer("factors", lesson.right_factors((4, 6)))
with warnings.catch_warnings(action="ignore"):  # torch warns that it drops the imaginary part
    print("a buffer of complex factors after the cast:", holder.to(torch.bfloat16).factors.dtype)
tower = MoonVitPretrainedModel(MoonViTConfig.preset("tiny")).eval()
before = tower.prepare_encoder_metadata([(4, 6)]).rope_cos_sin
after = tower.to(torch.bfloat16).prepare_encoder_metadata([(4, 6)]).rope_cos_sin
print("the tower:", len(list(tower.buffers())), "buffers, bits kept:", torch.equal(before, after))

# %% [markdown]
# ## Measure: new memory, without a clock
#
# The first measurement counts. It adds up the bytes of every tensor that an implementation makes.
# These are the *written* bytes of the tables above: 4 + 4 + 2 = 10 for `complex`, and one block
# for `in_place`.

# %%
qkv = torch.randn(36 * 46, 3, 16, 72).bfloat16()
cos_sin = library.get_cos_sin([(36, 46)])
numbers = qkv[:, :2].numel()
for way in moved:
    made = lesson.new_bytes(lambda way=way: ROPE_IMPLEMENTATIONS[way](qkv[:, :2], cos_sin))
    print(f"{way:9s} makes {made / numbers:4.1f} bytes for one number")

# %% [markdown]
# ## Measure: time on this machine
#
# The floor in time is a copy of as many bytes as the floor moves, timed in the same rounds. By
# bytes alone, `complex` takes 4.9 times as long as `in_place`, and `real` 11.7 times.
#
# **Your guess.** How many times longer does `complex` take here than `in_place`?

# %%
complex_guess = guess("time of complex over time of in_place", None)

# %% tags=["nbval-ignore-output"]
x, angles = qkv.to(device)[:, :2], cos_sin.to(device)
source = torch.ones(moved["in_place"] // 8, device=device)  # float32, read and written
target = source.clone()
names = [*moved] + ["compiled"] * (device == "cuda")
runs = {way: lambda way=way: ROPE_IMPLEMENTATIONS[way](x, angles) for way in names}
runs["copy"] = lambda: target.copy_(source)
timed = time_interleaved(runs, device=device, warmup=3, repeats=11)
least = timed["copy"].p50_ms
print(f"36 x 46, bfloat16; the floor: {least:.2f} ms, {moved['in_place'] / least / 1e6:.1f} GB/s")
for way in names:
    t = timed[way]
    spread = f"{t.p50_ms:.2f} ms ({t.p20_ms:.2f} to {t.p80_ms:.2f})"
    print(f"{way:9s} {spread:26s} over the floor {t.p50_ms / least:5.1f}", end=", ")
    print(f"by bytes {over.get(way, 1):.1f}")
ratio = timed["complex"].p50_ms / timed["in_place"].p50_ms
compare(Comparison(complex_guess, predicted=over["complex"], measured=ratio))

# %% [markdown]
# On a GPU a loop over blocks would launch many kernels, so `in_place` is slow there. The library
# uses `compiled` on a GPU: `torch.compile` joins the steps of `real` into one kernel, which reads
# and writes each number once.

# %% [markdown]
# ## Measure: predicted against recorded
#
# A recorded run on a server's CPU with AMX has larger grids, and one more way: the library's
# kernel in C, which does everything in one pass. By bytes, `in_place` and this kernel stand at
# the floor. The table shows times over the floor, by patches of the batch.

# %%
record = find_record("rope", data_path("measurements"), device="cpu-intel-*", dtype="bfloat16")
records, origin = read_record(record)
names = {"real": "real", "complex": "complex", "in_place": "in place", "amx": "one pass in C"}
print("over the floor   by bytes", *(f"{line['patches']:7,.0f}" for line in records[::4]))
for way, words in names.items():
    lines = [line for line in records if line["variant"] == way]
    ratios = [f"{line['latency_ms_p50'] / line['floor_ms']:7.2f}" for line in lines]
    print(f"{words:16s} {over.get(way, 1.0):8.2f}", *ratios)

# %% tags=["headline"]
gains = [line["speedup_ratio"] for line in records if line["variant"] == "in_place"]
by_bytes = f"by bytes {over['complex']:.1f}"
title = f"in place: {min(gains):.1f} to {max(gains):.1f} times faster; {by_bytes}"
note = floor.recorded_on(origin, "bfloat16, 16 heads of 72, median and p20 to p80")
ways = {"reference": "complex", "best": "in_place", "predicted": over}
fig, ax = floor.times_over_floor(records, names, **ways, title=title, subtitle=note)
plt.show()

# %% [markdown]
# *How to read it:* filled marks are measured, and hollow ones are the bytes at the speed of a
# copy. Bytes predict the **order** of the ways. They do not predict the distances:
#
# - **One pass in C** comes near the floor. So the floor is real: a kernel can reach it.
# - **`in_place`** stays above the floor on every grid. Only the floor's bytes pass through
#   memory, but each block is read and written three times in the cache, and this is not free.
# - **`complex`** is *faster* than predicted on the three smaller grids. Part of its new tensors
#   is still in a cache when the next operator reads them, so not all counted bytes go to memory.
# - **`complex` and `real`** are far slower than predicted on the largest batch. Their float32
#   tensors have 50 to 100 MB and leave the caches. They are also *new* memory in each call: the
#   system sets each page of it to zero first. The next cell measures this second part on your
#   machine.

# %% tags=["nbval-ignore-output"]
for patches in (1656, 10796):
    x = torch.randn(patches, 2304, device=device).bfloat16()
    used = x.float()
    both = {"new": lambda x=x: x.float(), "used": lambda x=x, used=used: used.copy_(x)}
    timed = time_interleaved(both, device=device, warmup=2, repeats=7)
    ratio = timed["new"].p50_ms / timed["used"].p50_ms
    print(f"{patches:6,} patches, copy to float32: into new memory {ratio:.1f} times as long")

# %% [markdown]
# A ratio above 1 is the price of new memory. On a GPU torch keeps freed memory, so it is near 1.

# %% [markdown]
# ## What to remember
#
# - Even slots use the column, odd slots use the row, with 18 wavelengths each. A score depends on
#   the differences only.
# - Test on a grid of 2 x 6 with different contents in every patch. On a square grid only a test
#   of single patches sees exchanged axes.
# - Angles are computed in float32. What a module does not hold, a cast cannot round.
# - Turning moves 20 bytes for one number as complex product in bfloat16, 48 in real steps, and 4
#   in place. Bytes predict the order; caches and new memory change the distances. One pass comes
#   near the floor.

# %% tags=["result"]
words = ", ".join(f"{way} {ratio:.1f}" for way, ratio in over.items())
print(f"Bytes over the floor, bfloat16: {words}.")
print(f"Exchanged axes are seen by {seen[6, 6]} of 3 tests on 6 x 6, by {seen[2, 6]} on 2 x 6.")

# %% [markdown]
# ## On Monday
#
# - **Decide** whether to compile the encoder: it joins RoPE's steps into one kernel.
# - **Flags:** vLLM `compile_mm_encoder` in `--compilation-config`, default `false`, as read in
#   its documentation of 2026. SGLang has no flag for it, as read in its server arguments of 2026.
#   Exercise 4 says how much it can win.
# - **Check:** record a profile of one request. Count the kernels between the QKV product and
#   attention: one is fused, five or more are not. Add up their times before you change anything.
# - **Check a port or a new release:** encode one image that is three times as wide as high, and
#   compare the features with the reference. A square image proves little.

# %% [markdown]
# ## Exercises
#
# Solutions, with the steps:
# [solutions/30_rope_2d__SOLUTION.ipynb](solutions/30_rope_2d__SOLUTION.ipynb).
#
# ### 1. A test for the axes
#
# Write a test. It gets a function that takes a grid (h, w) and gives $(hw, 36)$ complex factors.
# It returns True for the right factors, and False for four faulty ones: axes exchanged; patches
# numbered column by column; row slots turned by the column; the $\theta$ of the next $i$. Do not
# call the library in it.


# %%
def axes_are_right(factors_of):
    return ...


check(
    "verdicts on the right factors and four faulty ones",
    lesson.axes_verdicts(axes_are_right),
    [True, False, False, False, False],
    hint="compare the angles (.angle()) of one patch off the diagonal of 2 x 6, for slots 0 to 3",
)

# %% [markdown]
# ### 2. Half-split order
#
# Many kernels pair feature $c$ with $c + d/2$, where this lesson pairs $2c$ with $2c + 1$. When
# weights are ported to such a kernel, the features of `q` and `k` (rows of their weight matrices)
# must be reordered. Give the order of the 72 features, as a list of their old numbers.


# %%
def half_split_scores(order):
    """Scores of a kernel that pairs c with c + d/2, on reordered q and k."""
    factors = lesson.right_factors((4, 6))
    pairs = [torch.complex(*x[:, 0, order].chunk(2, dim=-1)) * factors for x in qk]
    a, b = (torch.cat((one.real, one.imag), dim=-1) for one in pairs)
    return a @ b.T


torch.manual_seed(5)
qk = torch.randn(2, 24, 1, 72)  # queries and keys of a grid of 4 x 6
answer_2 = None  # 72 numbers

a, b = (turn(x, 4, 6)[:, 0].float() for x in qk)
check(
    "scores of the half-split kernel",
    None if answer_2 is None else half_split_scores(list(answer_2)),
    a @ b.T,
    rtol=1e-5,
    hint="its first half are the first numbers of the slots, its second half the second numbers",
)

# %% [markdown]
# ### 3. Positions in bfloat16
#
# Positions are whole numbers 0, 1, 2, ... What is the longest side, in patches, whose positions
# all stay different in bfloat16?

# %%
answer_3 = None  # patches

side = next(n for n in range(1, 1000) if len(torch.arange(n + 1).bfloat16().unique()) < n + 1)
check(
    "longest side",
    answer_3,
    side,
    hint="try torch.arange(n).bfloat16().unique() for some n",
    near={side - 1: "all of these differ; try one more", side + 1: "two of these are equal"},
)

# %% [markdown]
# ### 4. What fusing RoPE wins (operator)
#
# An H100 moves $3.35 \cdot 10^{12}$ bytes in a second. Your images have $64 \times 64$ patches,
# in bfloat16, in the published encoder (27 blocks, 16 heads of 72). By bytes, how many ms does
# one fused pass save in one forward of one image, against `complex`?

# %%
answer_4 = None  # ms

saved = lesson.bytes_moved("complex", 4096) - lesson.bytes_moved("in_place", 4096)
check(
    "ms saved in one forward",
    answer_4,
    27 * saved / 3.35e12 * 1e3,
    rtol=0.02,
    hint="queries and keys: 2 x 16 x 72 numbers for each patch; 20 - 4 bytes for each; 27 blocks",
    near={27 * saved / 2 / 3.35e12 * 1e3: "both queries and keys are turned"},
)

# %% [markdown]
# ### 5. ★ Turn in place, without complex numbers
#
# `pairs` is $(L, d/2, 2)$ float32; `cos` and `sin` are $(L, d/2)$. Write the turned pairs into
# `pairs`, and return it. The new tensors may take together no more bytes than `pairs`. (Functions
# that end in `_` write into their tensor: `mul_`, `addcmul_`.)


# %%
def turn_in_place(pairs, cos, sin):
    return ...


check(
    "right values, the same memory, little new memory",
    lesson.in_place_verdicts(turn_in_place),
    (True, True, True),
    hint="keep a copy of the first numbers; x.addcmul_(y, z, value=-1) computes x - y * z",
)

# %% [markdown]
# ## References
#
# - J. Su et al., [RoFormer](https://arxiv.org/abs/2104.09864), 2021: rotary position embedding on
#   one axis.
# - [Kimi-VL technical report](https://arxiv.org/abs/2504.07491): MoonViT adds RoPE in two
#   dimensions.
# - [timm PR 2541](https://github.com/huggingface/pytorch-image-models/pull/2541): height and
#   width exchanged, seen only on images that are not square.
# - [gpt-neox issue 1003](https://github.com/EleutherAI/gpt-neox/issues/1003),
#   [transformers issue 25681](https://github.com/huggingface/transformers/issues/25681): angles
#   in half precision.
# - The axes' names:
#   [SGLang 0.5.23](https://github.com/sgl-project/sglang/blob/v0.5.23/python/sglang/srt/models/kimi_vl_moonvit.py),
#   [vLLM 0.32](https://github.com/vllm-project/vllm/blob/v0.32.0/vllm/model_executor/models/moonvit.py).
#
# **Next:** the turned queries and keys go into attention. Lesson 40 keeps the images of a batch
# apart there.
#
# [Map of the course](00_start_here.ipynb) · [Glossary](GLOSSARY.md) · [Notation](NOTATION.md) · previous: [25 A cache of position embeddings](25_position_cache.ipynb) · next: [40 Packed attention](40_packed_attention.ipynb)
