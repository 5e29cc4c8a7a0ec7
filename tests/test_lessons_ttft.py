"""What notebook 80 uses: FLOPs of a prefill, a small server, queues against formulas, and tables of records."""

import re

import numpy as np
import pytest
import torch
from PIL import Image

from kimivl_lab import KimiVLConfig
from kimivl_lab.engines.simulation import CallCost, Job, Limits, Stages, simulate
from kimivl_lab.kimi_vl.model import KimiVLForConditionalGeneration
from kimivl_lab.lessons import time_to_first_token as lesson


@pytest.fixture(scope="module")
def server():
    return lesson.SmallServer()


@pytest.mark.parametrize("name", ["kimi-vl-a3b", "tiny"])
def test_a_token_visits_all_weights_of_the_layers_but_the_experts_it_is_not_sent_to(name):
    config = KimiVLConfig.preset(name)
    with torch.device("meta"):
        layers = KimiVLForConditionalGeneration(config).language_model.model.layers
    held = sum(weight.numel() for weight in layers.parameters() if weight.dim() > 1)
    text = config.text_config
    others = text.n_routed_experts - text.num_experts_per_tok
    sparse = text.num_hidden_layers - text.first_k_dense_replace
    one = 3 * text.hidden_size * text.moe_intermediate_size
    assert lesson.weights_of_a_token(text) == held - sparse * others * one


def test_flops_of_the_prefill_grow_with_the_prompt_and_those_of_the_encoder_do_not():
    config = KimiVLConfig.preset("tiny")
    short, long = (lesson.request_flops(config, [64], text_tokens) for text_tokens in (8, 9))
    assert short.encode == long.encode and 0 < short.encode_share < 1
    text = config.text_config
    pairs = 2 * text.num_hidden_layers * text.num_attention_heads * (128 + 64 + 128) * (25**2 - 24**2)
    assert long.prefill - short.prefill == 2 * lesson.weights_of_a_token(text) + pairs


def test_the_small_server_answers_as_generate_does(server):
    image = Image.new("RGB", (56, 84), "red")
    with torch.no_grad():
        inputs = server.prompt(image)
        (first,) = server.model.generate(**inputs, max_new_tokens=1, do_sample=False)[0, inputs["input_ids"].shape[1] :]
        features = server.model.get_image_features(inputs["pixel_values"], inputs["image_grid_hws"])
        logits = server.model(inputs["input_ids"], image_embeds=features, logits_to_keep=1).logits
    assert logits.shape[1] == 1 and logits[0, -1].argmax() == first
    answer = server.answer(image)
    assert list(answer) == list(lesson.STAGES) and min(answer.values()) > 0
    tokens = inputs["input_ids"].numel() - 6
    assert server.flops((56, 84)) == lesson.request_flops(server.model.config, [24], tokens)


def test_requests_wait_for_each_other_and_the_server_for_requests():
    assert lesson.first_tokens([0, 2, 3, 20], [4] * 4) == [4, 8, 12, 24]
    assert lesson.first_tokens([0, 1, 9], [1, 5, 2]) == [1, 6, 11]


@pytest.mark.parametrize("rate", [1, 8, 30])
def test_the_fast_queue_is_the_plain_one_and_the_simulators(rate):
    arrivals = lesson.poisson(rate, 300, seed=rate)
    plain = np.array(lesson.first_tokens(list(arrivals), [0.1] * 300)) - arrivals
    one_at_a_time = simulate([Job(at) for at in arrivals], Stages(CallCost(), CallCost(0.1)), Limits(requests=1))
    assert np.allclose(lesson.ttfts(arrivals, 0.1), plain) and np.allclose(plain, one_at_a_time.ttft)
    assert arrivals[0] == 0 and abs(arrivals[-1] / (300 / rate) - 1) < 0.2


@pytest.mark.parametrize("services", [[1.0], [0.2, 1.8]])
def test_the_mean_wait_is_that_of_many_requests(services):
    chance = np.random.default_rng(1)
    arrivals, drawn = lesson.poisson(0.7, 200_000, seed=1), chance.choice(services, 200_000)
    waits = np.array(lesson.first_tokens(arrivals.tolist(), drawn.tolist())) - arrivals - drawn
    assert waits.mean() == pytest.approx(lesson.mean_wait(0.7, services), rel=0.05)


def test_a_server_without_rest_is_refused():
    with pytest.raises(ValueError, match="below 1, got 1.2"):
        lesson.mean_wait(12, [0.1])


