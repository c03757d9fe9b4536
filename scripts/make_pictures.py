#!/usr/bin/env python
"""Draws docs/mesh.svg, docs/sync.svg and docs/architecture.svg.

python scripts/make_pictures.py
"""

from __future__ import annotations

from html import escape
from pathlib import Path
from typing import NamedTuple

DOCS = Path(__file__).resolve().parent.parent / "docs"
INK, PAPER, GREY, LINE = "#1b1f24", "#ffffff", "#f3f4f6", "#9aa3ad"
BLUE, GREEN, ORANGE = "#cfe3f7", "#d5ecd4", "#fbdcb8"


class Picture:
    """An SVG picture, grown piece by piece.

    Args:
        width: Pixels.
        height: Pixels.
        title: Read out in place of the picture.
    """

    def __init__(self, width: int, height: int, title: str) -> None:
        self._parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
            f'width="{width}" height="{height}" font-family="sans-serif" font-size="13">',
            f"<title>{escape(title)}</title>",
            '<defs><marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" '
            'markerHeight="7" orient="auto-start-reverse">'
            f'<path d="M0 0L8 4L0 8z" fill="{INK}"/></marker></defs>',
            f'<rect width="{width}" height="{height}" fill="{PAPER}"/>',
        ]

    def box(self, x: float, y: float, width: float, height: float, fill: str) -> None:
        self._parts.append(
            f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="4" '
            f'fill="{fill}" stroke="{LINE}"/>'
        )

    def text(self, x: float, y: float, text: str, anchor: str = "middle", **style: str) -> None:
        extra = "".join(f' {key.replace("_", "-")}="{value}"' for key, value in style.items())
        self._parts.append(
            f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}" fill="{INK}"{extra}>'
            f"{escape(text)}</text>"
        )

    def labelled(
        self, x: float, y: float, width: float, height: float, fill: str, label: str
    ) -> None:
        self.box(x, y, width, height, fill)
        self.text(x + width / 2, y + height / 2 + 4.5, label)

    def arrow(self, x1: float, y1: float, x2: float, y2: float, both: bool = False) -> None:
        start = ' marker-start="url(#head)"' if both else ""
        self._parts.append(
            f'<path d="M{x1:g} {y1:g}L{x2:g} {y2:g}" stroke="{INK}" fill="none"'
            f'{start} marker-end="url(#head)"/>'
        )

    def save(self, name: str) -> None:
        (DOCS / name).write_text("\n".join([*self._parts, "</svg>"]) + "\n")


def mesh() -> None:
    """16 ranks: 2 replicas x PP 2 x S 2 x TP 2."""
    picture = Picture(820, 358, "16 ranks as 2 replicas of 2 x 2 x 2 ranks")
    picture.text(410, 26, "16 ranks = 2 replicas x PP 2 x S 2 x TP 2", font_size="16")
    for replica in range(2):
        left = 24 + 442 * replica
        picture.box(left, 44, 330, 234, GREY)
        first = 8 * replica
        picture.text(left + 165, 66, f"replica {replica}: ranks {first} to {first + 7}")
        for shard in range(2):
            picture.text(left + 124 + 138 * shard, 90, f"shard {shard}", font_size="12")
        for stage in range(2):
            top = 98 + 98 * stage
            picture.text(left + 10, top + 37, f"stage {stage}", "start", font_size="12")
            for shard in range(2):
                x = left + 64 + 138 * shard
                picture.box(x, top, 120, 66, BLUE if stage == 0 else GREEN)
                for tensor in range(2):
                    rank = first + 4 * shard + 2 * stage + tensor
                    picture.labelled(x + 8 + 54 * tensor, top + 8, 50, 32, PAPER, str(rank))
                picture.text(x + 60, top + 57, "TP", font_size="11")
            picture.arrow(left + 184, top + 33, left + 202, top + 33, both=True)
        for shard in range(2):
            x = left + 124 + 138 * shard
            picture.arrow(x, 164, x, 196, both=True)
    for y in (131, 229):
        picture.arrow(354, y, 466, y, both=True)
    picture.text(410, 156, "peer groups")
    picture.text(410, 176, "0-8, 1-9, ...", font_size="12")
    picture.text(410, 196, "the slow link", font_size="12")
    lines = [
        "sideways in a replica: its shard groups, which gather and reduce at every step",
        "downwards: the pipeline, activations;  within a box: tensor parallel",
        "between replicas: one synchronisation a round",
    ]
    for number, line in enumerate(lines):
        picture.text(410, 304 + 20 * number, line)
    picture.save("mesh.svg")


# The timeline's units: name, time of the all-reduce, time of the forward, colour.
UNITS = [
    ("embedding", 82, 30, ORANGE),
    ("layer 0", 90, 100, BLUE),
    ("layer 1", 90, 100, GREEN),
    ("head", 64, 70, ORANGE),
]
OUTER, GATHER = 24, 26


