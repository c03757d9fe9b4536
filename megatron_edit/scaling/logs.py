"""Runs from the logs of `pretrain_edit.py`: the last validation loss and the configuration.

A log holds one start or, appended to one another, several: a run and those that resumed it. Read is
the last start: its table "effective configuration" (or, where a log lacks it,
`effective_config.json` in the same folder or in a checkpoint below it), the line `parameters: N`,
and the validation after its last step. That step may be beyond `train_iters`: replicas that run by
the clock stop only where they meet.
"""

import re
from itertools import pairwise
from pathlib import Path

from megatron_edit.config.json_file import read_json
from megatron_edit.errors import ConfigurationError
from megatron_edit.scaling.runs import Run, positive

VALIDATION = re.compile(
    r"validation loss at iteration (?P<iteration>\d+)(?P<where> on \w+ set)? \| "
    r"lm loss value: (?P<loss>\S+)"
)
VALIDATION_SET, TEST_SET = " on validation set", " on test set"
PARAMETERS = re.compile(
    r"^ *parameters: (?P<count>[\d,]+)(; starts at step (?P<step>\d+))?", re.MULTILINE
)
TABLE_HEAD = re.compile(r"^[ \t]*effective configuration", re.MULTILINE)
TABLE_ROW = re.compile(r"^  (?P<name>\S+) +(?P<value>.*?) {2,}(?P<source>\S.*)$")
NEEDED = ("edit.method", "edit.replicas", "global_batch_size", "seq_length", "train_iters")


def read_logs(paths: list[Path]) -> list[Run]:
    """Returns one run per log.

    Raises:
        ConfigurationError: Names the log and what it lacks.
    """
    return [read_log(path) for path in paths]


def read_log(path: Path) -> Run:
    """Returns the run of one log.

    Raises:
        ConfigurationError: The log cannot be read, lacks something, or is of an unfinished run.
    """
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise ConfigurationError(f"{path}: cannot be read ({error})") from None
    text = last_start(text)
    values = _table(text) or _json_beside(path)
    for name in NEEDED:
        if name not in values:
            raise ConfigurationError(
                f"{path}: no value of {name}; neither the table 'effective configuration' nor an "
                "effective_config.json beside the log has it"
            )
    counted = PARAMETERS.search(text)
    if counted is None:
        raise ConfigurationError(f"{path}: no line 'parameters: N'")
    found = [match for match in VALIDATION.finditer(text) if match["where"] != TEST_SET]
    if not found:
        raise ConfigurationError(f"{path}: no line 'validation loss at iteration N'")
    last, wanted = int(found[-1]["iteration"]), int(values["train_iters"])
    if last < wanted or found[-1]["where"] != VALIDATION_SET:
        raise ConfigurationError(
            f"{path}: the run is not finished: last validation at iteration {last} of {wanted}"
        )
    tokens = float(last) * float(values["global_batch_size"]) * float(values["seq_length"])
    return Run(
        values["edit.method"],
        int(values["edit.replicas"]),
        float(counted["count"].replace(",", "")),
        tokens,
        positive(found[-1]["loss"], "lm loss value", str(path)),
    )


def last_start(text: str) -> str:
    """Returns the part of a log that its last start wrote, from the table of its configuration on.

    A start that found the run finished and evaluated nothing does not count.
    """
    heads = [match.start() for match in TABLE_HEAD.finditer(text)]
    starts = [text[head:end] for head, end in pairwise([*heads, len(text)])]
    while len(starts) > 1 and _had_nothing_to_do(starts[-1]):
        starts.pop()
    return starts[-1] if starts else text


def _had_nothing_to_do(text: str) -> bool:
    counted, wanted = PARAMETERS.search(text), _table(text).get("train_iters")
    if counted is None or counted["step"] is None or wanted is None:
        return False
    return int(counted["step"]) >= int(wanted) and VALIDATION.search(text) is None


def _table(text: str) -> dict[str, str]:
    """Returns the table "effective configuration" at the head of a start as name -> value."""
    values: dict[str, str] = {}
    if TABLE_HEAD.match(text) is None:
        return values
    for line in text.splitlines()[1:]:
        row = TABLE_ROW.match(line)
        if row is None:
            break
        values[row["name"]] = row["value"].strip()
    return values


def _json_beside(path: Path) -> dict[str, str]:
    """Returns the values of the newest effective_config.json beside or below a log."""
    files = sorted(path.parent.glob("**/effective_config.json"), key=lambda p: p.stat().st_mtime)
    if not files:
        return {}
    values = read_json(files[-1]).get("values")
    if not isinstance(values, dict):
        raise ConfigurationError(f"{files[-1]}: holds no object 'values'")
    return {name: str(value) for name, value in values.items()}
