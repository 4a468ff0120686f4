"""Attaches a runtime to each DeepSpeed engine whose config has an `ssdtrain` block.

Note: [What is patched]
`install` wraps `DeepSpeedEngine.__init__` alone: whoever imported `deepspeed.initialize` before is covered as well, and so is
everything that builds engines itself (accelerate, Megatron-DeepSpeed) or derives from the engine (pipelines). An engine whose
config asks for something gets its own `forward`, `backward`, `step` and `destroy`, or its own table of pipeline instructions,
as instance attributes; an engine without the block keeps the class's functions untouched.
"""

from __future__ import annotations

import inspect
import logging
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch

import ssdtrain
from ssdtrain.compact.feature import CompactLinear
from ssdtrain.compact.layers import find_layers
from ssdtrain.config import Config, ConfigError, load_config
from ssdtrain.integration.claims import claim
from ssdtrain.integration.compatibility import check_conflicts
from ssdtrain.integration.inner_hooks import InnerHooks
from ssdtrain.integration.patching import Patches, run_inside
from ssdtrain.integration.training_log import adds_metrics
from ssdtrain.offload.engine import OffloadEngine
from ssdtrain.offload.tensors.eligible import GatheredStorages
from ssdtrain.planner.plan_blocks import check_patterns
from ssdtrain.preflight import check_start
from ssdtrain.runtime import Runtime
from ssdtrain.telemetry.totals import Interval
from ssdtrain_ds import _compat, _compat_accelerate, _compat_comm, checkpointing, schedule
from ssdtrain_ds.block import BLOCK_KEY, check_place
from ssdtrain_ds.comm import CommAttachment
from ssdtrain_ds.compact import check_layers, check_mode, follow_zero, take_over
from ssdtrain_ds.conflicts import DEEPSPEED_CONFLICTS
from ssdtrain_ds.plan import HAS_NO_BLOCKS, NEVER_ENDS, plan_blocks, reject_compile
from ssdtrain_ds.state import place_state

logger = logging.getLogger("ssdtrain")

_ATTACHMENT = "ssdtrain_attachment"

_installed = Patches()
# Engines that are made after `uninstall` train without their block.
_was_uninstalled = False


def install() -> None:
    """Make `deepspeed.initialize` read the `ssdtrain` block. Idempotent.

    Raises:
        ImportError: this DeepSpeed lacks a name that is needed.
        ConfigError: there is an engine already whose config has an active block.
    """
    _compat.check()
    if _installed.active:
        return
    if not _was_uninstalled:
        _check_no_engine_made()
    _installed.replace(_compat.DeepSpeedEngine, "__init__", _reading_block)
    _compat_accelerate.install(_installed)
    ssdtrain.checkpoint.register_tracker(checkpointing.RANDOM_STATE, _compat.rng_tracker)


def _reading_block(plain: Callable[..., None]) -> Callable[..., None]:
    signature = inspect.signature(plain)

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        given = signature.bind(self, *args, **kwargs).arguments
        config_class = given.get("config_class")
        written = _compat.parameter_dict(config_class) if config_class is not None else {}
        # A mistake in the block is found before the model is partitioned.
        try:
            check_place(written)
            config = load_config(written[BLOCK_KEY], path=BLOCK_KEY) if BLOCK_KEY in written else None
            if config is not None and config.active and (config.offload is not None or config.plans):
                _check_instructions(type(self), written[BLOCK_KEY])
            if config is not None and config.plans:
                written = place_state(config, config_class, written, given["model"], given.get("optimizer"))
            if config is not None and config.active:
                check_conflicts(DEEPSPEED_CONFLICTS, config, written)
                check_mode(config)
                if not _compat.is_pipeline(self):  # whose stages have some of the model each
                    _check_patterns(given["model"], config)
            if config is not None:
                check_start(config)
        except BaseException:
            # Nothing of the engine was made yet, and the __del__ of some versions recurses without end where that is so.
            self.__class__ = torch.nn.Module
            raise
        if config is not None and config.enabled and not config.active:
            logger.warning(
                "the %s block (%s) switches nothing on: without offload, comm.preset, compact, plan and report.path the rest of "
                'it has no effect; write "offload": {"directories": ...}, "comm": {"preset": ...}, "compact": {} or "plan": '
                '"auto" into it, or "enabled": false',
                BLOCK_KEY,
                ", ".join(written[BLOCK_KEY]) or "empty",
            )
        plain(self, *args, **kwargs)
        if config is not None and config.active:
            self.__dict__[_ATTACHMENT] = _EngineAttachment(self, config, written)

    return init


