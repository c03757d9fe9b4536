"""The preprocessing script: formats, bad input, what a stopped run leaves."""

import gzip
import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import train_tokenizer
from megatron.core.datasets.indexed_dataset import IndexedDataset

from megatron_edit.commands import preprocess
from megatron_edit.data.tokenizer import HuggingFaceTokenizer

ROOT = Path(__file__).resolve().parent.parent
SCRIPTS = ROOT / "scripts"
NULL = ["--tokenizer-type", "NullTokenizer", "--vocab-size", "100"]


def run(monkeypatch: pytest.MonkeyPatch, *words: object) -> Any:
    """Runs the script in this process; returns its exit code."""
    monkeypatch.setattr(sys, "argv", ["preprocess_data.py", *map(str, words)])
    try:
        preprocess.main()
    except SystemExit as stop:
        return stop.code
    return 0


def documents(prefix: Path) -> list[list[int]]:
    data = IndexedDataset(str(prefix))
    return [data[i].tolist() for i in range(len(data))]


def write_jsonl(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer folder trained on a slice of the corpus."""
    place = tmp_path_factory.mktemp("tokenizer")
    text = place / "text.txt"
    text.write_bytes((ROOT / "data" / "kjv-1mb.txt").read_bytes()[:30000])
    words = ["train_tokenizer.py", "--input", str(text), "--vocab-size", "300"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", [*words, "--output", str(place / "out")])
        train_tokenizer.main()
    return place / "out"


@pytest.mark.parametrize("workers", [1, 2])
def test_text_comes_back_and_order_is_kept(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    folder: Path,
    workers: int,
) -> None:
    rows = [f"Verse {i}: été, 日本.\n\n" + "word " * (i % 7) for i in range(1500)]
    source = write_jsonl(tmp_path / "in.jsonl", [{"text": row} for row in rows])
    words = ["--input", source, "--output-prefix", tmp_path / "out", "--append-eod"]
    assert run(monkeypatch, *words, "--tokenizer-model", folder, "--workers", workers) == 0
    tokenizer = HuggingFaceTokenizer(str(folder))
    found = documents(tmp_path / "out_text_document")
    assert all(ids[-1] == tokenizer.eod for ids in found)
    assert [tokenizer.detokenize(ids[:-1]) for ids in found] == rows
    tokens = sum(map(len, found))
    assert f"1500 documents, {tokens} tokens" in capsys.readouterr().out


@pytest.mark.parametrize("kind", ["txt", "txt.gz", "jsonl", "jsonl.gz", "json", "parquet"])
def test_formats_give_the_same_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    texts = ["1 2 3", "", "4 5", "6"]
    source = tmp_path / f"in.{kind}"
    lines = texts if "txt" in kind else [json.dumps({"text": t, "other": 1}) for t in texts]
    content = "".join(f"{line}\n" for line in lines).encode()
    if kind == "parquet":
        from datasets import Dataset

        Dataset.from_dict({"text": texts, "other": [0] * 4}).to_parquet(source)
    else:
        source.write_bytes(gzip.compress(content) if kind.endswith("gz") else content)
    words = ["--input", source, "--output-prefix", tmp_path / "out", *NULL]
    assert run(monkeypatch, *words) == 0
    assert documents(tmp_path / "out_text_document") == [[1, 2, 3], [4, 5], [6]]


def test_several_inputs_and_keys(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    first = write_jsonl(tmp_path / "a.jsonl", [{"text": "1 2", "title": "9"}])
    second = write_jsonl(
        tmp_path / "b.jsonl", [{"text": "3", "title": ""}, {"text": "4", "title": "8"}]
    )
    words = ["--input", first, second, "--json-keys", "text", "title", *NULL]
    assert (
        run(monkeypatch, *words, "--output-prefix", tmp_path / "new" / "out", "--append-eod") == 0
    )
    assert documents(tmp_path / "new" / "out_text_document") == [[1, 2, 100], [3, 100], [4, 100]]
    assert documents(tmp_path / "new" / "out_title_document") == [[9, 100], [8, 100]]
    assert "1 empty documents and 0 bad rows skipped" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        ("line", [[1], [2], [3], [4]]),
        ("2", [[1, 2], [3], [4]]),
        ("paragraph", [[1, 2], [3, 4]]),
        ("file", [[1, 2, 3, 4]]),
    ],
)
def test_documents_of_a_text_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, choice: str, expected: Any
) -> None:
    (tmp_path / "in.txt").write_text("1\n2\n\n3\n4")
    words = ["--input", tmp_path / "in.txt", "--output-prefix", tmp_path / "out", *NULL]
    assert run(monkeypatch, *words, "--txt-document", choice) == 0
    assert documents(tmp_path / "out_text_document") == expected


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b'{"text": "1"', "not valid JSON"),
        (b"[1, 2]", "not a JSON object but a list"),
        (b'{"txt": "1"}', "no key 'text'; it has txt"),
        (b'{"text": 7}', "key 'text' holds int, not text"),
        (b'{"text": "\xff"}', "not valid UTF-8"),
        (b'{"text": "\\ud800"}', "lone surrogate"),
        (b'{"text": "101"}', "token id 101 outside"),
        (b'{"text": "one"}', "invalid literal"),
    ],
)
def test_bad_line_is_named_and_stops_or_is_skipped(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    line: bytes,
    reason: str,
) -> None:
    source = tmp_path / "in.jsonl"
    source.write_bytes(b'{"text": "1"}\n\n' + line + b'\n{"text": "2"}\n')
    words = ["--input", source, "--output-prefix", tmp_path / "out", *NULL]
    assert run(monkeypatch, *words) == 2
    told = capsys.readouterr().err
    assert f"{source}, line 3: " in told
    assert reason in told
    assert sorted(tmp_path.iterdir()) == [source]
    assert run(monkeypatch, *words, "--on-bad-line", "skip") == 0
    assert documents(tmp_path / "out_text_document") == [[1], [2]]
    said = capsys.readouterr()
    assert f"skipped: {source}, line 3: " in said.err
    assert "1 empty documents and 1 bad rows skipped" in said.out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--input", "nowhere.jsonl"], "--input: no such file: 'nowhere.jsonl'"),
        (["--input", "x.csv"], "--input: unknown kind of file 'x.csv'"),
        (["--input", "empty.txt"], "no document with text"),
        (["--input", "cut.jsonl.gz"], "--input: cannot read 'cut.jsonl.gz'"),
        (["--input", "cut.parquet"], "--input: 'cut.parquet' is no readable file"),
        (["--input", "ok.txt", "--workers", "0"], "--workers: got 0"),
        (["--input", "ok.txt", "--txt-document", "page"], "--txt-document: got 'page'"),
        (["--input", "ok.txt", "--json-keys", "a", "b"], "--json-keys"),
        (["--input", "ok.txt", "--output-prefix", "ok.txt/out"], "--output-prefix: cannot make"),
    ],
)
def test_mistakes_end_in_one_line_and_leave_nothing(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    words: Any,
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, content in {
        "ok.txt": b"1\n",
        "x.csv": b"a,b\n",
        "empty.txt": b"\n\n",
        "cut.jsonl.gz": gzip.compress(b'{"text": "1"}\n' * 100)[:-12],
        "cut.parquet": b"PAR1",
    }.items():
        Path(name).write_bytes(content)
    before = sorted(tmp_path.iterdir())
    assert run(monkeypatch, "--output-prefix", "out", *NULL, *words) == 2
    told = [t for t in capsys.readouterr().err.splitlines() if t.startswith("error: ")]
    assert len(told) == 1
    assert message in told[0]
    assert sorted(tmp_path.iterdir()) == before


def test_no_end_of_document_token(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    folder: Path,
) -> None:
    bare = tmp_path / "bare"
    bare.mkdir()
    (bare / "tokenizer.json").write_bytes((folder / "tokenizer.json").read_bytes())
    (bare / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    (tmp_path / "in.txt").write_text("In the beginning\n")
    words = ["--input", tmp_path / "in.txt", "--output-prefix", tmp_path / "out"]
    assert run(monkeypatch, *words, "--tokenizer-model", bare, "--append-eod") == 2
    assert "--append-eod" in capsys.readouterr().err
    assert run(monkeypatch, *words, "--tokenizer-model", bare) == 0


def test_killed_run_leaves_old_files_alone_and_no_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "old.txt").write_text("7\n")
    words = [*NULL, "--output-prefix", str(tmp_path / "out")]
    assert run(monkeypatch, *words, "--input", tmp_path / "old.txt") == 0
    old = documents(tmp_path / "out_text_document")
    (tmp_path / "big.txt").write_text("1 2 3\n" * 3_000_000)
    words += ["--input", "big.txt"]
    victim = subprocess.Popen(
        [sys.executable, SCRIPTS / "preprocess_data.py", *words, "--workers", "2"],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    part = tmp_path / "out_text_document.bin.part"
    deadline = time.monotonic() + 60
    while not (part.exists() and part.stat().st_size) and time.monotonic() < deadline:
        time.sleep(0.05)
    victim.send_signal(signal.SIGKILL)
    # The workers hold the pipe too, so this returns only when all of them are gone.
    victim.communicate(timeout=20)
    assert documents(tmp_path / "out_text_document") == old
    assert np.fromfile(part, dtype=np.uint16).size > 0
