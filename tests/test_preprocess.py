"""The preprocessing script: formats, bad input, what a stopped run leaves."""

import gzip
import json
import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import train_tokenizer
from megatron.core.datasets.indexed_dataset import IndexedDataset

from megatron_edit.commands import preprocess
from megatron_edit.data.corpus import BATCH_BYTES, read_batches
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


TEXT_KINDS = ["txt", "jsonl", "txt.gz", "jsonl.gz", "txt.zst", "jsonl.zst", "json", "json.ZST"]


def compressed(content: bytes, name: str) -> bytes:
    """The content as a file of that name would hold it."""
    if name.lower().endswith(".zst"):
        sink = pa.BufferOutputStream()
        with pa.CompressedOutputStream(sink, "zstd") as stream:
            stream.write(content)
        return sink.getvalue().to_pybytes()
    return gzip.compress(content) if name.endswith(".gz") else content


@pytest.mark.parametrize("kind", [*TEXT_KINDS, "parquet"])
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
        # Two frames, as tools leave that compress in parallel or append.
        half = len(content) // 2
        source.write_bytes(compressed(content[:half], kind) + compressed(content[half:], kind))
    words = ["--input", source, "--output-prefix", tmp_path / "out", *NULL]
    assert run(monkeypatch, *words) == 0
    assert documents(tmp_path / "out_text_document") == [[1, 2, 3], [4, 5], [6]]


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_long_rows_are_handed_on_a_few_at_a_time(tmp_path: Path, kind: str) -> None:
    rows = [{"text": "x" * (BATCH_BYTES // 2), "other": None}] * 5
    source = tmp_path / f"in.{kind}"
    if kind == "parquet":
        from datasets import Dataset

        Dataset.from_list(rows).to_parquet(source)
    else:
        write_jsonl(source, rows)
    batches = list(read_batches([str(source)], ["text", "other"]))
    assert [len(batch.rows) for batch in batches] == [2, 2, 1]
    assert [batch.first for batch in batches] == [1, 3, 5]


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
        (b'{"text": "1"', "not valid JSON: Expecting ',' delimiter (column 13)"),
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
        (["--input", "cut.jsonl.zst"], "--input: cannot read 'cut.jsonl.zst': Truncated"),
        (["--input", "torn.jsonl.gz"], "--input: cannot read 'torn.jsonl.gz'"),
        (["--input", "torn.jsonl.zst"], "--input: cannot read 'torn.jsonl.zst'"),
        (["--input", "cut.parquet"], "--input: 'cut.parquet' is no readable file"),
        (["--input", "ok.txt", "--workers", "0"], "--workers: got 0"),
        (["--input", "ok.txt", "--txt-document", "page"], "--txt-document: got 'page'"),
        (["--input", "ok.txt", "--json-keys", "a", "b"], "--json-keys"),
        (["--input", "ok.txt", "--json-keys", "a", "a"], "--json-keys: 'a' is given 2 times"),
        (["--input", "ok.txt", "./ok.txt"], "--input: 'ok.txt' is given 2 times; give each once"),
        (["--input", "ok.txt", "--json-keys", "a/b"], "cannot write 'out_a/b_document.bin.part'"),
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
    rows = b"".join(b'{"text": "%d"}\n' % (i * i % 97) for i in range(2000))
    packed = {kind: compressed(rows, f".{kind}") for kind in ("gz", "zst")}
    # Behind the headers, where neither format allows it.
    torn = {kind: data[:10] + b"\xff" * 40 + data[10:] for kind, data in packed.items()}
    for name, content in {
        "ok.txt": b"1\n",
        "x.csv": b"a,b\n",
        "empty.txt": b"\n\n",
        "cut.jsonl.gz": packed["gz"][:-12],
        "cut.jsonl.zst": packed["zst"][:-12],
        "torn.jsonl.gz": torn["gz"],
        "torn.jsonl.zst": torn["zst"],
        "cut.parquet": b"PAR1",
    }.items():
        Path(name).write_bytes(content)
    before = sorted(tmp_path.iterdir())
    assert run(monkeypatch, "--output-prefix", "out", *NULL, *words) == 2
    told = [t for t in capsys.readouterr().err.splitlines() if t.startswith("error: ")]
    assert len(told) == 1
    assert message in told[0]
    assert sorted(tmp_path.iterdir()) == before


ARRAY, SPREAD = "holds one JSON array", "holds JSON objects of several lines"


@pytest.mark.parametrize(
    ("name", "content", "found", "command"),
    [
        ("a.json", '[\n{"text": "1"},\n{"text": "2"}\n]\n', ARRAY, "jq -c '.[]' a.json"),
        ("a.json", '[{"text": "1"},\n {"text": "2"}]', ARRAY, "jq -c '.[]' a.json"),
        ("a.jsonl", '\n[{"text": "1"}, {"text": "2"}]\n', ARRAY, "jq -c '.[]' a.jsonl"),
        ("a.json", '[{"text": "' + "1 " * 700_000 + '"}]', ARRAY, "jq -c '.[]' a.json"),
        ("a b.json.gz", "[\n]", ARRAY, "gzip -dc 'a b.json.gz' | jq -c '.[]'"),
        ("a.jsonl.zst", "[\n]", ARRAY, "zstd -dc a.jsonl.zst | jq -c '.[]'"),
        ("a.json", '{\n  "text": "1"\n}\n', SPREAD, "jq -c . a.json"),
        ("a.json", '{"data": [\n{"text": "1"}\n]}', SPREAD, "jq -c . a.json"),
        ("a.json", '{"id": 1,\n "text": "1"}', SPREAD, "jq -c . a.json"),
    ],
)
def test_other_json_is_named_with_the_way_to_convert_it(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    name: str,
    content: str,
    found: str,
    command: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path(name).write_bytes(compressed(content.encode(), name))
    expected = (
        f"error: --input: {name!r} {found}; JSON Lines, one object a line, is expected: "
        f"{command} > lines.jsonl converts it\n"
    )
    words = ["--input", name, "--output-prefix", "out", *NULL, "--on-bad-line", "skip"]
    assert run(monkeypatch, *words) == 2
    assert capsys.readouterr().err == expected
    monkeypatch.setattr(sys, "argv", ["train_tokenizer.py", "--input", name, "--output", "t"])
    with pytest.raises(SystemExit) as stop:
        train_tokenizer.main()
    assert stop.value.code == 2
    assert capsys.readouterr().err == expected
    assert os.listdir() == [name]


def test_a_full_disk_ends_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "in.txt").write_text("1 2 3\n" * 100_000)
    words = ["--input", tmp_path / "in.txt", "--output-prefix", tmp_path / "out", *NULL]
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))
    try:
        assert run(monkeypatch, *words) == 2
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, ignored)
    told = [t for t in capsys.readouterr().err.splitlines() if t.startswith("error: ")]
    assert len(told) == 1
    assert f"cannot write '{tmp_path}/out_text_document.bin.part': " in told[0]
    assert "File too large" in told[0]
    assert os.listdir(tmp_path) == ["in.txt"]