def _check_patterns(model: torch.nn.Module, config: Config) -> None:
    """Raises ConfigError: a section names modules, and the model has none of them."""
    if config.plans and config.plan is not None:
        check_patterns(model, config.plan)
    if config.compact is not None:
        find_layers(model, config.compact)


def _check_no_engine_made() -> None:
    """An engine that was made before `install` trains without its block."""
    for engine in _compat.existing_engines():
        written = _compat.config_of(engine)
        if BLOCK_KEY in written and load_config(written[BLOCK_KEY], path=BLOCK_KEY).active:
            why = "is the block of an engine that deepspeed.initialize made before ssdtrain_ds.install() was called"
            allowed = (
                "calling ssdtrain_ds.install() before deepspeed.initialize, or python -m ssdtrain_ds SCRIPT"
            )
            raise ConfigError.of(BLOCK_KEY, written[BLOCK_KEY], why, allowed)


def _check_instructions(engine_class: type, block: dict[str, Any]) -> None:
    """Zero-bubble schedules sum weight gradients on `ctx.saved_tensors`, which are copies of the parameters wherever saved-tensor
    hooks are: the gradients would be lost silently."""
    foreign = _compat.foreign_instructions(engine_class)
    if foreign:
        why = f"cannot be had with the pipeline instructions {', '.join(foreign)}, which are not DeepSpeed's own"
        allowed = "the block without offload and plan, or a schedule of DeepSpeed's (1F1B, DualPipeV)"
        key = "offload" if "offload" in block else "plan"
        raise ConfigError.of(f"{BLOCK_KEY}.{key}", block[key], why, allowed)


def uninstall() -> None:
    """Undo `install` for engines made from now on. Engines that exist keep their runtime."""
    global _was_uninstalled
    _was_uninstalled = True
    if _installed.active:
        _installed.undo()
        ssdtrain.checkpoint.unregister_random_state(checkpointing.RANDOM_STATE)


def runtime_of(engine: Any) -> Runtime | None:
    """The runtime of `engine`, or None if its config has no active `ssdtrain` block or it was destroyed."""
    found = engine.__dict__.get(_ATTACHMENT)
    return found.runtime if isinstance(found, _EngineAttachment) else None


def _compact_of_earlier_engines(engine: Any) -> Iterator[CompactLinear]:
    """What compresses for other engines that have the same model."""
    for other in _compat.existing_engines():
        runtime = runtime_of(other) if other is not engine else None
        if runtime is not None and runtime.compact is not None and other.module is engine.module:
            yield runtime.compact


