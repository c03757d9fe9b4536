"""Makes a table and a plot of what ``bench`` measured.

python -m benchmarks.link.report --results FILE --output docs/results/link --command TEXT
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.link.bench import METHODS
from benchmarks.link.gate import Block

MB = 1e6
BASELINE = "none"


@dataclass(frozen=True)
class Spread:
    """Median, least and greatest of the cycles."""

    median: float
    least: float
    greatest: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """The spread of some values."""
        return cls(statistics.median(values), min(values), max(values))

    def show(self, digits: int, factor: float = 1.0) -> str:
        """Median (least to greatest)."""
        median, least, greatest = (
            f"{factor * value:.{digits}f}" for value in (self.median, self.least, self.greatest)
        )
        return median if least == greatest else f"{median} ({least} to {greatest})"


@dataclass(frozen=True)
class Row:
    """One method on one link.

    Attributes:
        method: Key in METHODS.
        step_s: Seconds of a step without what the rank waited for others.
        speed: Tokens per second over those without communication in the same cycle.
        exposed_s: Seconds of a synchronisation that training waits for it.
        sent_bytes: Bytes that a host puts on the link in tau steps.
        peak_bytes: Peak of the resident memory of a rank.
    """

    method: str
    step_s: Spread
    speed: Spread
    exposed_s: Spread
    sent_bytes: float
    peak_bytes: float


@dataclass(frozen=True)
class Setting:
    """One link, and the rows of all methods on it.

    Attributes:
        rate_mbit: Of each direction.
        delay_ms: Likewise.
        transfer_s: Bytes of one synchronisation in fp32 over the rate.
        rows: In the order of METHODS.
        cycles: Blocks of each method.
    """

    rate_mbit: float
    delay_ms: float
    transfer_s: float
    rows: list[Row]
    cycles: int

    @property
    def title(self) -> str:
        """The link in words."""
        delay = f" and {self.delay_ms:g} ms in each direction" if self.delay_ms else ""
        return f"{self.rate_mbit:g} Mbit/s{delay}"


def summarise(result: dict[str, Any]) -> list[Setting]:
    """Makes the rows of what the benchmark wrote, by growing delay."""
    links = sorted(result["links"], key=lambda link: float(link["delay_ms"]))
    return [_summarise(result, link["delay_ms"], link["blocks"]) for link in links]


def _summarise(result: dict[str, Any], delay_ms: float, blocks: list[dict[str, Any]]) -> Setting:
    cycles: dict[tuple[str, int], list[Block]] = {}
    for fields in blocks:
        block = Block(**fields)
        cycles.setdefault((block.method, block.cycle), []).append(block)
    numbers = sorted({cycle for _, cycle in cycles})
    rows = []
    for method in METHODS:
        if (method, numbers[0]) not in cycles:
            continue
        ranks = [cycles[method, cycle] for cycle in numbers]
        baseline = [cycles.get((BASELINE, cycle), cycles[method, cycle]) for cycle in numbers]
        every_step = method == "sync"
        rows.append(
            Row(
                method,
                step_s=Spread.of([_mean(own, _local_step_s) for own in ranks]),
                speed=Spread.of(
                    [
                        _mean(none, _step_s) / _mean(own, _step_s)
                        for own, none in zip(ranks, baseline, strict=True)
                    ]
                ),
                exposed_s=Spread.of(
                    [min(b.exposed_s / _synchronisations(b, every_step) for b in r) for r in ranks]
                ),
                sent_bytes=statistics.median(
                    _mean(own, lambda b: b.sent_bytes / len(b.step_s) * result["tau"])
                    for own in ranks
                ),
                peak_bytes=max(block.peak_bytes for own in ranks for block in own),
            )
        )
    # A ring moves 2 (R-1)/R payloads per host: one, for two.
    transfer_s = result["parameters"] * 4 * 8 / (result["rate_mbit"] * 1e6)
    return Setting(result["rate_mbit"], delay_ms, transfer_s, rows, len(numbers))


def _mean(blocks: list[Block], value: Callable[[Block], float]) -> float:
    return statistics.fmean(value(block) for block in blocks)


def _step_s(block: Block) -> float:
    return block.block_s / len(block.step_s)


def _local_step_s(block: Block) -> float:
    return (block.block_s - block.exposed_s) / len(block.step_s)


def _synchronisations(block: Block, every_step: bool) -> int:
    return len(block.step_s) if every_step else 1


def table(setting: Setting) -> str:
    """The rows as a table in markdown."""
    plain = {row.method: row for row in setting.rows}.get("edit")
    lines = [
        "| method | tokens/s, of those without communication | exposed per synchronisation, ms | "
        "the same over bytes/bandwidth | sent per round, MB | of `edit` | local step, ms | "
        "peak memory, MB |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in setting.rows:
        communicates = row.method != BASELINE
        share = f"{row.sent_bytes / plain.sent_bytes:.3f}" if plain and communicates else ""
        cells = [
            METHODS[row.method].title,
            row.speed.show(3),
            row.exposed_s.show(0, 1e3) if communicates else "",
            f"{row.exposed_s.median / setting.transfer_s:.2f}" if communicates else "",
            f"{row.sent_bytes / MB:.1f}",
            share,
            row.step_s.show(0, 1e3),
            f"{row.peak_bytes / MB:.0f}",
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def document(result: dict[str, Any], command: str, plot: str) -> str:
    """The page."""
    settings = summarise(result)
    parts = [
        "# Training over a slow link",
        f"Made by `{command}`. Two hosts (network namespaces) on one machine of {result['cores']} "
        f"cores, one rank on each, joined by the link named below; two TCP connections with "
        f"{result['congestion_control']}. A GPTModel of {result['parameters'] / MB:.2f} million "
        f"parameters, {result['tokens_per_step']} tokens per step on both hosts together, a "
        f"synchronisation every {result['tau']} steps.",
        f"![Speed and exposed time]({plot})",
    ]
    for setting in settings:
        parts += [
            f"## {setting.title}",
            "Bytes/bandwidth of one synchronisation in fp32, without headers: "
            f"{setting.transfer_s:.2f} s.",
            table(setting),
        ]
    parts.append(
        "## How it is measured\n\n"
        "All runs are started together by the real launcher and wait beside one another; they "
        f"train in turns, {settings[0].cycles} blocks of {result['tau']} steps each (`sync`: 2 "
        "steps), so that what else the machine does hits all alike. Before each block one more is "
        "trained that does not count: TCP forgets during a wait what the link carries. Both ranks "
        "of a run begin a block at the same time, with the synchronisation at its start. Numbers "
        "are medians over the blocks (least to greatest).\n\n"
        "- *Tokens/s* is wall time of whole blocks, over that of the same cycle's block without "
        "communication: `edit` whose first round never ends. Above 1 it is the machine's noise.\n"
        "- *Exposed* is the time a step waits for the other host: of the two ranks the one that "
        "waits less, since the other one also waits for it. `sync` synchronises at every step, the "
        "others once a round.\n"
        "- *Sent* is what a host's interface counted, headers and acknowledgements included.\n"
        "- *Local step* is the time of a step without the exposed time.\n"
        "- *Peak memory* is the resident memory of a rank; most of it is torch's code."
    )
    return "\n\n".join(parts) + "\n"


def draw(settings: Sequence[Setting], path: Path) -> None:
    """Draws speed and exposed time of the methods."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.2), sharey=True)
    names = [row.method for row in settings[0].rows if row.method != BASELINE]
    height = 0.8 / len(settings)
    for number, setting in enumerate(settings):
        rows = {row.method: row for row in setting.rows}
        places = [
            index + (number - (len(settings) - 1) / 2) * height for index in range(len(names))
        ]
        speeds = [rows[name].speed.median for name in names]
        exposed = [max(rows[name].exposed_s.median * 1e3, 1.0) for name in names]
        left.barh(places, speeds, height, label=setting.title)
        right.barh(places, exposed, height)
        right.axvline(setting.transfer_s * 1e3, color="grey", linestyle=":", linewidth=1)
    left.set_yticks(range(len(names)), [METHODS[name].title.replace("`", "") for name in names])
    left.invert_yaxis()
    left.set_xlabel("tokens/s, of those without communication")
    left.axvline(1, color="grey", linestyle=":", linewidth=1)
    right.set_xscale("log")
    right.set_xlabel("exposed per synchronisation, ms (dotted: bytes/bandwidth)")
    figure.legend(*left.get_legend_handles_labels(), loc="upper center", ncols=len(settings))
    figure.tight_layout(rect=(0, 0, 1, 0.93))
    figure.savefig(path, dpi=110)
    plt.close(figure)


def main() -> None:
    """Writes the page and the plot."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--results", type=Path, required=True, help="what the benchmark wrote")
    parser.add_argument("--output", type=Path, required=True, help="path without .md and .png")
    parser.add_argument("--command", required=True, help="what made it, for the page")
    args = parser.parse_args()
    result = json.loads(args.results.read_text())
    settings = summarise(result)
    args.output.parent.mkdir(parents=True, exist_ok=True)
    plot, page = args.output.with_suffix(".png"), args.output.with_suffix(".md")
    draw(settings, plot)
    page.write_text(document(result, args.command, plot.name))
    for setting in settings:
        print(f"\n{setting.title}\n\n{table(setting)}")
    print(f"\n{page}\n{plot}")


if __name__ == "__main__":
    main()
