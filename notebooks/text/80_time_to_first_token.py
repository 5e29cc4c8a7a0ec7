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
#     question: What does a user wait for until the first token, how does load change it, and how much can a faster encoder save?
#     minutes_cpu: 1
#     gpu: optional
#     data: data/images, published rows of data/published, a record of vLLM in data/measurements
# ---

# %% [markdown]
# # Time to first token: its stages, its load, and a faster encoder
#
# [Map of the course](00_start_here.ipynb) · [Glossary](GLOSSARY.md) · [Notation](NOTATION.md) · previous: [70 CUDA graphs by token budget](70_cuda_graphs.ipynb) · next: [90 Engines side by side](90_engines_side_by_side.md)
#
# Lesson 70 took the last launches out of the encoder. A user waits for the whole server.
#
# ## The question
#
# What does a user wait for until the first token, how does load change it, and how much can a
# faster encoder save?
#
# ## You will be able to
#
# - **predict** the time to first token of a server from its stages and its load;
# - **judge** a load test: does it count the waits, and are there enough requests for its P99?
# - **decide** whether a faster encoder is worth its price on your server.
#
# ## Needs
#
# Lessons [00](00_start_here.ipynb) and [70](70_cuda_graphs.ipynb). About 90 minutes to read and
# solve, one minute to run on a CPU. No GPU and no engine is needed: a small Kimi-VL with random
# weights runs in this notebook, and the times of vLLM come from a record.
#
# ## Versions and machine

# %% tags=["nbval-ignore-output"]
import warnings

warnings.filterwarnings("ignore", message="IProgress not found")  # about a widget that is not used
from kimivl_lab.measure.provenance import device_name, versions

print(device_name("cpu"))
print(versions())

# %%
import matplotlib.pyplot as plt
import numpy as np
import torch

from kimivl_lab import KimiVLConfig, image_geometry, plots
from kimivl_lab.datasets import sample_images
from kimivl_lab.engines.load import new_image
from kimivl_lab.engines.simulation import CallCost, Job, Limits, Stages, simulate
from kimivl_lab.lessons import time_to_first_token as lesson
from kimivl_lab.lessons.checks import check, check_function
from kimivl_lab.lessons.guesses import Comparison, compare, guess
from kimivl_lab.measure.roofline import matmul_peak_tflops
from kimivl_lab.plots import time_to_first_token as draw
from kimivl_lab.plots.floor import recorded_on
from kimivl_lab.plots.style import COMPUTED

plots.use_style()
torch.set_num_threads(1)  # times then depend less on what else runs on this machine

# %% [markdown]
# ## Stages: what a user waits for
#
# [Time to first token](GLOSSARY.md#ttft), TTFT, begins when a user sends a request. It ends when the first word of the answer arrives. In between:
#
# | stage | what happens | lesson |
# |---|---|---|
# | queue | the request waits until the server works on it | this one |
# | preprocess | images become patches, text becomes ids | 10 |
# | encode | patches become image tokens | 00 to 70 |
# | [prefill](GLOSSARY.md#prefill) | the language model reads the whole prompt once | |
# | first token | the most probable id is chosen and becomes text | |
#
# All other lessons made one of these stages faster. This lesson asks what that is worth.
#
# ## Predict: FLOPs of encode and prefill
#
# Lesson 00 counted the encoder: about 4 GFLOPs for each image token of a photograph. For the
# prefill, each weight that a token visits costs one multiplication and one addition: 2 FLOPs. The
# language model of Kimi-VL is a [mixture of experts](GLOSSARY.md#mixture-of-experts). In each of
# 26 layers, a token is sent to 6 of 64 experts, and always to 2 more experts that all tokens
# share. One expert has three matrices of 2,048 x 1,408 weights.
#
# **Your answer.** How many million weights of experts does one token visit in one layer?

# %%
million_weights = None

expert = 3 * 2048 * 1408 / 1e6
check(
    "million weights of experts that a token visits in one layer",
    million_weights,
    (6 + 2) * expert,
    rtol=0.01,
    hint="the matrices of one expert, times the experts that one token visits",
    near={
        66 * expert: "these are all experts of a layer; a token visits few of them",
        6 * expert: "all tokens visit the two shared experts too",
    },
)

