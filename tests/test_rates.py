"""`--rates`: records replace the rates of a data sheet and say so; those of another GPU or tower are refused."""

import csv
import json
import shutil

import pytest

from kimivl_lab.commands import main as cli
from kimivl_lab.commands.rates import read_rates
from kimivl_lab.commands.server import Server
from kimivl_lab.datasets import data_path
from kimivl_lab.planner.replay_cost import SUSTAINED, predicted_replay_cost

H100 = "NVIDIA H100 80GB HBM3"


def kept(kind, dtype):
    return sorted(data_path("measurements").glob(f"{kind}__*__{dtype}__*.csv"))[-1]


def as_of(device, kind, tmp_path, dtype="float32", **origin):
    """A kept record as if a server's full tower had been measured on `device`."""
    source = kept(kind, dtype)
    path = tmp_path / f"{kind}__a-device__bfloat16__20261201.csv"
    shutil.copy(source, path)
    said = json.loads(source.with_suffix(".json").read_text())
    said |= {"device": device, "preset": "kimi-vl-a3b", "date": "2026-12-01T00:00:00+00:00"} | origin
    path.with_suffix(".json").write_text(json.dumps(said))
    return path


def parsed(*options):
    return cli._parser().parse_args(["advise", "--workload", "cameras", *map(str, options)])


def page(capsys, *options):
    assert cli.main(["advise", "--workload", "cameras", "--markdown", *map(str, options)]) == 0
    return capsys.readouterr().out


def test_an_encoder_record_replaces_the_arithmetic_rate(tmp_path, capsys):
    record = as_of(H100, "encoder", tmp_path, "bfloat16")
    with record.open(newline="") as file:
        fastest = max(float(row["speed_tflops"] or 0) for row in csv.DictReader(file))
    server = Server.of(parsed("--gpu", "H100", "--rates", record), known=False)
    assert server.flops_per_s == pytest.approx(1e12 * fastest)
    assert server.replay_cost == predicted_replay_cost(1e12 * fastest)
    assert server.gpu is not None and server.gpu.name == "H100 SXM", "the link stays the data sheet's"
    text = page(capsys, "--gpu", "H100", "--ranks", "4", "--rates", record)
    said = f"predicted from rates measured in {record.name} ({H100}, 2026-12-01)"
    assert text.count(said) >= 2, "ranks and graphs"
    assert "predicted from data-sheet rates" not in text and "link and memory data-sheet rates of H100 SXM" in text


def test_without_records_every_prediction_names_the_data_sheet(capsys):
    text = page(capsys, "--gpu", "H100", "--ranks", "4")
    assert text.count("predicted from data-sheet rates of H100 SXM") >= 3
    server = Server.of(parsed("--gpu", "H100"))
    assert server.gpu is not None and server.flops_per_s == SUSTAINED * server.gpu.flops_per_s


def test_a_graphs_record_replaces_tau_and_the_price(tmp_path):
    record = as_of(H100, "graphs", tmp_path)
    server = Server.of(parsed("--rates", record))
    assert 1.3e-5 < server.launch_s < 1.5e-5, "4.185 - 0.286 ms over 301 - 15 launches"
    assert server.replay_cost == read_rates([record], None).replay_cost and server.replay_cost_source.startswith(
        "measured"
    )


def test_a_parallel_record_replaces_the_model_of_ranks(tmp_path, capsys):
    record = as_of(H100, "parallel", tmp_path)
    rates = read_rates([record], "H100")
    assert rates.ranks is not None and set(rates.ranks.links) == {"all_reduce", "all_gather", "broadcast"}
    assert 0 < rates.ranks_error < 1
    text = page(capsys, "--ranks", "4", "--images-per-call", "8", "--rates", record)
    assert f"predicted from rates measured in {record.name}" in text and "measured at 2 ranks, not at 4" in text


def test_a_gpu_outside_the_table_is_advised_by_its_records(tmp_path, capsys):
    record = as_of("NVIDIA T4", "encoder", tmp_path, "bfloat16")
    text = page(capsys, "--gpu", "T4", "--rates", record)
    assert "graphs can be faster for" in text
    assert cli.main(["plan", "--workload", "cameras", "--gpu", "T4", "--rates", str(record)]) == 0
    assert f"predicted from {record.name}" in capsys.readouterr().out


@pytest.mark.parametrize("gpu", ["A100", "T4", "H100 PCIe", "Voodoo 2", ""])
def test_a_record_of_another_gpu_is_refused(gpu, tmp_path):
    with pytest.raises(ValueError, match=f"{H100}.*{gpu}"):
        read_rates([as_of(H100, "encoder", tmp_path, "bfloat16")], gpu)


def test_records_of_two_devices_or_of_one_kind_are_refused(tmp_path):
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
    encoder = as_of(H100, "encoder", tmp_path / "a", "bfloat16")
    with pytest.raises(ValueError, match="two devices"):
        read_rates([encoder, as_of("NVIDIA A100-SXM4-80GB", "graphs", tmp_path / "b")], None)
    with pytest.raises(ValueError, match="two records of encoder"):
        read_rates([encoder, encoder], None)


def test_records_of_another_kind_or_tower_are_refused(tmp_path, capsys):
    with pytest.raises(ValueError, match=r"rope__.*encoder, graphs, parallel"):
        read_rates([kept("rope", "float32")], None)
    with pytest.raises(ValueError, match="'kimi-vl-a3b' in float32.*bfloat16"):
        read_rates([kept("encoder", "float32")], None)
    with pytest.raises(ValueError, match="preset 'lab'"):
        read_rates([as_of(H100, "graphs", tmp_path, preset="lab")], None)
    path = as_of(H100, "encoder", tmp_path, "bfloat16")
    path.write_text(path.read_text().splitlines()[0] + "\n")
    assert cli.main(["advise", "--workload", "cameras", "--rates", str(path)]) == 2
    assert "says no rate" in capsys.readouterr().err
