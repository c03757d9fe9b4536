"""Plans a run: is local SGD worth it on this hardware, and how should it be set?

    edit-plan examples/clusters/two_clusters_10gbps.yaml \
        --plot plan.png --json plan.json --write edit.json

CLUSTER.yaml describes the model, and either `sites` (one cluster or several) or `devices` (edge
devices behind a server); examples/clusters/ has one of each. Every field, its unit and its default
are in docs/scaling.md. Links can be measured on the running cluster and put into the plan:

    torchrun --nnodes 2 --nproc-per-node 1 ... --no-python edit-plan --measure links.json
    edit-plan CLUSTER.yaml --links links.json --link node_link

Losses are the published laws of DiLoCo, or with `--laws` those that `edit-fit --form replicas
--json` wrote.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Literal

import numpy as np
from pydantic import BaseModel

from megatron_edit.config.json_file import read_json
from megatron_edit.errors import ConfigurationError, exit_on_configuration_error
from megatron_edit.scaling.cluster import Cluster, NetworkLink, read_cluster, validated
from megatron_edit.scaling.command import Parser, write
from megatron_edit.scaling.edge import EdgePlanner
from megatron_edit.scaling.edge_report import EdgeReport
from megatron_edit.scaling.forms import Law, PowerForm, ReplicaForm
from megatron_edit.scaling.json_text import json_text
from megatron_edit.scaling.penalty import LossPenalty
from megatron_edit.scaling.planner import Planner
from megatron_edit.scaling.runs import SYNC
from megatron_edit.scaling.site_report import SiteReport

MEASURED_MEGABYTES = (1, 64)
"""Payloads timed by --measure: their two times give a bandwidth and a latency."""
REPETITIONS = 10


def parse_arguments() -> argparse.Namespace:
    """Reads the command line."""
    parser = Parser(__doc__)
    parser.add_argument("cluster", nargs="?", type=Path, metavar="CLUSTER.yaml", help="the plan")
    parser.add_argument("--all", action="store_true", help="print every setting that was tried")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the plan; - = stdout")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="write a picture (png, svg, pdf)")
    parser.add_argument(
        "--write", type=Path, metavar="FILE", help="write a JSON with the recommended edit section"
    )
    parser.add_argument(
        "--laws", type=Path, metavar="FILE", help="laws from edit-fit --form replicas"
    )
    parser.add_argument(
        "--measure", type=Path, metavar="FILE", help="under torchrun: measure the links, write them"
    )
    parser.add_argument("--links", type=Path, metavar="FILE", help="links that --measure wrote")
    parser.add_argument(
        "--link",
        choices=("node_link", "uplink"),
        default="node_link",
        help="which link of every site --links replaces (default: node_link)",
    )
    return parser.parse_args()


def measure(path: Path) -> None:
    """Times all-reduces over the ranks that torchrun started, one per host, and writes a link.

    An all-reduce of B bytes takes eps + 2 (R - 1)/R B/W; two payloads give W and eps.

    Raises:
        ConfigurationError: There are fewer than two ranks.
    """
    import os
    import time

    if int(os.environ.get("WORLD_SIZE", "1")) < 2:
        raise ConfigurationError("--measure: needs at least two ranks; start it with torchrun")
    import torch
    import torch.distributed as dist

    on_gpu = torch.cuda.is_available()
    dist.init_process_group("nccl" if on_gpu else "gloo")
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")) if on_gpu else 0)
    if not on_gpu:
        device = torch.device("cpu")

    def seconds(megabytes: int) -> float:
        payload = torch.zeros(megabytes * 250_000, device=device)
        times = []
        for _ in range(REPETITIONS + 2):
            dist.barrier()
            start = time.perf_counter()
            dist.all_reduce(payload)
            if on_gpu:
                torch.cuda.synchronize()
            times.append(time.perf_counter() - start)
        # The first two set up connections.
        return float(np.median(times[2:]))

    small, large = (seconds(megabytes) for megabytes in MEASURED_MEGABYTES)
    world = dist.get_world_size()
    if dist.get_rank() == 0:
        spread = (MEASURED_MEGABYTES[1] - MEASURED_MEGABYTES[0]) * 1e6 * 2 * (world - 1) / world
        bandwidth = spread / max(large - small, 1e-9)
        wire = MEASURED_MEGABYTES[0] * 1e6 * 2 * (world - 1) / world / bandwidth
        link = {
            "gbps": float(f"{bandwidth * 8 / 1e9:.4g}"),
            "latency_ms": float(f"{max(0.0, small - wire) * 1e3:.4g}"),
        }
        write(path, json.dumps(link), "--measure")
        print(f"{world} ranks, {dist.get_backend()}: {json.dumps(link)} -> {path}")
    dist.destroy_process_group()


def with_links(cluster: Cluster, path: Path, which: str) -> Cluster:
    """Returns the cluster with one link of every site replaced by the measured one.

    Raises:
        ConfigurationError: The file cannot be used.
    """
    if not cluster.sites:
        raise ConfigurationError("--links: applies to sites, the file has devices")
    link = validated(NetworkLink, read_json(path, "--links"), str(path))
    sites = tuple(site.model_copy(update={which: link}) for site in cluster.sites)
    return cluster.model_copy(update={"sites": sites})


class FittedLaw(BaseModel):
    """A law as `edit-fit --json` writes it; what else it writes is not needed here."""

    form: str
    variable: Literal["parameters", "tokens", "compute"] | None
    theta: tuple[float, ...]

    def is_of(self, form: type[PowerForm] | type[ReplicaForm]) -> bool:
        """Whether the law is of a form of one variable, with as many parameters as that has."""
        return self.form == form.name and len(self.theta) == len(form.labels)


class FittedLaws(BaseModel):
    """The laws of one fit by method."""

    laws: dict[str, FittedLaw]


def read_penalty(cluster: Cluster, path: Path | None) -> LossPenalty:
    """Returns the laws of the loss: the published ones, or those of a fit.

    Raises:
        ConfigurationError: The file holds no law of sync and joint law of one local method.
    """
    if path is None:
        return LossPenalty(cluster.assumptions)
    laws = validated(FittedLaws, read_json(path, "--laws"), f"--laws {path}").laws
    joint = [law for law in laws.values() if law.is_of(ReplicaForm)]
    sync = laws.get(SYNC)
    if len(joint) != 1 or sync is None or not sync.is_of(PowerForm):
        raise ConfigurationError(
            f"--laws {path}: needs a power law of sync and the joint law of one local method; "
            "edit-fit --form replicas --json writes them"
        )
    over = sync.variable
    if over is None or over != joint[0].variable:
        raise ConfigurationError(f"--laws {path}: the two laws have different variables")
    return LossPenalty(
        cluster.assumptions,
        Law(PowerForm(over), np.array(sync.theta)),
        Law(ReplicaForm(over), np.array(joint[0].theta)),
        str(path),
    )


def report_of(args: argparse.Namespace) -> SiteReport | EdgeReport:
    """Returns the plan of the file.

    Raises:
        ConfigurationError: The file is wrong, or its plan is infeasible.
    """
    if args.cluster is None:
        raise ConfigurationError("no plan: give a CLUSTER.yaml (or --measure under torchrun)")
    cluster = read_cluster(args.cluster)
    if args.links:
        cluster = with_links(cluster, args.links, args.link)
    penalty = read_penalty(cluster, args.laws)
    if cluster.devices:
        return EdgeReport(EdgePlanner(cluster, penalty), args.cluster.name)
    measured = args.links.name if args.links else None
    return SiteReport(Planner(cluster, penalty), args.cluster.name, measured, args.link)


@exit_on_configuration_error()
def main() -> None:
    """Plans, prints and writes."""
    args = parse_arguments()
    if args.measure:
        measure(args.measure)
        return
    report = report_of(args)
    if str(args.json) != "-":
        print(report.text(everything=args.all))
    if args.json:
        write(args.json, json_text(report.as_dict()), "--json")
    if args.write:
        section = json.dumps({"edit": report.edit_section()}, indent=2)
        write(args.write, section, "--write")
    if args.plot:
        from megatron_edit.scaling.plots import save

        save(report.figure(), args.plot)