# %% [markdown]
# With attention, the first layer and the routers, a token visits 2.24 billion weights in all
# layers. So the prefill costs about 4.5 GFLOPs a token. The photograph `china.jpg` has 1,472
# patches, so 368 image tokens, and the prompt has 75 more tokens of text.
#
# **Your guess.** How much of the FLOPs of encode and prefill together belongs to the encoder?

# %%
share_guess = guess("the encoder's share of the FLOPs", None, unit="%")

# %%
published_model = KimiVLConfig.preset("kimi-vl-a3b")
patches = image_geometry(640, 427).patches
flops = lesson.request_flops(published_model, [patches], text_tokens=75)
print(f"encode {flops.encode / 1e9:,.0f} GFLOPs, prefill {flops.prefill / 1e9:,.0f} GFLOPs")
compare(Comparison(share_guess, predicted=100 * flops.encode_share))

# %% [markdown]
# The encoder has only 0.4 billion weights. But nearly all of them meet each patch, and an image
# token has four patches.
#
# Now a server that runs here: the tower of the [lab preset](GLOSSARY.md#lab-preset) before a
# narrow language model of three layers, with random weights. The prediction divides the FLOPs by
# the speed of a large matrix product on this machine.
#
# **Your guess.** Which stage takes longest here?

# %%
stage_guess = guess("longest stage of the small server", None, choices=lesson.STAGES)

# %% tags=["nbval-ignore-output"]
server = lesson.SmallServer()
photograph = sample_images()["china"]
timed = server.time_stages(photograph, repeats=5)
flops_per_ms = matmul_peak_tflops(torch.float32) * 1e9
work = server.flops((640, 427))
predicted = {"encode": work.encode / flops_per_ms, "prefill": work.prefill / flops_per_ms}
measured = {stage: timing.p50_ms for stage, timing in timed.items()}
print("stage        measured  predicted   ratio   (ms)")
for stage, ms in measured.items():
    told = predicted.get(stage)
    by_flops = f"{told:10.1f} {ms / told:7.2f}" if told else ""
    print(f"{stage:12s} {ms:8.1f} {by_flops}")
longest = max(measured, key=lambda stage: measured[stage])
print("longest:", longest, "- your guess:", stage_guess.value)

# %%
bars = {"predicted from FLOPs": predicted, "measured": measured}
title = "The stages of one request, without any wait"
note = "640 x 427 pixels, one request at a time, one thread"
fig, ax = draw.stacked_stages(bars, title=title, subtitle=plots.measured_on(note=note))
plt.show()

# %% [markdown]
# *How to read it:* a bar is one request, and its parts are the stages in their order. Where a
# measured part is longer than the predicted one, the arithmetic does not explain the time. The
# experts of a layer are many small products, and all their weights are read from memory.
# Preprocessing moves bytes and computes little. The first token itself takes almost no time.
#
# ## Build: a queue before the server
#
# These are times of a request that comes alone. On a busy server, requests wait for each other.
# Let a server work on one request at a time, in the order of arrival, 4 seconds each:
#
# | request | arrives | begins | first token | TTFT |
# |---|---|---|---|---|
# | 1 | 0 | 0 | 4 | 4 |
# | 2 | 2 | 4 | 8 | 6 |
# | 3 | 3 | 8 | 12 | 9 |
# | 4 | 20 | 20 | 24 | 4 |
#
# Request 2 waits until the server is free. The server waits for request 4.
#
# **Your code.** Write the time of each first token. `services[i]` is how long request $i$ takes.


# %%
def first_tokens(arrivals, services):
    """Two lists of seconds -> the list of times of the first tokens."""
    return ...


loads = [([0, 2, 3, 20], [4] * 4), ([0, 1, 9], [1, 5, 2]), ([5, 6], [0.5, 3]), ([0, 0], [3, 1])]
check_function(
    "first tokens",
    first_tokens,
    [(load, lesson.first_tokens(*load)) for load in loads],
    rtol=1e-9,
    hint="a request begins at its arrival or when the server is free, whichever is later",
)

