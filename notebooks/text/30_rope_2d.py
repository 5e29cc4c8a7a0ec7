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
#     question: How do queries and keys learn where they stand in two dimensions, and what is the least that turning them can cost?
#     minutes_cpu: 1
#     gpu: optional
#     data: records of data/measurements
# ---

# %% [markdown]
# # Rope in two dimensions
#
# ## The question
#
# How do queries and keys learn where they stand in two dimensions, and what is the least that turning them can cost?

# %% [markdown]
# ## You will be able to
#
# - **name** axis and wavelength of every pair of channels, and write a test that swapped axes cannot pass;
# - **show** that scores depend on the difference of two places alone, and what a cast to bfloat16 does to that;
# - **predict** the bytes that each implementation moves, and measure how far it is from its floor.
#
# ## Needs
#
# Notebook [20](20_position_embedding.ipynb) helps: this is the second place where position enters. About half a minute on a
# CPU; nothing here runs on a GPU, and "Measure" says what changes there.
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

import matplotlib.pyplot as plt
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from kimivl_lab import MoonViTConfig, MoonVitPretrainedModel, plots
from kimivl_lab.datasets import data_path
from kimivl_lab.measure.accuracy import relative_error
from kimivl_lab.measure.records import find_record, read_record
from kimivl_lab.measure.timing import time_interleaved
from kimivl_lab.kernels.rotation import ROPE_IMPLEMENTATIONS, rotate_complex
from kimivl_lab.moonvit.rope import Rope2DPosEmb
from kimivl_lab.plots import floor, rope

plots.use_style()
_ = torch.set_grad_enabled(False)
rope_2d = Rope2DPosEmb(72)  # a head has 72 channels

# %% [markdown]
# ## Predict
#
# ### Why two axes
#
# Rope turns a query and a key by angles that grow with their positions, so that their product sees only the difference. Number the patches of a picture
# row by row, and "one below" is a difference of $w$: 46 in one picture, 12 in the next, and the last patch of a row is the neighbour of the first of
# the next. So each patch has two positions, row $y$ and column $x$, and the channels of a head are divided between them. Neighbouring channels $2c$ and
# $2c+1$ are one complex number, slot $c$, turned by
#
# $$\text{slot } 2i:\ e^{\mathrm{j} x \theta_i} \quad (x = \text{column}) \qquad \text{slot } 2i+1:\ e^{\mathrm{j} y \theta_i} \quad (y = \text{row})
# \qquad \theta_i = 10000^{-4i/72},\ i = 0..17$$
#
# Docstrings of two serving engines name the axes the other way round, as read in SGLang 0.5.23 and vLLM 0.32; their code is as here, and the code
# is what the weights were trained with.

# %%
h, w = 32, 46  # the grid of a 640 x 427 photograph
cos = rope_2d.get_cos_sin([(h, w)])[..., 0].view(h, w, 36).numpy()
assert (cos[..., 0::2] == cos[:1, :, 0::2]).all() and (cos[..., 1::2] == cos[:, :1, 1::2]).all()
maps = [[(f"slot {2 * i + odd} (i = {i})", cos[..., 2 * i + odd]) for i in (0, 2, 4, 8)] for odd in (0, 1)]
words = {"column slots": maps[0], "row slots": maps[1]}
fig, axes = rope.phase_maps(words, "Even slots turn along a row, odd slots down a column")
plt.show()

# %% [markdown]
# *How to read it:* a column slot is the same in every row and the other way round; the larger $i$, the slower it turns.
#
# How slowly? A slot comes full circle after $2\pi/\theta_i$ patches.

# %%
theta = [10000 ** (-4 * i / 72) for i in range(18)]
wavelength = [2 * math.pi / t for t in theta]
fast = sum(length <= 2 * 64 for length in wavelength)
print(f"{wavelength[0]:.1f} to {wavelength[-1]:,.0f} patches; {fast} of 18 make half a turn or more within 64 patches")
assert fast == 6 and round(wavelength[-1]) == 37667
sides = {"the position table's 64": 64, "the longest side there is: 510": 510}
fig, ax = rope.wavelengths(wavelength, sides, 64, "Each axis has 18 rulers, from 6 patches to 38,000")
plt.show()

