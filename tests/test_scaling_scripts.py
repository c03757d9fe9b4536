"""The three commands: their output, their files, and one line with exit code 2 for bad input."""

import importlib.util
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

from megatron_edit.errors import ConfigurationError, exit_on_configuration_error
from megatron_edit.scaling.hoffmann import optimal_split
from megatron_edit.scaling.logs import read_log
from megatron_edit.scaling.published import EPOCH
from megatron_edit.scaling.runs import COLUMNS, Run, read_csv, write_csv
from megatron_edit.scaling.synthetic import synthetic_runs

ROOT = Path(__file__).resolve().parent.parent
TABLE = ROOT / "examples" / "scaling" / "diloco_losses.csv"
CLUSTERS = sorted((ROOT / "examples" / "clusters").glob("*.yaml"))

Command = Callable[..., str]


def script(name: str) -> ModuleType:
    """Returns a script as a module."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "scripts" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    """Runs a script in this process and returns what it prints."""

    def run(name: str, *arguments: object) -> str:
        module = script(name)
        monkeypatch.setattr(sys, "argv", [name, *map(str, arguments)])
        capsys.readouterr()
        module.main()
        return capsys.readouterr().out

    return run


@pytest.fixture
def refused(
    command: Command, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Command:
    """Runs a script that must end with code 2, and returns the one line it prints."""

    def run(name: str, *arguments: object) -> str:
        with pytest.raises(SystemExit) as stopped, exit_on_configuration_error():
            command(name, *arguments)
        assert stopped.value.code == 2
        lines = capsys.readouterr().err.splitlines()
        assert len(lines) == 1
        return lines[0]

    return run


def csv_of(path: Path, *lines: str) -> Path:
    """Writes a CSV with the usual header."""
    path.write_text("\n".join([",".join(COLUMNS), *lines]) + "\n")
    return path


# fit_scaling_law.py


def test_fit_of_the_published_table(command: Command, tmp_path: Path) -> None:
    json_file, plot = tmp_path / "fit.json", tmp_path / "fit.png"
    text = command(
        "fit_scaling_law", TABLE, "--resamples", 60, "--predict", 1e10, 2e11, 4,
        "--json", json_file, "--plot", plot,
    )  # fmt: skip
    assert "worse than synchronous training" in text
    assert "collinear" in text
    assert "extrapolation: compute" in text
    result = json.loads(json_file.read_text())
    assert result["laws"]["sync"]["values"]["A"]["value"] == pytest.approx(18.1704, abs=1e-4)
    assert result["laws"]["diloco joint"]["values"]["b"]["value"] == pytest.approx(
        0.011618, abs=1e-6
    )
    assert result["comparisons"]["diloco R=8"]["differs"]
    assert 5_000 < plot.stat().st_size < 150_000


def test_fit_of_independent_sizes_and_tokens(command: Command, tmp_path: Path) -> None:
    runs = tmp_path / "runs.csv"
    write_csv(runs, synthetic_runs(EPOCH, 5e-4, 0, 60))
    out = command("fit_scaling_law", runs, "--resamples", 20, "--compute", "5.88e23", "--json", "-")
    result = json.loads(out)
    assert result["laws"]["sync"]["form"] == "hoffmann"
    split = result["splits"]["sync"][0]
    assert split["parameters"] == pytest.approx(optimal_split(EPOCH, 5.88e23).parameters, rel=0.1)


def test_csv_round_trip(tmp_path: Path) -> None:
    runs = [Run("edit", 4, 1.25e6, 3.5e7, 3.21)]
    write_csv(tmp_path / "a.csv", runs)
    assert read_csv(tmp_path / "a.csv") == runs


GOOD = ["sync,1,1e6,1e7,4.0", "sync,1,2e6,2e7,3.8", "sync,1,4e6,4e7,3.6"]


@pytest.mark.parametrize(
    ("lines", "arguments", "message"),
    [
        ([*GOOD, "sync,1,8e6,8e7,-3"], [], "line 5: column 'loss' is -3"),
        ([*GOOD, "sync,1,8e6,0,3.4"], [], "line 5: column 'tokens' is 0"),
        ([*GOOD, "sync,1,8e6,8e7,nan"], [], "line 5: column 'loss' is nan"),
        ([*GOOD, "sync,1,,8e7,3.4"], [], "line 5: column 'parameters' is empty"),
        ([*GOOD, "sync,1.5,8e6,8e7,3.4"], [], "column 'replicas' is '1.5'"),
        ([*GOOD, "sync,1,8e6,8e7"], [], "line 5: 4 cells, the header has 5"),
        (
            ["sync,1,1e6,1e7,4.0", "sync,1,1e6,2e7,3.9"],
            [],
            "column parameters: one model size only",
        ),
        (GOOD[:1], [], "one model size only"),
        (GOOD[:2], ["--form", "offset"], "2 runs are fewer than the 3 parameters of A N^a + C"),
        (GOOD, ["--form", "replicas"], "no method has runs with two or more"),
        (GOOD, ["--form", "quadratic"], "--form: unknown name 'quadratic'"),
        (GOOD, ["--variable", "flops"], "--variable: unknown name 'flops'"),
        (GOOD, ["--predict", "1e9"], "give parameters tokens [M]"),
        (GOOD, ["--predict", "1e9", "-1"], "--predict: got '-1'"),
        (GOOD, ["--compute", "1e20"], "no law depends on both N and D"),
        (GOOD, ["--resamples", "1"], "--resamples: got 1"),
        (GOOD, ["--resamples", "many"], "--resamples: invalid int value"),
        ([], [], "has a header and no runs"),
    ],
)
def test_bad_runs(
    refused: Command, tmp_path: Path, lines: list[str], arguments: list[str], message: str
) -> None:
    path = csv_of(tmp_path / "runs.csv", *lines)
    assert message in refused("fit_scaling_law", path, *arguments)


def test_missing_column_and_file(refused: Command, tmp_path: Path) -> None:
    path = tmp_path / "runs.csv"
    path.write_text("method,replicas,params,tokens,loss\n")
    assert "column 'parameters' is missing" in refused("fit_scaling_law", path)
    assert "cannot be read" in refused("fit_scaling_law", tmp_path / "none.csv")
    assert "no runs" in refused("fit_scaling_law")


def test_exit_code_of_the_process(tmp_path: Path) -> None:
    path = csv_of(tmp_path / "runs.csv", *GOOD, "sync,1,8e6,8e7,nan")
    done = subprocess.run(
        [sys.executable, "scripts/fit_scaling_law.py", str(path)],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.count("\n") == 1
    assert "Traceback" not in done.stderr


LOG = """\
world 4 = replicas 2 x PP 1 x S 2 x TP 1
effective configuration (world 4 = replicas 2 x PP 1 x S 2 x TP 1)
  global_batch_size                16                   json
  seq_length                       128                  flag
  train_iters                      240                  flag
  train_data_path                  none                 default
  edit.method                      edit                 json
  edit.replicas                    2                    json