# %% [markdown]
# ## Check equality: queue, formula and simulator
#
# Let $\lambda$ requests arrive in a second, and let each take $t_\text{service}$. The
# [utilisation](GLOSSARY.md#utilisation) is the share of the time in which the server is busy:
#
# $$\rho = \lambda\, t_\text{service}$$
#
# How long does a request wait on average? It waits for two things. With probability $\rho$ the
# server is busy, and then half of a service is left on average: $\rho\, t_\text{service} / 2$.
# And it waits for all that are already in the queue. Each of them stays there for
# $t_\text{queue}$, and $\lambda$ come in a second. So $\lambda\, t_\text{queue}$ are there, and
# each takes $t_\text{service}$, which is $\rho\, t_\text{queue}$ together:
#
# $$t_\text{queue} = \frac{\rho\, t_\text{service}}{2} + \rho\, t_\text{queue} \qquad\Rightarrow\qquad t_\text{queue} = \frac{\rho}{2\,(1 - \rho)}\, t_\text{service}$$
#
# **By hand,** with a service of 100 ms: at $\rho = 0.5$ the wait is 50 ms, at 0.8 it is 200 ms,
# at 0.9 it is 450 ms. The formula holds for [Poisson arrivals](GLOSSARY.md#poisson-arrivals),
# which come from many users who do not know of each other, and for services of one length.
#
# **Your code.** The mean TTFT: service and wait.


# %%
def mean_ttft(rate, service):
    """Requests a second, seconds -> seconds."""
    return ...


cases = {(rate, 0.1): lesson.mean_ttft(rate, [0.1]) for rate in (1, 5, 8, 9)}
cases[2.0, 0.25] = lesson.mean_ttft(2.0, [0.25])
hint = "the utilisation first; then the wait, and the service that follows it"
check_function("mean TTFT", mean_ttft, cases, rtol=1e-6, hint=hint)

# %% [markdown]
# Three ways to the same number: the queue of 500,000 drawn arrivals, the formula, and the
# library's simulator of an engine. The simulator knows stages, batches and budgets. With one
# request at a time, it must give exactly this queue.

# %%
print("utilisation   formula   500,000 requests   (TTFT in services)")
for busy in (0.2, 0.5, 0.8, 0.9):
    times = lesson.ttfts(lesson.poisson(busy, 500_000), service=1.0)
    print(f"{busy:11.0%} {lesson.mean_ttft(busy, [1.0]):9.2f} {times.mean():18.2f}")

arrivals = lesson.poisson(8, 300)
jobs = [Job(arrival) for arrival in arrivals]
one_at_a_time = simulate(jobs, Stages(CallCost(), CallCost(fixed_s=0.1)), Limits(requests=1))
equal = np.allclose(one_at_a_time.ttft, lesson.ttfts(arrivals, 0.1))
print("simulator with one request at a time equals the queue:", equal)

# %% [markdown]
# ## Measure: latency against load
#
# Now requests arrive at the small server: new images of 224 x 224 pixels. The test is an [open
# loop](GLOSSARY.md#open-loop): all arrivals are fixed before it starts. This is the whole test,
# and the simulation gets the same arrivals:
#
# ```python
# for number, arrival in enumerate(arrivals):
#     sleep until arrival, if that is still to come
#     sent.append(now)
#     serve(number)
#     answered.append(now)
# ```
#
# **Your guess.** The server is busy 85 % of the time. What is the mean TTFT, in services (1:
# nobody waits)?

# %%
load_guess = guess("mean TTFT at 85 % utilisation", None, unit="services")

# %% tags=["nbval-ignore-output"]
chance = np.random.default_rng(0)
small = [new_image(224, 224, chance) for _ in range(30)]
live = {}
print("utilisation   a service   mean TTFT: simulated   measured")
for busy in (0.4, 0.65, 0.85):
    alone = server.time_stages(small[0], repeats=5)  # again: machines change their speed
    service = sum(timing.p50_ms for timing in alone.values()) / 1e3
    arrivals = lesson.poisson(busy / service, len(small), seed=1)
    run = lesson.open_loop(lambda number: server.answer(small[number]), arrivals)
    live[busy] = {"mean": run.latency.mean() / service, "median": np.median(run.latency) / service}
    expected = lesson.ttfts(arrivals, service).mean()
    times = (f"{1e3 * one:.0f} ms" for one in (service, expected, run.latency.mean()))
    print("{:11.0%} {:>11s} {:>23s} {:>10s}".format(busy, *times))
