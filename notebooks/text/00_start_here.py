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
#     question: What does Kimi-VL's vision encoder compute, what should it cost, and where does the time go?
#     minutes_cpu: 1
#     gpu: optional
#     data: three photographs of data/images
# ---

# %% [markdown]
# # Start here: the encoder on one page
#
# ## The question
#
# What does Kimi-VL's vision encoder compute, what should it cost, and where does the time go?

# %% [markdown]
# ## You will be able to
#
# - **name** the shape of every tensor between a photograph and the language model;
# - **predict** parameters, FLOPs and bytes of the encoder by hand, and confirm them with a counter;
# - **measure** the encoder stage by stage and say for each stage how far it is from the speed that your machine allows.
#
# ## Needs
#
# No other notebook. PyTorch at the level of `nn.Linear` and `scaled_dot_product_attention`. About a minute on a laptop's
# CPU; with a GPU the same cells run there.
#
# ## Versions and machine

# %% tags=["nbval-ignore-output"]
import warnings

import torch

warnings.filterwarnings("ignore", message="IProgress not found")  # about a widget that nothing here uses
from kimivl_lab.measure.provenance import device_name, versions

device = "cuda" if torch.cuda.is_available() else "cpu"
print(device_name(device))
print(versions())

# %%
import json

import matplotlib.pyplot as plt
from IPython.display import Markdown
from PIL import Image

from kimivl_lab import EncoderOptions, KimiVLConfig, KimiVLEncoder, KimiVLImageProcessor, image_geometry, plots
from kimivl_lab.datasets import repository_root, sample_images
from kimivl_lab.measure.accuracy import relative_error
from kimivl_lab.measure.timing import Timing, time_interleaved
from kimivl_lab.moonvit.attention import resolve_attention
from kimivl_lab.moonvit.merger import patch_merger_packed
from kimivl_lab.kernels.rotation import rotate_complex

plots.use_style()
_ = torch.set_grad_enabled(False)

# %% [markdown]
# ## Predict
#
# A picture of any size becomes a grid of $h \times w$ patches of 14 x 14 pixels. The patches of **all** pictures of a batch
# are packed into one sequence of $L = \sum_j h_j w_j$ rows. No row is there to fill a rectangle: the pictures need not
# have the same size. A linear map and a position embedding turn each patch into $D$ numbers, the blocks mix the patches
# of each picture, every 2 x 2 patches are joined into one token, and the projector gives it the language model's width.

# %%
images = {name: Image.open(sample_images()[name]) for name in ("china", "coffee", "chelsea")}
pictures = {name: (image, image_geometry(*image.size)) for name, image in images.items()}
lengths = [geometry.patches for _, geometry in pictures.values()]
print({name: geometry.grid_hw for name, (_, geometry) in pictures.items()}, "sum of h x w:", sum(lengths))

# %%
full = KimiVLConfig.preset("kimi-vl-a3b")
fig, ax = plots.encoder_diagram(pictures, full)
plt.show()

# %% [markdown]
# *How to read it:* a tensor's height is its rows and its width its features, to scale; the merge folds four rows into one that
# is four times wider, so the area stays and only the projector shrinks it.
#
# ### Parameters
#
# With the width $D$, the MLP's width $F$, $N$ blocks and the language model's width $H$, biases included:
#
# $$\text{block} = \underbrace{3D^2 + 3D}_{W_{qkv}} + \underbrace{D^2 + D}_{W_o} + \underbrace{2DF + F + D}_{\text{MLP}} + \underbrace{4D}_{\text{norms}}$$
#
# $$\text{tower} = \underbrace{588D + D}_{\text{patch embed}} + \underbrace{64 \cdot 64 \cdot D}_{\text{position table}} + N \cdot \text{block} + 2D
# \qquad \text{projector} = 2D + (4D)^2 + 4D + 4DH + H$$

# %%
vision, H = full.vision_config, full.text_config.hidden_size
D, F, N = vision.hidden_size, vision.intermediate_size, vision.num_hidden_layers
block_parameters = 4 * D * D + 2 * D * F + 9 * D + F
tower_parameters = 588 * D + D + 64 * 64 * D + N * block_parameters + 2 * D
projector_parameters = 2 * D + (4 * D) ** 2 + 4 * D + 4 * D * H + H
print(f"D {D}, F {F}, N {N}, H {H}")
print(f"block {block_parameters:,}, tower {tower_parameters:,}, projector {projector_parameters:,}")

