"""Plans: closed forms, the published clock and bandwidths, clusters, devices, crossovers."""

import math
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import literature
import numpy as np
import pytest
import yaml
from ideal_clock import NETWORKS, IdealClock

from megatron_edit.errors import ConfigurationError
from megatron_edit.scaling import published
from megatron_edit.scaling.closed_forms import (
    Infeasible,
    Round,
    TwoStage,
    all_reduce_bytes,
    bytes_per_second,
    state_bytes,
    step_seconds,
)
from megatron_edit.scaling.cluster import (
    Assumptions,
    Cluster,
    Devices,
    Model,
    NetworkLink,
    Search,
    Site,
    read_cluster,
    validated,
)
from megatron_edit.scaling.constants import plan_constants
from megatron_edit.scaling.crossover import crossover_gbps, verdict
from megatron_edit.scaling.edge import EdgePlanner, best_edge, slowest_factor
from megatron_edit.scaling.penalty import LossPenalty, tokens_to_equal_loss
from megatron_edit.scaling.planner import Planner, Setting, best
from megatron_edit.scaling.provenance import Kind
from megatron_edit.scaling.published import EPOCH
from megatron_edit.scaling.topology import layouts
from megatron_edit.scaling.trainer_settings import edit_section, megatron_flags, refusal

ROOT = Path(__file__).resolve().parent.parent
EXAMPLES = ROOT / "examples" / "clusters"


def example(name: str, **changes: object) -> Cluster:
    """Returns an example with dotted fields replaced; a part that is a number indexes a list."""
    values = yaml.safe_load((EXAMPLES / f"{name}.yaml").read_text())
    for dotted, value in changes.items():
        *path, last = dotted.split("__")
        place = values
        for part in path:
            place = place[int(part)] if part.isdigit() else place.setdefault(part, {})
        place[last] = value
    return validated(Cluster, values, "test")


# Closed forms.


def test_step_time_and_state() -> None:
    assert step_seconds(1e9, 1e6, 8, 1e15, 0.5) == pytest.approx(1.5)
    assert state_bytes(7e9, 64, local_sgd=False) == pytest.approx(7e9 * 16 / 64)
    assert state_bytes(7e9, 64, local_sgd=True) == pytest.approx(7e9 * 24 / 64)
    assert all_reduce_bytes(1e9, 4, 2) == pytest.approx(4e9)
    assert all_reduce_bytes(1e9, 4, 8, 4.0) == pytest.approx(1e9 * 2 * 7 / 8)


@pytest.mark.parametrize("utilisation", published.UTILISATIONS)
@pytest.mark.parametrize("overlap", [0.0, 1 / 3, 4.0])
def test_smallest_bandwidth_inverts_utilisation(utilisation: float, overlap: float) -> None:
    current = Round(30, 0.8, 5e9, 0.01, overlap)
    bandwidth = current.smallest_bandwidth(utilisation)
    assert current.utilisation(bandwidth) == pytest.approx(utilisation)
    assert replace(current, interval=29).utilisation(bandwidth) < utilisation


def test_latency_alone_can_break_a_target() -> None:
    with pytest.raises(Infeasible, match=r"latency 1 s .* exceeds"):
        Round(1, 1.0, 1e6, 1.0, 0.0).smallest_bandwidth(0.9)
    assert Round(1, 1.0, 0.0, 0.0, 0.0).smallest_bandwidth(0.9) == 0.0


def test_two_stages() -> None:
    stages = TwoStage(14e9, 8, 2, 50e9, 1.25e9, 1e-3, 2e-2)
    wanted = 2 * 14e9 / 50e9 * (1 - 1 / 8) + 1e-3 + 2 * 14e9 / 1.25e9 * (1 - 1 / 2) + 2e-2
    assert stages.seconds == pytest.approx(wanted)
    assert stages.effective(128, 3.0, 0.1)
    assert not stages.effective(32, 3.0, 0.1)
    assert TwoStage(14e9, 1, 1, 50e9, 1.25e9, 1e-3).seconds == 0.0


# Published plans.

CLOCK = {
    "low": (3.16, 31600, 32653.3, 1829.3, 1804.3),
    "medium": (0.316, 3160, 3265.3, 881.3, 856.3),
    "high": (0.07885, 788.5, 814.8, 802.3, 777.3),
}