compare(Comparison(load_guess, lesson.mean_ttft(0.85, [1.0]), live[0.85]["mean"]))

# %% tags=["headline"]
loads = [0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.85, 0.9, 0.93, 0.96]
simulated = lesson.curves(loads)
title = "The wait grows as 1 / (1 - utilisation)"
note = plots.measured_on(note="lines: 500,000 requests, marks: 30 requests")
fig, ax = draw.knee(loads, simulated, live, title=title, subtitle=note)
plt.show()

# %% [markdown]
# *How to read it:* lines are simulated, marks are measured here with few requests, so they
# scatter. Up to about half of the capacity, the mean TTFT hardly grows. Above 80 % it grows
# steeply; this bend is called the knee. The utilisation is yours to choose: it is the rate of
# your users over what your servers can do.
#
# ## Faults: a test that leaves out its waits
#
# A simple client sends a request, waits for the answer, and sends the next one. This is a [closed
# loop](GLOSSARY.md#closed-loop). When the server is slow, this client sends less, and nothing
# queues. Some clients have fixed arrivals, but few connections, and count from the moment of
# sending. Both leave out the waits that real users have. This fault is called [coordinated
# omission](GLOSSARY.md#coordinated-omission): client and server together omit the slow part.
#
# **Your answer.** A client with one connection wrote down three times of each request, in
# seconds. What is the latency of each, as a user would see it?

# %%
intended = [0.0, 1.0, 2.0, 3.0, 4.0]  # when a user wanted to send it
sent = [0.0, 1.0, 5.0, 5.5, 6.0]  # when the client sent it
answered = [0.5, 5.0, 5.5, 6.0, 6.5]  # when the first token arrived
latencies = None  # a list of five numbers

from_send = tuple(end - begin for begin, end in zip(sent, answered, strict=True))
check(
    "latencies",
    latencies,
    [end - begin for begin, end in zip(intended, answered, strict=True)],
    hint="the clock of a user starts before the client is ready",
    near={from_send: "it counts from the sending, and leaves out the wait before it"},
)

# %% [markdown]
# One of five requests was slow in itself, and three more waited for it. Now the same on the small
# server, at half of its capacity. Request 10 brings a scanned page, which takes many times as
# long as the others.

# %% tags=["nbval-ignore-output"]
page = sample_images()["book_page_scan"]
arrivals = lesson.poisson(0.5 / service, 30, seed=2)
stall = lesson.open_loop(lambda i: server.answer(page if i == 9 else small[i]), arrivals)
ways = {"from the sending": stall.answered - stall.sent, "from the arrival": stall.latency}
for way, seconds in ways.items():
    words = ", ".join(f"{name} {ms:,.0f}" for name, ms in lesson.statistics_ms(seconds).items())
    slow = int((seconds > 3 * service).sum())
    print(f"{way}: {words} ms; {slow} of 30 took more than three services")

# %%
title = "One slow request, and all that wait behind it"
note = plots.measured_on(note="one request at a time")
times = (stall.intended, stall.sent, stall.answered)
fig, ax = draw.request_by_request(*times, title=title, subtitle=note)
plt.show()

# %% [markdown]
# *How to read it:* a line is a request. It should arrive at the tick. It waits along the orange
# bar and is served along the dark bar. A client that counts from the sending reports the dark
# bars only. `kimivl-lab ttft` counts from the tick. vLLM's `vllm bench serve`, as read in release
# 0.32, counts from the sending. Without `--max-concurrency` it sends at the tick. With it,
# requests wait in the client, and this wait is reported apart, as `client_queue_time`.
#
# ## Tail: why the P99 moves more than the mean
#
# [P99](GLOSSARY.md#p99) is the time that 99 % of the requests do not exceed. **By hand:** 8 requests a second, and a service of 100 ms becomes 90 ms, 10 % faster. The utilisation falls from 0.8 to 0.72. The mean TTFT was $100 + 200 = 300$ ms and becomes $90 + 116 = 206$ ms: 31 % less. A request with nine others before it saves ten times 10 ms, and long queues form less often.
#
# **Your guess.** The mean falls by 94 ms. By how many ms does the P99 fall?

