"""Gradient accumulation block by block: each block runs all microbatches before the next one does, in forward and in backward.

A further microbatch then moves no weights, gradients or optimizer state (GreedySnake, arXiv 2512.17570). Activations of all
microbatches are alive at a time, as in a pipeline: recompute blocks, or offload.

Note: [Lanes]
    The forward of a microbatch is the model's own code, on a thread of its own that stops at each call of a block. One thread
    runs at a time, so nothing else of the program notices them.

Note: [Segments]
    What a block is given and what it returns is cut out of the graph: a leaf takes its place, which collects the gradient. So
    the graph of a microbatch comes in segments, blocks and what lies between them, and their backwards run one by one, the last
    first, each for all microbatches in their order. Every parameter adds up the same gradients in the same order as in the usual
    loop, and a tensor that several segments use adds up theirs from the last to the first, as autograd does.

Note: [What is refused]
    A parameter or another tensor of the graph that two segments share other than through inputs and outputs of blocks (a head
    tied to the embedding, a skip over a block of what no block has returned): its gradients would add up in another order. Random
    numbers: they would be drawn in another order. Microbatches that call other blocks than the first one does.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import Node
from torch.utils._pytree import tree_map
from torch.utils.hooks import RemovableHandle

_WHERE = "(runtime.accumulate)"


class _Abandoned(BaseException):
    """Ends a lane whose run has failed elsewhere; not an error."""


class _Segment:
    """A part of the graph of one microbatch.

    Attributes:
        name: for errors.
        roots: ends of its graph, each with the leaf that takes its place in later segments.
        leaves: those of earlier segments that it uses.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.roots: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.leaves: list[torch.Tensor] = []

    def backward(self) -> None:
        """Run the backward from the gradients that the leaves have collected."""
        used = [(root, leaf.grad) for root, leaf in self.roots if leaf.grad is not None]
        # What a leaf has from later segments is the first summand: autograd sums up what this one adds before it adds that.
        used += [(leaf, leaf.grad) for leaf in self.leaves if used and leaf.grad is not None]
        for leaf in self.leaves if used else ():
            leaf.grad = None
        self.roots.clear()
        self.leaves.clear()
        if used:
            torch.autograd.backward([root for root, _ in used], [gradient for _, gradient in used])


