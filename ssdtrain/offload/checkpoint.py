"""Recompute and offload together: checkpointing whose saved inputs leave memory.

torch's own checkpoint saves the inputs of a block by autograd's means, outside of the hooks that it installs for the block.
Inside an offload context they therefore go to the tape and come back ahead of the recomputation like any other saved tensor.
What this adds: keyword tensors and those in containers are saved the same way, so that they leave memory, and a change in place
after the block is an error as for any saved tensor; a recomputation is called with the containers as they were, whatever was
written into a dict or list since; and random generators that torch does not know (of frameworks, which register them) are
restored for the recomputation, and so is what else a function reads of the process (`ambient_state`).
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch.utils.checkpoint
from torch.utils.checkpoint import noop_context_fn

from ssdtrain.config import CheckpointConfig
from ssdtrain.offload.ambient_state import AmbientState, State
from ssdtrain.profile.containers import copy_containers

__all__ = ["Checkpoint", "checkpoint", "detach_leaves"]


def detach_leaves(outputs: Any) -> Any:
    """What the first run of a reentrant checkpoint may return: `outputs` with every leaf that requires a gradient detached.

    An autograd function makes what its forward returns its own. A Parameter that a block returns (a bias that is added later)
    would no longer be a leaf, and with gradients off it would lose its `requires_grad`.

    Args:
        outputs: of a block: a tensor, or a tuple or list of tensors and other objects, which are kept.
    """
    if isinstance(outputs, torch.Tensor):
        return outputs.detach() if outputs.is_leaf and outputs.requires_grad else outputs
    if type(outputs) in (tuple, list):
        return type(outputs)(detach_leaves(output) for output in outputs)
    return outputs


class Checkpoint:
    """`torch.utils.checkpoint.checkpoint` with the defaults of a config, callable the same way.

    Example:
        >>> checkpoint = Checkpoint()
        >>> with runtime.forward():
        ...     for block in blocks:
        ...         x = checkpoint(block, x, mask=mask)

    Args:
        config: defaults of the arguments of calls.
    """

    def __init__(self, config: CheckpointConfig | None = None) -> None:
        self.config = config if config is not None else CheckpointConfig()
        self._random: dict[str, State] = {}

    def register_random_state(self, name: str, read: Callable[[], Any], write: Callable[[Any], None]) -> None:
        """Save and restore one more generator around every recomputation.

        Args:
            name: registering it again replaces it.
            read: returns a state that later use of the generator does not change.
            write: takes what `read` returned.
        """
        self._random[name] = State(read, write)

    def register_tracker(self, name: str, tracker: Callable[[], Any]) -> None:
        """`register_random_state` of the generators of a framework's tracker, an object with `get_states` and `set_states`.

        Args:
            tracker: returns it; it may be another object after a new seed. None: it is not made yet.
        """

        def read() -> dict[str, Any]:
            found = tracker()
            return {} if found is None else dict(found.get_states())

        def write(states: dict[str, Any]) -> None:
            # Nothing was drawn from a tracker without states, and it would take itself for seeded.
            found = tracker() if states else None
            if found is not None:
                # It may keep the dict that it is given and write into it; the next recomputation needs it as it was.
                found.set_states(dict(states))

        self.register_random_state(name, read, write)

    def unregister_random_state(self, name: str) -> None:
        self._random.pop(name, None)

    def exact(self, config: CheckpointConfig) -> Checkpoint:
        """One with this config that gives the gradients of a run without it, whatever the config says: generators are restored,
        also those that are registered here, now or later; and it is not reentrant, which keyword tensors and outputs that
        are no tensors would break."""
        found = Checkpoint(config.model_copy(update={"preserve_rng_state": True, "use_reentrant": False}))
        found._random = self._random
        return found

    def __call__(
        self,
        function: Callable[..., Any],
        *args: Any,
        use_reentrant: bool | None = None,
        preserve_rng_state: bool | None = None,
        context_fn: Callable[
            [], tuple[AbstractContextManager[Any], AbstractContextManager[Any]]
        ] = noop_context_fn,
        determinism_check: str | None = None,
        debug: bool = False,
        early_stop: bool | None = None,
        **kwargs: Any,
    ) -> Any:
        """Run `function(*args, **kwargs)` and save its inputs only; backward runs it again.

        The arguments are those of `torch.utils.checkpoint.checkpoint`; None takes the config's.

        Raises:
            ValueError: what torch's rejects: keyword arguments, `context_fn` or `debug` with `use_reentrant=True`.
        """
        config = self.config
        reentrant = config.use_reentrant if use_reentrant is None else use_reentrant
        preserve = config.preserve_rng_state if preserve_rng_state is None else preserve_rng_state
        states = tuple(self._random.values()) if preserve else ()
        if reentrant:
            replay = _Replay(function, states, preserve)
            return torch.utils.checkpoint.checkpoint(
                replay,
                *args,
                use_reentrant=True,
                preserve_rng_state=preserve,
                context_fn=context_fn,
                debug=debug,
                **kwargs,
            )
        # Positional tensors are what torch saves for backward; keyword ones and those in containers it would hold in memory.
        flat: list[Any] = []
        replay = _Replay(function, states, preserve, (args, kwargs), _flatten((args, kwargs), flat))
        with torch.utils.checkpoint.set_checkpoint_early_stop(
            config.early_stop if early_stop is None else early_stop
        ):
            return torch.utils.checkpoint.checkpoint(
                replay,
                *flat,
                use_reentrant=False,
                preserve_rng_state=preserve,
                context_fn=context_fn,
                determinism_check=config.determinism_check
                if determinism_check is None
                else determinism_check,
                debug=debug,
            )


checkpoint = Checkpoint()
"""`ssdtrain.checkpoint`."""


@dataclass(frozen=True, slots=True)
class _Place:
    """Stands in a copy of containers for what is at `index` of the flat list."""

    index: int


def _flatten(given: Any, flat: list[Any]) -> Any:
    """Append what is in the containers of `given` to `flat`.

    A tensor that comes several times is appended once, since a function may ask whether two arguments are the same object
    (`query is key` in attention).

    Returns:
        A copy of the containers, with a `_Place` for each of these. Inference tensors stay in it.
    """
    places: dict[int, _Place] = {}

    def place(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor) and leaf.is_inference():
            return leaf  # autograd cannot save it
        found = places.get(id(leaf))
        if found is None:
            found = _Place(len(flat))
            flat.append(leaf)
            if isinstance(leaf, torch.Tensor):
                places[id(leaf)] = found
        return found

    return copy_containers(given, place)


class _Replay:
    """Runs a function; every run after the first begins with the generators as they were at the first.

    Args:
        states: generators beside torch's.
        preserve: restore Python's and NumPy's too.
        given: arguments and keyword arguments of the first run, where it is called with them flat. None: it is called with the
            arguments, and the first run is the forward of a reentrant checkpoint.
        saved: of these, what `_flatten` returned.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        states: tuple[State, ...],
        preserve: bool,
        given: tuple[tuple[Any, ...], dict[str, Any]] | None = None,
        saved: Any = None,
    ) -> None:
        self._function = function
        self._states = states
        self._preserve = preserve
        self._given = given
        self._saved = saved
        self._reentrant = given is None
        self._first: list[Any] | None = None
        self._ambient: AmbientState | None = None

    def __call__(self, *args: Any) -> Any:
        kwargs: dict[str, Any] = {}
        if self._given is not None:  # the first run writes into the containers of its caller
            (args, kwargs), self._given = self._given, None
        elif not self._reentrant:
            restored = lambda one, flat=args: flat[one.index] if type(one) is _Place else one  # noqa: E731
            args, kwargs = copy_containers(self._saved, restored)
        if self._first is None or self._ambient is None:
            self._first = [state.read() for state in self._states]
            self._ambient = AmbientState(generators=self._preserve)
            outputs = self._function(*args, **kwargs)
            self._ambient.ran()
            return detach_leaves(outputs) if self._reentrant else outputs
        current = [state.read() for state in self._states]
        try:
            for state, value in zip(self._states, self._first, strict=True):
                state.write(value)
            with self._ambient.restored():
                return self._function(*args, **kwargs)
        finally:
            # torch ends a recomputation early by an exception.
            for state, value in zip(self._states, current, strict=True):
                state.write(value)
