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
#     question: When is replaying a captured encoder faster than running it, and what must a capture never freeze?
#     minutes_cpu: 1
#     gpu: optional
#     data: sizes of data/workloads, published rows of data/published
# ---

# %% [markdown]
# # CUDA graphs by token budget
#
# [Map of the course](00_start_here.ipynb) · [Glossary](GLOSSARY.md) · [Notation](NOTATION.md) · previous: [60 Host syncs](60_gpu_syncs.ipynb) · next: [80 Time to first token](80_time_to_first_token.ipynb)
#
# Lesson 60 removed the waits. Python still starts each kernel of a forward alone.
#
# ## The question
#
# When is replaying a captured encoder faster than running it, and what must a capture never
# freeze?
#
# ## You will be able to
#
# - **predict** from a GPU's data sheet up to which image size a graph can win;
# - **diagnose** five faults of a captured forward by what they do to the features;
# - **choose** budgets that weigh padding against replays, and paste them into a command line.
#
# ## Needs
#
# Notebooks [00](00_start_here.ipynb), [40](40_packed_attention.ipynb) and
# [60](60_gpu_syncs.ipynb). About 90 minutes to read and solve, one minute to run on a CPU. No GPU
# is needed: on a CPU the forward is recorded and replayed under the rules of CUDA graphs; on a
# GPU the same runner captures real ones.
#
# ## Versions and machine

# %% tags=["nbval-ignore-output"]
import warnings

warnings.filterwarnings("ignore", message="IProgress not found")  # about a widget that is not used
from kimivl_lab.measure.provenance import device_name, versions

print(device_name("cpu"))
print(versions())

# %%
import inspect

import matplotlib.pyplot as plt
import torch

from kimivl_lab import EncoderCudaGraphRunner, image_geometry, plots
from kimivl_lab.datasets import WORKLOADS, data_path, load_sizes
from kimivl_lab.gpus import find_gpu
from kimivl_lab.lessons import cuda_graphs as lesson
from kimivl_lab.lessons.checks import check, check_function
from kimivl_lab.lessons.cuda_graphs import NaiveGraph, same, small_tower
from kimivl_lab.lessons.guesses import Comparison, compare, guess
from kimivl_lab.planner.plan import evaluate_budgets, plan_budgets
from kimivl_lab.planner.replay_cost import LAUNCH_S, SUSTAINED
from kimivl_lab.planner.workload import count_tokens
from kimivl_lab.plots import budgets as budget_plots, graphs as graph_plots

plots.use_style()
_ = torch.set_grad_enabled(False), torch.manual_seed(0)

# %% [markdown]
# ## Predict: up to which size can a graph win?
#
# A forward is [eager](GLOSSARY.md#eager) if Python starts each [kernel](GLOSSARY.md#kernel) when
# it reaches it. Each [kernel launch](GLOSSARY.md#kernel-launch) takes the host a few
# microseconds. If the kernels are shorter than a launch, the GPU waits for the host.
#
# A [CUDA graph](GLOSSARY.md#cuda-graph) is a recorded sequence of kernels. One launch starts all
# of them. With $\ell$ kernels, $\tau$ seconds for a launch, and a device that does $p$ FLOP/s:
#
# $$t_\text{eager} \approx \max\left(\ell\tau,\; \frac{\text{FLOPs}}{p}\right) \qquad t_\text{graph} \approx \max\left(\tau,\; \frac{\text{FLOPs}}{p}\right)$$
#
# The two differ only while $\ell\tau$ is the larger term. So a graph can win only if
#
# $$\text{FLOPs} < \ell \cdot p\tau .$$
#
# $p\tau$ is the work that the device could do during one launch. **By hand, for an H100:** its
# data sheet says 989 TFLOP/s. Large products reach about 0.6 of that, 593 TFLOP/s. Let a launch
# take 6 µs. Then $p\tau = 593 \cdot 10^{12} \cdot 6 \cdot 10^{-6} = 3.56$ GFLOP. 0.6 and 6 µs are
# assumptions; 21 µs were published for one engine (vLLM 52229).
#
# $\ell$ does not depend on the images. It is counted on a [pretended
# device](GLOSSARY.md#pretended-device), for this library's tower; other engines launch other
# kernels.

# %%
kernels = lesson.count_kernels(27)
a_block = (kernels - lesson.count_kernels(1)) // 26
print(f"{kernels} kernels in a forward of 27 blocks, {a_block} in each block")

# %% [markdown]
# **Your code.** Up to how many GFLOPs of one forward can a graph win?


