"""A plan as the trainer's settings: the `edit` section of the JSON, and Megatron's flags."""

from collections.abc import Sequence

from megatron_edit.config.edit_config import flag_name
from megatron_edit.config.methods import resolve
from megatron_edit.errors import ConfigurationError
from megatron_edit.scaling.cluster import Cluster
from megatron_edit.scaling.planner import Plan, Setting


def edit_section(setting: Setting, warmup_steps: int, step: float) -> dict[str, object]:
    """Returns the `edit` section for a setting; fields at their default of 0 or none stay out.

    Args:
        setting: The choice.
        warmup_steps: Synchronous steps at the start.
        step: T in seconds, which turns an interval into a time for `a_edit`.
    """
    section: dict[str, object] = {"method": setting.method, "replicas": setting.layout.replicas}
    if setting.method == "sync":
        return section
    if setting.method == "a_edit":
        section["sync_seconds"] = float(round(setting.interval * step))
    else:
        section["sync_interval"] = setting.interval
    section["warmup_steps"] = warmup_steps
    if setting.delay:
        section["delay_steps"] = setting.delay
    if setting.compression != "none":
        section["compression"] = setting.compression
    return section


def refusal(section: dict[str, object]) -> str | None:
    """Returns why the trainer of this version refuses a section, or None."""
    try:
        resolve(None, section, {})
    except ConfigurationError as error:
        return str(error)
    return None


def known_to_trainer(plans: Sequence[Plan], warmup_steps: int) -> list[Plan]:
    """Returns the plans whose settings the trainer of this version accepts."""
    return [
        plan
        for plan in plans
        if refusal(edit_section(plan.setting, warmup_steps, plan.step)) is None
    ]


def megatron_flags(cluster: Cluster, plan: Plan) -> list[str]:
    """Returns the flags of `pretrain_edit.py` that a plan decides, one per entry.

    The global batch is rounded to a multiple of the data-parallel ranks, as the trainer wants it.
    """
    setting, model = plan.setting, cluster.model
    section = edit_section(setting, cluster.search.warmup_steps, plan.step)
    ranks = sum(
        nodes * count * site.gpus_per_node
        for site, nodes, count in zip(
            setting.layout.sites,
            setting.layout.nodes_per_replica,
            setting.layout.replicas_per_site,
            strict=True,
        )
    )
    samples = max(1, round(model.batch_tokens / model.sequence_length / ranks)) * ranks
    steps = round(model.tokens / (samples * model.sequence_length))
    flags = [
        f"--num-distributed-optimizer-instances {setting.layout.replicas}",
        "--data-parallel-sharding-strategy optim_grads_params",
        f"--seq-length {model.sequence_length}",
        f"--global-batch-size {samples}",
        f"--train-iters {steps}",
        "--bf16",
    ]
    names = [name for name in section if name != "replicas"]
    return flags + [f"{flag_name(name)} {section[name]}" for name in names]