# %% [markdown]
# *How to read it:* a filled slot can tell near from far on a 64-wide grid; a hollow one barely turns there, and keeps its channels almost free for content.
#
# ### What it should cost
#
# $N = 2 \cdot 16 \cdot 72 \cdot L$ numbers of q and k. The least is to read and write each once, and to read the angles. Count the reads and writes of every operator for
# bfloat16, where a number is 2 bytes and its float32 copy 4:
#
# - `complex`: copy to float32 (2 + 4), product (4 + 4), back (4 + 2): $20N$.
# - `real`: copy (2 + 4), four products on half the numbers each (4 · 4), a difference and a sum (2 · 6), stack (4 + 4), back (4 + 2): $48N$.
# - `in_place`: blocks of rows so small that their float32 copy stays in the processor's cache; memory sees 2 + 2: $4N$, the floor.
#
# So before any clock runs: `in_place` moves a fifth of the bytes of `complex` and does the same arithmetic.


# %%
def predict(rows, heads=16, d=72, itemsize=2):
    """Implementation -> bytes moved through memory, with the angles' (L, d/2, 2) float32 read once."""
    N, angles = 2 * rows * heads * d, 4 * rows * d
    casts = 12 if itemsize == 2 else 0  # there and back
    copy = 0 if itemsize == 2 else 8  # a product of complex numbers wants q and k in one piece
    a_number = {"complex": casts + copy + 8, "real": casts + 16 + 12 + 8, "in_place": 2 * itemsize}
    return {name: N * count + angles for name, count in a_number.items()}


for name, itemsize in {"bfloat16": 2, "float32": 4}.items():
    moved = predict(36 * 46, itemsize=itemsize)
    words = [f"{way} {n / 1e6:.0f} MB ({n / moved['in_place']:.1f} x the floor)" for way, n in moved.items()]
    print(f"36 x 46, {name}: {', '.join(words)}")

# %% [markdown]
# ## Build
#
# The rule once more, in float64 and with no library code: angles from meshgrid, then the product written out.


# %%
def turn(x, h, w):
    """(h*w, heads, d) of one picture -> the same, turned, float64."""
    d = x.shape[-1]
    theta = 10000.0 ** (-torch.arange(0, d, 4, dtype=torch.float64) / d)  # (d/4,)
    row, column = torch.meshgrid(torch.arange(h), torch.arange(w), indexing="ij")
    places = torch.stack((column, row), dim=-1).view(h * w, 1, 2)  # even slots: column
    angles = (places * theta[:, None]).flatten(1)  # (h*w, d/2)
    re, im = x.double().unflatten(-1, (-1, 2)).unbind(-1)  # (h*w, heads, d/2) each
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    return torch.stack((re * cos - im * sin, re * sin + im * cos), dim=-1).flatten(-2)


# %% [markdown]
# The property that it is all for: put one query at three places, one key everywhere, and look at the scores.

# %%
torch.manual_seed(3)
query = torch.randn(72, dtype=torch.float64)
key = query + 0.5 * torch.randn(72, dtype=torch.float64)
h, w = 24, 36
queries, keys = (turn(x.expand(h * w, 1, 72), h, w).view(h, w, 72) for x in (query, key))
maps = {place: (keys @ queries[place] / 72**0.5).numpy() for place in [(4, 6), (12, 18), (18, 28)]}
fig, axes = rope.score_maps(maps, "The pattern moves with the query")
plt.show()

# %% [markdown]
# *How to read it:* it is one pattern, cut out at three places. It is a plaid because a score is a function of $\Delta x$ plus a function of $\Delta y$;
# the learned table of notebook 20 had found the same.

# %%
first, second = maps[4, 6], maps[12, 18]
translated = bool(abs(second[8:, 12:] - first[:-8, :-12]).max() < 1e-12)
in_parts = bool(abs(second - second[12:13] - second[:, 18:19] + second[12, 18]).max() < 1e-12)
same_distance = second[12, 18 + 3] - second[12 + 3, 18]
print("same score for the same difference:", translated, " a row part plus a column part:", in_parts)
print("the same for the same distance:", bool(abs(same_distance) < 0.1))
assert translated and in_parts and abs(same_distance) > 0.1

# %% [markdown]
# ### Swapped axes
#
# The commonest fault of a port: rows and columns exchanged. On a square grid the swapped factors are $F'_{yx} = F_{xy}$: the right ones of the **transposed** picture.

# %%
pictures, verdicts = {}, {}
for h, w in [(6, 6), (2, 6)]:
    right = rope_2d.get_freqs_cis_by_seqlens_list([(h, w)]).view(h, w, 36)
    swapped, flipped = right.unflatten(-1, (18, 2)).flip(-1).flatten(-2), right.transpose(0, 1)
    triple = {"right": right, "axes swapped": swapped, "right, grid transposed": flipped}
    pictures[f"{h} x {w}"] = [(words, F[..., 0].real.numpy()) for words, F in triple.items()]
    kinds = [{tuple(row) for row in F.flatten(0, 1).tolist()} for F in (right, swapped)]
    alike = {"shape": right.shape == swapped.shape, "set of factors": kinds[0] == kinds[1]}
    verdicts[h, w] = alike | {"transposed": torch.equal(flipped, swapped), "each patch": torch.equal(right, swapped)}