# %%
def limit_gflops(tflops_per_s, launch_us, kernels):
    return ...


machines = [(593.4, 6, 355), (99.12, 6, 355), (593.4, 21, 355), (100, 10, 1)]
check_function(
    "limit in GFLOPs",
    limit_gflops,
    {one: one[2] * one[0] * 1e12 * one[1] * 1e-6 / 1e9 for one in machines},
    rtol=1e-6,
    hint="TFLOP/s times microseconds is 1e12 * 1e-6 = 1e6 FLOPs",
)

# %% [markdown]
# **Your guess.** A patch costs about 0.84 GFLOP, and attention adds to that. Up to how many
# patches can a graph win on an H100, and on an RTX 4090 (165 TFLOP/s on its data sheet)?

# %%
h100_guess = guess("largest image on an H100", None, unit="patches")
rtx_guess = guess("largest image on an RTX 4090", None, unit="patches")

# %%
names = ("coco_val2017", "receipts", "pew_charts")
workloads = {WORKLOADS[name]: load_sizes(name) for name in names}
counts = {name: count_tokens(sizes) for name, sizes in workloads.items()}
print(lesson.gpu_table(("RTX 4090", "A100", "L40S", "H100", "B200"), counts))
limits = [lesson.gpu_limit(find_gpu(name)) for name in ("H100", "RTX 4090")]
compare(Comparison(h100_guess, limits[0]), Comparison(rtx_guess, limits[1]))

# %% [markdown]
# "Square" is the side of a square image. Images above the limit gain nothing in this model, and
# padding makes them slower. The faster the GPU, the larger the images that gain. If launches take
# 21 µs on your server, the last column holds. The limit is for all patches of a call together.
#
# The figure shows one block on an H100. Each kernel has an equal share of the FLOPs.

# %%
lanes = lesson.block_timeline((400, 4096), SUSTAINED * find_gpu("H100").flops_per_s * LAUNCH_S)
title = "Short kernels wait for launches; a graph closes these gaps"
note = "one block on an H100, in launches of 6 us  ·  predicted, not measured"
fig, ax = graph_plots.launch_timeline(lanes, title=title, subtitle=note)
plt.show()

# %% [markdown]
# *How to read it:* with 400 patches a kernel is shorter than a launch, so the device waits
# between kernels. With 4,096 patches the host is ahead after the first kernel, and eager and
# graph end together. A graph also shortens the device's own pause between kernels (not drawn).
#
# ## Build: a graph by hand
#
# [Capture](GLOSSARY.md#capture): run the forward once and keep a list of its operators, with
# their arguments and results. [Replay](GLOSSARY.md#replay): run the same operators on the same
# arguments again, without the model. A CUDA graph does this with kernels. This class does it with
# operators:

# %%
print(inspect.getsource(NaiveGraph))


tower = small_tower()
static, other = torch.randn(2, 16, 3, 14, 14).unbind()
graph = NaiveGraph(lambda: tower(static, [(4, 4)]))
static.copy_(other)  # another image at the same address
graph.replay()
equal = same(graph.output, tower(other, [(4, 4)]))
print(f"{len(graph.calls)} operators remembered; the replay equals eager: {equal}")

# %% [markdown]
# It works for one grid. A replay uses addresses only:
#
# | | frozen at capture | may change before a replay |
# |---|---|---|
# | operators | which, their order, how many | |
# | numbers on the host | all: shapes, lengths, `max_seqlen`, the branch of an `if` | |
# | addresses | of inputs, weights, results | what lies at them |
# | offsets, gather order, positions, angles | | all, if they are **tensors among the inputs** |
#
# So everything that depends on the images must be an input. These inputs are **static**:
# allocated once, and each request is copied into them. A graph has one size, its
# [budget](GLOSSARY.md#budget) of merged tokens; what a request leaves free is
# [padding](GLOSSARY.md#padding).
#
# The library records the forward under these rules. Here is a budget of 16 tokens, 64 patches,
# with room for 3 images. The request has two images, 4 x 4 and 4 x 6 patches (rows x columns):

# %%
inputs, program = lesson.flat_program(small_tower(), budget=16, max_images=3)
title = "From a request to its features: what is copied, and what the graph holds"
drawn = lesson.drawn_request([16, 24], inputs, program)
fig, ax = graph_plots.request_to_output(*drawn, title=title)
plt.show()