@pytest.mark.parametrize("network", sorted(CLOCK))
def test_idealised_clock(network: str) -> None:
    clock = IdealClock(1e9, 64, 1e4, 30, NETWORKS[network])
    found = (
        clock.all_reduce(NETWORKS[network], 64),
        clock.data_parallel(),
        *(clock.diloco(m) for m in (1, 2, 4)),
    )
    assert found == pytest.approx(CLOCK[network], rel=1e-12, abs=0.05)
    assert found[0] == pytest.approx(CLOCK[network][0], rel=1e-6)
    assert clock.compute(20e9) == pytest.approx(6250)


@pytest.mark.parametrize("interval", sorted(literature.TABLE_6_GBPS))
def test_bandwidths_of_table_6_within_two_grid_steps(interval: int) -> None:
    grid = literature.TABLE_6_GRID_GBPS
    payload = literature.TABLE_6_PAYLOAD_SCALE * all_reduce_bytes(10e9, 2, 2)
    current = Round(interval, 0.8, payload, 0.0, literature.TABLE_6_OVERLAP)
    printed = literature.TABLE_6_GBPS[interval]
    for utilisation, gbps in zip(published.UTILISATIONS, printed, strict=True):
        needed = current.smallest_bandwidth(utilisation) * 8 / 1e9
        ours = int(np.searchsorted(grid, needed))
        theirs = int(np.argmin(np.abs(grid - gbps)))
        assert abs(ours - theirs) <= 2


# Clusters.


def test_layouts_have_equal_replicas() -> None:
    found = list(layouts(example("two_clusters_10gbps")))
    assert {layout.replicas for layout in found} == {1, 2, 4, 8, 16}
    assert len(found) == 12
    mixed = example("two_clusters_10gbps", sites__1__gpus_per_node=4, sites__1__nodes=6)
    both = [layout for layout in layouts(mixed) if len(layout.sites) == 2]
    for layout in both:
        per_replica = {
            k * site.gpus_per_node
            for k, site in zip(layout.nodes_per_replica, layout.sites, strict=True)
        }
        assert len(per_replica) == 1


def test_plan_of_two_clusters_by_hand() -> None:
    cluster = example("two_clusters_10gbps")
    planner = Planner(cluster)
    layout = next(x for x in layouts(cluster) if len(x.sites) == 2 and x.replicas == 2)
    plan = planner.evaluate(Setting("edit", layout, 64))
    step = 6 * 7e9 * 4194304 / 2 / (64 * 989e12 * 0.4)
    wire = 7e9 * 4 * 2 * (1 - 1 / 2) / 1.25e9 + 0.02
    exposed = wire - step / 3
    assert plan.step == pytest.approx(step)
    assert plan.sync == pytest.approx(wire)
    assert plan.exposed == pytest.approx(exposed)
    assert plan.utilisation == pytest.approx(64 * step / (64 * step + exposed))
    warm = step + (7e9 * 2 / 1.25e9 + 0.02 - 2 / 3 * step)
    steps = math.ceil(140e9 / 4194304)
    wanted = 1000 * warm + (steps - 1000) / 64 * (64 * step + exposed)
    assert plan.seconds == pytest.approx(wanted)
    assert plan.gpu_hours == pytest.approx(128 * wanted / 3600)
    int8 = planner.evaluate(Setting("edit", layout, 64, 4, "int8"))
    assert int8.exposed == pytest.approx(
        max(0, (wire - 0.02) * (1 + 4 / 256) / 4 + 0.02 - 4 * step)
    )
    assert plan.bandwidths[2] == pytest.approx(
        planner_round_gbps(plan.step, 7e9 * 4, 64, 0.9), rel=1e-3
    )


def planner_round_gbps(step: float, payload: float, interval: int, utilisation: float) -> float:
    """Returns the formula of the smallest bandwidth with 20 ms of latency, in Gbit/s."""
    room = interval * step * (1 - utilisation) / utilisation + step / 3 - 0.02
    return payload / room * 8 / 1e9


