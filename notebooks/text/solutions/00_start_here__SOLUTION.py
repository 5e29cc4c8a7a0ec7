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
#     question: Solutions to the exercises of Start here
#     minutes_cpu: 1
#     gpu: optional
#     data: three photographs of data/images
# ---

# %% [markdown]
# # Start here: solutions
#
# The exercises of [00_start_here](../00_start_here.ipynb), solved. Try them there first.

# %% tags=["nbval-ignore-output"]
import warnings

warnings.filterwarnings("ignore", message="IProgress not found")  # about a widget that nothing here uses
from kimivl_lab.measure.provenance import device_name, versions

print(device_name("cpu"))
print(versions())

# %%
from PIL import Image

from kimivl_lab import KimiVLConfig, image_geometry
from kimivl_lab.datasets import sample_images

full, lab = KimiVLConfig.preset("kimi-vl-a3b"), KimiVLConfig.preset("lab")
sizes = [Image.open(sample_images()[name]).size for name in ("china", "coffee", "chelsea")]
lengths = [image_geometry(*size).patches for size in sizes]
print(lengths)


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


# %% [markdown]
# **1.** From which $n$ on does attention cost more FLOPs than all linear maps of the blocks of the *lab* preset?
#
# $4Nn^2D = 2Nn(4D^2 + 2DF)$, so $n = 2D + F$, whatever the number of blocks.

# %%
answer_1 = 2 * lab.vision_config.hidden_size + lab.vision_config.intermediate_size
at = {stage: flops for stage, (flops, _) in predict(lab, [answer_1], 4).items()}
assert at["attention"] == at["MLP"] + at["QKV and output"]
print(f"{answer_1:,} patches")

# %% [markdown]
# **2.** By which factor does attention's work grow if one mask over all $L$ rows is computed in full?
#
# $\left(\sum n_j\right)^2 / \sum n_j^2$: for $m$ pictures of one size it is $m$.

# %%
answer_2 = sum(lengths) ** 2 / sum(n * n for n in lengths)
apart, together = predict(full, lengths, 2)["attention"][0], predict(full, [sum(lengths)], 2)["attention"][0]
assert abs(answer_2 - together / apart) < 1e-9
print(f"{answer_2:.2f} times")

# %% [markdown]
# **3.** The least number of patches that keeps a device busy with arithmetic rather than with reading weights.
#
# $P$ weights are read in $P \cdot \text{itemsize} / \text{bandwidth}$ seconds, and $L$ patches compute with them for $2PL/\text{peak}$ seconds: $P$ cancels.


# %%
def patches_to_saturate(peak, bandwidth, itemsize):
    return peak / bandwidth * itemsize / 2


assert patches_to_saturate(1e15, 4e12, 2) == 250
assert patches_to_saturate(1e15, 4e12, 1) == 125
print("halving the bytes of a weight halves the batch that a device needs")