# %% [markdown]
# *How to read it:* the values for both images are copied to the front of the static inputs. The
# program reads all 64 patches and writes 16 tokens. The first 10 are copied into a new tensor.
# All graphs of a runner share these inputs and one pool of memory, sized by the largest graph.
#
# The program is a list of operators. Inputs appear by name, such as `cu_seqlens` in the line of
# attention:

# %%
listing = program.source.splitlines()
here = next(number for number, line in enumerate(listing) if "cu_seqlens" in line)
print("...", *listing[here - 1 : here + 2], "...", sep="\n")

# %% [markdown]
# **The padding needs [segments](GLOSSARY.md#segment).** Attention writes only patches that lie in
# a segment of [cu_seqlens](GLOSSARY.md#cu_seqlens). So the padding is put into segments that hold
# no image, and no image looks at it. A graph for 3 images has 4 slots. The free slots share the
# padding evenly: 16 and 24 patches leave 64 - 40 = 24, and two free slots get 12 each: 0, 16, 40,
# 52, 64. (Attention costs the square of a segment: twice 12² = 288 pairs instead of 24² = 576.)
#
# **Your code.** Write these offsets. In the check the padding divides without remainder.


# %%
def offsets_in_graph(lengths, slots, patches):
    return ...


batches = [((16, 24), 4, 64), ((16,), 4, 64), ((8, 8, 16), 4, 64), ((20, 44), 3, 64)]
check_function(
    "offsets",
    offsets_in_graph,
    {one: lesson.graph_offsets(*one) for one in batches},
    hint="first the images, then equal steps up to patches; there are slots + 1 offsets",
)

# %% [markdown]
# ## Check equality: five faults
#
# Now the naive graph and the library's `EncoderCudaGraphRunner` meet five situations that serving
# engines have met. Eager is right by definition.
#
# **Your guess.** Which of the five naive faults raise an error: all, some or none?

# %%
error_guess = guess("faults that raise an error", None, choices=("all", "some", "none"))

# %% [markdown]
# ### Fault 1: the host reads a value during the capture
#
# The model holds a check for NaN. The branch that Python takes at the capture is frozen.


# %%
def refuse_nan(module, args, rows):
    if rows.isnan().any():
        raise ValueError("NaN in the features")


checked, image = small_tower(), torch.randn(16, 3, 14, 14)
checked.encoder.final_layernorm.register_forward_hook(refuse_nan)
graph_1 = NaiveGraph(lambda: checked(image, [(4, 4)]))
image.fill_(float("nan"))
graph_1.replay()
print("naive: no error, all features are NaN:", bool(graph_1.output.isnan().all()))
print("runner:", lesson.refusal(EncoderCudaGraphRunner(checked, [4]).capture))

# %% [markdown]
# The naive graph has lost the check. CUDA refuses a [sync](GLOSSARY.md#sync) during a capture; on
# a CPU the runner does, and its full message names file and line. The way out: compute what the
# host must know, such as lengths, before the forward, and check values behind the replay.
#
# ### Fault 2: an address changes
#
# A graph holds addresses, not names. After `image = torch.randn(...)` the name stands for a new
# address, and the replay still reads the old image. The same holds for a replaced weight.

# %%
tower_2 = small_tower()
old_image, new_image = torch.randn(2, 16, 3, 14, 14).unbind()
graph_2 = NaiveGraph(lambda: tower_2(old_image, [(4, 4)]))
runner_2 = EncoderCudaGraphRunner(tower_2, [4])
runner_2.capture()
graph_2.replay()  # the next request lies at new_image
want = tower_2(new_image, [(4, 4)])
print("naive equals eager:", same(graph_2.output, want))
print("runner equals eager:", same(runner_2(new_image, [(4, 4)]), want))
layer = tower_2.encoder.blocks[0].wo
layer.weight = torch.nn.Parameter(2 * layer.weight)  # a new address
graph_2.replay()
print("naive, a weight replaced:", same(graph_2.output, tower_2(old_image, [(4, 4)])))
print("runner, a weight replaced:", lesson.refusal(lambda: runner_2(new_image, [(4, 4)])))

# %% [markdown]
# The runner copies each request to where the graph reads. It refuses weights that were replaced,
# moved or cast; weights may change in place.
#
# ### Fault 3: equal totals
#
# One graph for each number of patches looks right, because every shape fits. But calls of 16
# patches can be different computations.