# %%
tail_guess = guess("fall of the P99", None, unit="ms")

# %%
arrivals = lesson.poisson(8, 100_000)
both = {f"service {ms} ms": 1e3 * lesson.ttfts(arrivals, ms / 1e3) for ms in (100, 90)}
stats = {name: lesson.statistics_ms(times / 1e3) for name, times in both.items()}
before, after = stats.values()
for name in before:
    ratio = after[name] / before[name]
    print(f"{name:7s} {before[name]:7,.0f} ms {after[name]:7,.0f} ms {ratio:7.2f}")
compare(Comparison(tail_guess, predicted=before["P99"] - after["P99"]))
title = "A service that is 10 % shorter, at 8 requests a second"
fig, ax = draw.tails(both, stats, title=title, subtitle=f"100,000 requests  ·  {COMPUTED}")
plt.show()

# %% [markdown]
# *How to read it:* at each time, the height is the share of requests that take longer. The
# distance between the lines grows to the right: the slowest requests gain most. In ms, the P99
# falls several times as far as the mean. In percent, both fall about equally, because nearly all
# of both is waiting.
#
# **How sure is a P99?** Of 200 requests, only two are slower than it. So it depends on how many
# users happened to come together. We test the same two servers many times with 200 requests each:
# once with other arrivals for each server, once with the same arrivals for both.

# %%
truth = {name: after[name] / before[name] for name in before}
found = {
    "own arrivals": lesson.ratios(8, 0.1, 0.09, requests=200, runs=300, same_arrivals=False),
    "the same arrivals": lesson.ratios(8, 0.1, 0.09, requests=200, runs=300, same_arrivals=True),
}
wrong = {way: float((one["P99"] > 1).mean()) for way, one in found.items()}
for way, share in wrong.items():
    print(f"{way}: {share:.0%} of the tests call the faster server slower, by P99")
title = "The same arrivals for both servers, or luck decides"
note = f"300 tests of 200 requests, 5 to 95 % of them  ·  {COMPUTED}"
fig, ax = draw.luck(found, truth, title=title, subtitle=note)
plt.show()

# %% [markdown]
# *How to read it:* a line covers what 90 % of the tests find. With own arrivals for each server,
# about one test in five says by its P99 that the faster server is slower. With the same arrivals,
# no test does. So fix the seed, and compare request by request: `kimivl-lab ttft --compare`.
# (Short tests begin with an empty queue, so they find a smaller gain than long ones.)
#
# ## Engine: vLLM with and without our parts
#
# A real engine does more than our queue. It takes several requests into one step, and another
# process prepares the images. The record is of vLLM's CPU build with a small random Kimi-VL, in
# three variants: vLLM's own encoder (`vllm`), our `metadata` part, and our whole `tower`. All
# three got the same arrivals and pixels, in turn, at 20, 50 and 80 % of the capacity. "Published"
# has two images a request, as in the next section; receipts are scans. Before the loads, all
# answers were equal in float32. `python -m kimivl_lab.bench.engine` makes this record.
#
# **Your guess.** Two images a request, 80 % of the capacity: which part is faster, so that the
# difference is shown?

# %%
part_guess = guess("part that is faster", None, choices=lesson.PART_CHOICES)

# %%
rows, origin = lesson.engine_record()
print(lesson.engine_table(rows))
print("faster at 80 %, two images:", lesson.faster_parts(rows), "- your guess:", part_guess.value)

# %%
title = "vLLM's mean TTFT over the load: measured, and simulated from its stages"
note = recorded_on(origin, "marks: mean and 95 % interval")
fig, axes = draw.engine_knees(lesson.engine_knees(rows), title=title, subtitle=note)
plt.show()