class _EngineAttachment:
    """A runtime and what it changed about one engine.

    Args:
        engine: initialised by DeepSpeed, except for what a derived class adds.
        written: the whole DeepSpeed config.
    """

    def __init__(self, engine: Any, config: Config, written: dict[str, Any]) -> None:
        _compat.check_engine(engine)
        self.engine = engine
        self.written = written
        self.steps = 0
        self.forwards = 0
        planned = plan_blocks(engine, config, written)
        self.runtime = Runtime(config, engine.device, plan_blocks=planned)
        self.by_blocks = planned is not None and bool(planned.blocks)
        self.offload = self.runtime.engine
        try:
            self._attach(config)
        except BaseException:
            self.runtime.close()
            raise

    def _attach(self, config: Config) -> None:
        engine, runtime = self.engine, self.runtime
        # 1. Features know the model.
        if runtime.compact is not None:
            self._prepare_compact(runtime.compact)
        runtime.register(engine.module)
        if self.offload is not None:
            self._prepare_offload(self.offload)
        self.checkpoint = checkpointing.function_for(config.checkpoint)
        # 2. Metrics go where DeepSpeed's and the Trainer's go.
        self.monitor = _Monitor(engine, runtime)
        runtime.call_at_close(lambda: engine.__dict__.pop(_ATTACHMENT, None))
        of_trainer = Patches()
        runtime.call_at_close(of_trainer.undo)
        weakref.finalize(self, of_trainer.undo)
        _patch_trainer(of_trainer, engine, runtime)
        # 3. Forwards, backwards and steps reach the runtime.
        self._record_skipped_steps()
        self._patch_engine()
        if runtime.comm is not None:
            runtime.call_at_close(CommAttachment(engine, runtime.comm).detach)
        runtime.step_begin()

    def _prepare_compact(self, linear: CompactLinear) -> None:
        engine = self.engine
        check_layers(engine)
        follow_zero()
        take_over(_compact_of_earlier_engines(engine))
        linear.step = lambda: int(engine.global_steps)
        if _compat.is_pipeline(engine) and _compat.stages_of(engine) > 1:
            linear.look_elsewhere([engine.module])

    def _patch_engine(self) -> None:
        """Give this engine methods of its own. See Note: [What is patched]."""
        engine, patches = self.engine, Patches()
        self.runtime.call_at_close(patches.undo)
        if _compat.is_pipeline(engine):
            schedule.patch_pipeline(patches, engine, self.runtime, self.recording, self.on_step_end)
            patches.replace(engine, _compat.EXEC_SCHEDULE, self._recording_skipped_steps)
        else:
            patches.replace(engine, "forward", run_inside(self._recording))
            patches.replace(engine, "backward", run_inside(lambda *_, **__: self.runtime.backward()))
            patches.replace(engine, "step", self._counted)
        patches.replace(engine, "destroy", self._destroy)
        if self.by_blocks:
            reject_compile(patches, engine, HAS_NO_BLOCKS)
        elif self.offload is not None and _compat.tensor_parallel_layers(engine.module):
            reject_compile(patches, engine, NEVER_ENDS)

    def _prepare_offload(self, offload: OffloadEngine) -> None:
        undo = self.runtime.call_at_close
        undo(claim(self.engine.module, f"DeepSpeed's {BLOCK_KEY} block"))
        if _compat.zero_stage(self.engine) == 3:
            gathered = GatheredStorages(_compat.gathering_points(self.engine.module))
            undo(gathered.remove)
            offload.eligible.add_parameter_predicate(gathered.__contains__)
        offload.eligible.add_parameter_predicate(_compat.is_zero_parameter)
        least, reports = offload.options.min_bytes, self.runtime.reports
        self.runtime.features.append(
            InnerHooks(least, *checkpointing.RECOMPUTING, reports=reports, moves=self.runtime.moves)
        )
        patches = Patches()
        # Also where the engine is dropped without `destroy`.
        undo(weakref.finalize(self, patches.undo))
        checkpointing.patch_checkpointing(patches)

    @contextmanager
    def recording(
        self, chunk: int = 0, microbatch: int | None = None, *, keep: bool = False
    ) -> Iterator[None]:
        """One forward: autograd's saved tensors and what DeepSpeed's checkpoint functions hold go to a tape."""
        self.forwards += 1
        with (
            self.runtime.forward(chunk, microbatch, keep=keep) as tape,
            checkpointing.recording(self.checkpoint, self.offload, tape),
        ):
            yield

    def _recording(self, *_: object, **__: object) -> AbstractContextManager[None]:
        return self.recording() if torch.is_grad_enabled() else nullcontext()

    def _counted(self, plain: Callable[..., Any]) -> Callable[..., Any]:
        def step(*args: Any, **kwargs: Any) -> Any:
            before = self.engine.global_steps
            self._record_skipped_steps()
            found = plain(*args, **kwargs)
            if self.engine.global_steps != before:
                self.on_step_end()
            return found

        return step

    def _recording_skipped_steps(self, plain: Callable[..., Any]) -> Callable[..., Any]:
        def exec_schedule(*args: Any, **kwargs: Any) -> Any:
            self._record_skipped_steps()
            return plain(*args, **kwargs)

        return exec_schedule

    def _record_skipped_steps(self) -> None:
        """A step begins. Not when the one before ends: `load_checkpoint` may set the count to another run's in between."""
        self.skipped = _compat_comm.skipped_steps(self.engine)

    def on_step_end(self) -> None:
        """The optimizer has made a step."""
        skipped = _compat_comm.skipped_steps(self.engine) != self.skipped
        self.runtime.step_end(skipped, self.engine.global_steps)
        self.monitor.step()
        self.steps += 1
        if self.steps == 1:
            self._warn_if_checkpointing_is_ignored()
            self._warn_if_bypassed()
        self.runtime.step_begin()

    def _warn_if_checkpointing_is_ignored(self) -> None:
        block = self.written.get("activation_checkpointing")
        asked = [key for key, value in block.items() if value] if isinstance(block, dict) else []
        if asked and not _compat.checkpointing_is_configured():
            logger.warning(
                "activation_checkpointing (%s) is in the DeepSpeed config, and DeepSpeed ignores it until somebody calls "
                "deepspeed.checkpointing.configure(mpu, deepspeed_config=...)",
                ", ".join(asked),
            )

    def _warn_if_bypassed(self) -> None:
        if self.offload is not None and not self.forwards:
            logger.warning(
                "%s.offload is on, and a step was made without a call of the engine: what engine.module(...) saves is not "
                "offloaded. Call engine(...) in its place",
                BLOCK_KEY,
            )

    def _destroy(self, plain: Callable[..., Any]) -> Callable[..., Any]:
        def destroy(*args: Any, **kwargs: Any) -> Any:
            try:
                self.runtime.close()
            finally:
                found = plain(*args, **kwargs)
            return found

        return destroy


