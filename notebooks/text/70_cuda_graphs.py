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
#     question: When does replaying a captured encoder beat running it, and what must a capture never freeze?
#     minutes_cpu: 1
#     gpu: optional
#     data: sizes of data/workloads, published rows of data/published
# ---

# %% [markdown]
# # CUDA graphs by token budget
#
# ## The question
#
# When does replaying a captured encoder beat running it, and what must a capture never freeze?
#
# ## You will be able to
#
# - **predict** from launches and FLOPs the size of picture up to which a graph can win anything at all;
# - **diagnose** five faults of a captured forward by what they do to the features;
# - **plan** the budgets for your own image sizes, and paste them into a server's command line.
#
# ## Needs
#
# Notebooks [00](00_start_here.ipynb), [40](40_packed_attention.ipynb) and [60](60_gpu_syncs.ipynb). A minute on a CPU, where the graphs of this notebook are recorded and replayed under the rules of CUDA graphs. On a GPU the same
# runner captures real ones; nothing here needs it.
#
# ## Versions and machine

# %% tags=["nbval-ignore-output"]
import warnings

warnings.filterwarnings("ignore", message="IProgress not found")  # about a widget that nothing here uses
from kimivl_lab.measure.provenance import device_name, versions

print(device_name("cpu"))
print(versions())

# %%
import csv
import random

import matplotlib.pyplot as plt
import torch

from kimivl_lab import EncoderCudaGraphRunner, EncoderOptions, KimiVLConfig, KimiVLEncoder, MoonViTConfig
from kimivl_lab import MoonVitPretrainedModel, count_host_syncs, image_geometry, plots
from kimivl_lab.graphs import inputs as graph_inputs, trace_program
from kimivl_lab.planner.plan import evaluate_budgets, plan_budgets
from kimivl_lab.graphs.packing import PACKERS
from kimivl_lab.planner.vllm import powers_of_two, vllm_flag
from kimivl_lab.planner.workload import count_tokens
from kimivl_lab.datasets import WORKLOADS, data_path, draw_sizes, load_sizes
from kimivl_lab.measure.accuracy import relative_error
from kimivl_lab.measure.records import find_record, read_record
from kimivl_lab.measure.roofline import matmul_peak_tflops
from kimivl_lab.syncs.counter import on_device
from kimivl_lab.measure.timing import time_interleaved
from kimivl_lab.moonvit.flops import tower_flops
from kimivl_lab.plots import budgets as budget_plots
from kimivl_lab.plots import floor, graphs as graph_plots

plots.use_style()
_ = torch.set_grad_enabled(False), torch.manual_seed(0)

# %% [markdown]
# ## Predict
#
# ### Launch-bound or compute-bound
#
# Eager, the host asks for every operator anew: Python, the dispatcher, a launch. A GPU meanwhile works off what it has been asked for. A graph is one launch of everything. With $K$ launches of $\tau$ seconds each, $F(n)$ FLOPs for
# a picture of $n$ patches, and a device that does $p$ FLOP/s:
#
# $$t_\text{eager} \approx \max\left(K\tau,\; F(n)/p\right) \qquad t_\text{graph} \approx \max\left(\tau,\; F(n)/p\right) \qquad\text{so a graph can win only while}\quad F(n) < K \cdot p\tau .$$
#
# $p\tau$ is what the device could do during one launch: a device of $P$ TFLOP/s, asked every $\tau$ microseconds, has $P\tau/1000$ GFLOP. $K$ does not depend on the pictures; it is counted here on a pretended GPU (notebook [60](60_gpu_syncs.ipynb)). So nobody can say
# "graphs make the encoder faster" without naming a device and a size:


# %%
def launches(layers):
    """Kernels that one forward in bfloat16 asks a GPU for."""
    config = MoonViTConfig.preset("tiny", num_hidden_layers=layers)
    tower = MoonVitPretrainedModel(config, EncoderOptions(rope="in_place")).to(torch.bfloat16)
    inputs = torch.zeros(16, 3, 14, 14, dtype=torch.bfloat16), tower.prepare_encoder_metadata([(4, 4)])
    model, pixels, metadata = (on_device(one, pretended=True) for one in (tower, *inputs))
    return count_host_syncs(model, pixels, encoder_metadata=metadata, pretended=True).launches