# %% [markdown]
# *How to read it:* marks are measured. Lines are the simulator's. It knows the stage times of
# requests that came alone, and nothing of the loads. Marks of one load stand side by side. A part
# is shown to be faster only if the interval of its ratio in the table does not contain 1, and the
# ratio is 3 % or more below it.
#
# **Simulation against measurement.** The last column of the table is the simulated mean over the
# measured one, for the same arrivals. Where it is close to 1, the simulator may be asked what was
# not measured: other rates, more ranks, other budgets. Where it is not, the server does something
# that is not in the model: on two cores, for example, images are prepared more slowly while a
# step runs.
#
# ## Evidence: what was published
#
# vLLM's pull request 41992 gave Kimi-VL encoder graphs, and states the TTFT before and after: an
# RTX 4090, 200 prompts, 8 a second, two images each. Two models of it:
#
# - **One queue.** The services are chosen so that both means are as published. Median and P99 are
#   predicted.
# - **The simulator.** The encoder's time comes from FLOPs, launches and the GPU's data sheet. The
#   language model's time is chosen so that the eager mean is as published. The sizes of the
#   images are not stated, so it gives ranges for 224 to 448 pixels and for launches of 6 to 21
#   µs.

# %%
print(lesson.published_table(rows))

# %% [markdown]
# *How to read it:* the queue is too simple, and its medians are too low. The simulator puts
# several requests into a step, and comes close to the published median and P99 of the eager side.
# With graphs, the published P99 is lower than both models expect, and the published mean is lower
# than the simulator's. So launches explain a part of the gain. The rest is not explained here:
# the change also removed one read in each of 27 blocks, and one run of 200 requests says little
# about a P99.
#
# Do not compare the published numbers with our record:
#
# | | published | our record |
# |---|---|---|
# | machine | RTX 4090 | a CPU |
# | model | Kimi-VL-A3B, bfloat16 | a small one, random weights, float32 |
# | what changed | eager to graphs; 27 reads of the longest image went away | the encoder's metadata, or its whole tower; no graphs |
# | the encoder waits for | launches and reads, in part | arithmetic |
# | repeated | not stated | in turn, with intervals |
#
# ## Amdahl: where the next millisecond is
#
# An encoder that is $f$ times as fast shortens one stage. **By hand:** preprocess 10 ms, encode
# 30 ms and prefill 40 ms are 80 ms. With $f = 2$ they are 65 ms, 19 % less. Even an encoder that
# takes no time leaves 50 ms. This limit is [Amdahl's law](GLOSSARY.md#amdahls-law).
#
# Under load, the wait shrinks too. At 6 requests a second, $\rho$ falls from 0.48 to 0.39, and
# the mean TTFT from 117 to 86 ms: 15 ms less work gives 31 ms less TTFT.
#
# **Your guess.** How many ms of TTFT do these 15 ms save at 11 requests a second?

# %%
saved_guess = guess("saved at 11 requests a second", None, unit="ms")

# %% [markdown]
# **Your code.** The mean TTFT if the encoder is `factor` times as fast.


# %%
def ttft_ms(rate, stages, factor):
    """Requests a second, stage -> ms, how many times as fast the encoder is -> ms."""
    return ...


stages = {"preprocess": 10.0, "encode": 30.0, "prefill": 40.0}
asked = [(0.01, 2), (6, 1), (6, 2), (11, 4)]
cases = [((rate, stages, f), lesson.ttft_with(rate, stages, "encode", f)) for rate, f in asked]
hint = "a new service gives a new utilisation and a new wait"
check_function("TTFT with a faster encoder", ttft_ms, cases, rtol=1e-3, hint=hint)

# %%
factors = (1, 2, 4, 8, float("inf"))
lines = {}
for rate in (0.01, 6, 9, 11):
    name = f"{rate} requests a second" if rate >= 1 else "one request at a time"
    lines[name] = [lesson.ttft_with(rate, stages, "encode", factor) for factor in factors]
    print(f"{name:24s}", "".join(f"{value:7.0f}" for value in lines[name]), "ms")
saved = lines["11 requests a second"][0] - lines["11 requests a second"][1]
compare(Comparison(saved_guess, predicted=saved))
title = "A faster encoder saves most where requests wait"
note = f"preprocess 10, encode 30, prefill 40 ms  ·  {COMPUTED}"
fig, ax = draw.faster_encoder(factors, lines, title=title, subtitle=note)
plt.show()