# %%
tower_3, graphs_3 = small_tower(), {}
runner_3 = EncoderCudaGraphRunner(tower_3, [4])
for grids in ([(4, 4)], [(2, 8)], [(2, 4), (2, 4)]):
    request = torch.randn(16, 3, 14, 14)
    if len(request) not in graphs_3:
        here = request.clone()
        graphs_3[len(request)] = here, NaiveGraph(lambda: tower_3(here, grids))
    here, graph_3 = graphs_3[len(request)]
    here.copy_(request)
    graph_3.replay()
    want_3 = tower_3(request, grids)
    naive, right = same(graph_3.output, want_3), same(runner_3(request, grids), want_3)
    print(f"{grids!s:17s} equals eager: naive {naive}, runner {right}")

# %% [markdown]
# Positions, angles, merge order and segments belong to the first grid. In the runner they are
# inputs.
#
# ### Fault 4: the result is overwritten
#
# Each replay writes to the same output. If an encoder returns this buffer, its next call changes
# the result of the first.

# %%
tower_4, buffer = small_tower(), torch.randn(16, 3, 14, 14)
graph_4 = NaiveGraph(lambda: tower_4(buffer, [(4, 4)]))
runner_4 = EncoderCudaGraphRunner(tower_4, [4])


def naive_4(pixels, grids):
    buffer.copy_(pixels)
    graph_4.replay()
    return graph_4.output


for name, encode in {"naive": naive_4, "runner": runner_4}.items():
    first = encode(torch.randn(16, 3, 14, 14), [(4, 4)])
    kept = first.clone()
    encode(torch.randn(16, 3, 14, 14), [(4, 4)])
    print(f"{name}: unchanged by the next call: {torch.equal(first, kept)}")

# %% [markdown]
# ### Fault 5: the image looks at the padding
#
# A graph of 32 patches gets an image of 16. All inputs are rewritten except the offsets, which
# still say one segment of 32. Behind the image lies what an earlier replay left.

# %%
tower_5, rows_5, image_5 = small_tower(), torch.zeros(32, 3, 14, 14), torch.randn(16, 3, 14, 14)
large, small = (tower_5.prepare_encoder_metadata(grids) for grids in ([(4, 8)], [(4, 4)]))
graph_5 = NaiveGraph(lambda: tower_5(rows_5, encoder_metadata=large))
for name in ("pos_embeds", "rope_cos_sin", "merge_gather_idx"):
    getattr(large, name)[:16].copy_(getattr(small, name))
want_5 = tower_5(image_5, [(4, 4)])
for left in (0.0, 1.0, float("nan")):
    rows_5[:16], rows_5[16:] = image_5, left
    graph_5.replay()
    print(f"naive, {left} behind the image: equals eager {same(graph_5.output[:4], want_5)}")
runner_5 = EncoderCudaGraphRunner(tower_5, [8], poison=("pool", "padding"))
print(f"runner, NaN behind the image: equals eager {same(runner_5(image_5, [(4, 4)]), want_5)}")
print("none of the five naive faults raised an error; your guess:", error_guess.value)

# %% [markdown]
# `poison` fills all that a replay must not read with NaN: one read of padding makes the features
# NaN. Zeros are not harmless: a key of zeros still takes a share of the
# [softmax](GLOSSARY.md#softmax).
#
# ## Measure: this machine, and the record
#
# **On a CPU** nothing computes while Python runs. So a call takes the *sum* of two times:
# Python's time $t_\text{host}$, the same for every image, and the time of the arithmetic,
# $\text{FLOPs}/p$, which grows with the image. A replay makes the first shorter. It makes the
# second longer, because it computes padding too.
#
# **By hand:** let Python take 0.8 ms for an eager call and 0.3 ms for a replay, and the
# arithmetic 0.02 ms a token. A replay saves 0.5 ms, and each padded token costs 0.02 ms. So it
# wins while fewer than $0.5 / 0.02 = 25$ tokens are padding. In a budget of 64, an image of 40
# tokens gains and one of 35 does not.
#
# The tower here is narrow (72 features, 6 blocks), so that Python matters. The smallest image
# gives $t_\text{host}$. Whole calls are timed, copies included (`time_calls` in
# `kimivl_lab/lessons/cuda_graphs.py`).
#
# **Your guess.** How many times as fast as eager is a replay of an image of 1 token?

# %%
gain_guess = guess("eager over replay at 1 token", None, unit="times")

# %% tags=["nbval-ignore-output"]
timed = lesson.time_calls()
print(timed.table())
compare(Comparison(gain_guess, measured=timed.eager[1].p50_ms / timed.replay[1].p50_ms))

