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
#     question: Solutions to the exercises of time to first token
#     minutes_cpu: 1
#     gpu: optional
#     data: published rows of data/published, a record of vLLM in data/measurements
# ---

# %% [markdown]
# # Time to first token: solutions
#
# The guesses, cells and exercises of [80_time_to_first_token](../80_time_to_first_token.ipynb),
# answered with their steps. Try them there first.

# %% tags=["nbval-ignore-output"]
import warnings

warnings.filterwarnings("ignore", message="IProgress not found")  # about a widget that is not used
from kimivl_lab.measure.provenance import device_name, versions

print(device_name("cpu"))
print(versions())

# %%
from kimivl_lab import KimiVLConfig, image_geometry
from kimivl_lab.lessons import time_to_first_token as lesson
from kimivl_lab.lessons.checks import check, check_function
from kimivl_lab.lessons.guesses import Comparison, compare, guess

# %% [markdown]
# ## In the text
#
# **Weights of experts.** A token visits 6 routed experts and 2 shared ones. One expert has
# $3 \cdot 2{,}048 \cdot 1{,}408$ = 8.65 million weights, so eight have 69.2 million.

# %%
million_weights = 8 * 3 * 2048 * 1408 / 1e6
expert = 3 * 2048 * 1408 / 1e6
check("million weights of experts", million_weights, (6 + 2) * expert, rtol=0.01)

# %% [markdown]
# **The guesses.** An image token costs the encoder about 4 GFLOPs and the language model 4.5, and
# text costs the encoder nothing: about 40 % belongs to the encoder. On a CPU the small server
# spends more on its prefill than the FLOPs say, because its experts are many small products. At
# 85 % utilisation the formula gives $1 + 0.85 / 0.3 = 3.8$ services. For the P99: at 8 requests a
# second it is three to four times the mean, so it falls three to four times as far, by 300 ms and
# more. And $373 - 147$ ms are saved at 11 requests a second.

# %%
share_guess = guess("the encoder's share of the FLOPs", 40, unit="%")
stage_guess = guess("longest stage of the small server", "prefill", choices=lesson.STAGES)
load_guess = guess("mean TTFT at 85 % utilisation", 3.8, unit="services")
tail_guess = guess("fall of the P99", 330, unit="ms")
part_guess = guess("part that is faster", "tower", choices=lesson.PART_CHOICES)
saved_guess = guess("saved at 11 requests a second", 200, unit="ms")

# %%
flops = lesson.request_flops(
    KimiVLConfig.preset("kimi-vl-a3b"), [image_geometry(640, 427).patches], text_tokens=75
)
stages = {"preprocess": 10.0, "encode": 30.0, "prefill": 40.0}
saved = [lesson.ttft_with(11, stages, "encode", factor) for factor in (1, 2)]
compare(
    Comparison(share_guess, 100 * flops.encode_share),
    Comparison(load_guess, lesson.mean_ttft(0.85, [1.0])),
    Comparison(saved_guess, saved[0] - saved[1]),
)

# %% [markdown]
# **First tokens.** `free` is when the server has finished all earlier requests. The sum of the
# services alone would forget that the server was idle; arrival and service alone would forget the
# queue.


# %%
def first_tokens(arrivals, services):
    free, done = 0.0, []
    for arrival, service in zip(arrivals, services, strict=True):
        free = max(free, arrival) + service
        done.append(free)
    return done


loads = [([0, 2, 3, 20], [4] * 4), ([0, 1, 9], [1, 5, 2]), ([5, 6], [0.5, 3]), ([0, 0], [3, 1])]
cases = [(load, lesson.first_tokens(*load)) for load in loads]
check_function("first tokens", first_tokens, cases, rtol=1e-9)

# %% [markdown]
# **Mean TTFT.** The wait is $\rho / (2 (1 - \rho))$ services, and one service follows.


# %%
def mean_ttft(rate, service):
    busy = rate * service
    return service + busy / (2 * (1 - busy)) * service


cases = {(rate, 0.1): lesson.mean_ttft(rate, [0.1]) for rate in (1, 5, 8, 9)}
cases[2.0, 0.25] = lesson.mean_ttft(2.0, [0.25])
check_function("mean TTFT", mean_ttft, cases, rtol=1e-6)

# %% [markdown]
# **Latencies.** From the time when a user wanted to send: 0.5, 4, 3.5, 3 and 2.5 s. From the
# sending, all but one would be 0.5 s.

# %%
intended = [0.0, 1.0, 2.0, 3.0, 4.0]
answered = [0.5, 5.0, 5.5, 6.0, 6.5]
latencies = [end - begin for begin, end in zip(intended, answered, strict=True)]
check("latencies", latencies, [0.5, 4.0, 3.5, 3.0, 2.5])

# %% [markdown]
# **A faster encoder.** First the new service, then the formula with it.