def test_bandwidth_decides_whether_two_clusters_win() -> None:
    planner = Planner(example("two_clusters_10gbps"))
    plans = planner.plans()
    found = verdict(planner, plans)
    assert found is not None
    assert found.several_win
    assert found.several.equal_loss_days < 0.6 * found.single.equal_loss_days
    rates = {c.setting: c.gbps for c in found.crossovers}
    for setting, gbps in rates.items():
        if gbps is None:
            continue
        there = planner.evaluate(setting, uplink_gbps=gbps)
        assert there.equal_loss_days == pytest.approx(found.single.equal_loss_days, rel=1e-4)
    layout = found.several.setting.layout
    sync, h32 = Setting("sync", layout), Setting("edit", layout, 32)
    assert rates[sync] > 10 > rates[h32] > 1  # type: ignore[operator]
    slow = {"sites__0__uplink": {"gbps": 0.5}, "sites__1__uplink": {"gbps": 0.5}}
    planner = Planner(example("two_clusters_10gbps", **slow))
    lost = verdict(planner, planner.plans())
    assert lost is not None
    assert not lost.several_win


def test_a_hopeless_pair_never_wins() -> None:
    cluster = example("two_clusters_10gbps", sites__1__nodes=1)
    planner = Planner(cluster)
    plans = planner.plans()
    one = best([p for p in plans if len(p.setting.layout.sites) == 1])
    layout = next(x for x in layouts(cluster) if len(x.sites) == 2)
    assert layout.replicas == 9
    assert crossover_gbps(planner, Setting("edit", layout, 512), one) is None


def test_one_fast_cluster_needs_no_local_sgd() -> None:
    planner = Planner(example("one_cluster_8x8_h100"))
    plans = planner.plans()
    assert verdict(planner, plans) is None
    chosen = best(planner.acceptable(plans))
    assert chosen.setting.method == "sync"
    assert chosen.utilisation == pytest.approx(1.0)


def test_uneven_sites_synchronise_by_time() -> None:
    planner = Planner(example("two_clusters_10gbps", sites__1__peak_tflops=312.0))
    plans = planner.plans()
    both = [p for p in plans if len(p.setting.layout.sites) == 2 and p.setting.interval == 64]
    by_steps = best([p for p in both if p.setting.method == "edit"], "days")
    by_time = best([p for p in both if p.setting.method == "a_edit"], "days")
    assert by_time.days < 0.7 * by_steps.days
    section = edit_section(by_time.setting, 1000, by_time.step)
    assert section["sync_seconds"] == round(64 * by_time.step)


def test_the_best_is_within_the_stated_penalty() -> None:
    planner = Planner(example("two_clusters_10gbps", search__max_loss_penalty=0.003))
    acceptable = planner.acceptable(planner.plans())
    assert all(plan.penalty <= 0.003 for plan in acceptable)
    strict = best(acceptable, "days")
    loose = Planner(example("two_clusters_10gbps", search__max_loss_penalty=0.05))
    assert best(loose.acceptable(loose.plans()), "days").days <= strict.days
    few = example("two_clusters_10gbps", search__fewest_rounds=1000)
    kept = Planner(few).acceptable(Planner(few).plans())
    assert all(p.setting.method == "sync" or p.rounds >= 1000 for p in kept)


def test_settings_are_accepted_by_the_trainer() -> None:
    cluster = example("two_clusters_10gbps")
    layout = next(x for x in layouts(cluster) if len(x.sites) == 2 and x.replicas == 4)
    plan = Planner(cluster).evaluate(Setting("edit", layout, 64))
    section = edit_section(plan.setting, 1000, plan.step)
    assert section == {"method": "edit", "replicas": 4, "sync_interval": 64, "warmup_steps": 1000}
    assert refusal(section) is None
    assert refusal({**section, "no_such_field": 1}) is not None
    flags = megatron_flags(cluster, plan)
    assert "--num-distributed-optimizer-instances 4" in flags
    assert "--global-batch-size 1024" in flags
    assert "--edit-sync-interval 64" in flags


