"""`kimivl-lab advise`: image sizes and a server become one page of decisions.

Each decision has a reason, the flag of vLLM and of SGLang, the default that it replaces, the predicted gain with its
range, what others published, and the command that checks it. A number that is not counted says what it is predicted
from: rates of a data sheet, or rates measured in a record (`--rates`). Where neither is known, or the predicted range
holds both answers, the decision is "measure".

Test: tests/test_advise.py.
"""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from rich.table import Table

from ..config import MoonViTConfig
from ..measure.published import graph_cases, graph_rows, not_predictable, parallel_cases
from ..moonvit.flops import tower_flops
from ..parallel.gpu_rates import parallel_gain
from ..planner.plan import BudgetPlan, plan_budgets
from ..planner.replay_cost import PUBLISHED_LAUNCH_S, kernels
from ..planner.vllm import READ_IN
from ..planner.workload import busiest_rank, draw_calls
from .output import on_one_line, show
from .plan import flag_or_advice
from .server import Server
from .sources import Sizes, failures_as_messages, read_source

MEASURE = "measure"
_CALLS = 200  # drawn, to say what share of calls the rule for graphs holds for
_CALLS_OF_RANKS = 12  # drawn, for the cost model of ranks
_FLOORS = (2 / 3, 4 / 3)  # kernels in a graph of 2 to 4 us, where the price takes 3
_PATCH_BYTES = 3 * 14 * 14 * 2  # in bfloat16
_VECTOR_BYTES = 2048 * 2  # of one token for the language model, in bfloat16


@dataclass(frozen=True)
class Decision:
    """One row of the page; every field is text."""

    question: str
    answer: str
    because: str
    vllm: str
    sglang: str
    replaces: str
    predicted: str
    published: str
    check: str


def run(arguments: argparse.Namespace) -> int:
    """Prints the page as a table with details, or as Markdown."""
    with failures_as_messages():
        source = read_source(arguments, iter)
        server = Server.of(arguments, known=False)
        decisions = decide(source, server, arguments)
        title = _title(source, server, arguments)
        bench = _serving_benchmark(source, max(arguments.images_per_call))
        if arguments.markdown:
            show(_markdown(title, decisions, bench), plain=True)
        else:
            show(*title, _table(decisions), *_details(decisions), "the benchmark, against the server:", bench)
    return 0


def decide(source: Sizes, server: Server, arguments: argparse.Namespace) -> list[Decision]:
    """The decisions, in the order in which an operator would take them."""
    plan = plan_budgets(
        source.sizes,
        sorted(set(arguments.images_per_call)),
        in_token_limit=arguments.in_token_limit,
        engine="vllm",
        replay_cost=server.replay_cost,
        max_batched_tokens=server.largest_budget,
        ranks=server.ranks,
    )
    graphs = _graphs(source, server, arguments)
    return [
        _ranks(source, server, arguments),
        graphs,
        _budgets(plan, server, graphs.answer),
        _images_a_replay(plan),
        _caches(source),
    ]


def _ranks(source: Sizes, server: Server, arguments: argparse.Namespace) -> Decision:
    cases = parallel_cases()
    right, wrong = (sum(case.verdict == verdict for case in cases) for verdict in ("right", "miss"))
    answer, because, predicted = _answer_for_ranks(source, server, arguments)
    flags = {
        "nothing to decide": ("none", "none"),
        "tensor parallel": ("--mm-encoder-tp-mode weights", "leave --mm-enable-dp-encoder out"),
    }.get(answer, ("--mm-encoder-tp-mode data", "--mm-enable-dp-encoder"))
    return Decision(
        "encoder: data or tensor parallel",
        answer,
        because,
        *flags,
        "vLLM: weights (tensor parallel); SGLang: off (tensor parallel)",
        predicted,
        f"of {len(cases)} published comparisons, all on MI300X, the model's direction was right in {right}, wrong in "
        f"{wrong}, and open in the others ({cases[0].url}); see also vLLM 18368, 23817, 24955, 53735 and SGLang 31212 "
        "in data/published",
        "the benchmark below with and without the flag; between ranks alone: python -m kimivl_lab.bench.parallel "
        "--preset kimi-vl-a3b --dtype bfloat16 (give its record with --rates)",
    )


