"""What docs/deepspeed.md tells a user to type, under the real launcher, on real text."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from distributed import free_port
from launching import BIN, NOISE, ROOT
from small_corpus import CORPUS, small_corpus
from transformers import LlamaForCausalLM
from zero_training import ZeroCase

PAGE = (ROOT / "docs" / "deepspeed.md").read_text()


def command(script: str, values: dict[str, str]) -> list[str]:
    """The page's command of a script, with real values in the places of its capitals."""
    block = re.search(rf"^    (deepspeed .*{script}(?:.*\\\n)*.*)$", PAGE, re.MULTILINE)
    assert block is not None, script
    words = block[1].replace("\\\n", " ").split()
    return [values.get(word, word) for word in words]


def run(words: list[str], **more: str) -> str:
    env = {name: value for name, value in os.environ.items() if name not in NOISE}
    env |= {"PATH": f"{BIN}:{env['PATH']}", "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    done = subprocess.run(
        [str(BIN / words[0]), f"--master_port={free_port()}", *words[1:]],
        cwd=ROOT, env={**env, **more}, capture_output=True, text=True, timeout=250,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a random model and a tokenizer."""
    folder = tmp_path_factory.mktemp("model")
    shutil.copytree(small_corpus().tokenizer, folder, dirs_exist_ok=True)
    ZeroCase(3).model(vocabulary=512, positions=128).save_pretrained(folder)
    return folder


def test_the_example_trains_a_model_folder_on_a_text(model: Path, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_bytes(Path(CORPUS).read_bytes()[:60_000])
    values = {"8": "2", "--num_gpus": "--num_accelerators", "MODEL": str(model), "TEXT": str(text)}
    out = tmp_path / "out"
    run(command("examples/hf_trainer.py", {**values, "OUT": str(out)}))
    exported = LlamaForCausalLM.from_pretrained(out / "model")
    first = LlamaForCausalLM.from_pretrained(model)
    moved = [
        (a - b).abs().max() > 0
        for a, b in zip(exported.parameters(), first.parameters(), strict=True)
    ]
    assert all(moved)
    assert all(torch.isfinite(parameter).all() for parameter in exported.parameters())
    assert len((out / "model" / "tokenizer.json").read_text()) > 100


def test_the_script_trains_by_megatrons_flags_and_goes_on(model: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    values = {
        "8": "2", "--num_gpus": "--num_accelerators", "MODEL": str(model),
        "PREFIX": small_corpus().prefix, "OUT": str(out), "2048": "32", "1000": "8", "1e-5": "1e-3",
    }  # fmt: skip
    words = command("scripts/pretrain_hf_edit.py", values)
    more = "--save-interval 4 --eval-iters 1 --eval-interval 100 --num-workers 0 --log-interval 2"
    edit = "--edit-warmup-steps 2 --edit-sync-interval 2"
    printed = run([*words, *more.split(), *edit.split()])
    assert f"saved {out}/hf" in printed
    assert {path.name for path in out.iterdir()} >= {"checkpoint-4", "checkpoint-8", "hf", "runs"}
    LlamaForCausalLM.from_pretrained(out / "hf")
    # By the same JSON a flag of the other script is refused, once and before anything is built.
    refused = subprocess.run(
        [str(BIN / "python"), "scripts/pretrain_hf_edit.py", "--num-layers", "2", "--lr", "1"],
        cwd=ROOT, capture_output=True, text=True,
    )  # fmt: skip
    assert refused.returncode == 2
    assert refused.stderr.count("error:") == 1
    assert "--num-layers: the model's folder, the DeepSpeed JSON" in refused.stderr