# %% [markdown]
# ### FLOPs and bytes
#
# A product of $(a, b)$ and $(b, c)$ is $2abc$ FLOPs. So one patch costs $2N(4D^2 + 2DF)$ in the blocks' linear maps, whatever
# the picture; attention ($QK^\top$, then the product with $V$) costs a picture of $n$ patches $4Nn^2D$: that is the only term
# that feels how large a picture is. Norms, rope, position and merge multiply no matrices, but they move bytes. Hence two
# predictions a stage: FLOPs, and the fewest bytes that it must read and write.


# %%
def predict(config, lengths, itemsize):
    """Stage -> (FLOPs of its matrix products, fewest bytes it moves), for pictures of `lengths` patches."""
    vision, H = config.vision_config, config.text_config.hidden_size
    D, F, N = vision.hidden_size, vision.intermediate_size, vision.num_hidden_layers
    L, T = sum(lengths), sum(lengths) // 4
    flops_and_numbers = {
        "position": (0, len(lengths) * 64 * 64 * D + L * D),
        "patch embed": (2 * L * 588 * D, L * 588 + 588 * D + 2 * L * D),
        "norms": (0, (2 * N + 1) * 2 * L * D),
        "QKV and output": (2 * N * L * 4 * D * D, N * (6 * L * D + 4 * D * D)),
        "rope": (0, N * 4 * L * D),
        "attention": (4 * N * D * sum(n * n for n in lengths), N * 4 * L * D),
        "MLP": (2 * N * L * 2 * D * F, N * (2 * L * D + 2 * D * F)),
        "merge": (0, 2 * L * D),
        "projector": (2 * T * (16 * D * D + 4 * D * H), 4 * T * D + 16 * D * D + 4 * D * H + T * H),
    }
    return {stage: (flops, itemsize * numbers) for stage, (flops, numbers) in flops_and_numbers.items()}


# %%
predicted = predict(full, lengths, itemsize=2)
print("stage             GFLOP     MB   FLOP/byte")
for stage, (flops, moved) in predicted.items():
    print(f"{stage:15s} {flops / 1e9:7.1f} {moved / 1e6:6.1f} {flops / moved:11.1f}")

# %% [markdown]
# The last column, the arithmetic intensity, sorts the stages. A device that computes $p$ FLOP/s and moves $b$ byte/s needs at
# least $\max(\text{FLOPs}/p, \text{bytes}/b)$: above $p/b$ a stage waits for arithmetic, below it for memory. The four stages
# at 0.0 can only be made fast by moving less.
#
# How large must a picture be before attention's square matters?

# %%
sizes = [4 * round(4 * 2 ** (step / 10)) for step in range(101)]
each = [{stage: flops for stage, (flops, _) in predict(full, [n], 2).items()} for n in sizes]
parts = {"MLP": ["MLP"], "QKV and output": ["QKV and output"], "both ends": ["patch embed", "projector"]}
parts["attention"] = ["attention"]
shares = {part: [sum(one[s] for s in stages) / sum(one.values()) for one in each] for part, stages in parts.items()}
crossing = 2 * D + F
marks = {"limit 4,096": 4096, f"attention = linear maps at 2D + F = {crossing:,}": crossing, "limit 16,384": 16384}
fig, ax = plots.flops_by_size(sizes, shares, marks, "The MLP leads until attention's square catches up")
plt.show()

# %% [markdown]
# *How to read it:* attention's $4n^2D$ catches the MLP's $4nDF$ at $n = F$, and all linear maps' $2n(4D^2 + 2DF)$ at $n = 2D + F$.
# A picture at the published limit of 4,096 patches just about reaches the first; a limit of 16,384 lies far beyond the second.

# %%
at_F, at_crossing = predict(full, [F], 2), predict(full, [crossing], 2)
assert at_F["attention"][0] == at_F["MLP"][0]
assert at_crossing["attention"][0] == at_crossing["MLP"][0] + at_crossing["QKV and output"][0]
assert all(abs(sum(column) - 1) < 1e-12 for column in zip(*shares.values(), strict=True))
print(f"linear maps of the blocks: {2 * N * (4 * D * D + 2 * D * F):,} FLOP a patch")
print(f"weights in bfloat16: {2 * tower_parameters:,} bytes, read once a forward: 1 FLOP a byte and patch")