def _answer_for_ranks(source: Sizes, server: Server, arguments: argparse.Namespace) -> tuple[str, str, str]:
    """(answer, because, predicted) of data or tensor parallel."""
    if server.ranks == 1:
        return "nothing to decide", "one rank encodes everything", "no change"
    fitted = None if server.measured is None else server.measured.ranks
    if fitted is None and server.gpu is None:
        return MEASURE, "the rates of the GPU and its link are not known", "none: measure"
    gains = {}
    for images in sorted(set(arguments.images_per_call)):
        calls = draw_calls(source.workload, images, _CALLS_OF_RANKS, f"advise {images}").tokens
        try:
            ranges = [_gain_of_ranks(server, (4 * call).tolist()) for call in calls]
        except ValueError as error:
            return "data parallel", str(error), "none: tensor parallel cannot run"
        gains[images] = min(low for low, _ in ranges), max(high for _, high in ranges)
    least, most = min(low for low, _ in gains.values()), max(high for _, high in gains.values())
    ranges = ", ".join(f"{low:.2f} to {high:.2f} at {images}" for images, (low, high) in gains.items())
    if fitted is not None:
        at = ", ".join(str(ranks) for ranks in fitted.measured_ranks if ranks > 1)
        because = f"measured at {at} ranks{'' if server.ranks in fitted.measured_ranks else f', not at {server.ranks}'}"
        origin = f"rates measured in {fitted.source}"
    else:
        assert server.gpu is not None
        because = f"{server.gpu.name}, {server.ranks} ranks over {server.gpu.link}; latencies of the link are assumed"
        link = f"data-sheet rates of {server.gpu.name}"
        origin = server.from_rates if link in server.from_rates else f"{server.from_rates}, its link and memory {link}"
    return (
        "data parallel" if least > 1 else "tensor parallel" if most < 1 else MEASURE,
        because,
        f"predicted from {origin}: encoder time of tensor over data parallel, by images a call: {ranges}",
    )


def _gain_of_ranks(server: Server, sizes: list[int]) -> tuple[float, float]:
    """(least, most) predicted time of tensor over data parallel of one call."""
    measured = server.measured
    if measured is not None and measured.ranks is not None:
        tensor, data = (measured.ranks.predict(mode, sizes, server.ranks).seconds for mode in ("tensor", "data"))
        error = 1 + measured.ranks_error
        return tensor / data / error, tensor / data * error
    assert server.gpu is not None
    return parallel_gain(
        MoonViTConfig.preset("kimi-vl-a3b"),
        server.gpu,
        sizes,
        server.ranks,
        launch_s=server.launch_s,
        flops_per_s=server.flops_per_s,
    )


def _graphs(source: Sizes, server: Server, arguments: argparse.Namespace) -> Decision:
    cases = graph_cases()
    right = sum(case.verdict == "right" for case in cases)
    kimi = next(row for row in graph_rows() if row["source"] == "vllm#41992")
    answer, because, predicted = MEASURE, "the rule needs the FLOP/s of the GPU, which are not known", "none: measure"
    if server.flops_per_s is not None:
        tau = server.launch_s
        launches = (tau, max(tau, PUBLISHED_LAUNCH_S))
        least, most = (_share_launch_bound(source, server, arguments, launch_s) for launch_s in launches)
        assumed = server.measured is None or server.measured.launch_s is None
        answer = "on" if least > 0.5 else "off" if most < 0.1 else MEASURE
        because = (
            f"a graph can win while the host needs longer to start {kernels()} kernels one by one than the GPU to "
            f"compute (F < K p tau), with p = {server.flops_per_s / 1e12:,.3g} TFLOP/s and a launch of "
            f"{1e6 * tau:.3g} us ({'assumed' if assumed else 'measured'}) to {1e6 * launches[1]:.3g} us (published for "
            f"an engine)"
        )
        predicted = (
            f"predicted from {server.from_rates}: graphs can be faster for {least:.0%} to {most:.0%} of the calls"
        )
    return Decision(
        "CUDA graphs of the encoder",
        answer,
        because,
        "leave it out" if answer == "off" else "cudagraph_mm_encoder, in the flag of the budgets",
        "none for Kimi-VL's encoder, as read in 0.5.23 (SGLANG_VIT_ENABLE_CUDA_GRAPH=1 is for other encoders)",
        "vLLM: false; SGLang: 0",
        predicted,
        f"Kimi-VL on an {kimi['gpu']}: {kimi['metric']} {kimi['eager']} to {kimi['graph']} ms, image sizes not stated "
        f"({kimi['url']}); the rule was right in {right} of {len(cases)} published cases, "
        f"{not_predictable()[0]} others do not state what it needs; "
        "Kimi-K2.5 and Step3-VL became slower (vLLM 40600, 41714)",
        "the benchmark below with and without the flag; the GPU alone: "
        "python -m kimivl_lab.bench.graphs --preset kimi-vl-a3b --dtype bfloat16 (give its record with --rates)",
    )