fig, axes = rope.swapped_axes(pictures, "Slot 0 (real part): a square grid excuses swapped axes")
plt.show()

# %% [markdown]
# *How to read it:* above, the second and the third are equal, so the fault gives every patch the right value of another patch; below, no transposed grid has the swapped one's shape.
#
# What a square grid hides: shapes, norms, sums, histograms, timings, every test with contents that equal their transpose (constants, for one), and every test that
# transposes picture and result. What it does not hide: the value at a patch off the diagonal, if the contents differ from patch to patch.

# %%
for (h, w), same in verdicts.items():
    words = ", ".join(f"{what} {'yes' if yes else 'NO'}" for what, yes in same.items())
    print(f"{h} x {w}, swapped equals right in: {words}")
assert list(verdicts[6, 6].values()) == [True, True, True, False]
assert list(verdicts[2, 6].values()) == [True, False, False, False]

# %% [markdown]
# ## Check equality
#
# The library's implementations against `turn`: three grids in one call, float32; swapped axes as the control. Then bfloat16, where `in_place` promises more than "close": the very bits of
# `complex`.

# %%
grids = [(4, 6), (2, 12), (20, 8)]
qkv, cos_sin = torch.randn(24 + 24 + 160, 3, 16, 72), rope_2d.get_cos_sin(grids)
parts = zip(qkv[:, :2].flatten(1, 2).split([h * w for h, w in grids]), grids, strict=True)
want = torch.cat([turn(x, h, w) for x, (h, w) in parts]).unflatten(1, (2, 16))
for name in ("complex", "real", "in_place"):
    error = relative_error(ROPE_IMPLEMENTATIONS[name](qkv[:, :2].clone(), cos_sin), want)
    print(f"{name:9s} error below 1e-6: {error < 1e-6}")
swapped = cos_sin.unflatten(1, (18, 2)).flip(2).flatten(1, 2)
assert error < 1e-6 < 0.5 < relative_error(rotate_complex(qkv[:, :2], swapped), want)

# %%
packed, v = qkv.bfloat16(), qkv[:, 2].bfloat16()
reference = rotate_complex(packed[:, :2], cos_sin)
_ = ROPE_IMPLEMENTATIONS["in_place"](packed[:, :2], cos_sin)  # writes into the packed (L, 3, heads, d)
print("bit-equal to complex:", torch.equal(packed[:, :2], reference), " v untouched:", torch.equal(packed[:, 2], v))
assert torch.equal(packed[:, :2], reference) and torch.equal(packed[:, 2], v)

# %% [markdown]
# ### Angles want float32
#
# bfloat16 has 8 bits. An angle is position times $\theta_i$, and its error grows with the position, while cos and sin forgive nothing beyond a fraction of a turn.

# %%
x, low = torch.arange(1, 511), torch.tensor(theta).bfloat16()
exact = x.double()[:, None] * torch.tensor(theta, dtype=torch.float64)
angles = {"all in bfloat16": x.bfloat16()[:, None] * low, "theta cast to bfloat16": x[:, None] * low.float()}
factors = {words: torch.stack((angle.cos(), angle.sin()), dim=-1) for words, angle in angles.items()}
here = rope_2d.get_cos_sin([(1, 511)])[1:, 0::2]  # column slots of x = 1..510
factors |= {"cos and sin cast to bfloat16": here.bfloat16(), "float32, as here": here}
want = torch.stack((exact.cos(), exact.sin()), dim=-1)
errors = {words: (F - want).abs().amax((1, 2)).cummax(0).values.tolist() for words, F in factors.items()}
fig, ax = rope.angle_errors(x.tolist(), errors, "Casting theta ruins far patches; casting cos and sin rounds them")
plt.show()

# %% [markdown]
# *How to read it:* upper lines, an error as large as the number itself within one long picture; dashed, an error that does not grow; bottom, float32, which still grows but from $2^{-24}$.
#
# Who casts? `module.to(torch.bfloat16)` casts every floating buffer, and a buffer of complex factors loses its imaginary part. The library keeps neither $\theta$ nor a table in a module: it
# builds the factors from short per-axis vectors, in float32, when the grids are known. There is nothing to cast.