# %% [markdown]
# *How to read it:* a line is a load. Most of the gain comes from the first factor of two; what is
# left belongs to the other stages. The nearer the server is to its capacity, the more a
# millisecond is worth. But then so is a second server: it halves the rate.
#
# The queue counts every stage as work of the one server. In vLLM, preprocessing runs in another
# process. It adds to each TTFT, and requests do not queue for the encoder behind it. So find out
# first where the time goes.
#
# ## What to remember
#
# - TTFT is queue, preprocess, encode and prefill. For the published model and a photograph, the
#   encoder has four tenths of the FLOPs of encode and prefill.
# - With one request at a time and Poisson arrivals, the wait is $\rho / (2 (1 - \rho))$ services:
#   half a service at 50 %, 4.5 at 90 %.
# - Latency counts from the arrival that was intended. An open loop and the same seed for both
#   servers, or the result is luck.
# - The P99 falls by more ms than the mean. A P99 needs 1,000 requests or more.
# - A faster encoder saves its share when the server is idle, and several times that near the
#   knee.

# %% tags=["result"]
six, eleven = (lines[f"{rate} requests a second"] for rate in (6, 11))
print("An encoder that takes 15 of 80 ms less saves 15 ms of TTFT on an idle server,")
print(f"{six[0] - six[1]:.0f} ms at 6 requests a second and {eleven[0] - eleven[1]:.0f} ms at 11.")
print(f"With own arrivals for each server, {wrong['own arrivals']:.0%} of the tests with 200")
print("requests call the faster server slower, by P99.")

# %% [markdown]
# ## On Monday
#
# Flags and defaults as read in vLLM 0.32, and in SGLang's source and documentation of 0.5.
#
# | decision | `kimivl-lab ttft` | `vllm bench serve` | SGLang's `bench_serving` |
# |---|---|---|---|
# | the rate of your busiest hour | `--rate`, default 1 | `--request-rate`, default all at once: TTFT is then queueing | `--request-rate`, default all at once |
# | the same arrivals for A and B | `--seed`, default 0 | `--seed`, default 0 | `--seed`, default 1 |
# | enough requests for a P99 | `--requests 1000`, default 100 | `--num-prompts`, default 1,000 | `--num-prompts`, default 1,000 |
# | no wait is left out | always | no `--max-concurrency` | no `--max-concurrency` |
# | your own image sizes, new pixels each time | `--sizes my_sizes.csv` | `--dataset-name random-mm` | `--dataset-name image` |
#
# **Check on your server.** First at a low rate, which gives the time without queue. Then before
# and after a change:
#
# ```bash
# kimivl-lab ttft --endpoint http://127.0.0.1:8000 --sizes my_sizes.csv \
#     --images-per-request 2 --rate 4 --requests 1000 --out before
# # restart the server with the new flag, and the same again with --out after
# kimivl-lab ttft --compare before after
# ```
#
# It says whether the difference is shown, for each statistic. If the answers a second stay below
# the rate, the server is past its knee: lower the rate. `vllm bench mm-processor` (lesson
# [70](70_cuda_graphs.ipynb)) prints the encoder's own time; over the TTFT at a low rate, this is
# the share that a faster encoder can save.

# %% [markdown]
# ## Exercises
#
# Solutions, with the steps:
# [solutions/80_time_to_first_token__SOLUTION.ipynb](solutions/80_time_to_first_token__SOLUTION.ipynb).
#
# ### 1. Icons and scans
#
# If services differ, the wait is $\lambda\,\overline{t^2} / (2 (1 - \rho))$, with the mean of the
# *squared* services (formula of Pollaczek and Khinchine). Half of the requests take 20 ms and
# half take 180 ms; 8 arrive in a second. How long is the mean wait, in ms?

# %%
wait_ms = None

check(
    "mean wait, ms",
    wait_ms,
    1e3 * lesson.mean_wait(8, [0.020, 0.180]),
    rtol=0.01,
    hint="square each service first, then take the mean",
    near={1e3 * lesson.mean_wait(8, [0.1]): "so it is if all take 100 ms; mixed sizes wait longer"},
)

