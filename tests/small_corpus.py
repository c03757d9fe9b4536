"""The embedded corpus tokenised once per test process, as the quick start does it."""

from __future__ import annotations

import functools
from argparse import Namespace
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import train_tokenizer

from megatron_edit.commands import preprocess

ROOT = Path(__file__).resolve().parent.parent
CORPUS = str(ROOT / "data" / "kjv-1mb.txt")


@dataclass(frozen=True)
class SmallCorpus:
    """Where the files are; the folder goes away with the process."""

    folder: TemporaryDirectory[str]

    @property
    def tokenizer(self) -> str:
        return f"{self.folder.name}/tokenizer"

    @property
    def prefix(self) -> str:
        return f"{self.folder.name}/kjv_text_document"


@functools.cache
def small_corpus(vocabulary: int = 512) -> SmallCorpus:
    """Trains a tokenizer on the corpus and tokenises it."""
    corpus = SmallCorpus(TemporaryDirectory())
    train_tokenizer.train(
        Namespace(
            input=[CORPUS], json_keys=["text"], vocab_size=vocabulary, output=corpus.tokenizer
        )
    )
    preprocess.preprocess(
        Namespace(
            input=[CORPUS], json_keys=["text"], output_prefix=f"{corpus.folder.name}/kjv",
            tokenizer_type="HuggingFaceTokenizer", tokenizer_model=corpus.tokenizer,
            vocab_size=None, append_eod=True, workers=1, on_bad_line="stop", txt_document="32",
            dataset_config=None, dataset_split="train",
        )
    )  # fmt: skip
    return corpus
