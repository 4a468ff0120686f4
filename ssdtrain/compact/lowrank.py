"""Linear layers that train a low-rank matrix of the size of their compressed input, in place of their weight.

Shapes: N tokens, n input features, m output features, r features kept.

Note: [Lazy merge]
    The paper saves z = x P, passes the gradient G^T z (m x r) to an optimizer with state of that size, and adds its update times
    P^T to the weight. This is equal to y = x W^T + z B^T with W frozen and B (m x r, initially zero) an ordinary parameter: the
    gradient of B is G^T z, and W + B P^T is the paper's weight at every step. A merge adds B P^T to W and sets B to zero. It
    happens when the projection changes, before a load, and at the end. It leaves W + B P^T unchanged, so it is safe between a
    forward and its backward. A `state_dict` holds W + B P^T in new tensors and has no side effects: a single rank may save.

    With a new projection B has new coordinates, so the optimizer's state of B is reset. A save in between keeps that state,
    which is part of the optimizer's checkpoint.

Note: [Scales]
    E[P P^T] = I, so the expected squared norm of B's gradient is that of the full gradient: clipping thresholds and learning
    rates keep their meaning. AdamW's decay multiplies B; it is applied to W as well, which decays W + B P^T.

Note: [Direct reads of a weight]
    Only the forward of a layer uses its B. A function that reads the weight directly would ignore B and train nothing. torch's
    fast path for encoder layers in evaluation is such a function; it is disabled for modules with hooks, so each layer gets one.
    For all others, a layer whose forward is not called in the first steps is an error.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from ssdtrain.compact.layers import Compression, LayerToCompress
from ssdtrain.compact.linear import ReplacedForward
from ssdtrain.compact.projection import ProjectionLayout, layer_key, project, unproject
from ssdtrain.compact.recompute import kept_by_producer
from ssdtrain.config import ConfigError
from ssdtrain.features import FIRST_STEPS
from ssdtrain.steps import call_after_steps

FACTOR = "lowrank_weight"
"""The parameter B of a layer's module; no `state_dict` has it."""

Optimizer = torch.optim.Optimizer
_OPTIMIZERS = (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW)


