"""This library's parts in a real vLLM: answers, graphs, refusals, and how it starts and ends."""

import base64
import io
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from PIL import Image
from safetensors.torch import load_file, save_file

from kimivl_lab.commands import main as cli
from kimivl_lab.engines.server import group_lives, wait_until
from kimivl_lab.graphs.packing import pack
from kimivl_lab.measure.records import read_record
from kimivl_lab.planner.vllm import vllm_flag, vllm_rows

from .conftest import run_in_process, served

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(params=["processor", "metadata", "tower"])
def part(request):
    return request.param


@pytest.fixture(scope="session")
def results(checkpoint, environment, tmp_path_factory):
    """Of one engine for each part, made when it is first asked for."""
    made, folder = {}, tmp_path_factory.mktemp("results")

    def result(part):
        if part not in made:
            out = folder / f"{part}.json"
            code, log = run_in_process(checkpoint, sorted({"processor", part}), out, environment)
            assert code == 0, log[-4000:]
            made[part] = json.loads(out.read_text())
        return made[part]

    return result


def test_answers_are_those_of_vllms_own_tower(results, part):
    """In float32, with 0, 1, 2 and 3 images: the same number of prompt tokens, the same ids."""
    own, got = results("processor"), results(part)
    assert (own["model"], got["answers"]) == ("MoonVitPretrainedModel", own["answers"])
    assert len({tuple(answer["ids"]) for answer in got["answers"]}) == 4  # an image changes an answer
    tokens = [answer["prompt"] - got["answers"][0]["prompt"] for answer in got["answers"]]
    frame = tokens[1] - 368  # tokens of china.jpg
    assert tokens[2] == 2 * frame + 368 + 111 and frame > 0


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_encoder_benchmark_checks_vllms_tower_and_times_it(environment, tmp_path, dtype):
    command = [sys.executable, "-m", "kimivl_lab.bench.encoder", "--quick", "--repeats", "1", "--preset", "lab"]
    command += ["--dtype", dtype, "--peers", "vllm", "--out", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-4000:]
    (path,) = tmp_path.glob("*.csv")
    forwards = {row["variant"]: row for row in read_record(path)[0] if row["phase"] == "forward"}
    assert set(forwards) == {"kimivl_lab", "transformers", "vllm"}
    assert forwards["vllm"]["relative_error"] < {"float32": 1e-5, "bfloat16": 0.02}[dtype]


def test_graphs_give_the_eager_values(results, part):
    """Every budget full and partly full, also after a larger replay, through vLLM's own manager."""
    result = results(part)
    assert result["replayed"] == [40, 96, 200, 400, 600]
    assert all(difference <= 1e-5 for difference in result["differences"])


def test_rows_and_bounds_of_the_graphs(results, part):
    """vLLM rounds its rows as the planner says, and bounds a captured image in tokens; ours are exact, in patches."""
    result = results(part)
    rows = {int(budget): rows for budget, rows in result["rows"].items()}
    bounds = {int(budget): bound for budget, bound in result["bounds"].items()}
    if part == "processor":
        assert rows == {budget: vllm_rows(budget, 5) for budget in rows} and rows[96] == 100
        assert bounds == {budget: budget for budget in rows}
    else:
        assert rows == {budget: budget for budget in rows}
        assert bounds == {budget: 4 * budget for budget in rows}


def test_the_planner_packs_as_the_manager(results, part):
    packing = results(part)["packing"]
    assert len(packing) == 200
    for call in packing:
        sizes = call["sizes"]
        planned = pack(sizes, [40, 96, 200, 400, 600], 5, "next_fit_deferred")
        replays = [[one.budget, [sizes[image] for image in one.images]] for one in planned if one.budget]
        assert sorted(call["replays"]) == sorted(replays)


