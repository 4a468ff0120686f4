"""Hooks into Megatron-LM's training loop: flags, attachment, metrics, checkpoints.

The loop looks its functions up in its modules when it calls them, so replacing them there is enough. What is replaced
before the flags are known is put back when they ask for nothing.
"""

from __future__ import annotations

import atexit
import functools
import sys
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from ssdtrain.config import Config, ConfigError
from ssdtrain.integration.patching import Function, Patches, call_after
from ssdtrain.preflight import check_start
from ssdtrain_megatron.flags import (
    add_arguments,
    config_from_args,
    given_flags,
    keys_without_effect,
    unused_flags,
)
from ssdtrain_megatron.planned_state import check_flags

if TYPE_CHECKING:
    from ssdtrain_megatron.attachment import Attachment

_patches = Patches()
_of_attachment = Patches()  # for the attachment that is alive
_attachment: Attachment | None = None


def install_pretrain() -> None:
    """Add the --ssdtrain-* flags to `pretrain` of Megatron-LM, and attach as they configure. Idempotent.

    Call it before `pretrain(...)`, in the script itself or from `python -m ssdtrain_megatron.run`.

    Raises:
        ConfigError: flags of the command line contradict each other. In a schedule: nothing was attached as they ask for.
        ImportError: megatron.training is not on the path, or lacks a name that is needed.
        SystemExit: a flag of ours is misspelled, or its value is invalid.
    """
    if _patches.active:
        return
    unused_flags.expect(sys.argv[1:])
    from ssdtrain_megatron import _compat

    arguments, training = _compat.check_training()
    unused_flags.watch(_compat.replaceable()["forward_step"])
    _patches.replace(arguments, "add_megatron_arguments", call_after(lambda parser, _: add_arguments(parser)))
    _patches.replace(training, "setup_model_and_optimizer", functools.partial(_attaching, training))


def uninstall_pretrain() -> None:
    """Put the training loop's functions back, and end what was attached. Idempotent."""
    _detach()
    unused_flags.used()
    _patches.undo()


def _detach() -> None:
    """End what is attached: a run that sets up a second model would else log and save for both."""
    global _attachment
    _of_attachment.undo()
    if _attachment is not None:
        atexit.unregister(_attachment.close)
        _attachment.close()
        _attachment = None


def _attaching(training: Any, plain: Function) -> Function:
    def setup_model_and_optimizer(*args: Any, **kwargs: Any) -> Any:
        # A mistake in the flags is found before the model is built.
        config = config_from_args(training.get_args())
        if config is None:
            _check_command_line(training.get_args())
        else:
            check_start(config)
            if config.plans and config.plan is not None and config.plan.file is not None:
                check_flags(config.plan.file, vars(training.get_args()))
            idle = keys_without_effect(config)
            if idle:
                training.print_rank_last(f" [ssdtrain] {idle}")
        result = plain(*args, **kwargs)
        attached = False
        if config is not None and config.active:
            if result[1] is None:
                training.print_rank_last(" [ssdtrain] nothing is trained (--skip-train): it does nothing")
            else:
                attached = _attach(training, result[0], result[1], config)
        if attached:
            _load(training, getattr(training.get_args(), "iteration", 0))
        else:
            uninstall_pretrain()
        return result

    return setup_model_and_optimizer


def _check_command_line(args: Any) -> None:
    """Check that flags of ours were not dropped: with --yaml-cfg Megatron-LM reads that file in place of the command line.

    Raises:
        ConfigError: names them.
    """
    file = getattr(args, "yaml_cfg", None)
    dropped = given_flags(sys.argv[1:])
    if file and dropped:
        why = f"is read in place of the command line, and {', '.join(dropped)} would be without effect"
        allowed = "the keys in that file instead (ssdtrain_config: FILE), or no --yaml-cfg"
        raise ConfigError.of("Megatron's --yaml-cfg", file, why, allowed)


def _attach(training: Any, chunks: Any, optimizer: Any, config: Config) -> bool:
    """Attach to the model of the loop; False: there are collectives to compress, and one rank."""
    global _attachment
    from ssdtrain_megatron.attachment import attach

    _detach()
    _attachment = attach(chunks, config, optimizer=optimizer, logs=False)
    if not _attachment.runtime.enabled:
        return False
    # The loop ends by sys.exit at --exit-interval, --exit-duration and signals.
    atexit.register(_attachment.close)
    _of_attachment.replace(training, "training_log", call_after(_logging(training, _attachment)))
    if _attachment.runtime.comm is not None:
        save = functools.partial(_save, training, _attachment)
        _of_attachment.replace(training, "save_checkpoint", call_after(save))
    return True


def _load(training: Any, iteration: int) -> None:
    """Go on after the checkpoint that the loop has loaded, with its residuals."""
    from ssdtrain_megatron import _compat

    if _attachment is None:
        return
    _attachment.resume(iteration)
    source = _compat.loaded_checkpoint(training.get_args(), iteration)
    if source is not None:
        _attachment.load(source)


def _save(training: Any, attachment: Attachment, _: object, given: Mapping[str, Any]) -> None:
    from ssdtrain_megatron import _compat

    target = _compat.saved_checkpoint(training.get_args(), given)
    if target is not None:
        attachment.save(target)


def _logging(training: Any, attachment: Attachment) -> Callable[[Any, Mapping[str, Any]], None]:
    from ssdtrain_megatron.metrics import GatheredMetrics

    metrics = GatheredMetrics(attachment)
    report = attachment.runtime.config.report
    own_interval = report.interval if "interval" in report.model_fields_set else None

    def log(_: object, given: Mapping[str, Any]) -> None:
        iteration = given["iteration"]
        interval = training.get_args().log_interval if own_interval is None else own_interval
        if interval and iteration % interval == 0:
            metrics.gather()
            training.print_rank_last(f" [ssdtrain] iteration {iteration} | {metrics.line()}")
            writer, wandb = training.get_tensorboard_writer(), training.get_wandb_writer()
            for name, value in metrics.scalars().items():
                if writer is not None:
                    writer.add_scalar(f"ssdtrain/{name}", value, iteration)
            if wandb is not None and wandb:
                wandb.log({f"ssdtrain/{name}": value for name, value in metrics.scalars().items()}, iteration)

    return log