# %%
title = "Whole calls on this machine: eager is a line, replays are steps"
note = plots.measured_on("cpu", f"width 72, 6 blocks, float32, threads: {torch.get_num_threads()}")
times = list(timed.eager), list(timed.eager.values()), timed.replay, timed.predicted()
fig, ax = graph_plots.replay_steps(*times, title=title, subtitle=note)
plt.show()

# %% [markdown]
# *How to read it:* each step is a budget, full at its right end and padded left of it. Hatched: a
# graph costs more than eager. The measured line rises faster than the dotted one: narrow products
# do not reach $p$, the speed of a large product.
#
# **The record** has a wider tower, and budgets that are full, three quarters full and half full.
# If only arithmetic mattered, a half-full budget would take twice the time of eager.

# %%
from kimivl_lab.measure.records import find_record, read_record
from kimivl_lab.plots import floor

path = find_record("graphs", data_path("measurements"), device="cpu-*", dtype="float32")
records, origin = read_record(path)
note = floor.recorded_on(origin, f"{origin['preset']} preset, float32; each capture timed once")
title = "Recorded on a CPU: what a replay costs, and how soon a capture pays"
fig, axes = graph_plots.recorded_replays(records, title=title, subtitle=note)
plt.show()

# %% [markdown]
# *How to read it:* left, below 1 the graph is faster. Full budgets gain little on a CPU, and
# padding soon costs more. Half-full budgets approach twice the time. (November's record is
# older than the cut of the padding into several segments.) Right, the time of one capture divided
# by what one full replay saves. Where the spreads of eager and replay overlap, no saving is
# known.
#
# ## Budgets: rows, and the price of a replay
#
# vLLM captures a few budgets and replays each call in the smallest that holds it. **SGLang**
# 0.5.23, as read, has no graphs for Kimi-VL, and for other models one graph for each exact
# length. So this section is about vLLM and this library.
#
# A replay computes all **rows** of its budget; a row is one merged token.
# [Waste](GLOSSARY.md#waste) is rows computed over real rows. **By hand:** china, coffee and
# chelsea have 368, 330 and 187 tokens. One a call, in budgets of 256 and 512, they take
# $512 + 512 + 256 = 1{,}280$ rows for 885 real ones, 1.45. Powers of two are bad for large images
# that come alone: the processor shrinks them to 1,024 tokens *before* it pads (notebook
# [10](10_images_to_patches.ipynb)), so they have a few more.
#
# **Your guess.** The waste of receipt scans, one a call, in powers of two?

# %%
waste_guess = guess("waste of receipts in powers of two", None, unit="times")

# %% tags=["headline"]
plans = {name: plan_budgets(sizes, max_graphs=8) for name, sizes in workloads.items()}
for name, plan in plans.items():
    print(f"{name:20s} {plan.waste[1]:.3f} in {list(plan.budgets)}")
compare(Comparison(waste_guess, 2, plans["receipt scans"].powers_of_two.waste[1]))
ladders = {name: (plan.powers_of_two.budgets, plan.budgets) for name, plan in plans.items()}
words = ("powers of two", "planned budgets")
title = "Rows computed over real rows, one image a call"
fig, axes = graph_plots.two_staircases(counts, ladders, words, title=title)
plt.show()

# %% [markdown]
# *How to read it:* images from small to large, areas to scale. Hatched: what powers of two
# (dashed) waste beyond the planned budgets. Dark: what the planned budgets waste. Receipts have
# few sizes, just above 1,024 tokens; those of charts are spread, so eight steps follow them less
# closely.
#
# **Rows are not the whole price.** Each of the $\ell$ kernels of a replay takes about 3 µs even
# for a tiny image (an assumption). On an H100 this is $355 \cdot 3$ µs = 1.07 ms, in which it
# could compute 188 rows. So a replay costs its rows and 188 more. An image without a graph costs
# its rows and 376: each launch takes twice as long.
#
# **Your code.** Predicted time of a call, in rows. `budgets` lists one budget for each replay,
# `eager` the tokens of each image without a graph.


# %%
def time_in_rows(budgets, eager, price):
    return ...


calls = {((64,) * 8, (), 188): 8 * (64 + 188), ((512,), (), 188): 512 + 188}
calls[(1104,), (), 31] = 1104 + 31
calls[(), (1200,), 188] = 1200 + 2 * 188
check_function("time in rows", time_in_rows, calls, hint="an eager image pays twice the price")

# %% [markdown]
# Eight thumbnails of 224 x 224 pixels, 64 tokens each, in one call, with three ladders:

