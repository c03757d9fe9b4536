"""Long texts are tokenised in pieces, to the same ids as in one go and in bounded memory."""

import json
import multiprocessing
import random
import resource
import sys
import unicodedata
from pathlib import Path
from typing import Any

import pytest
import train_tokenizer
from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    models,
    normalizers,
    pre_tokenizers,
    trainers,
)
from transformers import PreTrainedTokenizerFast

from megatron_edit.commands import preprocess
from megatron_edit.data import pieces
from megatron_edit.data.tokenizer import HuggingFaceTokenizer, NullTokenizer

KJV = Path(__file__).resolve().parent.parent / "data" / "kjv-1mb.txt"
BYTES = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
GPT2 = pre_tokenizers.ByteLevel(add_prefix_space=False)
ENDINGS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
LLAMA3 = ENDINGS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|" + REST
QWEN2 = LLAMA3.replace("{1,3}", "")
QWEN3 = (
    ENDINGS + r"|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
CL100K = (
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]++[\r\n]*"
    r"|\s*[\r\n]|\s+(?!\S)|\s+"
)
UPPER, LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
O200K = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{UPPER}*{LOWER}+{ENDINGS}?"
    rf"|[^\r\n\p{{L}}\p{{N}}]?{UPPER}+{LOWER}*{ENDINGS}?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def split(pattern: str, behavior: str = "isolated", invert: bool = False) -> Any:
    return pre_tokenizers.Split(Regex(pattern), behavior, invert)


def sequence(*parts: Any) -> Any:
    return pre_tokenizers.Sequence(list(parts))


# Letters of several scripts and forms, marks that compose, numbers that are no digits, white space
# of all kinds, and signs; the last are added tokens.
WORDS = [
    "a",
    "The",
    "word",
    "été",
    "e\u0301",
    "\u017f",
    "日本",
    "も",
    "\u1112\u1161\u11ab",
    "नमस्ते",
    "שלום",
]
WORDS += ["\ufb1d", "\u0130", "ǅ", "ʰ", "½", "Ⅷ", "٣", "7", "123", "4567"]
WORDS += ["'s", "'LL", "'\u017f", "\u2019s", "'", "\u0301", "\u20dd", "\u200d", "🙂", "👩‍👩‍👧"]
WORDS += [" ", "  ", "   ", "\n", "\r\n", "\t", "\n\n", "\x0b", "\x1c", "\x85", "\u00a0", "\u3000"]
WORDS += [
    "<é;>",
    ".",
    ",",
    "...",
    "(",
    ")",
    "/",
    "//",
    "-",
    "_",
    "!\n",
    "\uff0c",
    "\u3002",
    "\u2014",
    "{}",
]
ADDED = ["<|end|>", "<|a b|>", "<e\u0301;>", "        ", "\n\n\n", "cat.nap", "<eat>"]


def random_text(rng: random.Random) -> str:
    return "".join(rng.choices(WORDS + ADDED, k=rng.randint(1, 80)))