class Lane:
    """The forward of one microbatch, see Note: [Lanes].

    Args:
        forward: returns the loss.
        number: of the microbatch, for errors.
    """

    def __init__(self, forward: Callable[[], torch.Tensor], number: int) -> None:
        self.number = number
        self.at: nn.Module | None = None  # the block whose call it has stopped at
        self.segments = [_Segment("what comes before the blocks")]
        self.loss: torch.Tensor | None = None
        self._forward = forward
        self._failure: BaseException | None = None
        self._abandoned = False
        self._go, self._stopped = threading.Semaphore(0), threading.Semaphore(0)
        self._leaves: dict[torch.Tensor, torch.Tensor] = {}  # by what they stand for
        self._ambience = _ambience()
        self._thread = threading.Thread(target=self._run, name=f"ssdtrain-microbatch-{number}", daemon=True)

    def resume(self) -> None:
        """Run until the next call of a block, or the end.

        Raises:
            BaseException: that of the forward.
        """
        self.at = None
        if self._thread.ident is None:
            self._thread.start()
        self._go.release()
        self._stopped.acquire()
        if self._failure is not None:
            raise self._failure

    def abandon(self) -> None:
        """End the thread, wherever it is."""
        self._abandoned = True
        if self._thread.ident is not None:
            self._go.release()
            self._thread.join()

    def is_current(self) -> bool:
        """Return True on the thread of this lane."""
        return threading.current_thread() is self._thread

    def _run(self) -> None:
        self._go.acquire()
        try:
            with self._ambience():
                loss = self._forward()
            if not (isinstance(loss, torch.Tensor) and loss.requires_grad and loss.numel() == 1):
                raise TypeError(
                    f"the loss of microbatch {self.number} is no tensor of one element with a graph {_WHERE}"
                )
            self.loss = loss
        except _Abandoned:
            return
        except BaseException as error:  # noqa: BLE001 - the loop's thread raises it
            self._failure = error
            if isinstance(error, RuntimeError) and "leaf Variable" in str(error):
                why = f"the model changes in place what a block is given or returns {_WHERE}: let it make another tensor"
                self._failure = RuntimeError(why)
                self._failure.__cause__ = error
        finally:
            self._stopped.release()

    # On the lane's thread

    def stop(self, block: nn.Module) -> None:
        """Stop before the forward of `block`."""
        self.at = block
        self._stopped.release()
        self._go.acquire()
        if self._abandoned:
            raise _Abandoned

    def cut(self, value: Any) -> Any:
        """Return `value` with leaves in the places of tensors of a graph, which become ends of the last segment."""

        def leaf_of(tensor: Any) -> Any:
            if not isinstance(tensor, torch.Tensor) or tensor.grad_fn is None:
                return tensor
            leaf = self._leaves.get(tensor)
            if leaf is None:
                leaf = self._leaves[tensor] = tensor.detach().requires_grad_()
                self.segments[-1].roots.append((tensor, leaf))
            return leaf

        return tree_map(leaf_of, value)

    # On the loop's thread

    def check(self, names: Mapping[torch.Tensor, str]) -> None:
        """Check that no segments share a tensor. See Note: [What is refused].

        Raises:
            RuntimeError: two do.
        """
        assert self.loss is not None
        owner: dict[Any, _Segment] = {}
        cut = set(self._leaves.values())
        for segment in self.segments:
            roots = [root for root, _ in segment.roots] + [self.loss] * (segment is self.segments[-1])
            for node in _nodes([root.grad_fn for root in roots if root.grad_fn is not None]):
                leaf = getattr(node, "variable", None)
                if leaf in cut:
                    segment.leaves.append(leaf)
                    continue
                other = owner.setdefault(node, segment)
                if other is not segment:
                    what = "a tensor" if leaf is None else names.get(leaf, "a leaf of the graph")
                    raise RuntimeError(
                        f"{what} is used by {other.name} and by {segment.name}, other than through what blocks are given and "
                        f"return {_WHERE}: its gradients would add up in another order than in the usual loop. Run a "
                        "backward for each microbatch instead"
                    )

    def backward_of_loss(self) -> None:
        """Run the backward of what comes after the blocks."""
        assert self.loss is not None
        loss, self.loss = self.loss, self.loss.detach()
        loss.backward()
        self._leaves.clear()


def _nodes(roots: Sequence[Node]) -> Iterator[Node]:
    seen = set(roots)
    waiting = list(roots)
    while waiting:
        node = waiting.pop()
        yield node
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                waiting.append(following)


