"""What is replaced in megatron-core, while at least one attachment is alive and not a moment longer."""

from __future__ import annotations

import functools
import weakref
from typing import TYPE_CHECKING, Any

import torch

from ssdtrain.integration.claims import related
from ssdtrain.integration.patching import Function, Patches, Wrap, call_after
from ssdtrain.offload.checkpoint import detach_leaves
from ssdtrain_megatron import _compat
from ssdtrain_megatron.identity import KEEPING_LEAVES, read_inputs_once
from ssdtrain_megatron.recompute import any_requires_grad

if TYPE_CHECKING:
    from ssdtrain_megatron.attachment import Attachment


class Installation:
    """Sends the events of megatron-core's schedules to the attachment of the model they are about.

    Models that nothing is attached to, and forwards without gradients, run the original functions, except that a checkpoint
    function with gradients off is a call of what it was given. See Note: [Outputs that are parameters] in `recompute`.
    """

    def __init__(self) -> None:
        self._attachments: list[Attachment] = []
        self._active: Attachment | None = None  # whose forward is running
        self._in_first_run = False  # inside the first run of a reentrant checkpoint
        self._patches = Patches()
        # Storages that CheckpointWithoutOutput frees and fills again by itself.
        self._resized: weakref.WeakSet[torch.UntypedStorage] = weakref.WeakSet()
        # Models that have nothing in common with any chunk, as seen.
        self._unrelated: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()

    def add(self, attachment: Attachment) -> None:
        if not self._attachments:
            try:
                self._replace()
            except BaseException:
                self._restore()
                raise
        self._unrelated.clear()
        self._attachments.append(attachment)

    def remove(self, attachment: Attachment) -> None:
        if attachment in self._attachments:
            self._attachments.remove(attachment)
            if not self._attachments:
                self._restore()

    def related_chunk(self, model: torch.nn.Module) -> torch.nn.Module | None:
        """A chunk that something is attached to and that is `model`, inside of it or around it."""
        chunks = (chunk for attachment in self._attachments for chunk in attachment.chunks)
        return next((chunk for chunk in chunks if related(chunk, model)), None)

    def _check_unrelated(self, model: torch.nn.Module) -> None:
        """Refuse a model that was wrapped after it was attached: its attachment would silently do nothing."""
        if model in self._unrelated:
            return
        chunk = self.related_chunk(model)
        if chunk is not None:
            raise RuntimeError(
                f"the schedule runs a {type(model).__name__}, and what is attached is a {type(chunk).__name__} "
                "inside of it or around it: give attach the model chunks as the schedule gets them, after they are "
                "wrapped (Float16Module, DistributedDataParallel)"
            )
        self._unrelated.add(model)

    def must_stay(self, tensor: torch.Tensor) -> bool:
        """True for an output of CheckpointWithoutOutput and views of one, and for what is saved for nothing.

        See Note: [Saved for nothing] in `recompute`.
        """
        return self._in_first_run or (bool(self._resized) and tensor.untyped_storage() in self._resized)

    def _replace(self) -> None:
        wrappers: dict[str, Wrap] = {
            "forward_step": self._forward_step,
            "backward_step": self._backward_step,
            "checkpoint": self._checkpoint,
            "discarding_checkpoint": call_after(self._keep_resized),
            **KEEPING_LEAVES,
        }
        self._patches.replace_all(_compat.replaceable(), wrappers)
        read_inputs_once(self._patches)

    def _restore(self) -> None:
        self._patches.undo()
        self._resized.clear()
        self._unrelated.clear()

    def _forward_step(self, plain: Function) -> Function:
        def forward_step(*args: Any, **kwargs: Any) -> Any:
            if not torch.is_grad_enabled():
                return plain(*args, **kwargs)
            step = _compat.read_step(args, kwargs)
            for attachment in self._attachments:
                chunk = attachment.chunk_of(step.model)
                if chunk is not None:
                    break
            else:
                self._check_unrelated(step.model)
                return plain(*args, **kwargs)
            if step.microbatch is None:
                return plain(*args, **kwargs)
            schedule = attachment.schedule
            outer, self._active = self._active, attachment
            try:
                result = schedule.forward(
                    chunk, step.microbatch, step.microbatches, functools.partial(plain, *args, **kwargs)
                )
            finally:
                self._active = outer
            schedule.record_output(_compat.first_output(result), chunk, step.microbatch)
            return result

        return forward_step

    def _backward_step(self, plain: Function) -> Function:
        def backward_step(*args: Any, **kwargs: Any) -> Any:
            output = _compat.output_of(args, kwargs)
            for attachment in self._attachments:
                if attachment.schedule.knows(output):
                    return attachment.schedule.backward(output, functools.partial(plain, *args, **kwargs))
            return plain(*args, **kwargs)

        return backward_step

    def _checkpoint(self, plain: Function) -> Function:
        def checkpoint(function: Function, distribute_saved_activations: bool, *args: Any) -> Any:
            if not torch.is_grad_enabled():
                # Nothing is saved. See Note: [Outputs that are parameters] in `recompute`.
                return function(*args)
            current = self._active
            if current is None or current.runtime.engine is None:
                return plain(function, distribute_saved_activations, *args)

            def inside(*args: Any) -> Any:
                # Checkpoints inside this one are of the same kind when it is recomputed.
                outer, self._active = self._active, current
                first_run, self._in_first_run = self._in_first_run, not torch.is_grad_enabled()
                try:
                    outputs = function(*args)
                    return detach_leaves(outputs) if self._in_first_run else outputs
                finally:
                    self._active, self._in_first_run = outer, first_run

            reentrant = current.uses_native_checkpoint or current.checkpoint.config.use_reentrant
            # See Note: [Distributed saved activations] and Note: [Inputs without gradients] in `recompute`.
            if reentrant or distribute_saved_activations or not any_requires_grad(args):
                return plain(inside, distribute_saved_activations, *args)
            return current.checkpoint(inside, *args)

        return checkpoint

    def _keep_resized(self, outputs: Any, _: object) -> None:
        for output in outputs if isinstance(outputs, list | tuple) else (outputs,):
            if isinstance(output, torch.Tensor):
                self._resized.add(output.untyped_storage())


installation = Installation()
"""The one of this process: what it replaces are module globals."""
