"""Hooks into Megatron-LM's training loop: flags, attachment, figures, checkpoints.

The loop looks its functions up in its modules when it calls them, so replacing them there is enough. What is replaced
before the flags are known is put back when they ask for nothing.
"""

from __future__ import annotations

import atexit
import functools
import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ssdtrain import ranks
from ssdtrain.integration.patching import Patches
from ssdtrain_megatron.flags import add_arguments, config_from_args

if TYPE_CHECKING:
    from ssdtrain_megatron.attachment import Attachment

__all__ = ["install_pretrain", "uninstall_pretrain"]

Function = Callable[..., Any]

_patches = Patches()
_of_attachment = Patches()  # for the attachment that is alive
_attachment: Attachment | None = None


def install_pretrain() -> None:
    """Let `pretrain` of Megatron-LM know the --ssdtrain-* flags and do what they ask for. Idempotent.

    Call it before `pretrain(...)`, in the script itself or from `python -m ssdtrain_megatron.run`.

    Raises:
        ImportError: megatron.training is not on the path, or lacks a name that is needed.
    """
    if _patches.active:
        return
    from ssdtrain_megatron import _compat

    arguments, training = _compat.check_training()
    _patches.replace(arguments, "add_megatron_arguments", _with_flags)
    _patches.replace(training, "setup_model_and_optimizer", functools.partial(_attaching, training))


def uninstall_pretrain() -> None:
    """Put the training loop's functions back, and end what was attached. Idempotent."""
    _detach()
    _patches.undo()


def _detach() -> None:
    """End what is attached: a run that sets up a second model would else log and save for both."""
    global _attachment
    _of_attachment.undo()
    if _attachment is not None:
        atexit.unregister(_attachment.close)
        _attachment.close()
        _attachment = None


def _with_flags(plain: Function) -> Function:
    def add_megatron_arguments(parser: Any) -> Any:
        return add_arguments(plain(parser))

    return add_megatron_arguments


def _attaching(training: Any, plain: Function) -> Function:
    def setup_model_and_optimizer(*args: Any, **kwargs: Any) -> Any:
        global _attachment
        # A mistake in the flags is found before the model is built.
        config = config_from_args(training.get_args())
        if config is not None:
            from ssdtrain.preflight import check_start

            check_start(
                config,
                rank=ranks.global_rank(),
                local_rank=ranks.local_rank(),
                local_world_size=ranks.local_world_size(),
            )
        result = plain(*args, **kwargs)
        if config is None or not config.active:
            uninstall_pretrain()
            return result
        from ssdtrain_megatron import _compat
        from ssdtrain_megatron.attachment import attach

        _detach()
        _attachment = attach(result[0], config, optimizer=result[1], logs=False)
        if not _attachment.runtime.enabled:
            # Collectives to compress, and one rank.
            uninstall_pretrain()
            return result
        # The loop ends by sys.exit at --exit-interval, --exit-duration and signals.
        atexit.register(_attachment.close)
        _of_attachment.replace(training, "training_log", functools.partial(_logging, training, _attachment))
        if _attachment.runtime.comm is not None:
            source = _compat.loaded_checkpoint(training.get_args())
            if source is not None:
                _attachment.load(source)
            saving = functools.partial(_saving, training, _attachment)
            _of_attachment.replace(training, "save_checkpoint", saving)
        return result

    return setup_model_and_optimizer


def _logging(training: Any, attachment: Attachment, plain: Function) -> Function:
    from ssdtrain_megatron.metrics import GatheredMetrics

    figures = GatheredMetrics(attachment)
    signature = inspect.signature(plain)
    report = attachment.runtime.config.report
    own_interval = report.interval if "interval" in report.model_fields_set else None

    def training_log(*args: Any, **kwargs: Any) -> Any:
        result = plain(*args, **kwargs)
        iteration = signature.bind(*args, **kwargs).arguments["iteration"]
        interval = training.get_args().log_interval if own_interval is None else own_interval
        if interval and iteration % interval == 0:
            figures.gather()
            training.print_rank_last(f" [ssdtrain] iteration {iteration} | {figures.line()}")
            writer, wandb = training.get_tensorboard_writer(), training.get_wandb_writer()
            for name, value in figures.scalars().items():
                if writer is not None:
                    writer.add_scalar(f"ssdtrain/{name}", value, iteration)
            if wandb is not None and wandb:
                wandb.log({f"ssdtrain/{name}": value for name, value in figures.scalars().items()}, iteration)
        return result

    return training_log


def _saving(training: Any, attachment: Attachment, plain: Function) -> Function:
    from ssdtrain_megatron import _compat

    signature = inspect.signature(plain)

    def save_checkpoint(*args: Any, **kwargs: Any) -> Any:
        result = plain(*args, **kwargs)
        given = signature.bind(*args, **kwargs).arguments
        target = _compat.saved_checkpoint(training.get_args(), given)
        if target is not None:
            attachment.save(target)
        return result

    return save_checkpoint