# %%
thumbnails = [(224, 224)]
for ladder in ([64], [512], [32]):
    plan = evaluate_budgets(thumbnails, ladder, (8,), max_images=8)
    steps = f"{plan.replays_a_call[8]:.0f} replays or eager runs, {plan.eager[8]:.0%} eager"
    print(ladder, f"waste {plan.waste[8]:.2f}, {steps}, time {plan.time[8]:.2f}")
print("planned:", plan_budgets(thumbnails, (8,), engine="vllm").budgets)

# %% [markdown]
# All three waste nothing. [64] takes eight replays and nearly three times the time of [512]. [32]
# holds no image, so all run eager. **Read four numbers together:** waste, replays a call, share
# of images without a graph, and predicted time (over real rows: 1 would be rows alone).
#
# **Packing.** A rule decides which images of a call share a replay. vLLM sorts them by tokens and
# fills a run up to the largest budget; 0.32 also closes a run where two smaller budgets have
# fewer rows (exercise 1). This library takes the cheapest cut of the sorted images, price
# included. Eight charts:

# %%
from kimivl_lab.datasets import draw_sizes
from kimivl_lab.graphs.packing import pack
from kimivl_lab.planner.vllm import powers_of_two

eight = sorted(image_geometry(*size).tokens for size in draw_sizes("pew_charts", 8, seed=1235))
twos, planned = powers_of_two(most=2048), plan_budgets(workloads["charts"], (8,)).budgets
rules = ("next_fit", "next_fit_deferred", "exact")
packed = {f"{rule}, powers of two": pack(eight, twos, 8, rule, replay_cost=188) for rule in rules}
packed["exact, planned"] = pack(eight, planned, 8, replay_cost=188)
fig, ax = budget_plots.packed_replays(eight, packed, title="Eight charts in one call")
plt.show()

# %% [markdown]
# *How to read it:* a line is a replay, a block an image, hatched its padding; the number at the
# end is the budget. The greedy rules decide at each image without knowing the next one.
#
# **For your own server.** The planner knows Kimi-VL's sizes only, and counts with vLLM's rule and
# graphs. (vLLM captures 5 equal images here, so it rounds a budget up to a multiple of 5.) On the
# command line: `kimivl-lab plan --sizes my_sizes.csv --images-per-call 1,2,4`; `--rates` takes
# records of your GPU instead of the assumptions.

# %%
from kimivl_lab.planner.vllm import vllm_flag

served = plan_budgets(workloads["receipt scans"], (1, 2, 4), engine="vllm")
print(lesson.plan_table(served))
print("time by number of graphs:", {n: round(one, 3) for n, one in served.by_graphs.items()})
print(vllm_flag(served.budgets, served.max_images))

# %% [markdown]
# Four receipts a call take four replays instead of one; that saves more padding than it costs. A
# ninth budget would buy almost nothing (line "by number of graphs").
#
# ## Evidence: what others measured
#
# Developers published times of their servers, one row a benchmark. The rule predicts a range, for
# launches of 6 to 21 µs. Most numbers are of a whole server, so only the direction is compared.
# Many rows do not name GPU, encoder and patches.

# %%
from kimivl_lab.measure.published import graph_cases, not_predictable
from kimivl_lab.plots.published import predicted_against_published

panel = ("predicted: FLOPs during all launches / FLOPs of the call, 6 to 21 us", graph_cases())
note = f"{not_predictable()[0]} more benchmarks do not say enough"
fig, axes = predicted_against_published({"The rule": panel}, title="Encoder graphs", subtitle=note)
plt.show()
print(lesson.published_table())

