"""Recompute and offload together: checkpointing whose saved inputs leave memory.

torch's own checkpoint saves the inputs of a block by autograd's means, outside of the hooks that it installs for the block.
Inside an offload context they therefore go to the tape and come back ahead of the recomputation like any other saved tensor.
What this adds: keyword tensors and those in containers are saved the same way, so that they leave memory, and a change in place
after the block is an error as for any saved tensor; a recomputation is called with the containers as they were, whatever was
written into a dict or list since; and random generators that torch does not know (of frameworks, which register them) are
restored for the recomputation, and so is what else a function reads of the process (`AmbientState`).
"""

from __future__ import annotations

import pickle
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from contextvars import Context, copy_context
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.utils.checkpoint
from torch.backends import cuda, cudnn, mkldnn
from torch.utils.checkpoint import noop_context_fn

from ssdtrain.config import CheckpointConfig
from ssdtrain.profile.containers import copy_containers


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
        self._random: dict[str, StateAccess] = {}

    def register_random_state(self, name: str, read: Callable[[], Any], write: Callable[[Any], None]) -> None:
        """Save and restore one more generator around every recomputation.

        Args:
            name: registering it again replaces it.
            read: returns a state that later use of the generator does not change.
            write: takes what `read` returned.
        """
        self._random[name] = StateAccess(read, write)

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
        states: tuple[StateAccess, ...],
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
        self._ambient: AmbientState | None = None

    def __call__(self, *args: Any) -> Any:
        kwargs: dict[str, Any] = {}
        if self._given is not None:  # the first run writes into the containers of its caller
            (args, kwargs), self._given = self._given, None
        elif not self._reentrant:
            restored = lambda one, flat=args: flat[one.index] if type(one) is _Place else one  # noqa: E731
            args, kwargs = copy_containers(self._saved, restored)
        if self._ambient is None:
            self._ambient = AmbientState(self._states, generators=self._preserve)
            outputs = self._function(*args, **kwargs)
            self._ambient.ran()
            return detach_leaves(outputs) if self._reentrant else outputs
        with self._ambient.restored():  # torch ends a recomputation early by an exception
            return self._function(*args, **kwargs)


class StateAccess(NamedTuple):
    """How to read and write the state of something."""

    read: Callable[[], Any]
    write: Callable[[Any], None]


def _read_numpy() -> bytes | None:
    numpy = sys.modules.get("numpy.random")
    return None if numpy is None else pickle.dumps(numpy.get_state(legacy=False))


def _write_numpy(state: bytes | None) -> None:
    if state is not None:
        sys.modules["numpy.random"].set_state(pickle.loads(state))


_GENERATORS = StateAccess(random.getstate, random.setstate), StateAccess(_read_numpy, _write_numpy)


def _read_deterministic() -> tuple[bool, bool]:
    return (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
    )


def _write_deterministic(state: tuple[bool, bool]) -> None:
    enabled, warns = state
    torch.use_deterministic_algorithms(enabled, warn_only=warns)


def _read_precision() -> Any:
    try:
        return torch.get_float32_matmul_precision(), cudnn.allow_tf32
    except RuntimeError:  # it was set by the newer attributes, and torch refuses to read the older ones then
        return tuple(backend.fp32_precision for backend in _precisions())


def _write_precision(state: Any) -> None:
    if isinstance(state[-1], bool):
        torch.set_float32_matmul_precision(state[0])
        cudnn.allow_tf32 = state[1]
        return
    for backend, precision in zip(_precisions(), state, strict=True):
        backend.fp32_precision = precision


def _precisions() -> tuple[Any, ...]:
    return cuda.matmul, cudnn.conv, cudnn.rnn, mkldnn.matmul, mkldnn.conv, mkldnn.rnn  # type: ignore[attr-defined]


def _flag(module: Any, name: str) -> StateAccess:
    return StateAccess(partial(getattr, module, name), partial(setattr, module, name))


_KERNELS = (
    StateAccess(cuda.flash_sdp_enabled, cuda.enable_flash_sdp),
    StateAccess(cuda.mem_efficient_sdp_enabled, cuda.enable_mem_efficient_sdp),
    StateAccess(cuda.math_sdp_enabled, cuda.enable_math_sdp),
    StateAccess(cuda.cudnn_sdp_enabled, cuda.enable_cudnn_sdp),
    StateAccess(_read_deterministic, _write_deterministic),
    StateAccess(_read_precision, _write_precision),
    _flag(cuda.matmul, "allow_fp16_reduced_precision_reduction"),
    _flag(cuda.matmul, "allow_bf16_reduced_precision_reduction"),
    *(_flag(cudnn, name) for name in ("enabled", "benchmark", "deterministic")),
    StateAccess(torch.get_default_dtype, torch.set_default_dtype),
    StateAccess(torch.get_num_threads, torch.set_num_threads),
)
"""Which kernels compute, and in which order and precision they add."""


class AmbientState:
    """What is read before the first run of a function.

    Args:
        states: restored whether the function changes them or not.
        generators: restore Python's and NumPy's too.
    """

    def __init__(self, states: Sequence[StateAccess] = (), *, generators: bool) -> None:
        self._given = [(state, state.read()) for state in states]
        self._first = [(state, state.read()) for state in (_GENERATORS if generators else ())]
        self._kernels = [(state, state.read()) for state in _KERNELS]
        self._context = copy_context()

    def ran(self) -> None:
        """The first run is over: a generator that it did not draw from is left alone, since other threads may."""
        self._first = [(state, value) for state, value in self._first if state.read() != value]

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Inside they are as they were."""
        changed = [(state, value) for state, value in self._kernels if state.read() != value]
        then = [*self._given, *self._first, *changed]
        variables = _set(self._context)
        now: list[tuple[StateAccess, Any]] = []
        try:
            # Read where they are written: a generator may be in one of the variables.
            now += [(state, state.read()) for state, _ in then]
            _write(then)
            yield
        finally:
            _write(now)
            for variable, token in reversed(variables):
                variable.reset(token)


def _set(context: Context) -> list[tuple[Any, Any]]:
    """Give the variables their values in `context`. Returns those that had others, each with what resets it."""
    missing = object()
    return [
        (variable, variable.set(value))
        for variable, value in context.items()
        if variable.get(missing) is not value
    ]


def _write(values: list[tuple[StateAccess, Any]]) -> None:
    for state, value in values:
        state.write(value)
