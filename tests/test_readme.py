"""What README and docs name exists, and what they tell a user to type works."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import make_config_docs
import make_pictures
import pytest
from distributed import free_port

from megatron_edit.commands import simulate
from megatron_edit.config.arguments import parse_args
from megatron_edit.config.hf_arguments import TABLES
from megatron_edit.config.parser import known_flags
from megatron_edit.platform import nccl

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
FOLDERS = (
    "megatron_edit",
    "scripts",
    "ds_configs",
    "examples",
    "benchmarks",
    "tests",
    "docs",
    "data",
)
LAUNCHER_FLAGS = [
    "--num_accelerators", "--no_ssh", "--node_rank", "--master_addr", "--master_port",
    "--nnodes", "--nproc_per_node", "--nproc-per-node", "--node-rank", "--master-addr",
    "--master-port", "--no-python", "--module", "--num_gpus",
]  # fmt: skip
PIP_FLAGS = ["--no-deps"]
# Read by the libraries underneath.
LIBRARY_VARIABLES = {
    "GLOO_SOCKET_IFNAME",
    "CUDA_DEVICE_MAX_CONNECTIONS",
    "TORCH_FR_DUMP_TEMP_FILE",
    *nccl.READABLE_FAILURES,
}
# Command in the README -> the test that tries it.
COMMANDS = {
    "./scripts/quickstart.sh": "test_quick_start",
    "./scripts/test.sh": "test_the_test_script",
    "pip install .": "test_wheel.py",
    "DATA_PATH=/data/corpus_text_document TOKENIZER=/data/llama-tokenizer HOSTFILE=hostfile "
    "./scripts/pretrain_llama_7b_edit.sh": "test_7b_commands",
    "HOSTFILE=hostfile NODE_RANK=0 MASTER_ADDR=host0 ./scripts/pretrain_llama_7b_edit.sh": (
        "test_7b_commands"
    ),
    "LAUNCHER=torchrun NODE_RANK=0 MASTER_ADDR=host0 ./scripts/pretrain_llama_7b_edit.sh": (
        "test_7b_commands"
    ),
    "torchrun --nproc_per_node 4 -m examples.megatron_loop": "test_example.py",
    "edit-plan examples/clusters/two_clusters_10gbps.yaml": "test_planner",
    "edit-generate --load runs/quickstart/edit_tiny_cpu_360/checkpoints": "test_quick_start",
    "edit-export --load runs/quickstart/edit_tiny_cpu_360/checkpoints --output llama": (
        "test_quick_start"
    ),
    "CONFIG=ds_configs/sync_tiny_cpu.json ./scripts/quickstart.sh": "test_quick_start_of_sync",
    "python benchmarks/local_step.py": "test_benchmark",
    "./scripts/compare_methods.sh": "test_compare_methods.py",
    "./scripts/bench_link.sh": "test_bench_link.py",
    "./scripts/scaling_study.sh": "test_scaling_study.py",
}
# Of a shortened quick start: warm-up 8, one whole round, and the last synchronisation.
SHORT = {"TRAIN_ITERS": "24", "EVAL_ITERS": "1", "NUM_TOKENS": "8"}


def shell(command: str, **variables: object) -> str:
    """Runs a command as a user would, in this Python's environment; returns what it printed."""
    result = subprocess.run(
        ["bash", "-c", command],
        cwd=ROOT,
        env={
            **os.environ,
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "OMP_NUM_THREADS": "1",
            "VENV": sys.prefix,
            **{name: str(value) for name, value in variables.items()},
        },
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=600,
    )
    assert result.returncode == 0, result.stdout
    return result.stdout


def commands(page: Path) -> list[str]:
    """Shell commands of a page: in indented blocks and, in tables, between backticks."""
    text = page.read_text().replace("\\\n", " ")
    lines = re.findall(r"^    (\S.*)$", text, re.MULTILINE)
    lines += re.findall(r"`((?:\w+=[^\s`]+ )*(?:\./scripts/|python )[^`]*)`", text)
    starts = re.compile(r"(\w+=\S+ )*(\./scripts/|(python|torchrun|deepspeed|pip|edit-\w+) )")
    found = [" ".join(line.split("#")[0].split()) for line in lines]
    return sorted({line for line in found if starts.match(line)})


def test_every_command_of_the_readme_has_its_test() -> None:
    assert commands(ROOT / "README.md") == sorted(COMMANDS)


def test_planner() -> None:
    text = shell("edit-plan examples/clusters/two_clusters_10gbps.yaml")
    assert "--edit-sync-interval" in text or "sync_interval" in text


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)]+)\)", page.read_text()):
        if target.startswith("https://"):
            continue
        name, _, anchor = target.partition("#")
        file = page.parent / name if name else page
        assert file.exists(), f"{page.name}: {target}"
        if anchor:
            heads = re.findall(r"^#+ (.*)$", file.read_text(), re.MULTILINE)
            anchors = {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}
            assert anchor in anchors, f"{page.name}: {target}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_files_exist(page: Path) -> None:
    for name in re.findall(rf"(?<![\w/])(?:{'|'.join(FOLDERS)})/[\w./-]*\w", page.read_text()):
        assert (ROOT / name).exists() or (page.parent / name).exists(), f"{page.name}: {name}"