class LowRankLinear(torch.autograd.Function):
    """x W^T + z B^T, which saves z, or x where `saved` is x."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any,
        x: Tensor,
        saved: Tensor,
        weight: Tensor,
        factor: Tensor,
        bias: Tensor | None,
        block: Tensor,
        whole: bool,
        transposed: bool,
    ) -> Tensor:
        # Q is saved with z: a recomputation after a merge uses another projection.
        ctx.save_for_backward(saved, weight, factor, block)
        ctx.whole, ctx.transposed = whole, transposed
        with torch.autocast(x.device.type, enabled=False):
            z = project(x, block) if whole else saved
            cast = weight.to(x.dtype)
            y = F.linear(x, cast.t() if transposed else cast, bias.to(x.dtype) if bias is not None else None)
            return y + F.linear(z, factor.to(x.dtype))

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        saved, weight, factor, block = ctx.saved_tensors
        needs_x, _, _, needs_factor, needs_bias = ctx.needs_input_grad[:5]
        dx = dfactor = dbias = None
        with torch.autocast(gradient.device.type, enabled=False):
            gradient_NM = gradient.reshape(-1, gradient.shape[-1])
            if needs_x:
                cast = weight.to(gradient.dtype)
                dx = gradient @ (cast.t() if ctx.transposed else cast)
                dx = dx + unproject(gradient @ factor.to(gradient.dtype), block)
            if needs_factor:
                z = project(saved, block) if ctx.whole else saved
                dfactor = (gradient_NM.t() @ z.reshape(gradient_NM.shape[0], -1)).to(factor.dtype)
            if needs_bias:
                dbias = gradient_NM.sum(0)
        return dx, None, None, dfactor, dbias, None, None, None


def _problem(why: str, allowed: str) -> ConfigError:
    return ConfigError.of("ssdtrain.compact.mode", "lowrank", why, allowed)


def _skips_step(optimizer: Optimizer) -> bool:
    """True if a fused optimizer skips this step because gradients overflowed (torch.amp.GradScaler)."""
    overflowed = getattr(optimizer, "found_inf", None)
    return overflowed is not None and bool(overflowed)


class LowRank:
    """The low-rank layers of a model, and their optimizer.

    Args:
        model: holds these layers.
        layers: those to convert; those whose weight is frozen or not in the optimizer are skipped.
        optimizer: SGD, Adam or AdamW, without state for these weights. In its groups the low-rank matrices replace the weights.
        made_step: called after each of its steps that was not skipped.

    Raises:
        ConfigError: names `compact.mode`: there is no optimizer, or it is not supported.
    """

    def __init__(
        self,
        model: nn.Module,
        layers: Sequence[LayerToCompress],
        compression: Compression,
        optimizer: Optimizer | None,
        made_step: Callable[[], None] | None = None,
    ) -> None:
        groups = _checked(optimizer)
        assert optimizer is not None
        places = {id(p): (group, at) for group in groups for at, p in enumerate(group["params"])}
        chosen = [
            layer
            for layer in layers
            if isinstance(layer.module.weight, nn.Parameter)
            and layer.module.weight.requires_grad
            and id(layer.module.weight) in places
        ]
        self._check(model, chosen, places, optimizer)
        self.layers = [
            LowRankLayer(layer, compression, optimizer, *places[id(layer.module.weight)]) for layer in chosen
        ]
        self._optimizer = optimizer
        self._steps = 0
        self._made_step = made_step
        self._stepping = optimizer.register_step_post_hook(self._stepped)
        self._others = call_after_steps(self._check_optimizer)

    def _check(
        self, model: nn.Module, chosen: list[LayerToCompress], places: dict[int, Any], optimizer: Optimizer
    ) -> None:
        if not chosen:
            raise _problem(
                "finds no weight of a layer to compress in the optimizer",
                "the optimizer that trains this model",
            )
        holders: dict[int, list[tuple[str, nn.Module]]] = {}
        for path, module in model.named_modules():
            for parameter in module.parameters(recurse=False):
                holders.setdefault(id(parameter), []).append((path, module))
        for layer in chosen:
            weight = layer.module.weight
            assert isinstance(weight, nn.Parameter)
            others = [path for path, module in holders[id(weight)] if module is not layer.module]
            if others:
                raise _problem(
                    f"meets one weight in two modules, {layer.name} and {others[0]}",
                    "a compact.exclude that has them",
                )
            if type(weight.data) is not Tensor:
                raise _problem(
                    f"meets the weight of {layer.name}, a {type(weight.data).__name__}",
                    'weights that no wrapper has sharded, or mode "reconstruct"',
                )
            if optimizer.state.get(weight):
                raise _problem(
                    f"meets an optimizer that has state of the whole weight of {layer.name} already",
                    "attaching before the first step and before optimizer.load_state_dict",
                )
            group = places[id(weight)][0]
            if group.get("weight_decay") and not _decouples(optimizer, group):
                raise _problem(
                    f"cannot add weight_decay {group['weight_decay']} to the gradient of {layer.name}, as "
                    f"{type(optimizer).__name__} does",
                    "AdamW, or weight_decay 0 in its group",
                )

    def _stepped(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if _skips_step(optimizer):
            return
        self._decay()
        self._steps += 1
        silent = [layer.name for layer in self.layers if not layer.called]
        if self._steps == FIRST_STEPS and silent:
            raise RuntimeError(
                f"the forwards of {', '.join(silent[:4])} ({len(silent)} layers) were not called in {FIRST_STEPS} steps: "
                "another function reads their weights, or none does, and compact.mode lowrank does not train them; name them "
                "in compact.exclude"
            )
        if self._made_step is not None:
            self._made_step()

    @torch.no_grad()
    def _decay(self) -> None:
        # A load puts other groups into the optimizer.
        groups = {id(p): group for group in self._optimizer.param_groups for p in group["params"]}
        for layer in self.layers:
            group = groups.get(id(layer.factor), {})
            decay = group.get("weight_decay")
            if decay and layer.factor.grad is not None:
                layer.weight.mul_(1 - float(group["lr"]) * decay)

    def _check_optimizer(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """Raises RuntimeError: `optimizer` made a step with these matrices and is not the one given to `attach`."""
        factors = {id(layer.factor) for layer in self.layers}
        if optimizer is not self._optimizer and any(
            id(p) in factors for group in optimizer.param_groups for p in group["params"]
        ):
            raise RuntimeError(
                "another optimizer than the one given to ssdtrain.attach made a step, and compact.mode lowrank cannot follow it: "
                "close the runtime, make the optimizer, and attach again with it"
            )

    def merge(self) -> None:
        """Add B P^T to the weights. See Note: [Lazy merge]."""
        for layer in self.layers:
            layer.merge()

    def advance(self) -> None:
        """Follow a new step: merge the layers whose projection changes."""
        for layer in self.layers:
            layer.advance()

    def resume(self) -> None:
        """Follow the step set after a resume: keep the optimizer's state, which belongs to that step's projection."""
        for layer in self.layers:
            layer.resume()

    def restore(self) -> None:
        """Merge, and restore weights, forwards and the optimizer's parameters."""
        self._stepping.remove()
        self._others.remove()
        while self.layers:
            self.layers.pop().restore()