def _share_launch_bound(source: Sizes, server: Server, arguments: argparse.Namespace, launch_s: float) -> float:
    """Share of calls, of a rank, whose FLOPs the GPU does in less time than the host needs to start the kernels."""
    assert server.flops_per_s is not None
    config = MoonViTConfig.preset("kimi-vl-a3b")
    most = kernels() * server.flops_per_s * launch_s
    below = []
    for images in arguments.images_per_call:
        drawn = draw_calls(source.workload, images, _CALLS, f"advise {images}")
        calls, _ = busiest_rank(drawn, server.ranks)
        flops = [
            sum(tower_flops(config, [(2, 2 * tokens) for tokens in call if tokens]).values())
            for call in calls.tokens.tolist()
        ]
        below.append(np.mean(np.array(flops) < most))
    return float(np.mean(below))


def _budgets(plan: BudgetPlan, server: Server, graphs: str) -> Decision:
    own = plan.powers_of_two
    assert own is not None
    rows = ", ".join(f"{own.waste[n]:.2f} to {plan.waste[n]:.2f} at {n}" for n in plan.waste)
    where = "by images a call" if server.ranks == 1 else "by images a call, on the busiest rank"
    because = f"rows replayed over real rows fall (counted, {where}): {rows}"
    known = server.flops_per_s is not None or not server.replay_cost_source.startswith("predicted")
    predicted = "none: measure, because the price of a replay on this GPU is not known"
    if known:
        gains = [_time(own, n, floor) / _time(plan, n, floor) for n in plan.time for floor in _FLOORS]
        predicted = (
            f"predicted: graphs {min(gains):.2f} to {max(gains):.2f} times as fast as with vLLM's own budgets (a "
            f"replay costs {server.replay_cost} rows: {server.replay_cost_source})"
        )
    keep = flag_or_advice(plan).startswith("keep")
    return Decision(
        "budgets, where graphs are on" if graphs != "on" else "budgets",
        "keep vLLM's own" if keep else f"{len(plan.budgets)} planned ones",
        because,
        flag_or_advice(plan),
        "it has no budgets: kimivl-lab plan --round-to 224 shows sizes for clients that leave few sequence lengths",
        f"vLLM: {', '.join(map(str, own.budgets))} (--max-num-batched-tokens {server.batched_tokens}, "
        f"{server.batched_tokens_source})",
        predicted,
        "64 tokens forced into 4,096 took 3.3 to 12.7 times as long (vLLM 52229); nobody has published planned budgets",
        "the benchmark below with this flag and with cudagraph_mm_encoder alone",
    )


def _time(plan: BudgetPlan, images: int, floor: float) -> float:
    """Predicted time with a price that is `floor` times the plan's."""
    return plan.waste[images] + floor * (plan.time[images] - plan.waste[images])


def _images_a_replay(plan: BudgetPlan) -> Decision:
    own = plan.powers_of_two
    assert own is not None
    calls = ", ".join(f"{plan.replays_a_call[n]:.2f} at {n}" for n in plan.replays_a_call)
    return Decision(
        "images in one replay",
        f"at most {plan.max_images}",
        "a call should need few replays, and the graph of a budget computes no more than the budget with this number "
        f"(as read in {READ_IN})",
        f"encoder_cudagraph_max_vision_items_per_batch {plan.max_images}, part of the flag of the budgets",
        "none",
        f"vLLM: {own.max_images}, largest budget // smallest, at most the smallest",
        f"counted: replays a call {calls} (by images a call)",
        "Step3-VL with one image a replay: TTFT 178 to 329 ms (https://github.com/vllm-project/vllm/pull/41714)",
        "in vLLM's debug log: hits and misses of encoder graphs",
    )


