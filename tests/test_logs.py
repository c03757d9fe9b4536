"""Logs of one start and of several, by steps and by the clock, read for a scaling law."""

from pathlib import Path

import pytest
from distributed import run_ranks
from pretraining import command_line, pretrain

from megatron_edit.errors import ConfigurationError
from megatron_edit.scaling.logs import last_start, read_log
from megatron_edit.scaling.runs import Run


def _start(iters: int, started: int, method: str = "edit", batch: int = 16) -> str:
    return f"""\
without effect here: zero_optimization.overlap_comm (FSDP2)
effective configuration (world 4 = replicas 2 x PP 1 x S 2 x TP 1)
  global_batch_size                {batch}                   json
  seq_length                       128                  flag
  train_iters                      {iters}                   flag
  edit.method                      {method}                 json
  edit.replicas                    2                    json
parameters: 1,000; starts at step {started}
"""


def _validated(iteration: int, loss: float, where: str = "") -> str:
    return f" validation loss at iteration {iteration}{where} | lm loss value: {loss:.6E} |\n"


def _end(iteration: int, loss: float) -> str:
    on = " on validation set"
    return _validated(iteration, loss, on) + _validated(iteration, 9.0, " on test set")


RAN_20 = _start(20, 0) + _validated(10, 5.0) + _end(20, 4.0)
FINISHED = {
    "one start": (RAN_20, Run("edit", 2, 1000.0, 20 * 2048.0, 4.0)),
    "resumed and longer": (
        RAN_20 + _start(40, 20) + _validated(30, 3.5) + _end(40, 3.0),
        Run("edit", 2, 1000.0, 40 * 2048.0, 3.0),
    ),
    "died and resumed": (
        _start(40, 0) + _validated(30, 3.5) + _start(40, 20) + _validated(30, 3.6) + _end(40, 3.0),
        Run("edit", 2, 1000.0, 40 * 2048.0, 3.0),
    ),
    "resumed with other batches": (
        RAN_20 + _start(25, 10, batch=32) + _end(25, 3.0),
        Run("edit", 2, 1000.0, 25 * 4096.0, 3.0),
    ),
    "by the clock, beyond its end": (
        _start(400, 0, "a_edit") + _validated(388, 3.9) + _end(439, 3.0),
        Run("a_edit", 2, 1000.0, 439 * 2048.0, 3.0),
    ),
    "another run after it": (
        RAN_20 + _start(30, 0, "sync") + _end(30, 3.0),
        Run("sync", 2, 1000.0, 30 * 2048.0, 3.0),
    ),
    "started again, evaluated": (
        RAN_20 + _start(20, 20) + _end(20, 4.0),
        Run("edit", 2, 1000.0, 20 * 2048.0, 4.0),
    ),
    "started again, not evaluated": (
        RAN_20 + _start(20, 20) + _start(20, 20),
        Run("edit", 2, 1000.0, 20 * 2048.0, 4.0),
    ),
    "by the clock, started again": (
        _start(20, 0, "a_edit") + _end(23, 4.0) + _start(20, 23, "a_edit"),
        Run("a_edit", 2, 1000.0, 23 * 2048.0, 4.0),
    ),
}
UNFINISHED = {
    "stopped early": (_start(40, 0) + _validated(30, 3.0), "last validation at iteration 30 of 40"),
    "resumed and died": (
        RAN_20 + _start(40, 20) + _validated(30, 3.0),
        "last validation at iteration 30 of 40",
    ),
    "another run died": (RAN_20 + _start(40, 0, "sync"), "no line 'validation loss at iteration"),
    "evaluated at its last step, not at its end": (
        _start(40, 0, "a_edit") + _validated(40, 3.0),
        "last validation at iteration 40 of 40",
    ),
}


@pytest.mark.parametrize("name", FINISHED)
def test_a_finished_run_is_read(name: str, tmp_path: Path) -> None:
    text, run = FINISHED[name]
    log = tmp_path / "train.log"
    log.write_text(text)
    assert read_log(log) == run


@pytest.mark.parametrize("name", UNFINISHED)
def test_an_unfinished_run_is_refused(name: str, tmp_path: Path) -> None:
    text, message = UNFINISHED[name]
    log = tmp_path / "train.log"
    log.write_text(text)
    with pytest.raises(ConfigurationError, match=message):
        read_log(log)


def test_a_log_without_a_table_is_one_start() -> None:
    assert last_start("parameters: 3\n") == "parameters: 3\n"


def _trained_twice(line: str) -> str:
    first = pretrain(command_line(line))
    more = "--train-iters 30 --override-opt_param-scheduler"
    longer = pretrain(command_line(f"{line} {more} --load {line.split()[-1]}"))
    assert [first.code, longer.code] == [0, 0]
    return first.out + longer.out


def test_the_log_of_a_real_run_by_the_clock_that_was_resumed(tmp_path: Path) -> None:
    line = (
        "--edit-method a_edit --edit-sync-seconds 0.2 --eval-iters 1 --eval-interval 7 "
        f"--train-iters 13 --save {tmp_path / 'saved'}"
    )
    text = run_ranks(_trained_twice, 2, line)[0]
    log = tmp_path / "train.log"
    log.write_text(text)
    run = read_log(log)
    final = [row for row in text.splitlines() if "on validation set" in row][-1].split()
    steps, loss = int(final[4]), float(final[final.index("value:") + 1])
    assert steps >= 30
    assert (run.method, run.replicas) == ("a_edit", 2)
    # Micro-batches of 2 samples of 16 tokens on each of two replicas.
    assert (run.tokens, run.loss) == (steps * 4 * 16.0, loss)