def sync() -> None:
    """The first forward of a synchronising step, with times computed as the engine schedules it."""
    picture = Picture(960, 306, "Timeline of the forward in which the units synchronise")
    picture.text(480, 26, "the forward in which the units synchronise", font_size="16")
    lanes = {"between replicas": 50, "computation": 112, "inside the replica": 174}
    for name, y in lanes.items():
        picture.box(130, y, 820, 46, GREY)
        picture.text(120, y + 28, name, "end")
    between, compute, inside = (y + 6 for y in lanes.values())
    picture.labelled(136, compute, 50, 34, PAPER, "norms")
    picture.labelled(188, inside, 36, 34, PAPER, "sum")
    picture.labelled(226, between, 50, 34, PAPER, "norms")
    picture.labelled(278, compute, 62, 34, PAPER, "verdicts")
    link = now = 342.0
    arrives: list[float] = []

    def depart(unit: int) -> None:
        nonlocal link
        name, transfer, _, colour = UNITS[unit]
        start = max(link, now)
        picture.labelled(start, between, transfer - 2, 34, colour, name)
        link = start + transfer
        arrives.append(link)

    depart(0)
    depart(1)
    for unit, (_, _, forward, colour) in enumerate(UNITS):
        now = max(now, arrives[unit])
        picture.arrow(arrives[unit] - 3, between + 36, now + OUTER / 2, compute - 2)
        picture.labelled(now, compute, OUTER - 2, 34, PAPER, "o")
        now += OUTER
        if 0 < unit < len(UNITS) - 1:
            depart(unit + 1)
        picture.labelled(now, inside, GATHER - 2, 34, colour, "g")
        now += GATHER
        label = "forward" if forward > 60 else "f"
        picture.labelled(now, compute, forward - 2, 34, colour, label)
        now += forward
    picture.arrow(136, 232, 946, 232)
    picture.text(942, 246, "time", "end", font_size="11")
    left = [
        "between replicas: one number of each unit is exchanged, then",
        "one all-reduce a unit, in flight while the unit before it computes",
    ]
    right = [
        "o   clip, outer step, parameters := anchor",
        "g   gather of the unit over its shard group",
        "f   forward of the embedding",
    ]
    for x, lines in ((130, left), (610, right)):
        for number, line in enumerate(lines):
            picture.text(x, 260 + 20 * number, line, "start")
    picture.save("sync.svg")


class Room(NamedTuple):
    """A folder of the package in the picture: it may import what lies straight below it.

    Attributes:
        row: Its first, from the top.
        rows: How many it is high.
        left: Its first column, of four.
        right: The column after its last.
        inside: What is in it.
    """

    row: int
    rows: int
    left: int
    right: int
    inside: str


ROOMS = {
    "commands": Room(0, 1, 0, 4, "what a user types"),
    "scaling": Room(1, 5, 3, 4, "laws, plans, simulation"),
    "run": Room(1, 1, 0, 3, "loop, log, reasons to stop, failures"),
    "checkpoint": Room(2, 1, 0, 3, "saving, resuming, whole models"),
    "backends": Room(3, 1, 0, 3, "megatron, deepspeed: what trains and shards a replica"),
    "engine": Room(4, 1, 0, 3, "the method: rounds, penalty, outer step"),
    "replicas": Room(5, 1, 0, 2, "mesh, exchange, compression"),
    "data": Room(5, 1, 2, 3, "text to batches"),
    "config": Room(6, 1, 0, 4, "flags, JSON, methods, checks"),
    "platform": Room(7, 1, 0, 3, "CPU, NCCL, private names of DeepSpeed and FSDP2"),
    "errors": Room(8, 1, 0, 4, "a user's mistake, in one line"),
}


def architecture() -> None:
    """The rooms of the package, the highest on top."""
    picture = Picture(816, 506, "The folders of the package; each may import what lies below it")
    picture.text(410, 26, "each room may import the rooms straight below it", font_size="16")
    picture.labelled(20, 42, 776, 34, PAPER, "pretrain_edit.py, scripts, examples, your own script")
    width, height, top = 195, 44, 84

    for name, room in ROOMS.items():
        x, y = 20 + width * room.left, top + height * room.row
        across, down = width * (room.right - room.left) - 4, height * room.rows - 4
        fill = {"engine": ORANGE, "scaling": GREY}.get(name, BLUE if room.row < 4 else GREEN)
        picture.box(x, y, across, down, fill)
        middle = y + down / 2
        picture.text(x + across / 2, middle - 2, name, font_weight="bold")
        picture.text(x + across / 2, middle + 13, room.inside, font_size="11")
    note = "engine and replicas know no Megatron, FSDP2 or DeepSpeed; scaling knows no torch"
    picture.text(408, 494, note)
    picture.save("architecture.svg")


PICTURES = (mesh, sync, architecture)

if __name__ == "__main__":
    for draw in PICTURES:
        draw()