def test_loss_penalty() -> None:
    penalty = LossPenalty(example("two_clusters_10gbps").assumptions)
    args = (2.4e9, 48e9)
    by_replicas = [penalty.relative(*args, r, 30, 0) for r in (2, 4, 8)]
    assert by_replicas == sorted(by_replicas)
    assert by_replicas[-1] == pytest.approx(
        float((published.DILOCO_JOINT.loss(*args, 8) / published.DILOCO_FITS["DP"].loss(*args))[0])
        - 1
    )
    assert penalty.relative(*args, 8, 8, 0) == by_replicas[-1]
    longer = penalty.relative(*args, 8, 1000, 0) - penalty.relative(*args, 8, 50, 0)
    loss = float(published.DILOCO_FITS["DP"].loss(*args)[0])
    assert longer * loss == pytest.approx(0.0095 * math.log(20))
    quarter = penalty.relative(*args, 8, 16, 4) - by_replicas[-1]
    half = penalty.relative(*args, 8, 16, 8) - by_replicas[-1]
    assert quarter * loss == pytest.approx(math.log(1.01), rel=0.01)
    assert half * loss == pytest.approx(math.log(1.027), rel=0.01)
    assert penalty.warnings(1e9, 16)
    assert not penalty.warnings(1e9, 8)


def test_tokens_to_equal_loss() -> None:
    factor = tokens_to_equal_loss(7e9, 140e9, 0.01)
    assert factor is not None
    assert 1.01 * EPOCH.loss(7e9, factor * 140e9)[0] == pytest.approx(EPOCH.loss(7e9, 140e9)[0])
    assert tokens_to_equal_loss(7e9, 140e9, 0.0) == pytest.approx(1.0)
    assert tokens_to_equal_loss(7e9, 140e9, 0.5) is None


# Devices.


def test_edge_plan_by_hand() -> None:
    planner = EdgePlanner(example("edge_1000_laptops"))
    plan = planner.evaluate(128, 0, "none")
    step = 6 * 150e6 * 716800 / 700 / (5e12 * 0.3)
    slowest = step * math.exp(0.3 * 1.6448536)
    upload, server = 600e6 * 8 / 10e6, 700 * 600e6 * 8 / 25e9
    assert planner.replicas == 700
    assert plan.compute == pytest.approx(128 * slowest)
    assert plan.upload == pytest.approx(upload)
    # The server is slower than a device's own download.
    assert plan.download == pytest.approx(max(600e6 * 8 / 50e6, server))
    assert plan.exposed == pytest.approx(upload + server + 0.05)
    tokens = 0.95 * 128 * 716800
    assert plan.tokens_per_s == pytest.approx(tokens / (plan.compute + plan.exposed))
    for utilisation, rate in zip(published.UTILISATIONS, plan.upload_mbps, strict=True):
        scaled = example(
            "edge_1000_laptops",
            devices__upload_mbps=rate,
            devices__download_mbps=5 * rate,  # type: ignore[operator]
            devices__server_gbps=2.5 * rate,  # type: ignore[operator]
        )
        there = EdgePlanner(scaled).evaluate(128, 0, "none")
        assert there.compute / (there.compute + there.exposed) == pytest.approx(utilisation)


def test_stragglers() -> None:
    devices = example("edge_1000_laptops", devices__drop_slowest=0.0).devices
    assert devices is not None
    draws = np.random.default_rng(0).normal(0, 0.3, (4000, 700)).max(axis=1)
    assert slowest_factor(devices, 700) == pytest.approx(
        math.exp(float(np.median(draws))), rel=0.01
    )
    dropping = devices.model_copy(update={"drop_slowest": 0.1})
    assert slowest_factor(dropping, 700) == pytest.approx(math.exp(0.3 * 1.28155), rel=1e-4)
    assert slowest_factor(devices.model_copy(update={"speed_spread": 0.0}), 700) == 1.0


def test_sharing_a_replica_over_slow_links_costs_every_step() -> None:
    whole = EdgePlanner(example("edge_1000_laptops"))
    shared = EdgePlanner(example("edge_1000_laptops", devices__devices_per_replica=2))
    assert shared.memory_gb() == pytest.approx(whole.memory_gb() / 2)
    assert shared.step() > 300 * whole.step()


def test_best_edge_has_enough_rounds() -> None:
    planner = EdgePlanner(example("edge_1000_laptops"))
    chosen = best_edge(planner.acceptable(planner.plans()))
    assert chosen.rounds >= 30
    assert chosen.interval == 128
    assert chosen.equivalent_gpus < 1