def run_vertically(
    model: nn.Module,
    blocks: Mapping[str, nn.Module],
    forwards: Sequence[Callable[[], torch.Tensor]],
    hold: Callable[[nn.Module, bool], None],
) -> list[torch.Tensor]:
    """Run forward and backward of microbatches block by block.

    Args:
        blocks: of `model`, by name.
        forwards: of each microbatch; returns its loss.
        hold: called with a block and True before each microbatch that another one follows, and with False before the last.

    Returns:
        The losses, without a graph.

    Raises:
        RuntimeError: see Note: [What is refused].
    """
    lanes = [Lane(forward, number) for number, forward in enumerate(forwards)]
    parameters: dict[torch.Tensor, str] = {parameter: name for name, parameter in model.named_parameters()}
    of_block = {block: name for name, block in blocks.items()}
    before = _generators(model)
    called: list[nn.Module | None] = []
    with ExitStack() as ending:
        for lane in lanes:
            ending.callback(lane.abandon)
        for block in blocks.values():
            for handle in _watch(lanes, block, of_block[block]):
                ending.callback(handle.remove)
        # 1. Forward, and backward of what comes after the blocks.
        while lanes and lanes[0].loss is None:
            block_of_all = lanes[0].at
            called += [block_of_all]
            for lane in lanes:
                _check_place(lane, block_of_all, of_block)
                if block_of_all is not None:
                    hold(block_of_all, lane is not lanes[-1])
                lane.resume()
                if lane.loss is not None:
                    if not all(map(torch.equal, before, _generators(model))):
                        raise _random_numbers(model)
                    lane.check(parameters)
                    lane.backward_of_loss()
        for lane in lanes:
            _check_place(lane, None, of_block)
        # 2. Backward of blocks and of what comes before each; `called` begins with None.
        for place in reversed(range(len(lanes[0].segments) - 1 if lanes else 0)):
            block_of_all = called[(place + 1) // 2] if place % 2 else None
            for lane in lanes:
                if block_of_all is not None:
                    hold(block_of_all, lane is not lanes[-1])
                lane.segments[place].backward()
    return [lane.loss for lane in lanes if lane.loss is not None]


def _watch(lanes: Sequence[Lane], block: nn.Module, name: str) -> Iterator[RemovableHandle]:
    """Stop lanes before calls of `block`, and cut what goes in and out. Calls inside of a backward recompute."""

    def current() -> Lane | None:
        if torch._C._current_graph_task_id() != -1:
            return None
        return next((lane for lane in lanes if lane.is_current()), None)

    def before(module: nn.Module, args: Any, kwargs: Any) -> Any:
        lane = current()
        if lane is None:
            return None
        if not torch.is_grad_enabled():
            raise RuntimeError(
                f"{name} is called without gradients {_WHERE}: use torch.utils.checkpoint with use_reentrant=False, and call "
                "what needs no gradient outside of the loss"
            )
        lane.stop(module)
        cut = lane.cut((args, kwargs))
        lane.segments.append(_Segment(name))
        return cut

    def after(module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        lane = current()
        if lane is None:
            return None
        cut = lane.cut(output)
        lane.segments.append(_Segment(f"what comes after {name}"))
        return cut

    # Before the hooks that load the block, and after those that wait for the backward of what it returns.
    yield block.register_forward_pre_hook(before, with_kwargs=True, prepend=True)
    yield block.register_forward_hook(after, with_kwargs=True)


def _check_place(lane: Lane, block: nn.Module | None, names: Mapping[nn.Module, str]) -> None:
    if lane.at is not block:
        here, there = (names[place] if place is not None else "its end" for place in (lane.at, block))
        raise RuntimeError(
            f"microbatch {lane.number} comes to {here}, and microbatch 0 to {there} {_WHERE}: run a backward for each microbatch "
            "instead, where they take different ways"
        )


def _random_numbers(model: nn.Module) -> RuntimeError:
    dropouts = [
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.modules.dropout._DropoutNd) and module.training and module.p
    ]
    named = f" ({', '.join(dropouts[:3])})" if dropouts else ""
    return RuntimeError(
        f"the forward draws random numbers{named} {_WHERE}, which microbatches would draw in another order than in the usual "
        "loop: set dropout to 0, or run a backward for each microbatch instead"
    )


def _generators(model: nn.Module) -> list[torch.Tensor]:
    """Return the states of the generators that the forward may draw from."""
    devices = {parameter.device for parameter in model.parameters() if parameter.device.type == "cuda"}
    return [torch.get_rng_state(), *(torch.cuda.get_rng_state(device) for device in devices)]


def _ambience() -> Callable[[], AbstractContextManager[Any]]:
    """Return a function that makes what this thread runs in: autocast, and the stream. Weights are cast once in a forward, not
    once for all."""
    kinds = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]
    casts = [(kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind)) for kind in kinds]
    stream = torch.cuda.current_stream() if torch.cuda.is_initialized() else None

    def enter() -> AbstractContextManager[Any]:
        with ExitStack() as entered:
            for kind, dtype, enabled in casts:
                entered.enter_context(torch.autocast(kind, dtype, enabled, cache_enabled=False))
            if stream is not None:
                entered.enter_context(torch.cuda.stream(stream))
            return entered.pop_all()

    return enter
