"""The slow-link benchmark: its numbers, its page, where it is skipped, and a run of it."""

import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from benchmarks.link import bench, report
from benchmarks.link.gate import (
    Block,
    Controller,
    Gate,
    RankLostError,
    parse_peak_bytes,
    parse_sent_bytes,
)

ROOT = Path(__file__).resolve().parent.parent
SCRIPT = ROOT / "scripts" / "bench_link.sh"
LAB = ROOT / "benchmarks" / "link" / "lab.sh"
BIN = Path(sys.executable).parent

NET_DEV = """\
Inter-|   Receive                                                |  Transmit
 face |bytes    packets errs drop fifo frame compressed multicast|bytes    packets errs drop
    lo:     100       1    0    0    0     0          0         0      100       1    0    0
  eth0: 2005190    7352    0    0    0     0          0         0 26030517   18000    0    0
"""


def can_make_links() -> bool:
    """Whether the benchmark can run here."""
    if os.getuid() != 0 or not Path("/dev/net/tun").is_char_device() or not shutil.which("tc"):
        return False
    probe = [str(LAB), "run", "--rate-mbit", "100", "--delay-ms", "1", "--", "true"]
    return subprocess.run(probe, capture_output=True, timeout=60).returncode == 0


def block(method: str, rank: int, cycle: int, **changes: Any) -> dict[str, Any]:
    """A block of 16 steps of 0.5 s."""
    values = {"step_s": [0.5] * 16, "block_s": 8.0, "peak_bytes": 500_000_000, **changes}
    return asdict(Block(method, rank, cycle, **values))


def measured_blocks() -> list[dict[str, Any]]:
    """Of three methods, two cycles, two ranks."""
    blocks = []
    for cycle, edit_s in ((1, 10.0), (2, 12.0)):
        for rank in (0, 1):
            blocks += [
                block("none", rank, cycle),
                block(
                    "edit",
                    rank,
                    cycle,
                    block_s=edit_s,
                    exposed_s=2.0 + 0.1 * rank * cycle,
                    sent_bytes=25_000_000 + 1000 * rank,
                    peak_bytes=500_000_000 + 1_000_000 * cycle,
                ),
                block(
                    "sync",
                    rank,
                    cycle,
                    step_s=[2.5, 2.5],
                    block_s=5.0,
                    exposed_s=4.0,
                    sent_bytes=50_000_000,
                ),
            ]
    return blocks


def result(*links: tuple[float, list[dict[str, Any]]]) -> dict[str, Any]:
    """What the benchmark writes, for a model of 6.25 million parameters: 2 s at 100 Mbit/s."""
    return {
        "rate_mbit": 100.0,
        "tau": 16,
        "parameters": 6_250_000,
        "tokens_per_step": 1024,
        "cores": 2,
        "congestion_control": "cubic",
        "links": [{"delay_ms": delay_ms, "blocks": blocks} for delay_ms, blocks in links],
    }


def test_the_counters_of_the_kernel() -> None:
    assert parse_sent_bytes(NET_DEV, "eth0") == 26030517
    assert parse_sent_bytes(NET_DEV, "eth1") == 0
    assert parse_peak_bytes("VmPeak:\t 9 kB\nVmHWM:\t  1024 kB\nVmRSS:\t 5 kB\n") == 1024**2
    assert parse_peak_bytes("") == 0


def test_what_a_method_costs() -> None:
    (setting,) = report.summarise(result((20.0, measured_blocks())))
    rows = {row.method: row for row in setting.rows}
    assert list(rows) == ["none", "sync", "edit"]
    assert setting.transfer_s == 2.0
    edit = rows["edit"]
    assert edit.speed == report.Spread.of([8 / 10, 8 / 12])
    # Of the two ranks the one that waits less.
    assert edit.exposed_s == report.Spread(2.0, 2.0, 2.0)
    assert edit.sent_bytes == 25_000_500
    assert edit.peak_bytes == 502_000_000
    # sync's blocks have two steps with a synchronisation in each; a round has 16.
    assert rows["sync"].exposed_s.median == 2.0
    assert rows["sync"].sent_bytes == 8 * 50_000_000
    assert rows["sync"].speed.median == pytest.approx(0.5 / 2.5)
    assert rows["sync"].step_s.median == 0.5


def test_without_the_run_that_it_compares_with() -> None:
    some = [b for b in measured_blocks() if b["method"] == "edit"]
    (setting,) = report.summarise(result((20.0, some)))
    (row,) = setting.rows
    assert row.speed == report.Spread(1.0, 1.0, 1.0)


def test_table() -> None:
    (setting,) = report.summarise(result((20.0, measured_blocks())))
    lines = report.table(setting).splitlines()
    assert len({line.count("|") for line in lines}) == 1
    assert lines[2].startswith("| no communication | 1.000 |  |  | 0.0 |")
    assert lines[4].startswith(
        "| `edit` | 0.733 (0.667 to 0.800) | 2000 | 1.00 | 25.0 | 1.000 | 558 (497 to 619) | 502"
    )


def test_page_and_plot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "result.json"
    file.write_text(json.dumps(result((20.0, measured_blocks()), (0.0, measured_blocks()))))
    output = tmp_path / "docs" / "link"
    words = [
        "report",
        "--results",
        str(file),
        "--output",
        str(output),
        "--command",
        "run me",
    ]
    monkeypatch.setattr(sys, "argv", words)
    report.main()
    page = output.with_suffix(".md").read_text()
    assert "Made by `run me`" in page
    titles = [line for line in page.splitlines() if line.startswith("## 100")]
    assert titles == ["## 100 Mbit/s", "## 100 Mbit/s and 20 ms in each direction"]
    assert "](link.png)" in page
    assert output.with_suffix(".png").stat().st_size > 10_000