def own_flags() -> set[str]:
    """Flags of the commands, of the other scripts and of the benchmarks."""
    folders = ("megatron_edit/commands", "scripts", "benchmarks")
    sources = [path.read_text() for folder in folders for path in (ROOT / folder).glob("*.py")]
    return {flag for source in sources for flag in re.findall(r"\"(--[\w-]+)\"", source)}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_flags_exist(page: Path) -> None:
    made = {"--" + name.replace("_", "-") for name in simulate.DIRECT}
    of_transformers = {flag.name for flags in TABLES.values() for flag in flags}
    known = {
        *known_flags(),
        *of_transformers,
        *own_flags(),
        *made,
        *LAUNCHER_FLAGS,
        *PIP_FLAGS,
        "--help",
    }
    for flag in re.findall(r"(?<![\w-])--[a-z][\w-]*", page.read_text()):
        # `--edit-*` stands for all of them.
        assert flag in known or flag == "--edit-", f"{page.name}: {flag}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_variables_exist(page: Path) -> None:
    scripts = "".join(script.read_text() for script in (ROOT / "scripts").glob("*.sh"))
    for name in {*re.findall(r"\b([A-Z][A-Z_]+)=", page.read_text())} - LIBRARY_VARIABLES:
        assert re.search(rf"\b{name}\b", scripts), f"{page.name}: {name}"


@pytest.mark.parametrize("name", make_config_docs.FILES)
def test_tables_are_up_to_date(name: str) -> None:
    text = (ROOT / name).read_text()
    assert make_config_docs.filled(text) == text, "run scripts/make_config_docs.py"


def test_pictures_are_up_to_date(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(make_pictures, "DOCS", tmp_path)
    for draw in make_pictures.PICTURES:
        draw()
    for picture in tmp_path.iterdir():
        assert picture.read_text() == (ROOT / "docs" / picture.name).read_text(), picture.name


@pytest.mark.timeout(900)
def test_quick_start(tmp_path: Path) -> None:
    short = {**SHORT, "WORK_DIR": tmp_path, "MASTER_PORT": free_port()}
    run = tmp_path / "edit_tiny_cpu_24"

    # Interrupted after the warm-up and two steps apart.
    first = shell("./scripts/quickstart.sh --exit-interval 10", **short)
    assert "4 rank(s) = 2 replica(s) x PP 1 x S 2 x TP 1" in first
    assert "stopped at step 10; start again to resume" in first

    second = shell("./scripts/quickstart.sh", **short)
    assert "tokenizer: byte-level" not in second
    assert "from step 10" in second
    assert "iteration       20/      24" in second
    perplexity, guessing = re.findall(r"perplexity ([\d.]+) \(.*: ([\d.]+)\)", second)[0]
    assert float(guessing) == 279.2
    assert float(perplexity) < 400
    assert "And the LORD said unto" in second
    assert (run / "checkpoints" / "iter_0000024" / "state.json").is_file()
    assert list((run / "tensorboard").glob("**/events.out.tfevents.*"))

    third = shell("./scripts/quickstart.sh", **short)
    assert "training: done before" in third
    assert f"perplexity {perplexity}" in third

    for command in COMMANDS:
        if "runs/quickstart/edit_tiny_cpu_360" in command:
            here = command.replace("runs/quickstart/edit_tiny_cpu_360", str(run))
            shell(here.replace("--output llama", f"--output {tmp_path / 'llama'}"))
    assert (tmp_path / "llama" / "model.safetensors").is_file()
    assert (tmp_path / "llama" / "tokenizer.json").is_file()


def test_quick_start_of_sync(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    command = "CONFIG=ds_configs/sync_tiny_cpu.json ./scripts/quickstart.sh"
    assert command in COMMANDS
    printed = shell(command, DRY_RUN=1, GPUS=0, WORK_DIR=tmp_path)
    line = next(line for line in printed.splitlines() if "pretrain_edit.py" in line)
    arguments = shlex.split(line)
    monkeypatch.chdir(ROOT)
    for suffix in (".bin", ".idx"):
        (tmp_path / f"kjv_text_document{suffix}").touch()
    args = parse_args(arguments[arguments.index("pretrain_edit.py") + 1 :], world_size=4)
    assert (args.edit.method, args.replicas, args.train_iters) == ("sync", 2, 360)


@pytest.mark.parametrize(
    ("gpus", "ranks", "replicas"), [(1, 1, 1), (3, 2, 2), (8, 8, 2), (9, 8, 2)]
)
def test_quick_start_on_gpus(gpus: int, ranks: int, replicas: int) -> None:
    printed = shell("./scripts/quickstart.sh", DRY_RUN=1, GPUS=gpus)
    assert f"--num_accelerators {ranks} " in printed
    assert f"--edit-replicas {replicas} " in printed
    assert f"--micro-batch-size {16 // ranks} " in printed
    assert "ds_configs/edit_tiny_gpu.json" in printed


@pytest.mark.parametrize(
    "command", [c for c, test in COMMANDS.items() if test == "test_7b_commands"]
)
def test_7b_commands(command: str) -> None:
    # tests/test_scripts_7b.py has the rest.
    assert "pretrain_edit.py --num-layers 32" in shell(command, DRY_RUN=1)


def test_the_test_script() -> None:
    assert "passed" in shell("./scripts/test.sh -q tests/test_outer.py")


def test_benchmark() -> None:
    printed = shell("python benchmarks/local_step.py --blocks 2 --steps 1")
    assert "| 1 | bare loop |" in printed
    assert "| 2 | FSDP2 |" in printed