# %% [markdown]
# *How to read it:* four of six predictions hold: two gains in the shaded corner, and two of no
# gain, where 2 % were published (counted as none). In the misses 3 % and 6 % were published.
# Small gains beyond the limit exist.
#
# Of the ten that the rule cannot predict, five are faster with graphs and five slower; four of
# the slower ones are Step3-VL. Kimi-VL's TTFT fell by 22 ms on an RTX 4090. Its eager path also
# read a value back in every block; 27 at 45 µs are only 1.2 ms, and the rest is not explained
# here. The controls show padding: 64 tokens in a graph of 4,096 take 9 to 13 times as long, 176
# in 256 up to 11 % longer.
#
# ## Appendix: the names in vLLM
#
# In vLLM a manager calls the model through a protocol. `KimiVLEncoder` has the same methods:
# [protocol](https://github.com/vllm-project/vllm/blob/v0.32.0/vllm/model_executor/models/interfaces.py),
# [Kimi-VL](https://github.com/vllm-project/vllm/blob/v0.32.0/vllm/model_executor/models/kimi_vl.py),
# [manager](https://github.com/vllm-project/vllm/blob/v0.32.0/vllm/v1/worker/encoder_cudagraph.py).
# Three differences have an effect, as read in release 0.32:
#
# | | this library | vLLM 0.32 |
# |---|---|---|
# | `max_seqlen` | frozen, a bound in patches | rewritten, set to the budget in tokens |
# | padding | in segments without an image | in no segment |
# | without a graph | if too large, or above `max_waste` | if too large |
#
# ## What to remember
#
# - A graph can win only while FLOPs $< \ell \cdot p\tau$: on faster devices, larger images gain.
# - Frozen: operators, numbers on the host, addresses. All that depends on the images is an input.
# - Test a graph by **values**: partly full, after a larger replay, with NaN in the padding, with
#   equal totals, with the first result still in hand. None of the five faults raises an error.
# - Choose budgets by predicted time: rows, and a price for each replay. Powers of two are bad for
#   images near the processor's limit that come alone.

# %% tags=["result"]
receipts = plans["receipt scans"]
print(f"Receipts: {receipts.powers_of_two.waste[1]:.2f} times the rows in powers of two,")
print(f"{receipts.waste[1]:.2f} in eight planned budgets. By prediction a graph can win up to")
print(f"{limits[1]:,} patches a call on an RTX 4090 and {limits[0]:,} on an H100.")

# %% [markdown]
# ## On Monday
#
# Defaults as read in vLLM 0.32 and in SGLang's documentation of 0.5. `kimivl-lab advise` prints
# these decisions for your server.
#
# | decision | vLLM | SGLang | default |
# |---|---|---|---|
# | graphs on, if most calls lie below your GPU's limit | `--compilation-config '{"cudagraph_mm_encoder": true}'` | `SGLANG_VIT_ENABLE_CUDA_GRAPH=1`, for other models than Kimi-VL | off in both |
# | budgets from your own sizes | `encoder_cudagraph_token_budgets` in the same JSON | none: one graph for each exact length. Round sizes in the client so that few lengths occur | powers of two from 64 |
# | images in a replay | `encoder_cudagraph_max_vision_items_per_batch` | none | largest budget / smallest, at most the smallest |
# | largest default budget | `--max-num-batched-tokens` | none | depends on the GPU: 8,192 on H100, 2,048 on A100, L40S, RTX 4090 |
#
# Merge these keys into your own `--compilation-config`. In this library:
# `encoder.set_graphs(budgets=[256, 512], max_images=8)`.
#
# **Check on your server.** Time the encoder with graphs on and off, with your sizes:
#
# ```bash
# vllm bench mm-processor --model moonshotai/Kimi-VL-A3B-Instruct --trust-remote-code \
#     --dataset-name random-mm --random-mm-bucket-config '{(224, 224, 1): 1.0}' \
#     --compilation-config '...'
# ```
#
# It prints `encoder_forward_secs`. Then run `vllm bench serve` at two request rates for the
# [TTFT](GLOSSARY.md#ttft). If graphs do not win in both, leave them off.

# %% [markdown]
# ## Exercises
#
# Solutions, with the steps:
# [solutions/70_cuda_graphs__SOLUTION.ipynb](solutions/70_cuda_graphs__SOLUTION.ipynb).
#
# ### 1. When vLLM closes a run early
#
# vLLM 0.32 fills a run of sorted images up to the largest budget. With $B(x)$ the smallest budget
# that holds $x$ tokens, the next image begins a new run also if
# $B(\text{run}) + B(\text{image}) < B(\text{run} + \text{image})$ and
# $B(\text{image}) \ge B(\text{run})$. Write this rule: `held` are the tokens of the run. Answer
# True or False.


# %%
def closes_early(held, image, budgets):
    return ...


ladder = (512, 1024, 2048)
runs = [((190,), 1000), ((1000,), 1020), ((90, 100), 300), ((300, 300, 300), 400), ((500,), 600)]
cases = {}
for run, image in runs:
    last = pack([*run, image], ladder, 8, "next_fit_deferred")[-1]
    cases[sum(run), image, ladder] = last.images == (len(run),)
check_function("closes early", closes_early, cases, hint="three budgets, and two conditions")

# %% [markdown]
# ### 2. Three budgets
#
# A service sees five sizes (width x height, count), one image a call. Find three budgets that
# give every image a graph and waste less than 1.021. (By hand first: which two sizes share one
# budget?)