K, a_block = launches(27), launches(2) - launches(1)
assert K == launches(1) + 26 * a_block
print(f"{K} launches a forward of 27 blocks, {a_block} of them a block")
workloads = {WORKLOADS[name]: load_sizes(name) for name in ("coco_val2017", "receipts", "pew_charts")}
counts = {name: count_tokens(sizes) for name, sizes in workloads.items()}
flops = lambda n, **preset: sum(tower_flops(MoonViTConfig.preset("kimi-vl-a3b", **preset), [(2, n // 2)]).values())
print("FLOP in one launch   a graph can win below   share of:", *(f"{name:>20s}" for name in workloads))
for during_one in (0.5e9, 2e9, 8e9):
    largest = max(n for n in range(4, 4400, 4) if flops(n) < K * during_one)
    below = [one.counts[4 * one.tokens <= largest].sum() / one.images for one in counts.values()]
    print(f"{during_one / 1e9:16.1f} G {largest:15,} patches", 10 * " ", *(f"{share:20.0%}" for share in below))

# %%
from itertools import accumulate

lanes = {}  # one block, one launch worth 2 GFLOP, each kernel an equal share of the block's FLOPs
for n in (256, 2048):
    length = flops(n, num_hidden_layers=1) / a_block / 2e9
    for way, asked in {"eager": range(1, a_block + 1), "graph": [1] * a_block}.items():
        _, *ends = accumulate(asked, lambda end, at: max(end, at) + length, initial=0)
        kernels = [(end - length, length) for end in ends]
        lanes[f"{n:,} patches, {way}"] = [(at - 1, 1) for at in sorted(set(asked))], kernels
end = {words: sum(kernels[-1]) for words, (_, kernels) in lanes.items()}
assert end["256 patches, eager"] > 2 * end["256 patches, graph"]
assert end["2,048 patches, eager"] == end["2,048 patches, graph"]
title = "A graph closes the gaps between kernels; where there are none it changes nothing"
fig, ax = graph_plots.launch_timeline(lanes, title=title, subtitle=f"one block, 2 GFLOP a launch  ·  {plots.COUNTED}")
plt.show()

# %% [markdown]
# *How to read it:* above, the small picture's kernels are shorter than a launch, so the device waits between them; below, the host is ahead after the first kernel, and eager and graph end together.
#
# ### What a budget wastes
#
# A graph has one size. So engines capture a few **budgets** of merged tokens, and replay a picture of $x$ tokens in the smallest budget $B(x)$ that holds it. All $B(x)$ rows are computed: replayed rows over real rows are
# $\sum B(x) / \sum x$. With powers of two and sizes spread evenly between two of them that is $1/0.75 = 1.33$. But sizes are not spread evenly. The processor shrinks what is too large to 1,024 tokens *before* it pads (notebook
# [10](10_images_to_patches.ipynb)), so a large picture has a few tokens more than a power of two: predicted 2. Budgets may be any numbers, and for pictures that come alone the best eight are found exactly, by dynamic programming over the sizes.

# %% tags=["headline"]
plans = {name: plan_budgets(sizes, max_graphs=8) for name, sizes in workloads.items()}
for name, plan in plans.items():
    print(f"{name:20s} {plan.powers_of_two.waste[1]:.3f} in powers of two, {plan.waste[1]:.3f} in {list(plan.budgets)}")
    assert plan.exact and plan.waste[1] < 1.13 < plan.powers_of_two.waste[1]
ladders = {name: (powers_of_two(), plan.budgets) for name, plan in plans.items()}
title = "Rows replayed / real rows: budgets that are powers of two, and eight that are planned"
fig, axes = graph_plots.two_staircases(counts, ladders, ("powers of two", "8 planned budgets"), title=title)
plt.show()

# %% [markdown]
# *How to read it:* pictures from small to large, areas to scale; hatched is what the dashed staircase of powers of two computes for nothing beyond the planned one, dark what the planned one wastes itself. Receipts come in a few sizes just
# above 1,024 tokens, photographs at a few camera resolutions; charts are spread, so eight steps cannot follow them as closely.
#
# ## Build
#
# ### A graph, written out
#
# Capture: remember every operator of one run, its arguments, its result. Replay: run them again, at the same addresses, with no model around. A CUDA graph is this with kernels instead of operators, and launched at once:


# %%
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class NaiveGraph(TorchDispatchMode):
    """Remembers the operators of `forward()`; `replay` runs them again, and every result stays where it was."""

    def __init__(self, forward):
        super().__init__()
        self.calls = []
        with self:
            self.output = forward()

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        result = operator(*args, **(kwargs or {}))
        self.calls.append((operator, args, kwargs or {}, result))
        return result

    def replay(self):
        for operator, args, kwargs, result in self.calls:
            again = operator(*args, **kwargs)
            for old, new in zip(tree_leaves(result), tree_leaves(again), strict=True):
                if isinstance(old, torch.Tensor) and old.data_ptr() != new.data_ptr():
                    old.copy_(new)


# %%
tower = MoonVitPretrainedModel(MoonViTConfig.preset("tiny"), EncoderOptions(linear="plain", rope="in_place")).eval()
static, other = torch.randn(2, 16, 3, 14, 14).unbind()
same = lambda got, want: relative_error(got, want) < 1e-5
graph = NaiveGraph(lambda: tower(static, [(4, 4)]))
static.copy_(other)  # another picture at the same address
graph.replay()
assert same(graph.output, tower(other, [(4, 4)]))
print(f"{len(graph.calls)} operators remembered; the replay equals the eager forward")

# %% [markdown]
# It works, once. What a replay sees anew and what it does not:
#
# | | frozen at capture | may change before a replay |
# |---|---|---|
# | operators | which, their order, how many | |
# | numbers of the host | every one: shapes, lengths, `max_seqlen`, the branch that an `if` took | |
# | addresses | of inputs, weights, results | what lies there |
# | offsets, gather order, positions, angles | | all, if they are **tensors among the inputs** |
#
# So whatever depends on the pictures must be an input. The library's "trace" backend records the forward under exactly these rules, on a CPU, as a flat program. Its first lines, for a budget of 8 tokens:

# %%
protocol, budget = graph_inputs.TowerGraphs(tower), 8
inputs = graph_inputs.StaticInputs(protocol.prepare_encoder_cudagraph_capture_inputs(budget, max_images=3))
forward = lambda *values: protocol.encoder_cudagraph_forward(dict(zip(inputs.buffers, values, strict=True)))
program = trace_program.record(forward, inputs.views(4 * budget), trace_program.MemoryPool(), {})
print("inputs:", *inputs.buffers)
print(*program.source.splitlines()[:12], "...", f"{program.operators} operators, no module, no branch", sep="\n")
assert "cu_seqlens" in program.source and "merge_gather_idx" in program.source

# %% [markdown]
# Weights and results are constants of that code, inputs appear under their names: `cu_seqlens` is read by attention when it runs. This is what makes a budget serve any pictures that fit it.
#
# ### The same, as a serving engine asks for it
#
# vLLM keeps graphs out of its models: a manager asks the model. `KimiVLEncoder` answers under the same names, so that either can be read beside the other. As read in release 0.32 of vLLM, in
# [its protocol](https://github.com/vllm-project/vllm/blob/v0.32.0/vllm/model_executor/models/interfaces.py),
# [its Kimi-VL](https://github.com/vllm-project/vllm/blob/v0.32.0/vllm/model_executor/models/kimi_vl.py) and
# [its manager](https://github.com/vllm-project/vllm/blob/v0.32.0/vllm/v1/worker/encoder_cudagraph.py):
#
# | question | vLLM's name | here | there |
# |---|---|---|---|
# | which inputs are rewritten? | `get_encoder_cudagraph_config` | 5; `max_seqlen` is frozen, a bound in patches | 6; `max_seqlen` too, set to the budget in tokens |
# | which budgets are possible? | `get_encoder_cudagraph_budget_range` | what `max_images` can hold | 64 up to the scheduler's tokens |
# | how large is each picture? | `get_encoder_cudagraph_item_specs` | `EncoderItemSpec`s | `EncoderItemSpec`s |
# | these pictures only | `select_encoder_cudagraph_items` | grids stay on the host | grids become a tensor on the device |
# | buffers to capture with | `prepare_encoder_cudagraph_capture_inputs` | one set; budgets are views of it | one set a budget |
# | values to replay with | `prepare_encoder_cudagraph_replay_buffers` | `prepare_encoder_metadata` | the same, after the grids are read back |
# | the captured forward | `encoder_cudagraph_forward` | padding is in segments without an image | padding is in no segment |
# | the forward without a graph | `encoder_eager_forward` | if too large, or too much padding | if too large |
# | out of the static buffer | `postprocess_encoder_output` | the runner copies | copies, `clone=True` |
# | who asks | `EncoderCudaGraphManager` | `EncoderCudaGraphRunner` | |

# %%
encoder = KimiVLEncoder(KimiVLConfig.preset("tiny")).eval()
asked = {"pixel_values": torch.randn(40, 3, 14, 14), "image_grid_hws": [(4, 4), (4, 6)]}
print(encoder.get_encoder_cudagraph_item_specs(asked))
for name, value in encoder.prepare_encoder_cudagraph_replay_buffers(asked, max_images=3).items():
    print(f"{name:17s} {tuple(value.shape)!s:16s} {value.dtype}")
runner = EncoderCudaGraphRunner(encoder, [8, 16], max_images=3)
assert same(runner(**asked), encoder(**asked))

# %% [markdown]
# ### Three packers
#
# Several pictures of one call share budgets. Every packer sorts them by tokens and cuts the order into runs; a run is a replay. `next_fit` fills a run up to the largest budget (vLLM before 0.32). `next_fit_deferred` closes a run early when two
# budgets are smaller than the merged one (0.32). `exact` tries every cut, by dynamic programming: $\text{best}[e] = \min_s \text{best}[s] + B(x_s + \dots + x_{e-1})$. Eight charts, in powers of two up to 2,048:

# %%
eight = sorted(image_geometry(*size).tokens for size in draw_sizes("pew_charts", 8, seed=1235))
ladders = {name: powers_of_two(most=2048) for name in PACKERS} | {"exact, planned": plans["charts"].budgets}
packed = {words: PACKERS[words.split(",")[0]](eight, ladder, 8) for words, ladder in ladders.items()}
rows = {words: sum(replay.rows for replay in replays) for words, replays in packed.items()}
print(rows, "rows for", sum(eight))
assert list(rows.values()) == sorted(rows.values(), reverse=True) and len(set(rows.values())) == 4
fig, ax = budget_plots.packed_replays(eight, packed, title="Where to cut the sorted pictures, and what a cut pads")
plt.show()

# %% [markdown]
# *How to read it:* a line is a replay, a block a picture, hatched what the replay computes for nothing; the greedy rules decide at each picture without knowing the next.
#
# ### Plan for your own pictures
#
# From the sizes that your server has seen, and the number that arrive together, in vLLM's own packing and allocation: it captures `max_images` equal grids, so a graph may compute more rows than its budget. The planner takes only budgets that
# lose nothing there. On the command line: `kimivl-lab plan --sizes my_sizes.csv --images-per-call 1,2,4`.

# %%
served = plan_budgets(workloads["receipt scans"], (1, 2, 4), engine="vllm")
print("images a call   powers of two   planned")
for together, waste in served.waste.items():
    print(f"{together:13} {served.powers_of_two.waste[together]:15.2f} {waste:9.3f}")
    assert waste < served.powers_of_two.waste[together]
print("vllm serve", vllm_flag(served.budgets, served.max_images))

# %% [markdown]
# ## Check equality
#
# Now the naive graph against five situations that every engine has met, and the library's runner in each. Eager is right by definition.
#
# ### 1. A read during capture
#
# Somebody left a check in the model. Python takes a branch at capture, and the branch is frozen: the check is gone, or with `.item()` its number is there for ever. CUDA refuses a wait while it captures; on a CPU nothing would, so the runner does, and names the line.


# %%
import linecache
import re

from kimivl_lab.graphs.guards import GraphCaptureError


def checked(module, args, rows):
    if bool(rows.isnan().any()):
        raise ValueError("NaN in the features")


hook = tower.encoder.final_layernorm.register_forward_hook(checked)
graph = NaiveGraph(lambda: tower(static, [(4, 4)]))
static.copy_(torch.full_like(static, float("nan")))
graph.replay()
print("naive: the check is gone, NaN comes out:", bool(graph.output.isnan().all()))
try:
    EncoderCudaGraphRunner(tower, [4]).capture()
except GraphCaptureError as error:
    what, file, line = re.match(r"(.*) at (.*):(\d+) in checked", str(error)).groups()
    print("runner:", what, "in the line:", linecache.getline(file, int(line)).strip())
hook.remove()
assert graph.output.isnan().all() and "isnan" in linecache.getline(file, int(line))

# %% [markdown]
# The way out: what the host must know, it knows before (lengths, counts, grids), and what only the device knows, the device decides. A check belongs behind the replay.
#
# ### 2. An address that changed
#
# A graph knows addresses, not names. A tensor that is rebound is a new address: the replay goes on with the old picture, or the old weights.

# %%
from kimivl_lab.graphs.weights import StaleGraphError

grids, pixels, layer = [(4, 4)], torch.randn(16, 3, 14, 14), tower.encoder.blocks[0].wo
runner, graph = EncoderCudaGraphRunner(tower, [4]), NaiveGraph(lambda: tower(pixels, grids))
runner.capture()
pixels, old = torch.randn(16, 3, 14, 14), pixels  # the next picture lies elsewhere
graph.replay()
print("naive: still the old picture:", same(graph.output, tower(old, grids)))
layer.weight.mul_(2)  # in place
print("runner: the new picture, the new weights:", same(runner(pixels, grids), tower(pixels, grids)))
weight, layer.weight = layer.weight, torch.nn.Parameter(layer.weight.flip(0))  # elsewhere
graph.replay()
print("naive: still the old weights:", not same(graph.output, tower(old, grids)))
try:
    runner(pixels, grids)
except StaleGraphError as error:
    print("runner:", error)
layer.weight = weight  # as before

# %% [markdown]
# Inputs are copied to where the graph reads them. Weights changed in place are seen; weights replaced, moved or cast are an error before the replay.
#
# ### 3. and 4. Equal totals, and a result that is not yours
#
# A dictionary of graphs by the number of patches looks right: every shape fits. But three calls of 16 patches are three different computations, and the second call overwrites the result of the first.


# %%
captured, runner = {}, EncoderCudaGraphRunner(tower, [4])


def by_total(pixels, grids):
    """One graph for every number of patches."""
    if len(pixels) not in captured:
        static = pixels.clone()
        captured[len(pixels)] = static, NaiveGraph(lambda: tower(static, grids))
    static, graph = captured[len(pixels)]
    static.copy_(pixels)
    graph.replay()
    return graph.output


for grids in ([(4, 4)], [(2, 8)], [(2, 4), (2, 4)]):
    naive, right = (same(encode(pixels, grids), tower(pixels, grids)) for encode in (by_total, runner))
    print(f"{grids!s:17s} equals eager: naive {naive}, runner {right}")
    assert right and naive == (grids == [(4, 4)])

# %%
for name, encode in {"naive": by_total, "runner": runner}.items():
    first = encode(pixels, [(4, 4)])
    kept = first.clone()
    encode(other, [(4, 4)])
    print(f"{name}: after the next call the first result is unchanged: {torch.equal(first, kept)}")
    assert torch.equal(first, kept) == (name == "runner")

# %% [markdown]
# ### 5. Padding that crosses
#
# A budget is rarely full. What lies behind the last picture is what an earlier replay left, and in a pool of memory that can be anything, NaN too. Here a graph of 32 patches gets a picture of 16; all inputs are rewritten, but the
# lengths of its capture, one segment of 32, are frozen. The runner's offsets are data, and the padding is in segments without an image: every operator writes every row, and no attention crosses. `poison` fills all that a replay must
# not read with NaN: random calls through four budgets, after larger and smaller ones, with pictures that are too large:

# %%
large, small, buffer = *map(tower.prepare_encoder_metadata, ([(4, 8)], [(4, 4)])), torch.zeros(32, 3, 14, 14)
graph = NaiveGraph(lambda: tower(buffer, encoder_metadata=large))
for name in ("pos_embeds", "rope_cos_sin", "merge_gather_idx"):
    getattr(large, name)[:16].copy_(getattr(small, name))
for left in (0.0, 1.0, float("nan")):
    buffer[:16], buffer[16:] = pixels, left
    graph.replay()
    right, finite = same(graph.output[:4], tower(pixels, [(4, 4)])), bool(graph.output[:4].isfinite().all())
    print(f"naive, {left} behind the picture: equals eager {right}, finite {finite}")
    assert not right

draw, runner = random.Random(0), EncoderCudaGraphRunner(tower, [4, 9, 30, 60], 3, poison=("pool", "padding"))
for _ in range(60):
    grids = [(2 * draw.randint(1, 6), 2 * draw.randint(1, 12)) for _ in range(draw.randint(1, 5))]
    pixels = torch.randn(sum(h * w for h, w in grids), 3, 14, 14)
    assert same(runner(pixels, grids), tower(pixels, grids)), grids
print(f"runner, NaN behind the pictures: {runner.stats.total.images} pictures of 60 calls equal eager")
print("replays", {budget: one.calls for budget, one in runner.stats.graphs.items()}, end=", ")
print("eager calls", {why: one.calls for why, one in runner.stats.eager.items()})

# %% [markdown]
# ## Measure
#
# ### Here: the host's time, and where it is lost in the work
#
# A CPU has no device that works while the host asks: its time is the **sum** $K\tau + F(n)/p$, and a replay saves the part of $K\tau$ that is Python. It does few FLOPs during a launch, so to be launch-bound at all the model must be narrow: the
# published head, one of it, in six blocks. Whole calls are timed, metadata and copies included; the host's time is taken from the smallest picture there is, and predicts the others with $p$ of a large matrix product.

# %%
narrow = MoonViTConfig.preset("tiny", hidden_size=72, num_attention_heads=1, intermediate_size=288, num_hidden_layers=6)
tower = MoonVitPretrainedModel(narrow, EncoderOptions(linear="plain", rope="in_place")).eval()
runner = EncoderCudaGraphRunner(tower, [2**k for k in range(8)], max_images=1, max_waste=None)
runner.capture()
calls = {}
for tokens in (128, 96, 64, 48, 32, 24, 16, 12, 8, 6, 4, 3, 2, 1):  # so that a small one does not follow a large one
    image = torch.randn(4 * tokens, 3, 14, 14), [(2, 2 * tokens)]
    calls["eager", tokens] = lambda image=image: tower(*image)
    if tokens in runner.budgets:
        calls["replay", tokens] = lambda image=image: runner(*image)
        assert same(runner(*image), tower(*image))
metadata = tower.prepare_encoder_metadata(image[1])
calls["alone", "eager"] = lambda: tower(image[0], encoder_metadata=metadata)
calls["alone", "replay"] = EncoderCudaGraphRunner(tower, [tokens], max_images=1).graph(tokens).replay
peak = matmul_peak_tflops(torch.float32, size=1024)
timed = time_interleaved(calls, warmup=2, repeats=9)
eager, replay = ({n: t for (way, n), t in sorted(timed.items()) if way == kind} for kind in ("eager", "replay"))
host = eager[1].p50_ms
work = {tokens: sum(tower_flops(narrow, [(2, 2 * tokens)]).values()) / peak / 1e9 for tokens in eager}

# %% tags=["nbval-ignore-output"]
asked = len(NaiveGraph(lambda: tower(torch.zeros(4, 3, 14, 14), [(2, 2)])).calls)
print(f"host: {asked} operators in {host:.2f} ms, {1e3 * host / asked:.1f} us each; peak {1e3 * peak:.0f} GFLOP/s")
print("tokens    eager ms (p20 to p80)   predicted   ratio   replay ms   eager / replay")
for tokens, t in replay.items():
    e, sum_ms = eager[tokens], host + work[tokens]
    spread = f"{e.p50_ms:.2f} ({e.p20_ms:.2f} to {e.p80_ms:.2f})"
    print(f"{tokens:6} {spread:>24s} {sum_ms:11.2f} {e.p50_ms / sum_ms:7.2f} {t.p50_ms:11.2f} {e.p50_ms / t.p50_ms:16.2f}")
first = lambda tokens: 4 * next(iter(tokens), 0) or "no"
print(f"half of the time is work from {first(t for t in work if work[t] > host)} patches on, as predicted at peak;", end=" ")
print(f"measured, from {first(t for t in eager if eager[t].p50_ms > 2 * host)} patches on")
alone = [timed["alone", way].p50_ms for way in ("eager", "replay")]
print(f"the forward alone, 4 patches: eager {alone[0]:.2f} ms, replay {alone[1]:.2f} ms, ratio {alone[0] / alone[1]:.2f}\n")
print(runner.stats)

# %%
lines = {"predicted, host alone": [host] * len(eager)}
lines["predicted, host + FLOPs / peak"] = [host + one for one in work.values()]
gains = [eager[tokens].p50_ms / replay[tokens].p50_ms for tokens in (1, 128)]
title = f"A full budget: replay is {gains[0]:.2f} times as fast as eager at 1 token, {gains[1]:.2f} times at 128"
subtitle = plots.measured_on("cpu", f"width 72, 6 blocks, float32, threads: {torch.get_num_threads()}")
fig, ax = graph_plots.replay_steps(list(eager), list(eager.values()), replay, lines, title=title, subtitle=subtitle)
plt.show()

# %% [markdown]
# *How to read it:* a step is a budget, here a power of two. At its right end the budget is full, and a replay lies below eager by what it saves. To the left of that end it pads: hatched, a graph
# costs more than none. So a replay pays only while its padding costs less than it saves, $(\text{waste} - 1) \cdot F/p < \text{saved}$: the larger the picture, the closer the budgets must lie, and `max_waste` of the runner bounds it. What the
# prediction misses is work that FLOPs do not count: at this width most operators are passes over memory.
#
# ### Recorded: a wider tower, and the price of a capture
#
# The project's record has budgets that are full, three quarters full and half full. Where a replay's time is only work on rows, it costs rows replayed over real rows; where it is only the host's, the filling does not matter.

# %%
records, origin = read_record(find_record("graphs", data_path("measurements"), device="cpu-*", dtype="float32"))
replays = [row for row in records if row["phase"] == "budget" and row["variant"] == "replay"]
full = [row["speedup_ratio"] for row in replays if row["tokens"] == row["budget_tokens"]]
title = f"Full budgets, smallest to largest: {full[0]:.2f} to {full[-1]:.2f} times as fast as eager; padding costs more"
note = floor.recorded_on(origin, f"{origin['preset']} preset, float32, median and p20 to p80; each capture timed once")
fig, axes = graph_plots.recorded_replays(records, title=title, subtitle=note)
plt.show()

# %% [markdown]
# *How to read it:* left, below 1 the graph is faster, and where a line crosses 1, padding has eaten what a replay saves; the larger the budget, the less there is to save and the nearer a half-full one comes to its share of rows. Three quarters stay
# further below theirs: padding is a segment of its own, and attention among few rows is cheap. Right, a capture's time over what a full replay saves is the number of calls that earn it back, not told where the two times cannot be told
# apart; graphs share one pool, sized by the largest, which is captured first.
#
# ### Elsewhere: when graphs lost
#
# What developers of engines have published about their own encoders, with graphs and without:

# %%
with data_path("published", "cuda_graphs.csv").open(newline="") as file:
    rows = sorted(csv.DictReader(file), key=lambda row: float(row["after"]) / float(row["before"]))
case = lambda row: row["workload"] if "padded" in row["workload"] else row["metric"]
words = [", ".join(filter(None, (row["model"], row["gpu"], case(row)))) for row in rows]
ratios = {one: float(row["after"]) / float(row["before"]) for one, row in zip(words, rows, strict=True)}
title = f"{sum(ratio > 1 for ratio in ratios.values())} of {len(rows)} published measurements are slower with graphs"
fig, ax = graph_plots.time_ratios(ratios, title=title, subtitle="from vLLM's pull requests; not measured here")
plt.show()

# %% [markdown]
# *How to read it:* left of the line graphs were faster, right of it slower. Padding is the plainest way to lose: 64 tokens in a budget of 4,096 compute 64 times the rows, and 176 in 256 still cost more than they save. Step3-VL replayed
# one picture at a time, and what a call packs together is what a replay should hold. And the gains are not the graphs' alone: as read in release 0.32 of vLLM, Kimi-VL's eager path reads grids back 30 times a call, which the graph's path does not.
#
# ## What to remember
#
# - A graph saves the host's time and nothing else: it can win only while $F(n) < K \cdot p\tau$. The faster the device, the larger the pictures up to which it does.
# - Frozen: operators, host numbers, addresses. Rewritten: what lies at the inputs' addresses. So whatever depends on the pictures is an input, and none of it is read by the host.
# - A graph is tested by **values**: partly full, after a larger replay, with NaN in the padding, with equal totals, with the first result still in hand.
# - Budgets belong where the sizes are. Powers of two are nearly the worst choice for a processor whose limit is a power of two before padding.
# - Bound the waste, run eager beyond it, and count both.

# %% tags=["result"]
receipts = plans["receipt scans"]
print(f"Receipts: {receipts.powers_of_two.waste[1]:.2f} times their rows in powers of two,", end=" ")
print(f"{receipts.waste[1]:.2f} times in eight planned budgets.")
print(f"A forward of 27 blocks is {K} launches or one; a naive graph fails in five ways, each without an error.")

# %% [markdown]
# ## Exercises
#
# Solved in [solutions/70_cuda_graphs__SOLUTION.ipynb](solutions/70_cuda_graphs__SOLUTION.ipynb).
#
# **1.** Write next-fit: pictures from small to large; a run is closed when the next picture would be one too many, or would not fit the largest budget. (A picture that fits no budget does not come.)


# %%
def next_fit(tokens, budgets, max_images):
    return None  # a list of runs, each a list of picture numbers


if next_fit([5], [8], 2) is None:
    print("not answered yet")
else:
    for seed in range(100):
        tokens = random.Random(seed).choices(range(1, 17), k=9)
        want = [list(replay.images) for replay in PACKERS["next_fit"](tokens, [8, 16, 24], 3)]
        assert [list(run) for run in next_fit(tokens, [8, 16, 24], 3)] == want

# %% [markdown]
# **2.** A service sees five sizes, each with its count. Powers of two replay 1.74 times the real rows. Find three budgets that stay below 1.021. (Try it by hand first: which two sizes should share one?)

# %%
seen = [(640, 480, 50), (1280, 720, 10), (1024, 768, 25), (4000, 3000, 10), (224, 224, 5)]
answer_2 = None  # three budgets, in merged tokens

if answer_2 is None:
    print("not answered yet")
else:
    assert len(answer_2) == 3 and evaluate_budgets(seen, answer_2).waste[1] < 1.021

# %% [markdown]
# **3.** This call of the flat program from above, a budget of 8 tokens, forgets something: it is right for the picture that it was captured with, and for others it is not, though not one feature is lost. Which input does it
# forget? Give two pictures of 8 tokens as proof, one that comes out right and one that comes out wrong.


# %%
def values_of(pixels, grid):
    asked = {"pixel_values": pixels, "image_grid_hws": [grid]}
    return protocol.prepare_encoder_cudagraph_replay_buffers(asked, max_images=3)


def forgetful(pixels, grid):
    for name in ("pixel_values", "pos_embeds", "rope_cos_sin", "cu_seqlens"):
        inputs.buffers[name].copy_(values_of(pixels, grid)[name])
    program.run()
    return program.output.clone()


pixels = torch.randn(32, 3, 14, 14)
inputs.write(values_of(pixels, (4, 8)), images=1, rows=32)  # what it was captured with
answer_3 = None  # (name of the input, grid that comes out right, grid that comes out wrong)

if answer_3 is None:
    print("not answered yet")
else:
    name, right, wrong = answer_3
    assert same(forgetful(pixels, right), protocol.vision_tower(pixels, [right]))
    assert not same(forgetful(pixels, wrong), protocol.vision_tower(pixels, [wrong]))
    inputs.buffers[name].copy_(values_of(pixels, wrong)[name])  # not forgotten
    assert same(forgetful(pixels, wrong), protocol.vision_tower(pixels, [wrong]))

# %% [markdown]
# ## References
#
# - [CUDA graphs in PyTorch](https://docs.pytorch.org/docs/stable/notes/cuda.html#cuda-graphs): what a capture allows, private pools, whole-network capture.
# - [vLLM pull request 35963](https://github.com/vllm-project/vllm/pull/35963), the encoder's graphs by budget, and [41992](https://github.com/vllm-project/vllm/pull/41992), Kimi-VL's; as read in release 0.32.
# - Published measurements: vLLM pull requests [35963](https://github.com/vllm-project/vllm/pull/35963), [40600](https://github.com/vllm-project/vllm/pull/40600), [41714](https://github.com/vllm-project/vllm/pull/41714),
#   [41759](https://github.com/vllm-project/vllm/pull/41759), [41992](https://github.com/vllm-project/vllm/pull/41992), [52229](https://github.com/vllm-project/vllm/pull/52229); the rows are in `data/published/cuda_graphs.csv`.
# - Faults of the same kinds, met in engines: equal totals, [sglang 37043](https://github.com/sgl-project/sglang/issues/37043); unwritten padding, [vllm 57136](https://github.com/vllm-project/vllm/issues/57136); aliased results,
#   [vllm 52115](https://github.com/vllm-project/vllm/issues/52115); budget arithmetic, [vllm 38040](https://github.com/vllm-project/vllm/issues/38040).