# %%
def ttft_ms(rate, stages, factor):
    service = stages["preprocess"] + stages["encode"] / factor + stages["prefill"]
    return 1e3 * mean_ttft(rate, service / 1e3)


asked = [(0.01, 2), (6, 1), (6, 2), (11, 4)]
cases = [((rate, stages, f), lesson.ttft_with(rate, stages, "encode", f)) for rate, f in asked]
check_function("TTFT with a faster encoder", ttft_ms, cases, rtol=1e-3)

# %% [markdown]
# ## Exercises
#
# ### 1. Icons and scans
#
# The mean service is 100 ms, so $\rho = 0.8$. The mean square is $(0.02^2 + 0.18^2) / 2 = 0.0164$
# s². The wait is $8 \cdot 0.0164 / (2 \cdot 0.2) = 0.328$ s. If all took 100 ms it would be 200
# ms: icons wait behind scans, and more requests arrive during a scan than during an icon.

# %%
wait_ms = 1e3 * 8 * (0.02**2 + 0.18**2) / 2 / (2 * (1 - 0.8))
check("mean wait, ms", wait_ms, 1e3 * lesson.mean_wait(8, [0.020, 0.180]), rtol=0.01)

# %% [markdown]
# ### 2. Four connections
#
# Four requests are always on their way, and 20 a second are answered. So each is on its way for
# $4 / 20 = 0.2$ s (Little's law). The users are not four: at 18 a second, $\rho = 0.9$ and the
# wait is 4.5 services. $50 + 225 = 275$ ms. The client with four connections can never see more
# than 200 ms here, whatever the users see.

# %%
client_ms, users_ms = 4 / 20 * 1e3, 50 + 0.9 / (2 * 0.1) * 50
check("latency with four connections, ms", client_ms, 4 / 20 * 1e3, rtol=0.01)
check("TTFT at 18 requests a second, ms", users_ms, 1e3 * lesson.mean_ttft(18, [0.05]), rtol=0.01)

# %% [markdown]
# ### 3. A promise
#
# The wait may be 150 ms, which is 1.5 services: $\rho / (1 - \rho) = 3$, so $\rho = 0.75$ and 7.5
# requests a second. With 85 ms the wait may be 165 ms, 1.94 services:
# $\rho = 3.88 / 4.88 = 0.795$, and $0.795 / 0.085 = 9.36$ requests a second. A service that is 15
# % shorter allows 25 % more users.

# %%
rate_before, rate_after = 0.75 / 0.1, 3.882 / 4.882 / 0.085
check("highest rate before", rate_before, lesson.highest_rate(0.1, 0.25), rtol=0.01)
check("highest rate after", rate_after, lesson.highest_rate(0.085, 0.25), rtol=0.01)

# %% [markdown]
# ### 4. Plan a test (operator)
#
# The rate is $0.8 \cdot 9.6 = 7.68$ a second. One request in a hundred is slower than the P99, so
# 20 of them need 2,000 requests. They take $2{,}000 / 7.68 = 260$ s, 4.3 minutes.
# `kimivl-lab ttft --rate 7.68 --requests 2000`.

# %%
rate_4, requests_4, minutes_4 = 0.8 * 9.6, 2000, 2000 / 7.68 / 60
check("rate", rate_4, 0.8 * 9.6, rtol=0.01)
check("requests", requests_4, 20 * 100)
check("minutes", minutes_4, 20 * 100 / (0.8 * 9.6) / 60, rtol=0.02)

# %% [markdown]
# ### 5. ★ A server that batches
#
# `free` is when the last step ended. The next step begins then, or when the next request arrives.
# It takes all that have arrived by its begin. At a high rate the steps grow and the fixed part is
# shared, so this server does not reach its knee at one over the time of a single request.


# %%
def batched_ttfts(arrivals, fixed, each):
    free, at, found = 0.0, 0, []
    while at < len(arrivals):
        begin = max(free, arrivals[at])
        joined = [arrival for arrival in arrivals[at:] if arrival <= begin]
        free = begin + fixed + each * len(joined)
        found += [free - arrival for arrival in joined]
        at += len(joined)
    return found


loads = [(lesson.poisson(rate, 80, seed=rate).tolist(), 0.08, 0.02) for rate in (5, 20, 40)]
loads += [([0.0, 0.01, 0.02, 5.0], 0.5, 0.25)]
cases = [(load, lesson.batched(*load)) for load in loads]
check_function("TTFTs of a batching server", batched_ttfts, cases, rtol=1e-6)

# %%
print("requests a second   one at a time   batching   (mean TTFT, ms)")
for rate in (5, 9, 20, 40):
    arrivals = lesson.poisson(rate, 2000)
    one = f"{1e3 * lesson.ttfts(arrivals, 0.1).mean():.0f}" if rate < 10 else "no end"
    together = 1e3 * sum(batched_ttfts(arrivals.tolist(), 0.08, 0.02)) / len(arrivals)
    print(f"{rate:17d} {one:>15s} {together:10.0f}")