def trained(words: Any, normalizer: Any = None) -> Tokenizer:
    """A byte-level BPE tokenizer that merges whatever its words let it merge."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizer
    tokenizer.pre_tokenizer = words
    rng = random.Random(1)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=3000, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator((random_text(rng) for _ in range(400)), trainer)
    return tokenizer


@pytest.mark.parametrize("normalizer", [None, normalizers.NFC()], ids=["plain", "NFC"])
@pytest.mark.parametrize(
    "words",
    [
        GPT2,
        sequence(pre_tokenizers.Digits(individual_digits=True), GPT2),
        *(sequence(split(p), BYTES) for p in (LLAMA3, QWEN2, QWEN3, CL100K, O200K)),
    ],
    ids=["gpt2", "digits", "llama3", "qwen2", "qwen3", "cl100k", "o200k"],
)
def test_pieces_have_the_ids_of_the_whole(
    monkeypatch: pytest.MonkeyPatch, words: Any, normalizer: Any
) -> None:
    monkeypatch.setattr(pieces, "PIECE_CHARACTERS", 2)
    tokenizer = trained(words, normalizer)
    tokenizer.add_tokens([AddedToken(text, normalized=i % 2 == 0) for i, text in enumerate(ADDED)])
    tokenizer.add_special_tokens([AddedToken("<mask>", lstrip=True, special=True)])
    cut = pieces.cut_for(tokenizer)
    rng, cuts = random.Random(2), 0
    for _ in range(600):
        text = random_text(rng)
        parts = list(pieces.pieces(text, cut))
        ids = [i for encoded in tokenizer.encode_batch(parts) for i in encoded.ids]
        assert ids == tokenizer.encode(text).ids, parts
        assert "".join(parts) == text
        cuts += len(parts) - 1
    assert cuts > 1000


def plain(words: Any, normalizer: Any = None) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizer
    tokenizer.pre_tokenizer = words
    return tokenizer


def with_token(token: AddedToken) -> Tokenizer:
    tokenizer = plain(GPT2)
    tokenizer.add_tokens([token])
    return tokenizer


class Written:
    """A pre-tokenizer in Python."""

    def pre_tokenize(self, text: Any) -> None:
        """Leaves the text as it is."""


@pytest.mark.parametrize(
    "tokenizer",
    [
        None,
        Tokenizer(models.BPE()),
        plain(BYTES),
        plain(pre_tokenizers.Metaspace()),
        plain(pre_tokenizers.ByteLevel(add_prefix_space=True)),
        plain(pre_tokenizers.PreTokenizer.custom(Written())),
        plain(GPT2, normalizers.NFKC()),
        plain(sequence(split(r"\p{N}"), BYTES)),
        plain(sequence(split(LLAMA3 + r"|.+\n"), BYTES)),
        plain(sequence(split(LLAMA3, "removed"), BYTES)),
        plain(sequence(split(LLAMA3, invert=True), BYTES)),
        plain(sequence(split(LLAMA3), pre_tokenizers.Metaspace())),
        plain(sequence(pre_tokenizers.Digits(), BYTES)),
        plain(sequence()),
        with_token(AddedToken("<mask>", rstrip=True)),
        with_token(AddedToken("one", single_word=True)),
        with_token(AddedToken("".join(f"a{sign}" for sign in pieces._SIGNS))),
    ],
)
def test_other_tokenizers_get_texts_whole(monkeypatch: pytest.MonkeyPatch, tokenizer: Any) -> None:
    monkeypatch.setattr(pieces, "PIECE_CHARACTERS", 2)
    assert pieces.cut_for(tokenizer) is pieces.nowhere
    assert list(pieces.pieces("one two, three", pieces.nowhere)) == ["one two, three"]


def test_the_user_is_told_when_texts_are_tokenised_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "in.txt").write_text("one two\n" * 3)
    words = ["--input", str(tmp_path / "in.txt"), "--output-prefix", str(tmp_path / "out")]
    for name, pattern in (("cut", LLAMA3), ("whole", r"\S+ ?")):
        inner = trained(sequence(split(pattern), BYTES))
        PreTrainedTokenizerFast(tokenizer_object=inner).save_pretrained(tmp_path / name)
        monkeypatch.setattr(sys, "argv", ["x", *words, "--tokenizer-model", str(tmp_path / name)])
        preprocess.main()
        assert ("each document is tokenised whole" in capsys.readouterr().err) == (name == "whole")


def test_signs_are_no_letters_numbers_or_marks_and_stay_alone_under_nfc() -> None:
    assert not {unicodedata.category(sign)[0] for sign in pieces._SIGNS} & set("LNM")
    for sign in pieces._SIGNS:
        assert unicodedata.normalize("NFC", f"e{sign}\u0301")[:2] == f"e{sign}"[:2]
        assert unicodedata.is_normalized("NFC", sign)


def test_a_batch_of_texts_keeps_their_ids_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    PreTrainedTokenizerFast(tokenizer_object=trained(GPT2)).save_pretrained(tmp_path)
    tokenizer = HuggingFaceTokenizer(str(tmp_path))
    rng = random.Random(3)
    texts = ["", *(random_text(rng) for _ in range(20)), ""]
    numbers = ["", " 1  2 ", "3", "4 5 6\n7 8 9" * 5]
    whole = [ids.tolist() for ids in tokenizer.tokenize_batch(texts)]
    whole_numbers = [list(map(int, text.split())) for text in numbers]
    monkeypatch.setattr(pieces, "PIECE_CHARACTERS", 4)
    monkeypatch.setattr(pieces, "GROUP_CHARACTERS", 11)
    assert [ids.tolist() for ids in tokenizer.tokenize_batch(texts)] == whole
    found = NullTokenizer(999).tokenize_batch(numbers)
    assert [ids.tolist() for ids in found] == whole_numbers


def train(tmp_path: Path, words: list[str]) -> bytes:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["x", *words, "--output", str(tmp_path / "tokenizer")])
        train_tokenizer.main()
    return (tmp_path / "tokenizer" / "tokenizer.json").read_bytes()


def test_a_tokenizer_is_trained_the_same_on_pieces(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "in.txt").write_bytes(KJV.read_bytes()[:50000])
    words = ["--input", str(tmp_path / "in.txt"), "--vocab-size", "500"]
    whole = train(tmp_path, words)
    monkeypatch.setattr(pieces, "PIECE_CHARACTERS", 10)
    assert train(tmp_path, words) == whole


def _growth(results: Any, target: Any, words: list[str]) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    sys.argv = ["x", *words]
    target()
    results.put((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024)


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("case", "megabytes", "bytes_a_byte"), [("text", 3, 40), ("numbers", 10, 10), ("train", 3, 40)]
)
def test_a_long_document_takes_bounded_memory(
    tmp_path: Path, case: str, megabytes: int, bytes_a_byte: int
) -> None:
    text = "1 22 333 4 " * 95_000 if case == "numbers" else KJV.read_text()
    (tmp_path / "in.jsonl").write_text(json.dumps({"text": text * megabytes}))
    words, target = ["--input", str(tmp_path / "in.jsonl")], preprocess.main
    if case == "text":
        train(tmp_path, ["--input", str(KJV), "--vocab-size", "300"])
        words += ["--tokenizer-model", str(tmp_path / "tokenizer")]
    elif case == "numbers":
        words += ["--tokenizer-type", "NullTokenizer", "--vocab-size", "999"]
    if case == "train":
        target = train_tokenizer.main
        words += ["--vocab-size", "300", "--output", str(tmp_path / "out")]
    else:
        words += ["--output-prefix", str(tmp_path / "out")]
    fork = multiprocessing.get_context("fork")
    results = fork.Queue()
    child = fork.Process(target=_growth, args=(results, target, words))
    child.start()
    growth = results.get(timeout=100)
    child.join()
    assert growth < bytes_a_byte * len(text) * megabytes
