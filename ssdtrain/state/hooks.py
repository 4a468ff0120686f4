"""Events of blocks that bring their chunks into memory and let them go.

Note: [When a backward is over]
    A trainable parameter's gradient is accumulated after every operation that used it has run backward. When all parameters
    of a chunk have theirs, none of them is needed any more in this backward. Parameters that get no gradient keep their chunk
    in memory until autograd has finished the graph (its final callbacks). A backward that raised never gets there: the next
    event outside of a backward ends it. Recomputation (activation checkpointing) runs forwards of blocks inside of a
    backward, which are followed by the same events.

Note: [Which chunk is next]
    At first the order of the blocks; after the first step, whatever followed the last time.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils._pytree import tree_iter
from torch.utils.hooks import RemovableHandle

from ssdtrain.state.chunk import Chunk, StoredGradient, Where
from ssdtrain.state.residency import Residency
from ssdtrain.state.stored import GradientInTier, users
from ssdtrain.state.transfers import StateTransfers

if TYPE_CHECKING:
    from ssdtrain.state.host_steps import HostOptimizer

_OF_EVERY_MODULE = frozenset(vars(nn.Module()))
_PLAIN = torch.Tensor | int | float | str | None  # outputs that hide no tensor
_ELEMENTS = 1000  # of one attribute that are looked at

FORWARD, _RECOMPUTE, BACKWARD, STEP = "forward", "recompute", "backward", "step"


class Order:
    """Predicts the chunk of the next event.

    Args:
        chunks: in the order of execution.
    """

    def __init__(self, chunks: list[Chunk]) -> None:
        self._chunks = chunks
        self._place = {chunk: at for at, chunk in enumerate(chunks)}
        self._last: tuple[str, Chunk] | None = None
        self._followed: dict[tuple[str, Chunk], tuple[str, Chunk]] = {}

    def note(self, kind: str, chunk: Chunk) -> None:
        """Note an event that happens now."""
        if self._last == (kind, chunk):
            return  # another microbatch of the same block
        if self._last is not None:
            self._followed[self._last] = kind, chunk
        self._last = kind, chunk

    def following(self) -> tuple[str, Chunk] | None:
        """Return the event that is expected next."""
        if self._last is None:
            return (FORWARD, self._chunks[0]) if self._chunks else None
        known = self._followed.get(self._last)
        if known is not None:
            return known
        kind, chunk = self._last
        at = self._place[chunk] + (-1 if kind == BACKWARD else 1)
        return (kind, self._chunks[at]) if 0 <= at < len(self._chunks) else None


class BlockHooks:
    """Follows the blocks of chunks through forwards and backwards.

    Args:
        residency: of the chunks.
        transfers: for gradients that leave.

    Attributes:
        beside: makes a context for what runs in a hook, and is none of the model's computation.
        steps: what steps chunks inside of backward, and others as events go by.
    """

    def __init__(self, residency: Residency, transfers: StateTransfers) -> None:
        self._residency = residency
        self._transfers = transfers
        self.order = Order(list(residency.chunks))
        self._tasks: set[int] = set()  # of autograd, whose end is awaited
        self._handles: list[RemovableHandle] = []
        self.keeper: object = None  # lives as long as the hooks
        self.steps: HostOptimizer | None = None
        self.beside: Callable[[], AbstractContextManager[None]] = nullcontext
        for chunk in residency.chunks:
            self._watch(chunk)

    def _watch(self, chunk: Chunk) -> None:
        block = chunk.module
        self._handles.append(block.register_forward_pre_hook(self._before_forward(chunk), prepend=True))
        self._handles.append(block.register_forward_hook(self._after_forward(chunk), always_call=True))
        of_chunk = set(chunk.parameters)
        for module in block.modules():
            if module is not block and not of_chunk.isdisjoint(module._parameters.values()):  # type: ignore[arg-type]
                self._handles.append(module.register_forward_pre_hook(self._guard(chunk)))
        for parameter in chunk.parameters:
            hook = self._accumulated(chunk)
            self._handles.append(parameter.register_post_accumulate_grad_hook(hook))

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._next = None
        for chunk in self._residency.chunks:
            chunk.graph_task = None  # the end of a backward that is running changes nothing

    @contextmanager
    def _hook(self) -> Iterator[None]:
        with self.beside(), self._residency.in_a_hook():
            yield

    # Forward

    def _before_forward(self, chunk: Chunk) -> Callable[..., None]:
        def before(module: nn.Module, args: Any) -> None:
            if module is not chunk.module:
                raise RuntimeError(
                    f"{chunk.name} belongs to a copy of a model whose parameters come and go (config section state): copy the "
                    "model before ssdtrain.attach, or make another and load the state dict of this one"
                )
            recompute = torch._C._current_graph_task_id() != -1
            if not recompute:
                self.end_abandoned()
            with self._hook():
                self.expect(_RECOMPUTE if recompute else FORWARD, chunk)
                self._residency.load(chunk, chunk.values)
                if not chunk.forwards:
                    chunk.first_node = torch._C._autograd._get_sequence_nr()
                chunk.forwards += 1
                self.prefetch()

        return before

    def _after_forward(self, chunk: Chunk) -> Callable[..., None]:
        def after(module: nn.Module, args: Any, output: Any) -> None:
            if chunk.forwards:  # else its load failed, or the hooks came in the middle of it
                chunk.forwards -= 1
            with self._hook():
                self._await_backward(chunk, output)
                self.prefetch()

        return after

    def _await_backward(self, chunk: Chunk, output: Any) -> None:
        if not torch.is_grad_enabled():
            return
        leaves = list(tree_iter(output))
        tensors = [
            leaf
            for leaf in leaves
            if isinstance(leaf, torch.Tensor) and leaf.requires_grad and leaf.grad_fn is not None
        ]
        outputs = {id(tensor) for tensor in tensors}
        left = [tensor for tensor in _left_in_attributes(chunk) if id(tensor) not in outputs]
        if not tensors and not (left and all(isinstance(leaf, _PLAIN) for leaf in leaves)):
            if output is None and sys.exc_info()[0] is not None:
                return  # the forward raised
            if not any(parameter.requires_grad for parameter in chunk.parameters):
                return  # all were frozen since
            raise RuntimeError(
                f"{chunk.name} ({type(chunk.module).__name__}) returned {type(output).__name__}, in which no tensor with a "
                "gradient is found: its parameters could not be loaded for backward (config section state). Let it return "
                "tensors, or tuples, lists or dicts of them, or leave it out by state.blocks"
            )
        begin = self._before_backward(chunk)
        for tensor in tensors + left:
            tensor.register_hook(begin)

    def _guard(self, chunk: Chunk) -> Callable[..., None]:
        def guard(module: nn.Module, args: Any) -> None:
            if not chunk.in_use:
                raise RuntimeError(
                    f"{type(module).__name__} of {chunk.name} is called outside of the forward of {chunk.name}, and its "
                    "parameters are not in memory (config section state): call the block, or name what is called "
                    "by state.blocks"
                )

        return guard

    # Backward

    def _before_backward(self, chunk: Chunk) -> Callable[[torch.Tensor], None]:
        weak = weakref.ref(self)  # a graph that is kept keeps nothing of this

        def before(gradient: torch.Tensor) -> None:
            hooks = weak()
            if hooks is not None and hooks._handles:
                with hooks._hook():
                    hooks._begin_backward(chunk)

        return before

    def _begin_backward(self, chunk: Chunk) -> None:
        task = torch._C._current_graph_task_id()
        if chunk.graph_task == task:
            return
        if torch.is_grad_enabled():
            raise RuntimeError(
                f"backward with create_graph=True meets {chunk.name}, whose gradients would be part of a graph and could not "
                "leave memory (config section state): leave create_graph out, or train without the section"
            )
        self.expect(BACKWARD, chunk)
        if chunk.pending is not None:
            chunk.pending.finish()
        state = (chunk.state,) if self.steps is not None and self.steps.before_backward(chunk) else ()
        for part in (chunk.values, chunk.gradients, *state):
            self._residency.begin(part, chunk)
        self._residency.load(chunk, chunk.values, chunk.gradients)
        self._residency.settle(chunk.gradients)
        if task not in self._tasks:
            self._tasks.add(task)  # first: an interrupt from here on is a backward that raised
            torch.autograd.Variable._execution_engine.queue_callback(lambda: self._task_is_over(task))
        chunk.missing = set(chunk.parameters)
        chunk.graph_task = task
        self.prefetch()

    def _accumulated(self, chunk: Chunk) -> Callable[[torch.Tensor], None]:
        def accumulated(parameter: torch.Tensor) -> None:
            assert isinstance(parameter, nn.Parameter)
            if parameter.grad is not None and parameter.grad.layout is not torch.strided:
                raise RuntimeError(
                    f"{chunk.names[parameter]} has a sparse gradient, which cannot leave memory (config section state): use "
                    "dense gradients, or leave the module out by state.blocks"
                )
            with self._hook():
                chunk.missing.discard(parameter)
                if chunk.graph_task is not None and not chunk.missing:
                    self._end_backward(chunk, parameter)
                self.prefetch()

        return accumulated

    def _end_backward(
        self, chunk: Chunk, accumulated: nn.Parameter | None = None, *, whole: bool = True
    ) -> None:
        chunk.graph_task = None
        chunk.missing.clear()
        self.adopt_gradients(chunk, accumulated)
        if self.steps is not None and whole:
            chunk.backwards += 1
            if self.steps.after_backward(chunk):
                return
        if not chunk.held:
            self._residency.release(chunk.gradients)

    def _task_is_over(self, task: int) -> None:
        self._tasks.discard(task)
        for chunk in self._residency.chunks:
            if chunk.graph_task == task:
                self._end_backward(chunk)

    def end_abandoned(self) -> None:
        """End the backwards that raised; called when none is running."""
        if self._tasks:
            for chunk in self._residency.chunks:
                if chunk.graph_task is not None:
                    self._end_backward(chunk, whole=False)
            self._tasks.clear()

    def adopt_gradients(self, chunk: Chunk, accumulated: nn.Parameter | None = None) -> None:
        """Let gradients that autograd has made come and go.

        Args:
            accumulated: whose gradient autograd has made just now and holds for itself as well.
        """
        if chunk.gradients.where is not Where.HERE:
            self._residency.load(chunk, chunk.gradients)
        known = {gradient.parameter for gradient in chunk.stored_gradients()}
        for parameter, name in chunk.names.items():
            gradient = parameter.grad
            if gradient is None or parameter in known or isinstance(gradient, GradientInTier):
                continue  # the last: a step has used it up
            part_of_one = gradient.untyped_storage().nbytes() != gradient.nbytes or gradient.storage_offset()
            if part_of_one or users(gradient) > 1 + (parameter is accumulated):
                # Others go on to use the storage: autograd gives away views.
                parameter.grad = gradient.clone()
            slot = chunk.gradient_slots[parameter]
            stored = StoredGradient(f"the gradient of {name}", parameter, slot, self._transfers)
            chunk.gradients.tensors.append(stored)

    # Next

    def expect(self, kind: str, chunk: Chunk) -> None:
        """Note an event that happens now, and what it lets expect."""
        self.order.note(kind, chunk)
        following = self.order.following()
        # Gradients and optimizer state are loaded ahead by the step alone: another microbatch may come before it.
        self._next = None if following is not None and following[0] == STEP != kind else following

    _next: tuple[str, Chunk] | None = None

    def prefetch(self, *, patient: bool = False) -> None:
        """Load what is needed next, as far as there is room (`patient`: also what stores in flight will give); else the next
        event tries again."""
        if self.steps is not None:
            self.steps.advance()
        if self._next is None:
            return
        kind, chunk = self._next
        parts = {
            BACKWARD: (chunk.values, chunk.gradients) if any(chunk.stored_gradients()) else (chunk.values,),
            STEP: (chunk.values, chunk.gradients, chunk.state),
        }.get(kind, (chunk.values,))
        if self._residency.prefetch(chunk, *parts, patient=patient):
            self._next = None


def _left_in_attributes(chunk: Chunk) -> Iterator[torch.Tensor]:
    """Yield tensors of a graph that this forward has put into attributes of the block's modules, such as a loss for balance:
    their backward may come before that of the output."""
    for module in chunk.module.modules():
        for name, value in vars(module).items():
            if name in _OF_EVERY_MODULE or not isinstance(value, torch.Tensor | list | tuple | dict):
                continue
            for tensor in _tensors_in(value):
                if (
                    tensor.requires_grad
                    and tensor.grad_fn is not None
                    and tensor.grad_fn._sequence_nr() >= chunk.first_node
                ):
                    yield tensor


def _tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Yield the tensor that `value` is, or those in it and in lists, tuples and dicts inside of it.

    At most `_ELEMENTS` elements are looked at, because this is done in every forward and `value` may be a vocabulary, or contain
    itself: a list, tuple or dict that would exceed them is passed over.
    """
    elements = [value]
    for element in elements:
        if isinstance(element, torch.Tensor):
            yield element
        elif isinstance(element, list | tuple | dict) and len(elements) + len(element) <= _ELEMENTS:
            elements.extend(element.values() if isinstance(element, dict) else element)