@pytest.mark.parametrize(
    "first",
    [
        "[1, 2]",
        '{"text": "1",',
        '{"text": "1"',
        '{"text": "' + "x, " * 500_000,
    ],
)
def test_a_wrong_first_line_is_a_bad_row_and_no_other_format(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, first: str
) -> None:
    (tmp_path / "in.jsonl").write_text(f'{first}\n{{"text": "2"}}\n')
    words = ["--input", tmp_path / "in.jsonl", "--output-prefix", tmp_path / "out", *NULL]
    assert run(monkeypatch, *words) == 2
    assert run(monkeypatch, *words, "--on-bad-line", "skip") == 0
    assert documents(tmp_path / "out_text_document") == [[2]]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--input", "a.txt", "--json-keys", "k", "k"], "--json-keys: 'k' is given 2 times"),
        (["--input", "a.txt", "a.txt", "a.txt"], "--input: 'a.txt' is given 3 times"),
        (["--input", "a.txt", "--json-keys", "a", "b"], "--json-keys: a .txt input has one text"),
        (["--input", "a.txt", "nowhere.txt"], "--input: no such file: 'nowhere.txt'"),
    ],
)
def test_the_tokenizer_is_not_trained_on_mistaken_flags(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    words: list[str],
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("a.txt").write_text("one\ntwo\n")
    monkeypatch.setattr(sys, "argv", ["train_tokenizer.py", *words, "--output", "t"])
    with pytest.raises(SystemExit) as stop:
        train_tokenizer.main()
    assert stop.value.code == 2
    told = capsys.readouterr().err
    assert told.startswith(f"error: {message}")
    assert told.count("\n") == 1
    assert os.listdir() == ["a.txt"]


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