parameters: 1,055,104; starts at step 0
 validation loss at iteration 100 | lm loss value: 5.100000E+00 | lm loss PPL: 1.640219E+02 |
 validation loss at iteration 240 on validation set | lm loss value: 3.706500E+00 |
 validation loss at iteration 240 on test set | lm loss value: 9.000000E+00 |
"""


def test_runs_from_logs(command: Command, refused: Command, tmp_path: Path) -> None:
    log = tmp_path / "train.log"
    log.write_text(LOG)
    assert read_log(log) == Run("edit", 2, 1055104.0, 240 * 16 * 128.0, 3.7065)
    log.write_text(LOG.replace("iteration 240", "iteration 200"))
    assert "last validation at iteration 200 of 240" in refused("fit_scaling_law", "--logs", log)
    log.write_text(LOG.split("effective")[0] + LOG[LOG.index("parameters:") :])
    assert "no value of edit.method" in refused("fit_scaling_law", "--logs", log)
    values = {"edit.method": "sync", "edit.replicas": 2, "global_batch_size": 8, "seq_length": 64}
    below = tmp_path / "iter_0000240"
    below.mkdir()
    (below / "effective_config.json").write_text(
        json.dumps({"values": {**values, "train_iters": 240}, "sources": {}})
    )
    assert read_log(log) == Run("sync", 2, 1055104.0, 240 * 8 * 64.0, 3.7065)
    sizes = []
    for i, loss in enumerate((4.0, 3.7, 3.5, 3.4)):
        part = tmp_path / f"{i}.log"
        count = f"{10 ** (5 + i):,}"
        part.write_text(LOG.replace("3.706500E+00", str(loss)).replace("1,055,104", count))
        sizes.append(part)
    out = command("fit_scaling_law", "--logs", *sizes, "--save-csv", tmp_path / "runs.csv")
    assert "edit R=2: 4 runs" in out
    assert "no runs of method 'sync'" in out
    assert len(read_csv(tmp_path / "runs.csv")) == 4


# plan_cluster.py


@pytest.mark.parametrize("path", CLUSTERS, ids=lambda path: path.stem)
def test_plans_of_the_examples(command: Command, tmp_path: Path, path: Path) -> None:
    json_file, plot = tmp_path / "plan.json", tmp_path / "plan.png"
    text = command("plan_cluster", path, "--json", json_file, "--plot", plot)
    for words in ("Constants", "assumed", "published", "given", "Smallest", "Best with a loss"):
        assert words in text
    result = json.loads(json_file.read_text())
    assert 0 < result["best"]["utilisation"] <= 1
    assert all(c["source"] for c in result["constants"])
    assert 5_000 < plot.stat().st_size < 150_000


def test_plan_writes_the_edit_section(command: Command, refused: Command, tmp_path: Path) -> None:
    two = next(path for path in CLUSTERS if "two" in path.stem)
    command("plan_cluster", two, "--write", tmp_path / "edit.json")
    section = json.loads((tmp_path / "edit.json").read_text())["edit"]
    assert section["replicas"] == 2
    assert section["sync_interval"] > 1
    edge = next(path for path in CLUSTERS if "edge" in path.stem)
    assert "behind a server" in refused("plan_cluster", edge, "--write", tmp_path / "edit.json")


def test_plan_with_fitted_laws(command: Command, refused: Command, tmp_path: Path) -> None:
    laws, two = tmp_path / "laws.json", next(path for path in CLUSTERS if "two" in path.stem)
    command("fit_scaling_law", TABLE, "--form", "replicas", "--resamples", 20, "--json", laws)
    text = command("plan_cluster", two, "--laws", laws)
    assert "loss of local SGD         fitted" in text
    command("fit_scaling_law", TABLE, "--resamples", 20, "--json", laws)
    values = json.loads(laws.read_text())
    del values["laws"]["diloco joint"]
    laws.write_text(json.dumps(values))
    assert "--form replicas --json writes them" in refused("plan_cluster", two, "--laws", laws)


def test_plan_of_a_narrow_search(command: Command, tmp_path: Path) -> None:
    text = next(path for path in CLUSTERS if "one" in path.stem).read_text()
    path = tmp_path / "cluster.yaml"
    narrow = "  sync_intervals: [64]\n  delays: [4]\n  compressions: [int8]\n"
    path.write_text(text + narrow)
    assert "edit H=64 d=4 int8" in command("plan_cluster", path, "--plot", tmp_path / "a.png")
    path.write_text(text.replace("nodes: 8", "nodes: 1").replace("7.0e9", "1.0e9"))
    assert "sync hall R=1" in command("plan_cluster", path, "--plot", tmp_path / "a.png")


def test_infeasible_plan(refused: Command, tmp_path: Path) -> None:
    text = next(path for path in CLUSTERS if "one" in path.stem).read_text()
    path = tmp_path / "cluster.yaml"
    path.write_text(text.replace("7.0e9", "7.0e11"))
    line = refused("plan_cluster", path)
    assert "does not fit: 7e+11 parameters over 64 GPUs of hall need" in line
    assert "no plan" in refused("plan_cluster")


def test_links_are_measured_and_used(command: Command, refused: Command, tmp_path: Path) -> None:
    links = tmp_path / "links.json"
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    measure = ["--nproc-per-node", "2", "scripts/plan_cluster.py", "--measure", str(links)]
    subprocess.run([*torchrun, *measure], cwd=ROOT, check=True, capture_output=True, timeout=240)
    measured = json.loads(links.read_text())
    assert measured["gbps"] > 0.01
    assert 0 <= measured["latency_ms"] < 1000
    two = next(path for path in CLUSTERS if "two" in path.stem)
    text = command("plan_cluster", two, "--links", links, "--link", "uplink")
    row = next(line for line in text.splitlines() if line.startswith("east.uplink.gbps"))
    assert "measured" in row and "links.json" in row
    assert "at least two ranks" in refused("plan_cluster", "--measure", links)


# simulate_run.py


@pytest.mark.parametrize(
    "arguments",
    [
        ["--method", "sync", "--steps", "40"],
        ["--method", "edit", "--interval", "16", "--slow", "1:1.5", "--jitter", "0.1"],
        ["--method", "delayed", "--delay", "4", "--interval", "16"],
        ["--method", "streaming", "--fragments", "4", "--delay", "2", "--interval", "16"],
        ["--method", "a_edit", "--sync-seconds", "20", "--slow", "1:4.3", "--compression", "int8"],
        [
            "--mtbf-hours",
            "0.02",
            "--repair-minutes",
            "1",
            "--on-failure",
            "drop",
            "--replicas",
            "4",
        ],
    ],
    ids=lambda arguments: arguments[1],
)
def test_simulations(command: Command, tmp_path: Path, arguments: list[str]) -> None:
    plot, json_file = tmp_path / "t.png", tmp_path / "t.json"
    text = command("simulate_run", *arguments, "--plot", plot, "--json", json_file)
    assert "utilisation" in text
    outcome = json.loads(json_file.read_text())["outcome"]
    assert 0 < outcome["utilisation"] <= 1
    assert sum(outcome["shares"].values()) == pytest.approx(1.0, abs=1e-6)
    assert 5_000 < plot.stat().st_size < 150_000


def test_simulation_prints_the_closed_form(command: Command) -> None:
    result = json.loads(command("simulate_run", "--method", "sync", "--gbps", "5", "--json", "-"))
    outcome = result["outcome"]
    assert outcome["utilisation"] == pytest.approx(outcome["closed_form_utilisation"], rel=1e-6)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--method", "dilloco"], "method: got 'dilloco'"),
        (["--stepp", "3"], "unrecognized arguments: --stepp"),
        (["--json", "/nowhere/a.json"], "--json /nowhere/a.json: cannot be written"),
        (["--gbps", "fast"], "--gbps: got 'fast'"),
        (["--gbps", "0"], "bandwidth: got 0"),
        (["--slow", "one"], "--slow: got 'one'"),
        (["--delay", "99"], "delay 99 must be below interval 64"),
        (["--compression", "int4"], "--compression: got 'int4'"),
        (["--method", "sync", "--compression", "int8"], "gradients of sync are not compressed"),
        (["--window", "5:2"], "--window: got '5:2'"),
        (["--plot", "/nowhere/a.png"], "--plot /nowhere/a.png: cannot be written"),
    ],
)
def test_bad_simulations(refused: Command, arguments: list[str], message: str) -> None:
    assert message in refused("simulate_run", *arguments)


@pytest.mark.parametrize(
    ("name", "command"),
    [
        ("fit_scaling_law", "edit-fit"),
        ("plan_cluster", "edit-plan"),
        ("simulate_run", "edit-simulate"),
    ],
)
def test_help(
    name: str, command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", [name, "--help"])
    with pytest.raises(SystemExit) as stopped:
        script(name).main()
    assert stopped.value.code == 0
    assert f"\n    {command} " in capsys.readouterr().out


def test_configuration_errors_are_one_line() -> None:
    assert "\n" not in str(ConfigurationError("a\n  b"))
