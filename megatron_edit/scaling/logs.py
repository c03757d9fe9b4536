"""Runs from the logs of `pretrain_edit.py`: the last validation loss and the configuration.

Read are the table "effective configuration" that every log starts with (or, where a log lacks it,
`effective_config.json` in the same folder or in a checkpoint below it), the line `parameters: N`,
and the last `validation loss at iteration ...`.
"""

import json
import re
from pathlib import Path

from megatron_edit.errors import ConfigurationError
from megatron_edit.scaling.runs import Run, positive

VALIDATION = re.compile(
    r"validation loss at iteration (?P<iteration>\d+)(?P<where> on \w+ set)? \| "
    r"lm loss value: (?P<loss>\S+)"
)
TEST_SET = " on test set"
PARAMETERS = re.compile(r"^ *parameters: (?P<count>[\d,]+)", re.MULTILINE)
TABLE_HEAD = "effective configuration"
TABLE_ROW = re.compile(r"^  (?P<name>\S+) +(?P<value>.*?) {2,}(?P<source>\S.*)$")
NEEDED = ("edit.method", "edit.replicas", "global_batch_size", "seq_length", "train_iters")


def read_logs(paths: list[Path]) -> list[Run]:
    """Returns one run per log.

    Raises:
        ConfigurationError: Names the log and what it lacks.
    """
    return [read_log(path) for path in paths]


def read_log(path: Path) -> Run:
    """Returns the run of one log: its last validation loss, which must be at its last step.

    Raises:
        ConfigurationError: The log cannot be read, lacks something, or is of an unfinished run.
    """
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise ConfigurationError(f"{path}: cannot be read ({error})") from None
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
    if last != wanted:
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


def _table(text: str) -> dict[str, str]:
    """Returns the table "effective configuration" of a log as name -> value; empty if missing."""
    lines = iter(text.splitlines())
    for line in lines:
        if line.strip().startswith(TABLE_HEAD):
            break
    values = {}
    for line in lines:
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
    try:
        values = json.loads(files[-1].read_text(encoding="utf-8"))["values"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigurationError(f"{files[-1]}: cannot be read ({error})") from None
    return {name: str(value) for name, value in values.items()}