# %% [markdown]
# The last line is why encoding is not decoding: a language model reads all its weights for one token a sequence, the encoder
# for every patch of a batch. As soon as $L > p/b$ the weights' traffic is paid for.
#
# ## Build
#
# First the published size, on the meta device: all shapes, no memory. The counter sees every matrix product.

# %%
from torch.utils.flop_counter import FlopCounterMode

with torch.device("meta"):
    skeleton = KimiVLEncoder(full, EncoderOptions(attention="sdpa"))
grids = [geometry.grid_hw for _, geometry in pictures.values()]
with FlopCounterMode(display=False) as counter:
    skeleton(torch.empty(sum(lengths), 3, 14, 14, device="meta"), grids)
print(f"{counter.get_total_flops():,} FLOP for {len(grids)} pictures")

# %% [markdown]
# Then the "lab" preset: the same code with fewer and narrower blocks (the published head size, the MLP's ratio kept), so that a
# laptop can run it. Its switches are set to the plain reference: this is the encoder before anybody made it fast.
# The processor cuts the photographs into patches; the grids stay on the host.

# %%
lab = KimiVLConfig.preset("lab")
torch.manual_seed(0)
encoder = KimiVLEncoder(lab, EncoderOptions(position="interpolate", rope="complex")).eval().to(device)
tower, projector = encoder.vision_tower, encoder.multi_modal_projector
batch = KimiVLImageProcessor()(list(images.values()))
pixels, grid_hws = batch.pixel_values.to(device), batch.image_grid_hws
print("pixel_values", tuple(pixels.shape), "image_grid_hws", grid_hws.tolist())

# %% [markdown]
# And this is the whole encoder, written out with the library's parts. Whatever depends on the grids (position embeddings, rope angles, the
# pictures' offsets, the merge order) is built once, before the first block, by `prepare_encoder_metadata`.

# %%
attend = resolve_attention("auto")
metadata = tower.prepare_encoder_metadata(grid_hws)
x = tower.patch_embed(pixels, metadata.pos_embeds)  # (L, D)
for block in tower.encoder.blocks:
    qkv = block.wqkv(block.norm0(x)).unflatten(-1, (3, block.num_heads, -1))  # (L, 3, heads, d)
    q, k = rotate_complex(qkv[:, :2], metadata.rope_cos_sin).unbind(1)  # (L, heads, d) each
    x = x + block.wo(attend(q, k, qkv[:, 2], metadata).flatten(1))
    x = x + block.mlp(block.norm1(x))
merged = patch_merger_packed(tower.encoder.final_layernorm(x), metadata.merge_gather_idx)  # (T, 4, D)
written_out = projector(merged)  # (T, H)
print(tuple(x.shape), tuple(merged.shape), tuple(written_out.shape))

# %% [markdown]
# ## Check equality
#
# Counted against predicted, in whole numbers:

# %%
counted_tower = sum(p.numel() for p in skeleton.vision_tower.parameters())
counted_projector = sum(p.numel() for p in skeleton.multi_modal_projector.parameters())
rows = {
    "tower parameters": (tower_parameters, counted_tower),
    "projector parameters": (projector_parameters, counted_projector),
    "FLOPs": (sum(flops for flops, _ in predicted.values()), counter.get_total_flops()),
}
for name, (by_hand, counted) in rows.items():
    assert by_hand == counted
    print(f"{name:21s} predicted {by_hand:17,}   counted {counted:17,}   ratio {by_hand / counted:.6f}")

# %% [markdown]
# The written-out encoder against the library's, and each picture alone against the same picture in the batch. A check that cannot fail is
# worth nothing, so the third line swaps height and width of every grid: same number of patches, wrong places.

# %%
features = encoder.get_image_features(pixels, grid_hws)
alone = torch.cat([encoder(p, [grid]) for p, grid in zip(pixels.split(lengths), grids, strict=True)])
swapped = encoder(pixels, [(w, h) for h, w in grids])
differences = {"written out": written_out, "each picture alone": alone, "grids swapped": swapped}
for name, other in differences.items():
    equal = relative_error(other, features) < 1e-5
    print(f"{name:18s} equal to the library's encoder: {equal}")
    assert equal == (name != "grids swapped")