def test_services_and_rates_are_found_again():
    assert lesson.service_of(8, lesson.mean_ttft(8, [0.07])) == pytest.approx(0.07)
    assert lesson.mean_ttft(lesson.highest_rate(0.085, 0.25), [0.085]) == pytest.approx(0.25)
    assert lesson.ttft_with(0, {"encode": 30.0, "prefill": 40.0}, "encode", 2) == pytest.approx(55)


def test_an_open_loop_sends_late_requests_as_soon_as_it_can_and_keeps_their_arrival(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(lesson.time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(lesson.time, "sleep", lambda seconds: now.__setitem__(0, now[0] + seconds))
    run = lesson.open_loop(lambda number: now.__setitem__(0, now[0] + 4), [0.0, 2.0, 3.0, 20.0])
    assert run.sent.tolist() == [0, 4, 8, 20] and run.answered.tolist() == [4, 8, 12, 24]
    assert run.latency.tolist() == [4, 6, 9, 4]


def test_with_the_same_arrivals_the_shorter_service_is_never_slower():
    same, own = (lesson.ratios(8, 0.1, 0.09, 60, 40, same_arrivals=one)["P99"] for one in (True, False))
    assert (same <= 1).all() and (own > 1).any()


def test_a_step_takes_all_that_wait():
    assert lesson.batched([0.0, 0.01, 0.02, 5.0], 0.5, 0.25) == pytest.approx([0.75, 1.74, 1.73, 0.75])


def load(variant, ms, case="published high", **more):
    times = {"ttft_ms": ms, "ttft_low_ms": 0.9 * ms, "ttft_high_ms": 1.1 * ms, "ttft_ms_p50": ms, "ttft_ms_p99": 3 * ms}
    row = {
        "case": case,
        "variant": variant,
        "phase": "load",
        "workload": "published",
        "load_share": 0.8,
        "policy": None,
    }
    ratios = {"ttft_ratio": None, "ttft_low_ratio": None, "ttft_high_ratio": None, "error_ratio": None}
    return {**row, **times, **ratios, "encoder_ms": 20.0, "note": None, **more}


TOLD = {"ttft_ratio": 0.9, "ttft_low_ratio": 0.85, "ttft_high_ratio": 0.95}
ROWS = [
    load("vllm", 100.0),
    load("metadata", 99.0, note="no difference shown", **(TOLD | {"ttft_ratio": 0.99})),
    load("tower", 90.0, note="tower is faster", **TOLD),
    load("simulated", 80.0, phase="simulation", policy="tower", error_ratio=0.89),
    load("simulated", 50.0, "published at 0.1 of capacity", phase="prediction", policy="tower", load_share=0.1),
    load("simulated", 60.0, "published with 2 encoders", phase="prediction", policy="tower"),
    load("simulated eager", 133.0, "224x224", phase="published"),
    load("simulated graph", 110.0, "224x224", phase="published"),
    load("simulated graph", 120.0, "448x448", phase="published"),
]


def test_the_record_of_an_engine_is_told_with_its_verdicts_and_the_simulators_error():
    table = lesson.engine_table(ROWS).splitlines()
    assert len(table) == 4 and "0.900 (0.850 to 0.950)" in table[3] and table[3].split()[-1] == "0.89"
    assert lesson.faster_parts(ROWS) == "tower" and lesson.faster_parts(ROWS[:2]) == "none"
    knees = lesson.engine_knees(ROWS)["published"]
    assert knees["tower"].predicted == {"load_share": [0.1], "ttft_ms": [50.0]}
    assert knees["tower"].measured["ttft_ms"] == [90.0] and knees["vllm"].predicted["ttft_ms"] == []


def test_the_published_times_stand_beside_both_models():
    mean, median, p99 = lesson.published_table(ROWS).splitlines()[2:]
    assert mean.split(maxsplit=4) == ["mean", "133", "111", "0.84", mean[36:].strip()]
    assert re.fullmatch(r"as published +as published +133 +110 to 120", mean[36:].strip())
    assert median.split()[:4] == ["median", "131", "103", "0.78"] and p99.split()[:4] == ["P99", "290", "193", "0.67"]
    low, high = (float(word) for word in p99.split()[4:7:2])
    assert low < 290 < high


def test_the_small_server_hides_progress_bars_only_while_it_loads(server, capfd):
    assert lesson.logging.is_progress_bar_enabled()
    assert server.model.config.vision_config.hidden_size == KimiVLConfig.preset("lab").vision_config.hidden_size
