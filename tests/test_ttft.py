"""Time to first token: the load, the client against a stub server with its faults, the statistics, what a run keeps."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kimivl_lab import image_geometry
from kimivl_lab.commands import main as cli
from kimivl_lab.datasets import load_sizes
from kimivl_lab.engines.client import GONE, Endpoint
from kimivl_lab.engines.load import draw_requests, message
from kimivl_lab.engines.load_statistics import compare, compare_pairs, summarise

FAST = ["--rate", "200", "--warmup", "2", "--timeout", "5"]
SIZES = "width,height,count\n60,40,5\n224,224,2\n90,300,1\n"


@pytest.fixture
def stub():
    """Starts stub servers and ends them."""
    started = []

    def start(**options):
        program = [sys.executable, str(Path(__file__).with_name("stub_server.py")), json.dumps({"from": 5, **options})]
        server = subprocess.Popen(program, stdout=subprocess.PIPE, text=True)
        started.append(server)
        assert server.stdout
        return server, f"http://127.0.0.1:{int(server.stdout.readline())}"

    yield start
    for server in started:
        server.kill()
        server.wait()


def measure(url, out, *arguments, requests=12):
    sizes = out.parent / "sizes.csv"
    sizes.write_text(SIZES)
    load = ["--requests", str(requests), "--sizes", str(sizes)]
    return cli.main(["ttft", "--endpoint", url, "--out", str(out), *load, *FAST, *arguments])


@pytest.fixture
def tool(tmp_path):
    """Starts the tool in a process, with 4,000 requests to the server."""
    (tmp_path / "sizes.csv").write_text(SIZES)
    started = []

    def start(url, out):
        program = [
            sys.executable,
            "-m",
            "kimivl_lab.cli",
            "ttft",
            "--endpoint",
            url,
            "--out",
            str(out),
            "--warmup",
            "1",
        ]
        program += ["--requests", "4000", "--rate", "100", "--sizes", str(tmp_path / "sizes.csv")]
        started.append(subprocess.Popen(program, stderr=subprocess.PIPE, text=True, start_new_session=True))
        for _ in range(1200):
            if (out / "requests.jsonl").exists() and len((out / "requests.jsonl").read_text().splitlines()) >= 20:
                return started[-1]
            time.sleep(0.05)
        raise AssertionError("no lines after 60 s")

    yield start
    for process in started:
        process.kill()
        process.wait()


def lines_of(out):
    return [json.loads(line) for line in (out / "requests.jsonl").read_text().splitlines()]


def test_the_load_is_drawn_beforehand():
    sizes = load_sizes("receipts")
    requests = draw_requests(2000, 4.0, sizes, (1, 2), seed=1)
    again = draw_requests(2000, 4.0, sizes, (1, 2), seed=1)
    assert requests == again != draw_requests(2000, 4.0, sizes, (1, 2), seed=2)
    times = np.array([request.arrival for request in requests])
    gaps = np.diff(times)
    assert times[0] == 0 and (gaps >= 0).all()
    assert abs(gaps.mean() * 4 - 1) < 0.1 and abs(gaps.std() / gaps.mean() - 1) < 0.1  # exponential: mean = deviation
    assert {len(request.sizes) for request in requests} == {1, 2}
    assert {size for request in requests for size in request.sizes} <= {size[:2] for size in sizes}
    constant = draw_requests(5, 4.0, sizes, arrivals="constant")
    assert [request.arrival for request in constant] == [0, 0.25, 0.5, 0.75, 1.0]


def test_every_image_is_new_and_has_its_size():
    requests = draw_requests(30, 1.0, [(60, 40, 1)], (2,))
    urls = [part["image_url"]["url"] for one in requests for part in message(one, "?")["content"][:2]]
    assert len(set(urls)) == 60
    assert message(requests[0], "?", salt=1) != message(requests[0], "?")
    assert requests[0].image_tokens() == 2 * image_geometry(60, 40).tokens


@pytest.mark.parametrize(
    "wrong", [{"rate": 0}, {"rate": -1}, {"rate": float("nan")}, {"requests": 0}, {"sizes": []}, {"arrivals": "burst"}]
)
def test_a_load_that_cannot_be_is_refused(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        draw_requests(**({"requests": 3, "rate": 1.0, "sizes": [(10, 10, 1)]} | wrong))


def test_a_run_against_a_good_server(stub, tmp_path, capsys):
    _, url = stub(delay=0.004)
    assert measure(url + "/v1/", tmp_path / "run", "--images-per-request", "1,2", requests=30) == 0
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    lines = lines_of(tmp_path / "run")
    assert summary["answered"] == 30 == len(lines) and summary["failures"] == {}
    assert summary["prompt_tokens_checked"] == 30 and summary["prompt_tokens_wrong"] == []
    images = sum(line["images"] for line in lines)
    assert images > 30 and summary["server"]["cache_queries"] == images and summary["server"]["cache_hits"] == 0
    assert all(4 <= line["ttft_ms"] <= line["end_ms"] and line["new_tokens"] == 2 for line in lines)
    assert (
        summary["ttft_ms"]["mean"]["low"] <= summary["ttft_ms"]["mean"]["value"] <= summary["ttft_ms"]["mean"]["high"]
    )
    told = capsys.readouterr().out
    assert "30 of 30" in told and "encoder ran each time" in told and "as predicted" in told


def test_latency_counts_from_the_intended_arrival(stub, tmp_path):
    """40 requests at once, served one after another: the last waits for all, however late its bytes were read."""
    _, url = stub(delay=0.02)
    assert measure(url, tmp_path / "run", "--arrivals", "constant", "--rate", "10000", requests=40) == 0
    times = [line["ttft_ms"] for line in sorted(lines_of(tmp_path / "run"), key=lambda line: line["index"])]
    assert max(times) >= 0.9 * 40 * 20 and min(times) < 0.5 * max(times)


@pytest.mark.parametrize(
    ("options", "failure"),
    [
        ({"mode": "status", "status": 400}, "HTTP 400"),
        ({"mode": "status", "status": 503}, "HTTP 503"),
        ({"mode": "reset"}, "connection lost"),
        ({"mode": "bad"}, "bad stream"),
        ({"mode": "error"}, "bad stream"),
        ({"mode": "silent"}, "no text"),
        ({"mode": "hang"}, "timeout"),
    ],
)
def test_failures_are_counted_by_kind_while_others_go_on(stub, tmp_path, capsys, options, failure):
    _, url = stub(every=3, **options)
    limit = ["--timeout", "1"] if failure == "timeout" else []
    assert measure(url, tmp_path / "run", *limit) == 2
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["failures"] == {failure: 4} and summary["answered"] == 8
    assert "4 failed" in capsys.readouterr().out
    if options["mode"] == "status":
        assert any("no such size" in line["detail"] for line in lines_of(tmp_path / "run"))


def test_a_server_without_usage_or_metrics(stub, tmp_path, capsys):
    _, url = stub(no_usage=True, no_metrics=True)
    assert measure(url, tmp_path / "run") == 0
    told = capsys.readouterr().out
    assert "not checked" in told and "no counter" in told
    assert all(line["new_tokens"] == 2 and line["prompt_tokens"] is None for line in lines_of(tmp_path / "run"))


def test_a_skipped_encoder_and_wrong_counts_are_told(stub, tmp_path, capsys):
    _, url = stub(always_hits=True, extra=3)
    assert measure(url, tmp_path / "run") == 0
    told = capsys.readouterr().out
    assert "12 hits" in told and "skipped the encoder" in told
    assert "other than predicted in 12 of 12" in told


def test_what_cannot_be_measured_is_said_before_the_load(stub, tmp_path, capsys):
    assert measure("http://127.0.0.1:9", tmp_path / "a") == 2
    assert measure("nonsense", tmp_path / "a") == 2
    _, two = stub(models=["a", "b"])
    assert measure(two, tmp_path / "b") == 2
    assert "a, b" in capsys.readouterr().err
    assert measure(two, tmp_path / "c", "--model", "b") == 0
    assert measure(two, tmp_path / "c", "--model", "b") == 2  # the folder holds a run
    _, refuses = stub(**{"mode": "status", "status": 400, "from": 2})
    assert measure(refuses, tmp_path / "d") == 2
    assert "with an image: HTTP 400" in capsys.readouterr().err
    assert cli.main(["ttft"]) == 2


@pytest.mark.parametrize("path", ["", "/", "/v1", "/v1/", "/v1/chat/completions", "/v1/models", "/under/v1"])
def test_an_address_is_taken_with_or_without_the_path_of_its_api(path):
    assert Endpoint(f"https://a:b@c{path}").root == "https://a:b@c" + "/under" * path.startswith("/under")
    assert "a:b" not in Endpoint(f"https://a:b@c{path}").name  # goes into records


@pytest.mark.parametrize(
    ("path", "options", "told"),
    [
        ("/wrong", {}, "/wrong/v1/models lists no model (HTTP 404)"),
        ("", {"models": []}, "lists no models"),
        ("", {"key": "secret"}, "--api-key"),
    ],
)
def test_an_operator_is_told_what_to_give(stub, tmp_path, capsys, path, options, told):
    _, url = stub(**options)
    assert measure(url + path, tmp_path / "run") == 2
    assert told in capsys.readouterr().err
    if "key" in options:
        assert measure(url, tmp_path / "run", "--api-key", "secret") == 0
    else:
        assert measure(url + path, tmp_path / "run", "--model", "stub") == (0 if not path else 2)


def test_a_server_that_is_killed_ends_the_test_with_a_summary(stub, tool, tmp_path):
    server, url = stub()
    process = tool(url, tmp_path / "run")
    server.kill()
    _, told = process.communicate(timeout=60)
    assert process.returncode == 2 and "Traceback" not in told
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    failures = summary["failures"]
    assert not summary["server"]["read"]
    assert failures["connection refused"] >= GONE and failures["not sent"] > 1000
    assert set(failures) <= {"connection refused", "connection lost", "not sent"}


def test_a_killed_run_keeps_what_ended(stub, tool, tmp_path, capsys):
    _, url = stub()
    out = tmp_path / "run"
    process = tool(url, out)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    with (out / "requests.jsonl").open("a") as file:
        file.write('{"index": 39')  # a line that was being written
    kept = len((out / "requests.jsonl").read_text().splitlines()) - 1
    assert cli.main(["ttft", "--show", str(out)]) == 0
    told = capsys.readouterr().out
    assert f"{kept} of 4000" in told and f"{4000 - kept} not recorded" in told
    assert "failed" not in told and "could not be read" in told


def test_a_time_limit_ends_the_sending(stub, tmp_path):
    _, url = stub()
    assert measure(url, tmp_path / "run", "--rate", "20", "--time-limit", "0.4", requests=100) == 2
    failures = json.loads((tmp_path / "run" / "summary.json").read_text())["failures"]
    assert set(failures) == {"not sent"} and 60 < failures["not sent"] < 100


def test_two_runs_are_compared_only_if_their_load_is_the_same(stub, tmp_path, capsys):
    _, url = stub()
    _, slow = stub(delay=0.1)
    for name, server, seed in [("a", url, 0), ("slow", slow, 0), ("other", url, 1)]:
        assert measure(server, tmp_path / name, "--rate", "30", "--seed", str(seed), requests=30) == 0
    capsys.readouterr()
    assert cli.main(["ttft", "--compare", str(tmp_path / "a"), str(tmp_path / "slow")]) == 0
    assert "B is slower (by the mean of 30 requests" in capsys.readouterr().out
    assert cli.main(["ttft", "--compare", str(tmp_path / "slow"), str(tmp_path / "a")]) == 0
    assert "B is faster (by the mean" in capsys.readouterr().out
    assert cli.main(["ttft", "--compare", str(tmp_path / "a"), str(tmp_path / "other")]) == 2
    assert "seed: 0 and 1" in capsys.readouterr().err
    assert cli.main(["ttft", "--compare", str(tmp_path / "a"), str(tmp_path / "none")]) == 2
    assert cli.main(["ttft", "--compare", *map(str, [tmp_path / "a"] * 3)]) == 2
    assert "3 folders" in capsys.readouterr().err
    pairs = [str(tmp_path / name) for name in ("a", "slow", "a", "slow")]
    assert cli.main(["ttft", "--compare", *pairs]) == 0
    told = capsys.readouterr().out
    assert "B is slower (by the mean of 60 requests" in told and "each pair" in told  # the two pairs are the same


def test_one_pair_of_runs_shows_a_large_difference_only(stub, tmp_path, capsys):
    _, url = stub(delay=0.1)
    assert measure(url, tmp_path / "a", "--rate", "30", requests=30) == 0
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    lines = [json.loads(line) for line in (tmp_path / "a" / "requests.jsonl").read_text().splitlines()]
    slower = [json.dumps(line | {"ttft_ms": 1.1 * line["ttft_ms"]}) for line in lines]
    (tmp_path / "b" / "requests.jsonl").write_text("\n".join(slower) + "\n")
    for more, verdict in ((), "no difference shown"), (("--margin", "0.03"), "B is slower"):
        capsys.readouterr()
        assert cli.main(["ttft", "--compare", str(tmp_path / "a"), str(tmp_path / "b"), *more]) == 0
        assert f"{verdict} (by the mean of 30 requests" in capsys.readouterr().out


def test_several_pairs_show_what_the_server_does_and_not_what_its_machine_does():
    """A machine that is up to a third slower in a run: single pairs differ, five pairs of equal servers do not."""
    wrong, single, found = 0, 0, 0
    for seed in range(20):
        chance = np.random.default_rng(seed)
        pairs, slower = [], []
        for _ in range(5):
            arrivals = np.cumsum(chance.exponential(1 / 0.5, 60))
            work = chance.uniform(0.5, 1.5, 60)
            a, b = (queue(arrivals, chance.uniform(0.85, 1.15) * work) for _ in range(2))
            pairs.append((a, b))
            slower.append((a, [3 * time for time in b]))
        wrong += compare_pairs(pairs, seed=seed)["mean"].verdict != "no difference shown"
        single += compare(*pairs[0], seed=seed)["mean"].verdict != "no difference shown"
        found += compare_pairs(slower, seed=seed)["mean"].verdict == "B is slower"
    assert wrong <= 2 and single >= 10 and found >= 18


def queue(arrivals, service):
    """Times to first token of one server that answers in turn."""
    free, times = 0.0, []
    for arrival, takes in zip(arrivals, service, strict=True):
        free = max(free, arrival) + takes
        times.append(free - arrival)
    return times


def test_identical_servers_show_no_difference_and_others_do():
    """At 0.7 of capacity, where waits are shared: 30 pairs of equal servers, 30 of which one is 10 % slower."""
    verdicts = {1.0: 0, 1.1: 0}
    for slower in verdicts:
        for seed in range(30):
            chance = np.random.default_rng([seed, int(10 * slower)])
            arrivals = np.cumsum(chance.exponential(1 / 0.7, 200))
            work = chance.uniform(0.5, 1.5, 200)  # the images, the same for both
            a, b = (queue(arrivals, work * chance.normal(1, 0.05, 200)) for _ in range(2))
            if slower > 1:
                b = queue(arrivals, slower * work * chance.normal(1, 0.05, 200))
            verdicts[slower] += compare(a, b, seed=seed)["mean"].verdict == "no difference shown"
    assert verdicts[1.0] >= 28 and verdicts[1.1] <= 2


def test_intervals_contain_the_true_value_as_often_as_they_say():
    """Times whose neighbours are alike, mean 1: single requests drawn would give far too short intervals."""
    hits = 0
    for seed in range(50):
        chance = np.random.default_rng(seed)
        noise = np.convolve(chance.normal(0, 1, 404), np.ones(5) / 5, mode="valid")
        mean = summarise((1 + 0.3 * noise).tolist())["mean"]
        hits += mean.low <= 1 <= mean.high
    assert 42 <= hits <= 50


@settings(max_examples=50, deadline=None)
@given(st.lists(st.floats(0.1, 1e5), min_size=1, max_size=60))
def test_summaries_lie_within_the_times(times):
    found = summarise(times)
    slack = 1e-9 * max(times)
    for one in found.values():
        assert min(times) - slack <= one.low <= one.high <= max(times) + slack
    assert found["median"].value <= found["P90"].value + slack <= found["P99"].value + 2 * slack


def test_too_few_times_are_refused():
    with pytest.raises(ValueError, match="no times"):
        summarise([])
    with pytest.raises(ValueError, match="20 .* 3 and 3"):
        compare([1, 2, 3], [1, 2, 3])
    with pytest.raises(ValueError, match="30 and 29"):
        compare_pairs([([1.0] * 30, [1.0] * 30), ([1.0] * 30, [1.0] * 29)])
    with pytest.raises(ValueError, match="no pairs"):
        compare_pairs([])


@pytest.mark.parametrize("url", ["http://127.0.0.1:x", "http://127.0.0.1:99999999"])
def test_what_is_no_address_is_refused_with_a_model_too(tmp_path, capsys, url):
    assert measure(url, tmp_path / "run", "--model", "kimi-vl") != 0
    assert "is not an address" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["{}", "[]", "3"])
def test_a_folder_of_something_else_is_no_run(tmp_path, capsys, text):
    (tmp_path / "run.json").write_text(text)
    (tmp_path / "requests.jsonl").touch()
    for options in (["--show", str(tmp_path)], ["--compare", str(tmp_path), str(tmp_path)]):
        assert cli.main(["ttft", *options]) != 0
        assert "is not of a run" in capsys.readouterr().err
