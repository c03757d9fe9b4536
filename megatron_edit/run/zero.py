"""EDiT around ``deepspeed.initialize``: ZeRO 1, 2 or 3 inside a replica, EDiT between replicas."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from megatron_edit.backends.deepspeed.backend import ZeroBackend
from megatron_edit.checkpoint.zero import ZeroCheckpoints
from megatron_edit.config.zero_config import read_zero_run
from megatron_edit.engine.record import SyncRecord
from megatron_edit.engine.sync_engine import SyncEngine
from megatron_edit.errors import ConfigurationError
from megatron_edit.platform import ds_compat, ds_zero
from megatron_edit.replicas.mesh import Mesh, build_mesh
from megatron_edit.run.charts import sync_events
from megatron_edit.run.stop import rollback_limit


class EDiT:
    """Replicas of a model under DeepSpeed, each a world of ZeRO of its own.

    The engine that :meth:`initialize` returns is DeepSpeed's: ``engine(batch)``,
    ``engine.backward(loss)`` and ``engine.step()`` train as ever, and rounds begin and end in them.

    Args:
        config: DeepSpeed's JSON with an ``edit`` section, a file or its content. Its
            ``train_batch_size`` counts all replicas.
        timeout_minutes: Bound of every wait between ranks.

    Attributes:
        engine: DeepSpeed's engine, once initialised.
        sync: The engine of the synchronisations, once initialised.

    Raises:
        ConfigurationError: The JSON asks for what cannot be had; before anything is built.
    """

    def __init__(self, config: str | Mapping[str, Any], timeout_minutes: float = 10) -> None:
        self.run = read_zero_run(config)
        self._timeout_minutes = timeout_minutes
        self._mesh: Mesh | None = None
        self.engine: Any = None
        self.sync: SyncEngine
        self._backend: ZeroBackend
        self._forward = ExitStack()
        self._records: list[SyncRecord] = []

    @property
    def mesh(self) -> Mesh:
        """Which rank is where; the first call joins the other ranks."""
        if self._mesh is None:
            backend = "nccl" if torch.cuda.is_available() else "gloo"
            ds_compat.init_distributed(backend, self._timeout_minutes)
            self.run.shard_size(dist.get_world_size())
            self._mesh = build_mesh(
                self.run.edit.replicas or 1, timeout_minutes=self._timeout_minutes
            )
        return self._mesh

    def initialize(self, model: nn.Module, **arguments: Any) -> tuple[Any, Any, Any, Any]:
        """Calls ``deepspeed.initialize`` for this rank's replica.

        Args:
            model: The model, with its layers in a ``ModuleList``.
            arguments: Those of ``deepspeed.initialize`` but ``config`` and ``mpu``.

        Returns:
            Engine, optimizer, data loader and learning-rate scheduler, as ``deepspeed.initialize``.

        Raises:
            ConfigurationError: Some parameters are frozen, or the batch sizes do not multiply.
        """
        import deepspeed

        return self.initialize_with(deepspeed.initialize, model, **arguments)

    def initialize_with(
        self,
        initialize: Callable[..., tuple[Any, Any, Any, Any]],
        model: nn.Module,
        **arguments: Any,
    ) -> tuple[Any, Any, Any, Any]:
        """As :meth:`initialize`, through a given ``deepspeed.initialize``."""
        mesh = self.mesh
        _refuse_frozen(model)
        engine, optimizer, loader, scheduler = initialize(
            model=model,
            config=self.run.replica_json(mesh.shard),
            mpu=ds_zero.ShardGroupOnly(mesh.shard_group, mesh.tensor_group),
            **arguments,
        )
        self._attach(engine)
        return engine, optimizer, loader, scheduler

    def synchronize(self) -> None:
        """Brings all replicas to one anchor; to be called by all ranks at the end of training.

        Raises:
            RuntimeError: Some unit has failed everywhere too often.
        """
        self.sync.synchronize()
        self._note(self.sync.records())

    def records(self) -> list[SyncRecord]:
        """Synchronisations since the last call, once their numbers have reached the host."""
        records, self._records = self._records, []
        return records

    def _note(self, records: list[SyncRecord]) -> None:
        """Draws the ``edit/`` charts where the JSON has a monitor on, and looks after rollbacks."""
        self._records += records
        if self.engine.monitor.enabled and dist.get_rank() == 0:
            for record in records:
                events = sync_events(record).items()
                self.engine.monitor.write_events([(tag, v, record.step) for tag, v in events])
        if (stop := rollback_limit(records, self.run.edit.max_consecutive_rollbacks)) is not None:
            raise RuntimeError(stop.reason)

    def _attach(self, engine: Any) -> None:
        """Has rounds begin and end in the steps of a DeepSpeed engine."""
        self.engine = engine
        self._backend = backend = ZeroBackend(engine, self.run.edit.gradient_dtype)
        samples = engine.train_batch_size()
        self._begin_alike(backend)
        self.sync = SyncEngine(backend, self.mesh, self.run.edit, samples)
        model = engine.module
        model.register_forward_pre_hook(self._before_forward, prepend=True)
        model.register_forward_hook(lambda *_: self._forward.close())
        ds_zero.wrap_update(engine, self._around_update)
        checkpoints = ZeroCheckpoints(engine, self.sync, self.mesh, self._follow_anchor)
        # Also for those who hold DeepSpeed's engine alone, such as a Trainer.
        engine.save_checkpoint, engine.load_checkpoint = checkpoints.save, checkpoints.load

    @torch.no_grad()
    def _follow_anchor(self) -> None:
        """Puts all replicas where the anchor is."""
        self._backend.release()
        for state in self.sync.outer:
            state.unit.copy_from(state.anchor)
        self._backend.flush()

    @torch.no_grad()
    def _begin_alike(self, backend: ZeroBackend) -> None:
        """Gives all replicas the first one's parameters: weights may have been loaded there alone,
        and seeds may differ."""
        backend.release()
        for unit in backend.units:
            flat = torch.zeros(unit.numel, device=unit.locals[0].device)
            if self.mesh.replica == 0:
                unit.copy_to(flat)
            self.mesh.peers.all_reduce(flat, f"beginning with {unit.name}").wait()
            unit.copy_from(flat)
        backend.flush()

    def _before_forward(self, model: nn.Module, *_: object) -> None:
        if not (model.training and torch.is_grad_enabled()):
            return
        self.sync.begin_step()
        if self.sync.landing and ds_zero.stage(self.engine) == 3:
            self._forward.enter_context(ds_zero.no_prefetch(self.engine))

    def _around_update(self, update: Callable[[], None]) -> None:
        self.sync.average_gradients()
        update()
        skipped = float(ds_zero.was_skipped(self.engine))
        self.sync.end_step(torch.full((), skipped, device=self.sync.device))
        self._note(self.sync.records())


def _refuse_frozen(model: nn.Module) -> None:
    frozen = [name for name, p in model.named_parameters() if not p.requires_grad]
    if frozen:
        raise ConfigurationError(
            f"model: {len(frozen)} parameter(s) are frozen, {frozen[0]} first; allowed: all are "
            "trained (no adapters, no requires_grad=False)"
        )