def _checked(optimizer: Optimizer | None) -> list[dict[str, Any]]:
    names = ", ".join(cls.__name__ for cls in _OPTIMIZERS)
    if optimizer is None:
        raise _problem(
            "replaces parameters of the optimizer, and was given none",
            f"ssdtrain.attach(model, config, optimizer=...) with {names} of torch.optim",
        )
    if type(optimizer) not in _OPTIMIZERS:
        cls = type(optimizer)
        raise _problem(
            f"cannot be had with the optimizer {cls.__module__}.{cls.__name__}",
            f'{names} of torch.optim, or mode "reconstruct"',
        )
    return optimizer.param_groups


def _decouples(optimizer: Optimizer, group: dict[str, Any]) -> bool:
    """True if the decay multiplies the parameter, and does not enter its gradient."""
    return isinstance(optimizer, torch.optim.AdamW) or bool(group.get("decoupled_weight_decay"))


class LowRankLayer:
    """One layer. See Note: [Lazy merge].

    Attributes:
        weight: W, frozen while attached.
        factor: B, a parameter of the module named `FACTOR`.
        called: whether its forward has been called.
    """

    def __init__(
        self,
        layer: LayerToCompress,
        compression: Compression,
        optimizer: Optimizer,
        group: dict[str, Any],
        place: int,
    ) -> None:
        assert layer.layout is not None
        self.name, self.module = layer.name, layer.module
        self.layout: ProjectionLayout = layer.layout
        self.transposed = layer.kind.transposed
        self.compression = compression
        self.called = False
        self._optimizer = optimizer
        self._key: int | None = None
        self._period = self._present_period()
        module = layer.module
        weight = module.weight
        assert isinstance(weight, nn.Parameter)
        self.weight = weight
        outputs = weight.shape[1 if self.transposed else 0]
        self.factor = nn.Parameter(weight.new_zeros(outputs, self.layout.compressed))
        weight.requires_grad_(False)
        weight.grad = None
        group["params"][place] = self.factor
        module.register_parameter(FACTOR, self.factor)
        self._forward = ReplacedForward(module, self._computed)
        self._hooks = [
            module.register_forward_pre_hook(_disable_fast_path),
            module.register_state_dict_post_hook(partial(_write_merged_weight, self)),
            module.register_load_state_dict_pre_hook(partial(_merge_before_load, self)),
        ]

    def _present_period(self) -> int:
        return self.compression.projections.period(self.compression.step())

    def _computed(self, plain: Callable[..., Any]) -> Callable[..., Any]:
        def forward(*args: Any, **kwargs: Any) -> Tensor:
            return self(args[0] if args else next(iter(kwargs.values())))

        return forward

    def __call__(self, x: Tensor) -> Tensor:
        module = self.module
        if module.weight is not self.weight or getattr(module, FACTOR) is not self.factor:
            raise RuntimeError(
                f"the parameters of {self.name} were replaced after ssdtrain.attach with compact.mode lowrank, which trains "
                "those that were there: wrap and convert the model before"
            )
        self.called = True
        self.advance()
        bias: Tensor | None = module.bias  # type: ignore[assignment]
        if x.is_nested and not torch.is_grad_enabled():
            whole_weight = self.whole_weight()
            return F.linear(x, whole_weight.t() if self.transposed else whole_weight, bias)
        original = x
        device = x.device.type
        if torch.is_autocast_enabled(device):
            x = x.to(torch.get_autocast_dtype(device))
        compression = self.compression
        key = self._key
        if key is None:
            key = compression.key_for(original, self.layout, layer_key(self.name))
            if torch.is_grad_enabled():
                self._key = key  # one rank alone may evaluate; until now B is zero
        block = compression.projections.block(self.layout, key, compression.step(), x)
        whole = not torch.is_grad_enabled() or kept_by_producer(x)
        saved = x
        if not whole:
            _, saved = compression.compressed(original, x, self.layout, key)
        elif torch.is_grad_enabled():
            compression.counted.skipped_inputs += 1
        y: Tensor = LowRankLinear.apply(  # type: ignore[no-untyped-call]
            x, saved, self.weight, self.factor, bias, block, whole, self.transposed
        )
        return y

    def advance(self) -> None:
        """If the projection of the current step is a new one, merge and reset the optimizer's state."""
        present = self._present_period()
        if present != self._period:
            self.merge()
            self._optimizer.state.pop(self.factor, None)
            self._period = present

    def resume(self) -> None:
        """Merge, and continue with the projection of the current step and the optimizer's state unchanged."""
        self.merge()
        self._period = self._present_period()

    @torch.no_grad()
    def whole_weight(self) -> Tensor:
        """W + B P^T, rounded once."""
        if self._key is None:
            return self.weight.detach()  # no forward with gradients so far: B is zero
        work = torch.promote_types(self.weight.dtype, torch.float32)
        like = self.factor.new_empty(0, dtype=work)
        projections = self.compression.projections
        block = projections.block(self.layout, self._key, self._period * projections.every, like)
        change = unproject(self.factor.to(work), block)
        return (self.weight + (change.t() if self.transposed else change)).to(self.weight.dtype)

    def merge(self) -> None:
        """Add B P^T to W and set B to zero. See Note: [Lazy merge]."""
        if self._key is None:
            return
        # Through `.data`, so that version counters stay: W + B P^T is unchanged for a graph that has saved both.
        self.weight.data.copy_(self.whole_weight())
        self.factor.data.zero_()

    def restore(self) -> None:
        """Merge, and restore the module and the optimizer."""
        self.merge()
        self._forward.remove()
        for hook in self._hooks:
            hook.remove()
        delattr(self.module, FACTOR)
        self.weight.requires_grad_(True)
        self._optimizer.state.pop(self.factor, None)
        for group in self._optimizer.param_groups:
            group["params"][:] = [self.weight if p is self.factor else p for p in group["params"]]

    def __deepcopy__(self, memo: dict[int, Any]) -> NoReturn:
        raise RuntimeError(
            f"the model has layers ({self.name}) that compact.mode lowrank trains, and cannot be copied or pickled as a whole: "
            "copy its state_dict, or copy it before ssdtrain.attach"
        )

    def __reduce__(self) -> NoReturn:
        self.__deepcopy__({})


def _disable_fast_path(module: nn.Module, args: Any) -> None:
    """Do nothing. See Note: [Direct reads of a weight]."""


def _write_merged_weight(
    layer: LowRankLayer, module: nn.Module, state_dict: dict[str, Any], prefix: str, metadata: Any
) -> None:
    state_dict.pop(prefix + FACTOR, None)
    state_dict[f"{prefix}weight"] = layer.whole_weight()


def _merge_before_load(
    layer: LowRankLayer, module: nn.Module, state_dict: dict[str, Any], prefix: str, *_: Any
) -> None:
    """A checkpoint holds the merged weight, so B has to be zero after the load."""
    layer.merge()
    state_dict[prefix + FACTOR] = layer.factor