# %% [markdown]
# ### 2. Four connections
#
# A client has four connections. Each sends its next request as soon as it has an answer. Together
# they get 20 answers a second. What is the mean latency in ms? The server works on one request at
# a time, so a service takes 50 ms. What is the mean TTFT of users who send 18 requests a second?

# %%
client_ms, users_ms = None, None

near = {50: "this is the time between two answers; four requests are always on their way"}
check("latency with four connections, ms", client_ms, 4 / 20 * 1e3, rtol=0.01, near=near)
check(
    "TTFT at 18 requests a second, ms",
    users_ms,
    1e3 * lesson.mean_ttft(18, [0.05]),
    rtol=0.01,
    hint="the utilisation is 0.9",
    near={225: "this is the wait alone"},
)

# %% [markdown]
# ### 3. A promise
#
# A service takes 100 ms, and the mean TTFT must stay below 250 ms. What is the highest rate? An
# encoder that is twice as fast makes the service 85 ms. What is the highest rate then?

# %%
rate_before, rate_after = None, None

hint = "set the formula to 250 ms and find the utilisation"
right = lesson.highest_rate(0.1, 0.25)
check("highest rate before", rate_before, right, rtol=0.01, hint=hint, near={10: "the capacity"})
check(
    "highest rate after",
    rate_after,
    lesson.highest_rate(0.085, 0.25),
    rtol=0.01,
    hint="the wait may now be 165 ms",
    near={right / 0.85: "a shorter service also allows more utilisation"},
)

# %% [markdown]
# ### 4. Plan a test (operator)
#
# Your server answers 9.6 requests a second at most. You want its P99 at 0.8 of that, with 20
# requests slower than the P99. Which rate, how many requests, how many minutes?

# %%
rate_4, requests_4, minutes_4 = None, None, None

rate_right, requests_right = 0.8 * 9.6, 20 * 100
check("rate", rate_4, rate_right, rtol=0.01)
check("requests", requests_4, requests_right, near={200: "then two are slower than the P99"})
check("minutes", minutes_4, requests_right / rate_right / 60, rtol=0.02)

# %% [markdown]
# ### 5. ★ A server that batches
#
# An engine takes all requests that wait into one step. A step with `count` requests takes
# `fixed + each * count` seconds, and all of them get their first token at its end. A request that
# arrives during a step waits for the next one. Write the TTFTs. The check compares with the
# simulator.


# %%
def batched_ttfts(arrivals, fixed, each):
    """Arrivals in seconds, in order -> the list of times to first token."""
    return ...


loads = [(lesson.poisson(rate, 80, seed=rate).tolist(), 0.08, 0.02) for rate in (5, 20, 40)]
loads += [([0.0, 0.01, 0.02, 5.0], 0.5, 0.25)]
cases = [(load, lesson.batched(*load)) for load in loads]
hint = "a step begins when the server is free and someone waits; it takes all that have arrived"
check_function("TTFTs of a batching server", batched_ttfts, cases, rtol=1e-6, hint=hint)

# %% [markdown]
# ## References
#
# - vLLM's pull request [41992](https://github.com/vllm-project/vllm/pull/41992), encoder graphs
#   for Kimi-VL; all published rows are in `data/published/encoder_graphs.csv`.
# - [vllm bench serve](https://docs.vllm.ai/en/v0.32.0/cli/bench/serve/) and SGLang's
#   [bench_serving](https://docs.sglang.io/developer_guide/bench_serving.html).
# - G. Tene, [How NOT to measure
#   latency](https://www.infoq.com/presentations/latency-response-time/), the talk that named
#   coordinated omission.
# - M. Harchol-Balter, *Performance Modeling and Design of Computer Systems*, Cambridge University
#   Press, 2013: queues, the formula of Pollaczek and Khinchine, open and closed loops.
#
# **Next:** what the engines do, feature by feature.
#
# [Map of the course](00_start_here.ipynb) · [Glossary](GLOSSARY.md) · [Notation](NOTATION.md) · previous: [70 CUDA graphs by token budget](70_cuda_graphs.ipynb) · next: [90 Engines side by side](90_engines_side_by_side.md)