# What cannot be.


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("one_cluster_8x8_h100", {"model__parameters": 7e11}, "does not fit: 7e"),
        ("one_cluster_8x8_h100", {"search__deadline_days": 1}, "deadline_days 1 cannot be kept"),
        ("edge_1000_laptops", {"model__parameters": 1.3e9}, "need 31.2 GB .* memory_gb is 8"),
        ("edge_1000_laptops", {"model__batch_tokens": 1e5}, "less than one sequence"),
        ("edge_1000_laptops", {"devices__availability": 0.0005}, "fewer than devices_per_replica"),
        ("edge_1000_laptops", {"search__deadline_days": 0.01}, "deadline_days 0.01"),
    ],
)
def test_infeasible_plans_name_the_number(
    name: str, changes: dict[str, object], message: str
) -> None:
    cluster = example(name, **changes)
    with pytest.raises(ConfigurationError, match=message):
        (EdgePlanner(cluster) if cluster.devices else Planner(cluster)).plans()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sites__0__nodes": 0}, "sites.0.nodes: got 0"),
        ({"sites__0__mfu": 1.5}, "sites.0.mfu: got 1.5"),
        (
            {"sites__0__peak_tflop": 3},
            "'sites.0.peak_tflop'; did you mean 'peak_tflops'",
        ),
        ({"model__tokens": -1}, "model.tokens: got -1"),
        ({"sites__1__name": "east"}, "two sites have the same name"),
        ({"sites__1__uplink": None}, "site 'west' needs an uplink"),
        ({"devices": {"count": 1}}, "devices.peak_tflops is missing"),
        ({"model__batch_tokens": 100}, "less than one sequence"),
        ({"search__compressions": ["int4"]}, "search.compressions.0: got 'int4'"),
        ({"sites": []}, "give either sites or devices"),
    ],
)
def test_bad_clusters(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        example("two_clusters_10gbps", **changes)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("name: [", "is not YAML"),
        ("- a", "holds no mapping"),
        ("name: a\nname: b", "'name' is given twice in the block at line 1"),
    ],
)
def test_bad_files(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "cluster.yaml"
    path.write_text(text)
    with pytest.raises(ConfigurationError, match=message):
        read_cluster(path)
    with pytest.raises(ConfigurationError, match="cannot be read"):
        read_cluster(tmp_path / "none.yaml")


def test_every_constant_has_a_source() -> None:
    for name in ("two_clusters_10gbps", "edge_1000_laptops"):
        cluster = example(name)
        constants = plan_constants(cluster, LossPenalty(cluster.assumptions), "x.yaml")
        assert {Kind.GIVEN, Kind.ASSUMED, Kind.PUBLISHED} <= {c.kind for c in constants}
        assert all(c.source for c in constants)
        names = [c.name for c in constants]
        assert len(names) == len(set(names))
        assert "assumptions" not in names
    cluster = example("two_clusters_10gbps", assumptions__gradient_bytes=4.0)
    constants = plan_constants(cluster, LossPenalty(cluster.assumptions), "x.yaml", "l.json")
    kinds = {c.name: c.kind for c in constants}
    assert kinds["gradient_bytes"] == Kind.GIVEN
    assert kinds["east.node_link.gbps"] == Kind.MEASURED
    assert kinds["east.uplink.gbps"] == Kind.GIVEN


def test_the_docs_have_every_field_and_file() -> None:
    text = (ROOT / "docs" / "scaling.md").read_text()
    for section in (Model, Site, NetworkLink, Devices, Search, Assumptions):
        for name in section.model_fields:
            assert f"`{name}`" in text, name
    linked = re.findall(r"\]\((results/[^)]+)\)", text)
    assert len(linked) > 10
    for target in linked:
        assert (ROOT / "docs" / target).exists(), target


def test_the_package_imports_no_torch() -> None:
    modules = sorted(p.stem for p in (ROOT / "megatron_edit" / "scaling").glob("*.py"))
    imports = "".join(f"import megatron_edit.scaling.{m}\n" for m in modules if m != "__init__")
    code = f"import sys\n{imports}assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


def test_bytes_per_second() -> None:
    assert bytes_per_second(10) == pytest.approx(1.25e9)
