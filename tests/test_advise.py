"""`kimivl-lab advise`: the decisions follow from the sizes and the server, and what is not known is said."""

import re
from collections import Counter

import pytest

from kimivl_lab.commands import main as cli
from kimivl_lab.commands.advise import MEASURE, decide
from kimivl_lab.commands.server import Server
from kimivl_lab.commands.sources import Sizes
from kimivl_lab.datasets import data_path
from kimivl_lab.planner.replay_cost import REPLAY_COST
from kimivl_lab.planner.workload import count_tokens

SMALL, LARGE = [(224, 224, 10)], [(1100, 1100, 10)]


def parsed(*options):
    return cli._parser().parse_args(["advise", "--workload", "receipts", *options])


def decisions(sizes, *options):
    arguments = parsed(*options)
    source = Sizes("mine.csv", sizes, count_tokens(sizes), Counter())
    return {one.question.partition(",")[0]: one for one in decide(source, Server.of(arguments, known=False), arguments)}


def test_every_decision_has_a_reason_flags_a_default_and_a_check():
    for one in decisions(SMALL, "--gpu", "H100", "--ranks", "4", "--images-per-call", "1,8").values():
        assert all(vars(one).values())
        assert re.search("predicted|counted|measure", one.predicted)


@pytest.mark.parametrize(
    ("sizes", "gpu", "answer"), [(SMALL, "B200", "on"), (LARGE, "RTX 4090", "off"), (LARGE, "T4", MEASURE)]
)
def test_graphs_are_for_small_images_on_fast_gpus(sizes, gpu, answer):
    assert decisions(sizes, "--gpu", gpu)["CUDA graphs of the encoder"].answer == answer


@pytest.mark.parametrize(
    ("sizes", "options", "answer"),
    [
        (SMALL, ["--gpu", "H100"], "nothing to decide"),
        (LARGE, ["--gpu", "H100", "--ranks", "4"], "tensor parallel"),
        (LARGE, ["--gpu", "H100", "--ranks", "4", "--images-per-call", "8"], "data parallel"),
        (LARGE, ["--gpu", "H100", "--ranks", "4", "--images-per-call", "1,8"], MEASURE),
        (LARGE, ["--gpu", "L40S", "--ranks", "4"], "data parallel"),
        (SMALL, ["--gpu", "H100", "--ranks", "3"], "data parallel"),
        (SMALL, ["--gpu", "T4", "--ranks", "4"], MEASURE),
    ],
)
def test_ranks_share_images_or_layers_by_the_cost_model(sizes, options, answer):
    one = decisions(sizes, *options)["encoder: data or tensor parallel"]
    assert one.answer == answer
    assert ("--mm-encoder-tp-mode data" in one.vllm) == (answer in ("data parallel", MEASURE))


def test_an_unknown_gpu_gets_no_predicted_gain():
    found = decisions(LARGE, "--gpu", "Voodoo 2", "--ranks", "2")
    assert not any("predicted:" in one.predicted for one in found.values())
    assert found["budgets"].predicted.startswith("none: measure")
    assert "bench" in found["CUDA graphs of the encoder"].check
    given = decisions(LARGE, "--gpu", "Voodoo 2", "--replay-cost-rows", "50")
    assert given["budgets"].predicted.startswith("predicted"), "a price that is given is known"


def test_the_gpu_sets_vllms_own_budgets():
    assert "2048 (" not in decisions(LARGE, "--gpu", "H100")["budgets"].replaces
    for gpu, most in (("RTX 4090", 2048), ("A100", 2048), ("H200", 8192), ("B200", 16384)):
        assert Server.of(parsed("--gpu", gpu)).largest_budget == most
    assert Server.of(parsed("--gpu", "B200", "--max-model-len", "4096")).largest_budget == 4096
    assert Server.of(parsed("--max-num-batched-tokens", "3000")).largest_budget == 3000


def test_the_price_is_predicted_given_or_measured():
    assert Server.of(parsed()).replay_cost == REPLAY_COST
    assert Server.of(parsed("--gpu", "RTX 4090")).replay_cost == 31
    assert Server.of(parsed("--replay-cost-rows", "0")).replay_cost == 0
    record = next(data_path("measurements").glob("graphs__*.csv"))
    measured = Server.of(parsed("--costs", str(record)))
    assert measured.replay_cost_source.startswith("measured") and measured.replay_cost < REPLAY_COST
    with pytest.raises(ValueError, match="unknown GPU"):
        Server.of(parsed("--gpu", "T4"))


def test_a_record_of_something_else_is_refused(capsys):
    other = next(data_path("measurements").glob("rope__*.csv"))
    assert cli.main(["plan", "--workload", "cameras", "--costs", str(other)]) == 2
    assert "0 replays of full budgets" in capsys.readouterr().err
    assert cli.main(["plan", "--workload", "cameras", "--costs", "none.csv"]) == 2


def test_the_page_is_a_table_or_markdown(capsys):
    options = ["advise", "--workload", "cameras", "--gpu", "H100"]
    assert cli.main(options) == 0
    page = capsys.readouterr().out
    assert cli.main([*options, "--markdown"]) == 0
    markdown = capsys.readouterr().out
    assert markdown.startswith("# ") and markdown.count("\n## ") == 5
    flag = next(line for line in page.splitlines() if "token_budgets" in line).strip().partition(": ")[2]
    assert flag in markdown, "the flag stays one line"
    assert "vllm bench serve" in page and "vllm bench serve" in markdown


def test_a_missing_source_is_one_line(tmp_path, capsys):
    assert cli.main(["advise", "--sizes", str(tmp_path / "none.csv"), "--gpu", "H100"]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1
