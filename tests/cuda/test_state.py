"""The section `state` on the device, whose work comes late: the bits of the same training without chunks."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator

import emulated_cuda
import pytest
import torch

import ssdtrain
from ssdtrain.planner.controller import PlanController
from tests.state import test_equality, test_vertical
from tests.state.conftest import Attach
from tests.state.training import Recipe, adamw, make_model, plain, run, same


@pytest.fixture
def later() -> Iterator[None]:
    """As `late`, by less: the host waits for each checksum."""
    with emulated_cuda.settings(delay_ms=1, h2d_gbps=1, d2h_gbps=1):
        yield


RECIPES = [
    "foreach",
    "fused",
    "sgd-momentum",
    "clipping-accumulation-schedule",
    "recompute-reentrant",
    "tied",
    "autocast",
]


@pytest.mark.usefixtures("later")
@pytest.mark.parametrize("name", RECIPES)
def test_equal_to_the_bit(name: str, device: torch.device, attach: Attach) -> None:
    with device:
        test_equality.test_equal_to_the_bit(name, attach)


@pytest.mark.usefixtures("later")
@pytest.mark.parametrize("tier", ["ssd", "host"])
def test_equal_in_every_tier(tier: str, device: torch.device, attach: Attach) -> None:
    with device:
        test_equality.test_equal_in_every_tier_and_way(tier, True, attach)


@pytest.mark.usefixtures("later")
def test_equal_with_activations_offloaded(device: torch.device, attach: Attach) -> None:
    with device:
        test_equality.test_equal_with_activations_offloaded("c", attach)


@pytest.mark.usefixtures("later")
def test_equal_where_only_one_chunk_fits(device: torch.device, attach: Attach) -> None:
    with device:
        test_equality.test_equal_where_only_one_chunk_fits(attach)


@pytest.mark.usefixtures("later")
def test_the_device_is_asked_for_lost_writes_of_parameters_of_any_name(
    device: torch.device, attach: Attach, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CUDA refuses messages of more than 254 bytes, also where there is no error."""
    texts: list[str] = []
    monkeypatch.setattr(torch, "_assert_async", lambda _, text: texts.append(text))
    with device:
        model = torch.nn.Sequential(OrderedDict({"ö" * 300: make_model()}))
        optimizer = adamw(model.parameters())
        attach(model, optimizer)
        run(Recipe(steps=2), model, optimizer)
    assert texts and max(len(text.encode()) for text in texts) < 255


class OnTheCpu:
    """The optimizer of a run without chunks and without overlap: parameters of blocks are stepped by torch's fused AdamW on the
    CPU, on copies, the others on the device. Takes the place of an optimizer in `run`."""

    def __init__(self, model: torch.nn.Module) -> None:
        named = dict(model.named_parameters())
        blocks = [named[name] for name in named if name.startswith("layers.") and named[name].nbytes >= 256]
        self.copies = {
            parameter: torch.nn.Parameter(parameter.detach().to("cpu", copy=True)) for parameter in blocks
        }
        self.parameters = list(named.values())
        self.cpu = torch.optim.AdamW(self.copies.values(), lr=1e-2, fused=True)
        others = [parameter for parameter in self.parameters if parameter not in self.copies]
        self.device = torch.optim.AdamW(others, lr=1e-2)

    def step(self) -> None:
        for parameter, copy in self.copies.items():
            copy.grad = parameter.grad.to("cpu", copy=True)
        self.cpu.step()
        self.device.step()
        with torch.no_grad():
            for parameter, copy in self.copies.items():
                parameter.copy_(copy)

    def zero_grad(self) -> None:
        for parameter in self.parameters:
            parameter.grad = None

    def state(self) -> list[dict[str, torch.Tensor]]:
        return [
            self.cpu.state[self.copies[parameter]]
            if parameter in self.copies
            else self.device.state[parameter]
            for parameter in self.parameters
        ]