def _post(client, images, text="What is it?"):
    content = [
        {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{base64.b64encode(image).decode()}"}}
        for image in images
    ]
    message = {"role": "user", "content": [*content, {"type": "text", "text": text}]}
    body = {"model": "kimi-vl", "messages": [message], "max_tokens": 4, "temperature": 0}
    return client.post("/v1/chat/completions", json=body)


def _png(width, height):
    file = io.BytesIO()
    Image.new("RGB", (width, height), (width % 255, height % 255, 7)).save(file, "PNG")
    return file.getvalue()


def test_a_server_refuses_bad_images_while_it_answers_others(checkpoint, environment, tmp_path):
    """Nothing of the checkpoint is executed: it holds no code, and the server gets no --trust-remote-code."""
    with served(checkpoint, ["processor", "tower"], environment, tmp_path) as (client, process):
        with ThreadPoolExecutor(4) as pool:
            good = [pool.submit(_post, client, [_png(640, 480 + 28 * index)]) for index in range(4)]
            refused = _post(client, [_png(20000, 28)])
            broken = _post(client, [b"nonsense"])
            assert [answer.result().status_code for answer in good] == [200] * 4
        assert refused.status_code == 400 and "20000x28" in refused.text and "below 512" in refused.text
        assert broken.status_code == 400
        assert _post(client, []).status_code == 200
    assert process.poll() is not None and not group_lives(process.pid)


def test_time_to_first_token_is_measured(checkpoint, environment, tmp_path, capsys):
    """`kimivl-lab ttft`: every prompt is counted as predicted, no image is skipped, and a dead server is a summary."""
    sizes, run, cut = tmp_path / "sizes.csv", tmp_path / "run", tmp_path / "cut"
    sizes.write_text("width,height,count\n224,224,2\n90,300,1\n640,480,1\n")
    with served(checkpoint, ["processor", "metadata"], environment, tmp_path) as (client, process):
        load = ["ttft", "--endpoint", str(client.base_url), "--sizes", str(sizes), "--rate", "6", "--max-tokens", "3"]
        load += ["--warmup", "4"]
        assert cli.main([*load, "--out", str(run), "--requests", "24", "--images-per-request", "1,2"]) == 0
        before = client.get("/metrics").text
        assert [_post(client, [_png(224, 224)]).status_code for _ in range(2)] == [200, 200]
        assert _counted(client.get("/metrics").text) == _counted(before) + 1  # the counter knows a repeated image
        tool = [sys.executable, "-m", "kimivl_lab.cli", *load, "--out", str(cut), "--requests", "150"]
        with subprocess.Popen(tool, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as measuring:
            lines = cut / "requests.jsonl"
            wait_until(lambda: lines.exists() and len(lines.read_text().splitlines()) >= 6, 60)
            os.killpg(process.pid, signal.SIGKILL)
            _, told = measuring.communicate(timeout=60)
    assert measuring.returncode == 2 and "Traceback" not in told
    ended = json.loads((cut / "summary.json").read_text())
    assert ended["answered"] >= 6 and ended["answered"] + sum(ended["failures"].values()) == 150
    assert ended["failures"]["not sent"] > 50 and set(ended["failures"]) <= FAILS

    summary = json.loads((run / "summary.json").read_text())
    outcomes = [json.loads(line) for line in (run / "requests.jsonl").read_text().splitlines()]
    images, mean = sum(one["images"] for one in outcomes), summary["ttft_ms"]["mean"]["value"]
    assert summary["answered"] == summary["prompt_tokens_checked"] == 24 < images
    assert summary["failures"] == {} and summary["prompt_tokens_wrong"] == []
    server = summary["server"]
    assert (server["cache_hits"], server["cache_queries"]) == (0, images)
    assert 0 < server["ttft_ms_mean"] <= mean and all(one["new_tokens"] == 3 for one in outcomes)
    capsys.readouterr()
    assert cli.main(["ttft", "--show", str(run)]) == 0 and "24 of 24" in capsys.readouterr().out


FAILS = {"connection refused", "connection lost", "bad stream", "not sent"}


def _counted(metrics):
    return sum(float(value) for value in re.findall(r"^vllm:mm_cache_hits_total\{.*\} (\S+)", metrics, re.MULTILINE))


@pytest.mark.parametrize("part", ["processor", "tower"])
def test_a_missing_vision_tensor_stops_the_start(checkpoint, environment, part, tmp_path):
    name, lacking = "vision_tower.encoder.blocks.1.mlp.fc1.bias", tmp_path / "lacking"
    shutil.copytree(checkpoint, lacking)
    index = json.loads((lacking / "model.safetensors.index.json").read_text())
    file = lacking / index["weight_map"].pop(name)
    tensors = load_file(file)
    del tensors[name]
    save_file(tensors, file)
    (lacking / "model.safetensors.index.json").write_text(json.dumps(index))
    code, log = run_in_process(lacking, sorted({"processor", part}), tmp_path / "out.json", environment)
    assert code != 0 and name in log and not (tmp_path / "out.json").exists()


def test_vllm_parses_the_planners_flag(checkpoint, environment, tmp_path):
    flag = vllm_flag([580, 820, 1105], 5)
    program = (
        "import sys\n"
        "from vllm.engine.arg_utils import EngineArgs\n"
        "from vllm.utils.argparse_utils import FlexibleArgumentParser\n"
        "given = EngineArgs.add_cli_args(FlexibleArgumentParser()).parse_args(sys.argv[1:])\n"
        "config = EngineArgs.from_cli_args(given).create_engine_config().compilation_config\n"
        "print('READ', config.cudagraph_mm_encoder, config.encoder_cudagraph_token_budgets,\n"
        "      config.encoder_cudagraph_max_vision_items_per_batch)\n"
    )
    command = [sys.executable, "-c", program, "--model", str(checkpoint), "--max-model-len", "4096", *shlex.split(flag)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=150)
    assert "READ True [580, 820, 1105] 5" in done.stdout, done.stderr[-3000:]
