"""Under torch.compile: inductor asserts on the strides of what comes back, and may reuse saved buffers in place."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch

from ssdtrain.offload.functorch import compiler
from ssdtrain.pytorch.attached import attach_model
from tests.offload import zoo
from tests.offload.conftest import MakeRuntime
from tests.offload.test_equality import asked_for, same


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.linear(x))


@pytest.fixture(autouse=True)
def fresh_compiler() -> None:
    torch._dynamo.reset()


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
@pytest.mark.parametrize("outside", [True, False], ids=["compiled before", "compiled inside"])
def test_a_compiled_model_gives_the_same_bits(backend: str, outside: bool, make_runtime: MakeRuntime) -> None:
    runtime = make_runtime()

    def case(recording: zoo.Recording) -> list[torch.Tensor]:
        torch._dynamo.reset()
        model = zoo.Gpt(layers=1)
        compiled = torch.compile(model, backend=backend)
        if outside:
            compiled(zoo.tokens()).sum().backward()
            model.zero_grad()
        return zoo.train(compiled, zoo.tokens(), recording)

    plain = zoo.run(case, nullcontext)
    assert same(plain, zoo.run(case, runtime.forward))
    assert asked_for(runtime) > 0


def test_attach_to_a_compiled_model(make_runtime: MakeRuntime) -> None:
    runtime = make_runtime()

    def case(recording: zoo.Recording) -> list[torch.Tensor]:
        torch._dynamo.reset()
        model = torch.compile(zoo.Gpt(layers=1), backend="aot_eager")
        if recording == runtime.forward:
            attach_model(runtime, model)
        return zoo.train(model, zoo.tokens(), nullcontext)

    assert same(zoo.run(case, nullcontext), zoo.run(case, runtime.forward))
    assert asked_for(runtime) > 0


def test_the_hooks_are_not_compiled(make_runtime: MakeRuntime, monkeypatch: pytest.MonkeyPatch) -> None:
    """A function that a compiled one calls, and that is left as it is, saves tensors while Dynamo looks at what is called."""
    looking: list[bool] = []

    def inner(x: torch.Tensor) -> torch.Tensor:
        return (x * 2).exp() * (x + 1).sin()

    inner = torch.compiler.disable(inner, recursive=False)

    @torch.compile(backend="eager")
    def step(x: torch.Tensor) -> torch.Tensor:
        y = x.cos()
        return inner(y) + y

    runtime = make_runtime()
    may_move = runtime.engine.eligible.may_move

    def asked(tensor: torch.Tensor) -> bool:
        looking.append(compiler() is not None)
        return may_move(tensor)

    monkeypatch.setattr(runtime.engine.eligible, "may_move", asked)
    gradients = []
    for recorded in (runtime.forward(), nullcontext()):
        x = torch.linspace(-1, 1, 4096, requires_grad=True)
        with recorded:
            loss = step(x).sum()
        loss.backward()
        gradients.append(x.grad)
    assert torch.equal(*gradients)
    assert runtime.statistics().offload.saved_tensors > 0
    assert looking and not any(looking)


def test_a_whole_graph_is_the_models(make_runtime: MakeRuntime) -> None:
    """A graph that may not break cannot call an attached model, which is said; the model itself may be one."""
    runtime = make_runtime()
    model = Net()
    attach_model(runtime, model)
    x = zoo.noise(64, 64)
    around = torch.compile(lambda x: model(x).sum(), backend="eager", fullgraph=True)
    with pytest.raises(torch._dynamo.exc.Unsupported, match=r"compile the model itself"):
        around(x)
    torch.compile(model, backend="eager", fullgraph=True)(x).sum().backward()
    seen = asked_for(runtime)
    assert seen > 0
    torch.compile(lambda x: model(x).sum(), backend="eager")(x).backward()
    assert asked_for(runtime) > seen