@pytest.mark.usefixtures("later")
@pytest.mark.parametrize("place", ["ssd", "host", "kept"])
@pytest.mark.parametrize("clip", ["exact", "none"])
def test_equal_with_steps_on_the_cpu(clip: str, place: str, device: torch.device, attach: Attach) -> None:
    recipe = Recipe(clip=0.5 if clip == "exact" else None, microbatches=2)
    with device:
        twin = make_model()
        reference = OnTheCpu(twin)
        losses = run(recipe, twin, reference)
        model = make_model()
        optimizer = adamw(model.parameters())
        options = {"tier": "ssd" if place == "ssd" else "host", "clip": clip}
        options |= {"microbatches": 2} if clip == "none" else {}
        if place == "kept":
            options["device_limit"] = sum(parameter.nbytes for parameter in model.parameters()) * 3 // 2
        runtime = attach(model, optimizer, optimizer_on="cpu", **options)
        assert (runtime.state.plan.persistent, runtime.state.plan.kept) == (0, 8 if place == "kept" else 0)
        assert run(recipe, model, optimizer, runtime) == losses
        assert same(dict(model.state_dict()), dict(twin.state_dict()))
        assert same(list(optimizer.state_dict()["state"].values()), reference.state())
        values = runtime.statistics().values()
        assert values["state/resident_peak_bytes"] <= values["state/limit_bytes"]
        runtime.close()
        assert same(dict(model.state_dict()), dict(twin.state_dict()))
        assert same(list(optimizer.state_dict()["state"].values()), reference.state())
        state = optimizer.state[model.layers[0].up.weight]
        assert state["exp_avg"].device == device
        assert state["step"].device.type == "cpu"


@pytest.mark.usefixtures("later")
@pytest.mark.parametrize("recompute", [None, "each"])
def test_equal_block_by_block(recompute: str | None, device: torch.device, attach: Attach) -> None:
    with device:
        test_vertical.test_equal_to_the_bit({}, recompute, attach)


@pytest.mark.usefixtures("later")
def test_accumulation_block_by_block_on_another_stream(device: torch.device, attach: Attach) -> None:
    with device, torch.cuda.stream(torch.cuda.Stream()):
        test_vertical.test_equal_with_autocast_and_activations_offloaded(attach)


def test_one_key_puts_model_state_in_chunks(device: torch.device) -> None:
    recipe = Recipe(steps=8, model={"layers": 16, "width": 128})
    with device:
        losses, parameters, _ = plain(recipe)
        model = make_model(layers=16, width=128)
    optimizer = recipe.optimizer(list(model.parameters()))
    limit = sum(parameter.nbytes for parameter in model.parameters())
    config = {"plan": {"state_limit": limit}, "report": {"interval": 0}}
    with ssdtrain.attach(model, config, optimizer=optimizer) as runtime:
        assert run(recipe, model, optimizer, runtime) == losses
        assert same(dict(model.state_dict()), dict(parameters))
        assert runtime.statistics().values()["plan/plans"] >= 1


@pytest.mark.usefixtures("later")
@pytest.mark.parametrize("clip", ["exact", "none"])
def test_a_plan_of_blocks_and_of_chunks_that_the_cpu_steps(clip: str, device: torch.device) -> None:
    recipe = Recipe(steps=9, clip=0.5 if clip == "exact" else None)
    with device:
        twin, model = make_model(), make_model()
        losses = run(recipe, twin, OnTheCpu(twin))
        optimizer = adamw(model.parameters())
        limit = 2 * sum(parameter.nbytes for parameter in model.parameters())
        section = {"host": "64MiB", "optimizer": "cpu", "clip": clip, "device_limit": limit, "min_bytes": 256}
        config = {"plan": "auto", "state": section, "report": {"interval": 0}}
        with ssdtrain.attach(model, config, optimizer=optimizer) as runtime:
            assert run(recipe, model, optimizer, runtime) == losses
            assert same(dict(model.state_dict()), dict(twin.state_dict()))
            [controller] = [part for part in runtime.features if isinstance(part, PlanController)]
            assert controller.plan is not None and controller.problem is not None
            assert all(
                block.cpu_step for block in controller.problem.blocks if block.name.startswith("layers")
            )
            assert controller.plan.timeline.step_wait > 0
