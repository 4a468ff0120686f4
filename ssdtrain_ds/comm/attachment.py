"""Compressed collectives of one engine."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from ssdtrain.comm import Communicator
from ssdtrain.comm.exclusion import excluded
from ssdtrain.integration.patching import Patches
from ssdtrain_ds import _compat, _compat_comm
from ssdtrain_ds.comm import gradients, layers, pipeline, traffic, weights

__all__ = ["CommAttachment"]

logger = logging.getLogger("ssdtrain")


class CommAttachment:
    """What compression changed about one engine and its optimizer, until `detach`.

    The engine gets functions of its own that open a traffic scope around its gradients, weights and messages; the class of
    DeepSpeed's backend and its layers' autograd functions look for one as long as something is attached.
    """

    def __init__(self, engine: Any, comm: Communicator) -> None:
        _compat_comm.check()
        self.engine = engine
        self.comm = comm
        # What undoes each change, the last first, and all whatever one raises.
        self._undo = ExitStack()
        try:
            self._attach()
        except BaseException:
            self.detach()
            raise

    def _attach(self) -> None:
        engine, comm = self.engine, self.comm
        self._undo.callback(comm.forget_weights)
        patches = Patches()
        self._undo.callback(patches.undo)
        self._undo.callback(layers.leave, comm)
        traffic.follow(patches)
        weights.follow(patches)
        layers.follow(patches, comm)
        # A quantised block is coded with its neighbours, which differ from one data-parallel group to another: what several
        # groups hold alike would drift apart.
        exact = excluded(engine.module, comm.policy.exclude) | _compat_comm.repeated_parameters(engine)
        gradients.wrap_gradients(patches, engine, comm, exact)
        weights.wrap_weights(patches, engine, comm, exact)
        patches.replace(engine, "save_checkpoint", self._saving)
        patches.replace(engine, "load_checkpoint", self._loading)
        if _compat.is_pipeline(engine):
            patches.replace(engine, _compat.INSTRUCTION_MAP, functools.partial(pipeline.instructions, comm))
        comm.loss_scale = _compat_comm.loss_scale(engine)
        for reason in _compat_comm.bypasses(engine):
            comm.notices.add(reason, f"comm: {reason}")

    def _file(self, directory: str | Path, tag: str) -> Path:
        return Path(directory) / tag / f"ssdtrain_comm_rank_{self.comm.rank}.pt"

    def _saving(self, plain: Callable[..., Any]) -> Callable[..., Any]:
        def save_checkpoint(save_dir: Any, tag: Any = None, *args: Any, **kwargs: Any) -> Any:
            found = plain(save_dir, tag, *args, **kwargs)
            file = self._file(
                save_dir, str(tag) if tag is not None else f"global_step{self.engine.global_steps}"
            )
            if file.parent.is_dir():
                torch.save(self.comm.state_dict(), file)
            else:
                logger.warning("comm: residuals are not saved: %s is no directory on this node", file.parent)
            return found

        return save_checkpoint

    def _loading(self, plain: Callable[..., Any]) -> Callable[..., Any]:
        def load_checkpoint(load_dir: Any, *args: Any, **kwargs: Any) -> Any:
            try:
                found = plain(load_dir, *args, **kwargs)
            finally:
                self.comm.forget_weights()
            path = found[0] if isinstance(found, tuple) else None
            if path is not None:
                directory = Path(path) if Path(path).is_dir() else Path(path).parent
                self._load(directory / f"ssdtrain_comm_rank_{self.comm.rank}.pt")
            return found

        return load_checkpoint

    def _load(self, file: Path) -> None:
        """Take residuals if every rank has its file; the step is the engine's on all ranks, whatever they found."""
        there = torch.tensor([int(file.is_file())], device=self.comm.device)
        torch.distributed.all_reduce(there, op=torch.distributed.ReduceOp.MIN)
        if there.item():
            self.comm.load_state_dict(torch.load(file, map_location="cpu", weights_only=True))
        elif self.comm.feedback is not None:
            self.comm.feedback.clear()
            logger.warning("comm: not every rank finds its residuals (%s): error feedback begins anew", file)
        self.comm.steps = int(self.engine.global_steps)

    def detach(self) -> None:
        """The engine, its optimizer, DeepSpeed's backend and layers are as they were. Idempotent."""
        self._undo.close()