# %%
seen = [(640, 480, 50), (1280, 720, 10), (1024, 768, 25), (4000, 3000, 10), (224, 224, 5)]
answer_2 = None  # three budgets, in merged tokens

plan_2 = evaluate_budgets(seen, answer_2 or [1])
check(
    "three budgets, every image has a graph, waste below 1.021",
    answer_2 and (len(plan_2.budgets) == 3, plan_2.eager[1] == 0, plan_2.waste[1] < 1.021),
    (True, True, True),
    hint="sizes differ in tokens; the smaller of two neighbours pays the difference, by its count",
    near={(True, False, True): "some images have no graph; eager wastes nothing and is slower"},
)

# %% [markdown]
# ### 3. The forgotten input
#
# `is_right(grid)` writes all inputs for the grid 4 x 8, rewrites all but one for `grid`, replays,
# and compares with eager. Find a grid of 32 patches that comes out wrong, and the forgotten
# input. `is_right(grid, name)` rewrites that input too.

# %%
forgetful = lesson.ForgetfulGraph()
print(forgetful.inputs, "4 x 8 is right:", forgetful.is_right((4, 8)))


grid_3, name_3 = None, None  # (h, w) and a name

wrong = grid_3 and not forgetful.is_right(grid_3)
check("a grid that comes out wrong", wrong, True, hint="which grids have 32 patches?")
mended = grid_3 and name_3 and (wrong, forgetful.is_right(grid_3, name_3))
check("this input mends it", mended, (True, True), hint="try the names that are printed above")

# %% [markdown]
# ### 4. Graphs for a service (operator)
#
# A vLLM server on H100s receives thumbnails of 224 x 224 pixels, four a call. Plan A has the
# budget [64], plan B the budget [256], both with four images a replay. Which plan do you ship,
# and by which factor is the other one slower, in predicted time?

# %%
plan_4, factor_4 = None, None  # "A" or "B"; a number above 1

a, b = (evaluate_budgets(thumbnails, [size], (4,), max_images=4).time[4] for size in (64, 256))
check("the plan", plan_4, "A" if a < b else "B", hint="count the replays of a call")
check("the factor", factor_4, max(a, b) / min(a, b), rtol=0.01, near={1: "only rows are equal"})

# %% [markdown]
# ### 5. ★ A test that finds every broken graph
#
# Six encoders use graphs of the same tower, and some are broken like faults 2 to 5. Write
# `is_right(encode, tower)`: it calls `encode(pixels, grids)` as often as you like, compares with
# `tower(pixels, grids)` by `same`, and returns True or False. The encoders take any images of up
# to 64 patches in all.


# %%
def is_right(encode, tower):
    return ...


judged = small_tower()
check_function(
    "encoders judged",
    lambda encoder: is_right(encoder, judged),
    [((one,), one.right) for one in lesson.candidates(judged)],
    hint="several grids with the same total, new pixels each time, small ones after large ones, "
    "and the first result compared again at the end",
)

# %% [markdown]
# ## References
#
# - [CUDA graphs in PyTorch](https://docs.pytorch.org/docs/stable/notes/cuda.html#cuda-graphs).
# - [Encoder graphs in vLLM 0.32](https://docs.vllm.ai/en/v0.32.0/design/cuda_graphs_multimodal/)
#   and [in
#   SGLang](https://docs.sglang.io/docs/advanced_features/cuda_graph_for_multi_modal_encoder).
# - vLLM pull requests [35963](https://github.com/vllm-project/vllm/pull/35963), encoder graphs by
#   budget, and [41992](https://github.com/vllm-project/vllm/pull/41992), Kimi-VL's. All published
#   rows, with their addresses: `data/published/encoder_graphs.csv`.
# - Faults of the same kinds, met in engines: equal totals, [sglang
#   37043](https://github.com/sgl-project/sglang/issues/37043); unwritten padding, [vllm
#   57136](https://github.com/vllm-project/vllm/issues/57136); aliased results, [vllm
#   52115](https://github.com/vllm-project/vllm/issues/52115); budget arithmetic, [vllm
#   38040](https://github.com/vllm-project/vllm/issues/38040).
#
# **Next:** a user waits for the whole server, not for the encoder alone.
#
# [Map of the course](00_start_here.ipynb) · [Glossary](GLOSSARY.md) · [Notation](NOTATION.md) · previous: [60 Host syncs](60_gpu_syncs.ipynb) · next: [80 Time to first token](80_time_to_first_token.ipynb)