# %%
end = {words: values[-1] for words, values in errors.items()}
assert end["all in bfloat16"] > 1 and end["theta cast to bfloat16"] > 0.5
assert end["cos and sin cast to bfloat16"] < 2**-8 and end["float32, as here"] < 1e-4
holder = torch.nn.Module()
holder.register_buffer("freqs_cis", rope_2d.get_freqs_cis_by_seqlens_list([(4, 6)]))
with warnings.catch_warnings(action="ignore"):  # torch warns that it discards the imaginary part
    cast = holder.to(torch.bfloat16).freqs_cis
print(f"a buffer of complex factors after .to(bfloat16): {cast.dtype}, no sine left")

# %%
tower = MoonVitPretrainedModel(MoonViTConfig.preset("tiny")).eval()
before = tower.prepare_encoder_metadata([(4, 6)]).rope_cos_sin
after = tower.to(torch.bfloat16).prepare_encoder_metadata([(4, 6)]).rope_cos_sin
buffers = len(list(tower.buffers()))
print(f"the tower: {buffers} buffers; angles after .to(bfloat16) bit-equal: {torch.equal(before, after)}")
assert not cast.is_complex() and torch.equal(before, after) and buffers == 0

# %% [markdown]
# ## Measure
#
# First without a clock. A dispatch mode sees every operator; add up the bytes of every tensor that is new, neither a view nor written in place. By the count above, for $N$ bfloat16 numbers: `complex`
# $4N + 4N + 2N$, `real` $4N + 8N + 4N + 4N + 2N$, `in_place` one block.


# %%
class NewBytes(TorchDispatchMode):
    """Bytes of all tensors made inside."""

    total = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if not (func.is_view or func._schema.is_mutable):
            self.total += result.nbytes
        return result


# %%
packed, N = torch.randn(36 * 46, 3, 16, 72).bfloat16(), 2 * 36 * 46 * 16 * 72
cos_sin = rope_2d.get_cos_sin([(36, 46)])
for name, expected in {"complex": 10, "real": 22, "in_place": 0}.items():
    with NewBytes() as new:
        ROPE_IMPLEMENTATIONS[name](packed[:, :2], cos_sin)
    print(f"{name:8s} made {new.total // N:2d} N bytes" + " and a block" * (new.total % N > 0))
    assert new.total // N == expected

# %% [markdown]
# Fresh memory is dear on a CPU: the system hands it out page by page, zeroed. Now with the clock; the floor is a copy of as many bytes, timed in the same rounds.
# Below it the recorded run, with larger grids and a batch of real sizes.

