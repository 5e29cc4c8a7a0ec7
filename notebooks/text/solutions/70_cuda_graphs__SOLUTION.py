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
#     question: Solutions to the exercises of CUDA graphs by token budget
#     minutes_cpu: 1
#     gpu: optional
#     data: none
# ---

# %% [markdown]
# # CUDA graphs by token budget: solutions
#
# The exercises of [70_cuda_graphs](../70_cuda_graphs.ipynb), solved. Try them there first.

# %% tags=["nbval-ignore-output"]
import warnings

warnings.filterwarnings("ignore", message="IProgress not found")  # about a widget that nothing here uses
from kimivl_lab.measure.provenance import device_name, versions

print(device_name("cpu"))
print(versions())

# %%
import random

import torch

from kimivl_lab import EncoderOptions, MoonViTConfig, MoonVitPretrainedModel, image_geometry
from kimivl_lab.graphs import inputs as graph_inputs, trace_program
from kimivl_lab.planner.plan import evaluate_budgets, plan_budgets
from kimivl_lab.graphs.packing import PACKERS
from kimivl_lab.measure.accuracy import relative_error

_ = torch.set_grad_enabled(False), torch.manual_seed(0)

# %% [markdown]
# **1.** Write next-fit: pictures from small to large; a run is closed when the next picture would be one too many, or would not fit the largest budget. (A picture that fits no budget does not come.)
#
# One run is open at a time. It never looks at the smaller budgets: that is what the exact packer does better.


# %%
def next_fit(tokens, budgets, max_images):
    runs, held = [[]], 0
    for picture in sorted(range(len(tokens)), key=tokens.__getitem__):
        if len(runs[-1]) == max_images or held + tokens[picture] > max(budgets):
            runs, held = [*runs, []], 0
        runs[-1].append(picture)
        held += tokens[picture]
    return runs


# %%
for seed in range(100):
    tokens = random.Random(seed).choices(range(1, 17), k=9)
    want = [list(replay.images) for replay in PACKERS["next_fit"](tokens, [8, 16, 24], 3)]
    assert [list(run) for run in next_fit(tokens, [8, 16, 24], 3)] == want
print(tokens, "->", next_fit(tokens, [8, 16, 24], 3))

# %% [markdown]
# **2.** A service sees five sizes, each with its count. Powers of two replay 1.74 times the real rows. Find three budgets that stay below 1.021. (Try it by hand first: which two sizes should share one?)
#
# The sizes have four numbers of tokens. Of two neighbours, the smaller pays the difference, as often as it comes: 64 in 414 costs 5 times 350, 414 in 1,036 costs 50 times 622, 1,036 in 1,075 only 35 times 39. So the last two share a budget; the
# planner agrees.

# %%
seen = [(640, 480, 50), (1280, 720, 10), (1024, 768, 25), (4000, 3000, 10), (224, 224, 5)]
tokens = {image_geometry(width, height).tokens for width, height, _ in seen}
answer_2 = [64, 414, 1075]
waste = evaluate_budgets(seen, answer_2).waste[1]
assert len(answer_2) == 3 and waste < 1.021
assert list(plan_budgets(seen, max_graphs=3).budgets) == answer_2
print(f"{sorted(tokens)} tokens in {answer_2}: {waste:.4f} times the real rows")

# %% [markdown]
# **3.** This call of the flat program, a budget of 8 tokens, forgets something: it is right for the picture that it was captured with, and for others it is not, though not one feature is lost. Which input does it
# forget? Give two pictures of 8 tokens as proof, one that comes out right and one that comes out wrong.
#
# Four of the five inputs are rewritten. `merge_gather_idx`, the order in which patches are joined into tokens, stays that of a 4 x 8 grid. For another grid of 32 patches every patch is computed rightly, and then joined with strangers:
# the features are all there, in the wrong places, so their mean and norm are right, and no check by shape, by NaN or by norm would notice.

# %%
tower = MoonVitPretrainedModel(MoonViTConfig.preset("tiny"), EncoderOptions(linear="plain", rope="in_place")).eval()
protocol, budget = graph_inputs.TowerGraphs(tower), 8
inputs = graph_inputs.StaticInputs(protocol.prepare_encoder_cudagraph_capture_inputs(budget, max_images=3))
forward = lambda *values: protocol.encoder_cudagraph_forward(dict(zip(inputs.buffers, values, strict=True)))
program = trace_program.record(forward, inputs.views(4 * budget), trace_program.MemoryPool(), {})
same = lambda got, want: relative_error(got, want) < 1e-5


# %%
def values_of(pixels, grid):
    asked = {"pixel_values": pixels, "image_grid_hws": [grid]}
    return protocol.prepare_encoder_cudagraph_replay_buffers(asked, max_images=3)


def forgetful(pixels, grid):
    for name in ("pixel_values", "pos_embeds", "rope_cos_sin", "cu_seqlens"):
        inputs.buffers[name].copy_(values_of(pixels, grid)[name])
    program.run()
    return program.output.clone()


# %%
pixels = torch.randn(32, 3, 14, 14)
inputs.write(values_of(pixels, (4, 8)), images=1, rows=32)  # what it was captured with
answer_3 = ("merge_gather_idx", (4, 8), (2, 16))
name, right, wrong = answer_3
assert same(forgetful(pixels, right), tower(pixels, [right]))
got, want = forgetful(pixels, wrong), tower(pixels, [wrong])
assert not same(got, want) and same(got.sum((0, 1)), want.sum((0, 1)))
inputs.buffers[name].copy_(values_of(pixels, wrong)[name])  # not forgotten
assert same(forgetful(pixels, wrong), want)
print(f"{right} right; {wrong} wrong, though the sum over all features is right")
