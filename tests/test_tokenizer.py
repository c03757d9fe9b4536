"""Tokenizers: training, round trips, vocabulary sizes, mistakes."""

import subprocess
import sys
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest

from megatron_edit.data.tokenizer import build_tokenizer, model_vocab_size, padded_vocab_size
from megatron_edit.errors import ConfigurationError

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer of 300 tokens, trained by the script from another working directory."""
    place = tmp_path_factory.mktemp("tokenizer")
    (place / "text.txt").write_bytes((ROOT / "data" / "kjv-1mb.txt").read_bytes()[:30000])
    (place / "more.jsonl").write_text('{"text": "one"}\n{"text": "two"}\n')
    script = ROOT / "scripts" / "train_tokenizer.py"
    words = ["--input", "text.txt", "more.jsonl", "--vocab-size", "300", "--output", "out"]
    subprocess.run([sys.executable, script, *words], cwd=place, check=True)
    return place / "out"


def arguments(**changes: Any) -> Namespace:
    values = {
        "tokenizer_type": "HuggingFaceTokenizer",
        "tokenizer_model": None,
        "vocab_size": None,
        "make_vocab_size_divisible_by": 128,
        "tensor_model_parallel_size": 1,
    }
    return Namespace(**(values | changes))


@pytest.mark.parametrize(
    "text",
    ["And God said", "  two  blanks , and commas.", "tab\tline\n\n", "été 日本 🙂", ""],
)
def test_trained_tokenizer_gives_any_text_back(folder: Path, text: str) -> None:
    tokenizer = build_tokenizer(arguments(tokenizer_model=str(folder)))
    assert tokenizer.detokenize(tokenizer.tokenize(text)) == text
    assert tokenizer.tokenize_batch([text, "x"])[0].tolist() == tokenizer.tokenize(text)


def test_trained_tokenizer_has_an_end_of_document_token(folder: Path) -> None:
    tokenizer = build_tokenizer(arguments(tokenizer_model=str(folder)))
    assert tokenizer.vocab_size == 300
    assert tokenizer.eod is not None
    assert tokenizer.detokenize([tokenizer.eod]) == "<|endoftext|>"
    assert not (folder.parent / "out.part").exists()


def test_null_tokenizer_counts_its_end_of_document_token_on_top() -> None:
    tokenizer = build_tokenizer(arguments(tokenizer_type="NullTokenizer", vocab_size=99))
    assert (tokenizer.vocab_size, tokenizer.eod) == (100, 99)
    assert tokenizer.tokenize("3 1 4") == [3, 1, 4]
    assert tokenizer.detokenize([3, 1, 4]) == "3 1 4"
    by_model = build_tokenizer(arguments(tokenizer_type="NullTokenizer", tokenizer_model="99"))
    assert by_model.unique_identifiers == tokenizer.unique_identifiers


@pytest.mark.parametrize(
    ("vocab", "divisible_by", "tp", "expected"),
    [(1024, 128, 1, 1024), (1025, 128, 1, 1152), (1024, 128, 3, 1152), (50257, 128, 8, 51200)],
)
def test_padded_vocab_size(vocab: int, divisible_by: int, tp: int, expected: Any) -> None:
    assert padded_vocab_size(vocab, divisible_by, tp) == expected


def test_model_vocabulary_may_be_larger_than_the_tokenizers_but_not_smaller(folder: Path) -> None:
    args = arguments(tokenizer_model=str(folder))
    tokenizer = build_tokenizer(args)
    assert model_vocab_size(args, tokenizer) == 384
    args.vocab_size = 400
    assert model_vocab_size(args, tokenizer) == 512
    args.vocab_size = 299
    with pytest.raises(ConfigurationError, match=r"--vocab-size: the tokenizer has 300 tokens"):
        model_vocab_size(args, tokenizer)


def test_null_tokenizer_sets_the_model_vocabulary() -> None:
    args = arguments(tokenizer_type="NullTokenizer", vocab_size=128)
    assert model_vocab_size(args, build_tokenizer(args)) == 256


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tokenizer_model": "nowhere"}, "--tokenizer-model: no such folder: 'nowhere'"),
        ({}, "--tokenizer-model: HuggingFaceTokenizer needs a folder"),
        ({"tokenizer_model": str(ROOT / "data")}, "--tokenizer-model: no tokenizer of"),
        ({"tokenizer_type": "NullTokenizer"}, "--vocab-size: NullTokenizer needs"),
        ({"tokenizer_type": "NullTokeniser"}, "did you mean 'NullTokenizer'"),
    ],
)
def test_mistakes_are_told_in_one_line(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        build_tokenizer(arguments(**changes))
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