# %% tags=["nbval-ignore-output"]
moved = predict(36 * 46)
ratio = {name: count / moved["in_place"] for name, count in moved.items()}
source = torch.ones(moved["in_place"] // 8)
target = source.clone()
runs = {name: lambda name=name: ROPE_IMPLEMENTATIONS[name](packed[:, :2], cos_sin) for name in moved}
timed = time_interleaved(runs | {"copy": lambda: target.copy_(source)}, warmup=2, repeats=9)
least = timed["copy"].p50_ms
rate = moved["in_place"] / least / 1e6
print(f"{device_name('cpu')}, 36 x 46, bfloat16; the floor, a copy: {least:.2f} ms, {rate:.1f} GB/s")
print("               MB   ms p50 (p20 to p80)    measured/floor  predicted/floor")
for name, count in moved.items():
    t = timed[name]
    spread = f"{t.p50_ms:.2f} ({t.p20_ms:.2f} to {t.p80_ms:.2f})"
    print(f"{name:10s} {count / 1e6:6.1f}   {spread:22s} {t.p50_ms / least:14.1f} {ratio[name]:16.1f}")

# %% tags=["headline"]
records, origin = read_record(find_record("rope", data_path("measurements"), device="cpu-*", dtype="bfloat16"))
gains = [row["speedup_ratio"] for row in records if row["variant"] == "in_place"]
assert len(gains) > 2 and max(row["relative_error"] for row in records) < 2**-8
title = f"A fifth of the bytes: in place is {min(gains):.1f} to {max(gains):.1f} times faster"
note = floor.recorded_on(origin, "bfloat16, 16 heads of 72, median and p20 to p80")
ways = {"reference": "complex", "best": "in_place", "predicted": ratio}
names = {name: name.replace("_", " ") for name in ("real", "complex", "in_place")}
fig, ax = floor.times_over_floor(records, names, **ways, title=title, subtitle=note)
plt.show()

# %% [markdown]
# *How to read it:* hollow marks are the bytes at the speed of a copy, the same marks filled are measured. Bytes predict the order, and roughly the distances;
# what each pays beyond is conversion, fresh pages, and loops too short to stream.
#
# On a GPU blocks would be launches, so there the library fuses `real` into one kernel with `torch.compile`: nothing is kept between its steps, and again memory sees each number twice.

# %% [markdown]
# ## What to remember
#
# - Even slots turn by the column, odd slots by the row, with 18 wavelengths each; scores depend on $\Delta x$ and $\Delta y$ alone.
# - Test on a 2 x 6 grid with different contents in every patch. A square grid excuses swapped axes from every test that does not look at single patches.
# - Angles in float32, always; what a module does not hold, a cast cannot round.
# - Turning q and k does 3 FLOPs a number, and is paid in bytes: 20 a number as complex product in bfloat16, 48 in real steps, 4 in place.

# %% tags=["result"]
print("Bytes against the floor, bfloat16:", ", ".join(f"{name} {value:.1f} x" for name, value in ratio.items()))
print("Swapped axes: another picture's factors on 6 x 6, nobody's on 2 x 6. In place: bit-equal to the complex form.")

# %% [markdown]
# ## Exercises
#
# Solved in [solutions/30_rope_2d__SOLUTION.ipynb](solutions/30_rope_2d__SOLUTION.ipynb).
#
# **1.** Write the test. It gets a function `grid -> (h*w, 36)` complex factors, and must accept the right one, refuse swapped axes, and refuse patches numbered column by column.

# %%
axes_are_right = lambda factors_of: None  # a test of yours

right = lambda grid: rope_2d.get_freqs_cis_by_seqlens_list([grid])
if axes_are_right(right) is None:
    print("not answered yet")
else:
    assert axes_are_right(right)
    assert not axes_are_right(lambda grid: right(grid).unflatten(-1, (18, 2)).flip(-1).flatten(-2))
    assert not axes_are_right(lambda grid: right(grid).unflatten(0, grid).transpose(0, 1).flatten(0, 1))

# %% [markdown]
# **2.** Many kernels pair channel $c$ with $c + d/2$ instead of $2c$ with $2c + 1$ ("half-split"). Give the order of the 72 channels of q and k (rows of $W_q$ and $W_k$, in a port) that makes such a kernel
# give the same scores.


# %%
def half_split(x, factors):
    """(L, d), (L, d/2) complex -> x turned, channel c paired with c + d/2."""
    pairs = torch.complex(*x.chunk(2, dim=-1)) * factors
    return torch.cat((pairs.real, pairs.imag), dim=-1)


answer_2 = None  # a list of 72 channels: what stands first, second, ...

if answer_2 is None:
    print("not answered yet")
else:
    q, k, F = torch.randn(24, 72), torch.randn(24, 72), rope_2d.get_freqs_cis_by_seqlens_list([(4, 6)])
    scores = turn(q[:, None], 4, 6)[:, 0] @ turn(k[:, None], 4, 6)[:, 0].T
    assert relative_error(half_split(q[:, answer_2], F) @ half_split(k[:, answer_2], F).T, scores) < 1e-6

# %% [markdown]
# **3.** Positions themselves do not survive bfloat16 for long. What is the longest side whose positions 0, 1, ... all stay different?

# %%
answer_3 = None  # in patches

if answer_3 is None:
    print("not answered yet")
else:
    assert len(torch.arange(answer_3).bfloat16().unique()) == answer_3
    assert len(torch.arange(answer_3 + 1).bfloat16().unique()) == answer_3

# %% [markdown]
# ## References
#
# - J. Su et al., [RoFormer](https://arxiv.org/abs/2104.09864), 2021: rotary position embedding, on one axis.
# - [Kimi-VL technical report](https://arxiv.org/abs/2504.07491): MoonViT adds rope in two dimensions to the learned table.
# - [timm PR 2541](https://github.com/huggingface/pytorch-image-models/pull/2541): height and width in the wrong order, felt on non-square pictures only.
# - [gpt-neox issue 1003](https://github.com/EleutherAI/gpt-neox/issues/1003), [transformers issue 25681](https://github.com/huggingface/transformers/issues/25681): angles computed in half precision; a cast
#   that reaches a rope buffer.
# - The axes' names: [SGLang 0.5.23, kimi_vl_moonvit.py](https://github.com/sgl-project/sglang/blob/v0.5.23/python/sglang/srt/models/kimi_vl_moonvit.py),
#   [vLLM 0.32, moonvit.py](https://github.com/vllm-project/vllm/blob/v0.32.0/vllm/model_executor/models/moonvit.py).