def _caches(source: Sizes) -> Decision:
    tokens = source.workload.mean
    in_vllm = 4 * 2**30 / (4 * tokens * _PATCH_BYTES)
    in_sglang = 100 * 2**20 / (tokens * _VECTOR_BYTES)
    thousand = 1000 * tokens * _VECTOR_BYTES / 2**20
    return Decision(
        "caches for images that come again",
        MEASURE,
        "what a cache saves is the share of images that come again, which sizes do not tell",
        "--mm-processor-cache-gb 4 holds the patches, not the encoder's result; 0 turns it off where no image repeats",
        f"SGLANG_VLM_CACHE_SIZE_MB={thousand:.0f} holds the result for 1,000 images of your mean size",
        f"vLLM: 4 GiB, about {in_vllm:,.0f} images of your mean size; SGLang: 100 MB, about {in_sglang:,.0f}",
        "none: measure (the sizes above are counted, in bfloat16)",
        "none found",
        "count equal image hashes in a day's log; vLLM logs the hit rate of its multimodal cache",
    )


def _serving_benchmark(source: Sizes, images: int) -> str:
    """A run of vLLM's benchmark with the most frequent size."""
    width, height, *_ = max(source.sizes, key=lambda size: size[2] if len(size) == 3 else 1)
    return (
        "vllm bench serve --backend openai-chat --endpoint /v1/chat/completions --dataset-name random-mm "
        f"--random-mm-base-items-per-request {images} --random-mm-num-mm-items-range-ratio 0 "
        f'--random-mm-limit-mm-per-prompt \'{{"image": {images}, "video": 0}}\' '
        f"--random-mm-bucket-config '{{({height}, {width}, 1): 1.0}}' --num-prompts 200 --request-rate 4"
    )


def _title(source: Sizes, server: Server, arguments: argparse.Namespace) -> list[str]:
    if server.gpu is not None:
        gpu = f"{server.gpu.name} (data sheet: {server.gpu.flops_per_s / 1e12:,.0f} TFLOP/s, {server.gpu.link})"
    elif server.measured is not None:
        gpu = server.measured.device
    else:
        gpu = "GPU not given" if arguments.gpu is None else f"unknown GPU {on_one_line(arguments.gpu)[:40]}"
    calls = ", ".join(map(str, arguments.images_per_call))
    lines = [*source.summary, f"{gpu}, {server.ranks} rank{'s' * (server.ranks > 1)}, {calls} images a call"]
    records = {} if server.measured is None else server.measured.sources
    return lines + [f"rates measured in {source}" for source in records.values()]


def _table(decisions: Sequence[Decision]) -> Table:
    table = Table(
        caption="predicted: by a stated model, from the rates that are named; not measured on your server",
        caption_justify="left",
    )
    for heading in ("decision", "answer", "gain"):
        table.add_column(heading, overflow="fold")  # the name of a record is one long word
    for one in decisions:
        table.add_row(one.question, one.answer, one.predicted)
        table.add_section()
    return table


_FIELDS = ("because", "vllm", "sglang", "replaces", "published", "check")
_NAMES = ("because", "vLLM", "SGLang", "default", "published", "check")


def _details(decisions: Sequence[Decision]) -> list[str]:
    lines = []
    for one in decisions:
        lines.append(f"{one.question}: {one.answer}")
        lines += [f"  {name}: {getattr(one, field)}" for name, field in zip(_NAMES, _FIELDS, strict=True)]
    return lines


def _markdown(title: Sequence[str], decisions: Sequence[Decision], bench: str) -> str:
    lines = ["# Advice for your server", "", *(f"{line}  " for line in title), ""]
    lines += ["| decision | answer | gain |", "|---|---|---|"]
    lines += [f"| {one.question} | {one.answer} | {one.predicted} |" for one in decisions]
    for one in decisions:
        lines += ["", f"## {one.question}: {one.answer}", ""]
        lines += [f"- {name}: {getattr(one, field)}" for name, field in zip(_NAMES, _FIELDS, strict=True)]
    lines += ["", "The benchmark, against the server:", "", "```bash", bench, "```"]
    return "\n".join(
        [*lines, "", "Predicted: by a stated model, from the rates that are named; not measured on your server."]
    )