# %% [markdown]
# ## Measure
#
# Each stage alone, on the tensors from above, in turn with the others so that a drifting machine favours none; stages that run once
# a block are timed in one block and multiplied. Two yardsticks run in the same rounds: a large matrix product for $p$, the
# arithmetic that this machine does, and a copy of the hidden states for $b$, the bytes that it moves. They give each stage's
# roofline, $\max(\text{FLOPs}/p, \text{bytes}/b)$.

# %%
N = lab.vision_config.num_hidden_layers
pos_emb, gather = tower.patch_embed.pos_emb, metadata.merge_gather_idx
stages = {
    "position": (1, lambda: pos_emb.get_pos_embeds(metadata.grid_hws)),
    "patch embed": (1, lambda: tower.patch_embed(pixels, metadata.pos_embeds)),
    "norms": (2 * N + 1, lambda: block.norm0(x)),
    "QKV and output": (N, lambda: (block.wqkv(x), block.wo(x))),
    "rope": (N, lambda: rotate_complex(qkv[:, :2], metadata.rope_cos_sin)),
    "attention": (N, lambda: attend(q, k, qkv[:, 2], metadata)),
    "MLP": (N, lambda: block.mlp(x)),
    "merge": (1, lambda: patch_merger_packed(x, gather)),
    "projector": (1, lambda: projector(merged)),
}
big = torch.randn(1536, 1536, device=device)
variants = {stage: run for stage, (_, run) in stages.items()}
variants |= {"product": lambda: big @ big, "copy": lambda: x.clone(), "whole": lambda: encoder(pixels, grid_hws)}
timed = time_interleaved(variants, device=device, warmup=1, repeats=7)

# %%
flops_per_ms = 2 * big.shape[0] ** 3 / timed["product"].p50_ms
bytes_per_ms = 2 * x.numel() * x.element_size() / timed["copy"].p50_ms
work = predict(lab, lengths, itemsize=4)
roofline = {stage: max(flops / flops_per_ms, moved / bytes_per_ms) for stage, (flops, moved) in work.items()}
total_flops = sum(flops for flops, _ in work.values())
flops_share = {stage: flops / total_flops for stage, (flops, _) in work.items()}
times = {}
for stage, (count, _) in stages.items():
    one = timed[stage]
    times[stage] = Timing(count * one.p20_ms, count * one.p50_ms, count * one.p80_ms, one.repeats)

# %% tags=["nbval-ignore-output"]
print("stage           FLOPs  time   ms p50 (p20 to p80)  roofline ms  ratio")
total_ms = sum(timing.p50_ms for timing in times.values())
for stage, t in times.items():
    spread = f"{t.p50_ms:8.2f} ({t.p20_ms:.2f} to {t.p80_ms:.2f})"
    shares_text = f"{flops_share[stage]:5.1%} {t.p50_ms / total_ms:5.1%}"
    print(f"{stage:15s} {shares_text} {spread:27s} {roofline[stage]:8.2f} {t.p50_ms / roofline[stage]:6.1f}")
print(f"sum of the stages / whole encoder: {total_ms / timed['whole'].p50_ms:.2f}")

# %% tags=["headline"]
subtitle = plots.measured_on(device, f"lab preset, {len(lengths)} photographs, {sum(lengths):,} patches, float32")
unseen = sum(times[stage].p50_ms for stage, share in flops_share.items() if share == 0) / total_ms
title = f"FLOPs do not see {unseen:.0%} of the time"
fig, axes = plots.stage_profile(flops_share, times, roofline, title=title, subtitle=subtitle)
plt.show()

# %% [markdown]
# *How to read it:* left, a measured bar without a hatched one is time that no count of FLOPs explains; right, how far a stage is
# from what this machine's own product and copy reach, which is what a better implementation can win. The lab tower is narrow, so
# attention weighs more in it than in the published one (exercise 1).

# %%
assert abs(sum(flops_share.values()) - 1) < 1e-12
assert all(roofline[stage] > 0 and times[stage].p50_ms > 0 for stage in stages)
assert [stage for stage, share in flops_share.items() if share == 0] == ["position", "norms", "rope", "merge"]

