"""Trainings on the embedded text through the real launcher, one log each.

A training whose log is there, of the very same command line, is not repeated.
"""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
# What all models have in common.
ARCHITECTURE: dict[str, object] = {
    "--normalization": "RMSNorm",
    "--attention-dropout": 0,
    "--hidden-dropout": 0,
    "--swiglu": True,
    "--disable-bias-linear": True,
    "--untie-embeddings-and-output-weights": True,
}


class Trainings:
    """Starts trainings and keeps their logs.

    Args:
        work: Folder of logs, tokenizer and data.
        vocabulary: Size of the tokenizer's vocabulary.
        total: Number of trainings, for the progress.
    """

    def __init__(self, work: Path, vocabulary: int, total: int) -> None:
        self._work, self._total, self._begun = work, total, 0
        self._prepare_data(vocabulary)

    def log(self, slug: str, replicas: int, flags: Mapping[str, object]) -> Path:
        """Trains once, unless that was done before.

        Args:
            slug: Name of the log, without its suffix.
            replicas: Ranks to start, one a replica.
            flags: Of pretrain_edit.py, beside those of data and tokenizer; a switch has True.

        Returns:
            The log: a line with the flags, then what the training printed.

        Raises:
            SystemExit: The training failed; says how.
        """
        self._begun += 1
        shown, words = f"[{self._begun}/{self._total}] {slug}", self.words(flags)
        log = self._work / f"{slug}.log"
        if log.exists() and log.read_text().startswith(" ".join(words) + "\n"):
            print(f"{shown}: there already", flush=True)
            return log
        launch = ["deepspeed", "--num_accelerators", str(replicas), "--master_port", _free_port()]
        run = subprocess.run(
            [*launch, "pretrain_edit.py", *words], cwd=ROOT, capture_output=True, text=True
        )
        if run.returncode:
            sys.exit(f"{shown} failed:\n{run.stdout[-2000:]}\n{run.stderr[-4000:]}")
        aside = log.with_suffix(".part")
        aside.write_text(" ".join(words) + "\n" + run.stdout)
        aside.replace(log)
        print(f"{shown}: done", flush=True)
        return log

    def words(self, flags: Mapping[str, object]) -> list[str]:
        """Returns the words of a command line: the flags, and those of data and tokenizer."""
        own = {
            "--data-path": self._work / "kjv_text_document",
            "--split": "95,5,0",
            "--tokenizer-type": "HuggingFaceTokenizer",
            "--tokenizer-model": self._work / "tokenizer",
            "--num-workers": 0,
        }
        words = []
        for flag, value in {**own, **flags}.items():
            words += [flag] if value is True else [flag, str(value)]
        return words

    def _prepare_data(self, vocabulary: int) -> None:
        self._work.mkdir(parents=True, exist_ok=True)
        corpus, tokenizer = ROOT / "data" / "kjv-1mb.txt", self._work / "tokenizer"
        steps = {
            tokenizer: [
                "train_tokenizer.py", "--vocab-size", vocabulary, "--output", tokenizer,
            ],
            self._work / "kjv_text_document.bin": [
                "preprocess_data.py", "--txt-document", "32", "--tokenizer-model", tokenizer,
                "--append-eod", "--output-prefix", self._work / "kjv",
            ],
        }  # fmt: skip
        for made, (script, *flags) in steps.items():
            if not made.exists():
                command = [sys.executable, ROOT / "scripts" / str(script), "--input", corpus]
                subprocess.run([str(word) for word in [*command, *flags]], check=True)


def _free_port() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])