def test_the_models_size() -> None:
    assert bench.Model().parameters(1024) == 6_491_904


@pytest.fixture
def controller(tmp_path: Path) -> Controller:
    # The ranks are threads of this process.
    return Controller(str(tmp_path / "gate"), stops=False)


def in_thread(target: Callable[[], None]) -> threading.Thread:
    thread = threading.Thread(target=target, daemon=True)
    thread.start()
    return thread


def test_runs_train_in_turns(controller: Controller, tmp_path: Path) -> None:
    trained: list[str] = []

    def train(method: str, rank: int) -> None:
        gate = Gate(method, rank, str(tmp_path / "gate"))
        for _ in range(4):
            gate.before_step()
            trained.append(method)
            gate.exposed(0.5)
            gate.after_step()
        gate.wait()

    expected = [(method, rank) for method in "ab" for rank in (0, 1)]
    threads = [in_thread(lambda key=key: train(*key)) for key in expected]  # type: ignore[misc]
    controller.meet(expected, 10, lambda: None)
    blocks = [controller.run(method, 2, 10) for _ in range(2) for method in "ab"]
    assert trained == ["a"] * 4 + ["b"] * 4 + ["a"] * 4 + ["b"] * 4
    assert [[b.rank for b in pair] for pair in blocks] == [[0, 1]] * 4
    assert [pair[0].cycle for pair in blocks] == [0, 0, 1, 1]
    assert all(len(b.step_s) == 2 and b.exposed_s == 1.0 for pair in blocks for b in pair)
    assert all(b.peak_bytes > 0 for pair in blocks for b in pair)
    controller.release()
    for thread in threads:
        thread.join(10)
        assert not thread.is_alive()


def test_a_gate_without_a_benchmark_is_open() -> None:
    gate = Gate("a", 0, None)
    for _ in range(3):
        gate.before_step()
        gate.after_step()
    gate.wait()


def test_a_rank_that_ends_or_does_not_come(controller: Controller, tmp_path: Path) -> None:
    def come_and_go() -> None:
        gate = Gate("a", 0, str(tmp_path / "gate"))
        gate._controller.close()

    in_thread(come_and_go)
    controller.meet([("a", 0)], 10, lambda: None)
    with pytest.raises(RankLostError, match="a: rank 0 ended"):
        controller.run("a", 1, 10)
    with pytest.raises(RankLostError, match=r"not there after 0 s: \[\('b', 1\)\]"):
        controller.meet([("b", 1)], 0, lambda: None)


def run_script(
    *arguments: str, timeout_s: float = 60, **variables: object
) -> subprocess.CompletedProcess[str]:
    environment = {
        **os.environ,
        "PATH": f"{BIN}:{os.environ['PATH']}",
        "VENV": str(BIN.parent),
        **{name: str(value) for name, value in variables.items()},
    }
    return subprocess.run(
        [SCRIPT, *arguments], env=environment, capture_output=True, text=True, timeout=timeout_s
    )


def test_it_is_skipped_without_the_tools(tmp_path: Path) -> None:
    for tool in ("bash", "dirname", "id", "env"):
        path = shutil.which(tool)
        assert path is not None
        (tmp_path / tool).symlink_to(path)
    skipped = run_script(PATH=tmp_path)
    assert skipped.returncode == 0, skipped.stderr
    assert skipped.stdout.startswith("skipped: needs ")


def test_it_is_skipped_without_root(tmp_path: Path) -> None:
    nobody = tmp_path / "id"
    nobody.write_text("#!/bin/sh\necho 1000\n")
    nobody.chmod(0o755)
    skipped = run_script(PATH=f"{tmp_path}:{os.environ['PATH']}")
    assert skipped.returncode == 0, skipped.stderr
    assert skipped.stdout == "skipped: needs root and /dev/net/tun\n"


def test_it_refuses_what_it_does_not_know() -> None:
    refused = run_script("--fast")
    assert refused.returncode == 2
    assert refused.stderr == "error: --fast: unknown; allowed: --quick\n"


@pytest.mark.timeout(600)
def test_a_quick_run(tmp_path: Path) -> None:
    if not can_make_links():
        pytest.skip("needs root, /dev/net/tun and tc")
    done = run_script("--quick", WORK_DIR=tmp_path, METHODS="none edit_int8", timeout_s=550)
    assert done.returncode == 0, done.stdout + done.stderr
    written = json.loads((tmp_path / "quick.json").read_text())
    (setting,) = report.summarise(written)
    rows = {row.method: row for row in setting.rows}
    parameters = written["parameters"]
    # Nothing crosses the link that should not, and int8 shrinks what does. (Of so small a payload
    # headers, acknowledgements and norms are a few parts in a hundred.)
    assert rows["none"].sent_bytes < 5_000
    assert parameters < rows["edit_int8"].sent_bytes < 1.2 * parameters
    # The exchange of norms and two collectives, of 20 ms or more.
    assert 0.06 < rows["edit_int8"].exposed_s.median < 5
    assert "| `edit`, int8 |" in (tmp_path / "quick.md").read_text()
    left = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True)
    assert "h0" not in left.stdout