# %% [markdown]
# ## What to remember
#
# - One packed sequence: $L = \sum h_j w_j$ rows in, $L/4$ tokens out, no filler between pictures of different sizes.
# - A patch costs $2N(4D^2 + 2DF)$ FLOPs plus $4NnD$ for attending to its own picture; the two are equal at $n = 2D + F$.
# - $n$ patches do $n$ FLOPs a byte of bfloat16 weights: the batch, not the weights, decides what the encoder waits for.
# - Position, norms, rope and merge do no matrix products. If they show up in a profile, they cost memory traffic or overhead.

# %% tags=["result"]
idle = [stage for stage, (flops, _) in predicted.items() if flops == 0]
idle_bytes = sum(predicted[stage][1] for stage in idle) / sum(moved for _, moved in predicted.values())
print(f"By hand = counted: {tower_parameters:,} + {projector_parameters:,} parameters, FLOPs to the last one.")
print(f"Position, norms, rope and merge: 0 % of the FLOPs, {idle_bytes:.0%} of the least bytes moved.")

# %% [markdown]
# Where to go from here:

# %% tags=["nbval-ignore-output"]
topics = {
    "00": "start here",
    "10": "images to patches",
    "20": "position embedding",
    "30": "rope in two dimensions",
    "40": "packed attention",
    "50": "tensor or data parallel",
    "60": "host syncs",
    "70": "CUDA graphs",
    "95": "appendix: kernels of one's own",
}
lines = ["| notebook | question |", "|---|---|"]
for number, topic in topics.items():
    found = sorted((repository_root() / "notebooks").glob(f"{number}_*.ipynb"))
    lines += [f"| {number} {topic} | to come |"] if not found else []
    for path in found:
        question = json.loads(path.read_text())["metadata"].get("kimivl_lab", {}).get("question", topic)
        lines.append(f"| [{path.stem}]({path.name}) | {question} |")
Markdown("\n".join(lines))

# %% [markdown]
# ## Exercises
#
# Solved in [solutions/00_start_here__SOLUTION.ipynb](solutions/00_start_here__SOLUTION.ipynb).
#
# **1.** From which $n$ on does attention cost more FLOPs than all linear maps of the blocks of the *lab* preset?

# %%
answer_1 = None  # a number of patches

if answer_1 is None:
    print("not answered yet")
else:
    at = {stage: flops for stage, (flops, _) in predict(lab, [answer_1], 4).items()}
    assert at["attention"] == at["MLP"] + at["QKV and output"]

# %% [markdown]
# **2.** Without packing by picture, one mask over all $L$ rows would be computed in full. By which factor does attention's work grow
# for the three photographs of this notebook? (A ratio; no model needed.)

# %%
answer_2 = None  # a ratio, from `lengths`

if answer_2 is None:
    print("not answered yet")
else:
    apart, together = predict(full, lengths, 2)["attention"][0], predict(full, [sum(lengths)], 2)["attention"][0]
    assert abs(answer_2 - together / apart) < 1e-9

# %% [markdown]
# **3.** Write the least number of patches in a batch that keeps a device busy with arithmetic rather than with reading weights, for the
# blocks' linear maps: `peak` FLOP/s, `bandwidth` byte/s, `itemsize` bytes a weight.


# %%
def patches_to_saturate(peak, bandwidth, itemsize):
    return None


if patches_to_saturate(1e15, 4e12, 2) is None:
    print("not answered yet")
else:
    assert patches_to_saturate(1e15, 4e12, 2) == 250
    assert patches_to_saturate(1e15, 4e12, 1) == 125

# %% [markdown]
# ## References
#
# - [Kimi-VL technical report](https://arxiv.org/abs/2504.07491): MoonViT, the projector, native resolution.
# - [moonshotai/Kimi-VL-A3B-Instruct](https://huggingface.co/moonshotai/Kimi-VL-A3B-Instruct): configuration and weights.
# - [Patch n' Pack: NaViT](https://arxiv.org/abs/2307.06304): packing pictures of any size into one sequence.
# - [Roofline](https://doi.org/10.1145/1498765.1498785): Williams, Waterman and Patterson, why FLOPs alone do not predict time.