_IN_MONITOR = "Train/SSDTrain"


class _Monitor:
    """Writes the metrics of rank 0 to DeepSpeed's monitor (TensorBoard, csv, Weights & Biases, Comet) after each step, against
    the samples seen, as DeepSpeed's own values are.

    The log lines are the runtime's, every `report.interval` steps: DeepSpeed's logger is at WARNING by default, and
    `steps_per_print` is infinite under accelerate.
    """

    def __init__(self, engine: Any, runtime: Runtime) -> None:
        self._engine = engine
        self._runtime = runtime
        self._interval = Interval(runtime.statistics())

    def step(self) -> None:
        """A step is over."""
        engine = self._engine
        if engine.global_rank != 0 or not engine.monitor.enabled:
            return
        now = self._runtime.statistics()
        if now is not None:
            samples = engine.global_samples
            events = [
                (f"{_IN_MONITOR}/{name}", value, samples) for name, value in self._interval.end(now).items()
            ]
            engine.monitor.write_events(events)


def _patch_trainer(patches: Patches, engine: Any, runtime: Runtime) -> None:
    """Add the metrics of `runtime` to the training logs of the Trainer that drives `engine`, if there is one.

    A log gets what log lines show: bytes and seconds per step since the log before, of this process's rank.
    """
    trainer = _compat.trainer_class()
    if trainer is None:
        return
    # Weak references: the class outlives engines, and nobody destroys those of a Trainer.
    driven, known = weakref.ref(engine), weakref.ref(runtime)

    def runtime_of(self: Any) -> Runtime | None:
        return known() if self.model_wrapped is driven() else None

    patches.replace(trainer, "log", adds_metrics(Interval(runtime.statistics()), runtime_of))
