"""Policies: those of the config by module, and one written outside of the package."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from torch import nn

import ssdtrain
from ssdtrain.config import ConfigError, load_config
from ssdtrain.offload.policy import KEEP, OFFLOAD, Action, ForwardProfile, ModulePolicy, SavedTensorInfo
from ssdtrain.offload.tensors.meter import ActivationMeter
from ssdtrain.offload.tensors.sharing import Geometries, make_region
from ssdtrain.offload.tensors.tape import Tape
from ssdtrain.offload.transfer.coding import Coding
from ssdtrain.profile.modules import Running
from tests.offload.conftest import settled
from tests.support.policies import Decides

BYTES = 64 * 64 * 4  # of what one activation function saves


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.Sequential(nn.Linear(64, 64), nn.Tanh())
        self.mlp = nn.Sequential(nn.Linear(64, 64), nn.Sigmoid())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.mlp(self.attention(x))


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(Block(), Block())


def step(trained: nn.Module) -> list[torch.Tensor]:
    trained(torch.ones(64, 64)).square().sum().backward()
    return [parameter.grad for parameter in trained.parameters() if parameter.grad is not None]


class ByModule:
    """Twenty lines of a user's own: attention stays, the rest goes to the drive by a codec where it is float32."""

    needs_modules = True

    def __init__(self) -> None:
        self.seen: list[SavedTensorInfo] = []
        self.forwards: list[ForwardProfile] = []

    def decide(self, saved: SavedTensorInfo) -> Action:
        self.seen.append(saved)
        if any(module.name.endswith("attention") for module in saved.modules):
            return KEEP
        return Action(True, codec="lossless", tier="ssd") if saved.dtype is torch.float32 else OFFLOAD

    def observe(self, forward: ForwardProfile) -> None:
        self.forwards.append(forward)


def test_a_policy_of_ones_own_decides_by_module_with_codec_and_tier(tmp_path: Path) -> None:
    plain = model()
    trained = copy.deepcopy(plain)
    policy = ByModule()
    offload = {"directories": str(tmp_path), "min_bytes": 1024, "host": "1MiB"}
    with ssdtrain.attach(trained, {"offload": offload}, policy=policy) as runtime:
        gradients = step(trained)
        assert all(torch.equal(a, b) for a, b in zip(gradients, step(plain), strict=True))
        found = runtime.statistics()
        offloaded = [saved for saved in policy.seen if not any("attention" in m.name for m in saved.modules)]
        assert 0 < len(offloaded) < len(policy.seen)
        assert found.offload.offloaded_bytes + found.offload.avoided_write_bytes == sum(
            s.nbytes for s in offloaded
        )
        assert found.offload.encoded_bytes == sum(s.nbytes for s in offloaded)
        assert found.store.host.bytes_written == 0
        assert [forward.saved_bytes for forward in policy.forwards] == [sum(s.nbytes for s in policy.seen)]
        assert {saved.module for saved in policy.seen} <= {name for name, _ in trained.named_modules()}
    assert not any(module._forward_pre_hooks for module in trained.modules())


@pytest.mark.parametrize(
    ("patterns", "blocks"),
    [
        ({"include": ["*.mlp"]}, 2),
        ({"include": ["0.mlp"]}, 1),
        ({"include": ["Sigmoid", "Tanh"]}, 4),
        ({"exclude": ["*.attention", "1.*"]}, 1),
        ({"include": ["0"], "exclude": ["*.mlp"]}, 2),  # its input too
    ],
)
def test_the_config_chooses_modules_by_pattern(
    patterns: dict[str, list[str]], blocks: int, tmp_path: Path
) -> None:
    plain = model()
    trained = copy.deepcopy(plain)
    offload = {"directories": str(tmp_path), "min_bytes": 1024, **patterns}
    with ssdtrain.attach(trained, {"offload": offload}) as runtime:
        gradients = step(trained)
        assert all(torch.equal(a, b) for a, b in zip(gradients, step(plain), strict=True))
        found = runtime.statistics()
        # What a block's activation function saves is its output, which the next layer saves too.
        assert (found.offload.offloaded_bytes + found.offload.avoided_write_bytes) // BYTES == blocks


def test_a_policy_that_leaves_nothing_is_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    trained = model()
    offload = {"directories": str(tmp_path), "min_bytes": 1024, "include": ["*.no_such_module"]}
    with ssdtrain.attach(trained, {"offload": offload}) as runtime:
        for _ in range(3):
            with runtime.step():
                step(trained)
    assert "offload.include" in caplog.text


def test_patterns_are_checked() -> None:
    with pytest.raises(ConfigError, match=r"offload\.include.*LayerNorm"):
        ssdtrain.attach(model(), {"offload": {"host": "1MiB", "include": [3]}})


def test_a_codec_that_cannot_encode_on_the_device_is_an_error_of_the_policy() -> None:
    saved = torch.empty(64, device="meta")
    geometry, extent, form = Geometries().add((saved.dtype, saved.shape, saved.stride(), 0), saved)
    storage = saved.untyped_storage()
    seen = ActivationMeter().see(storage)
    region = make_region(seen, saved, storage, geometry, extent, form, Tape(), 0, None)
    with pytest.raises(ValueError, match=r"policy asks for the codec 'lossless'.*meta device"):
        Coding(None).choose(saved, extent, region, Action(True, "lossless"))
    assert Coding(None).choose(saved, extent, region, Action(True, "int8")) is not None
    with pytest.raises(ValueError, match="int99"):
        Coding(None).choose(saved, extent, region, Action(True, "int99"))


def test_what_is_never_loaded_takes_no_room_in_the_arena(tmp_path: Path) -> None:
    """The logits of a large vocabulary, last on their tape, had room for five of them beside a small model."""
    keep_logits = Decides(lambda saved: KEEP if saved.nbytes > 1 << 20 else OFFLOAD)
    head = (nn.Linear(128, 4096), nn.LogSoftmax(1))
    body = nn.Sequential(*(nn.Linear(128, 128) for _ in range(8)), *head)
    config = {"offload": {"directories": str(tmp_path), "min_bytes": 1024}, "report": {"interval": 0}}
    with ssdtrain.attach(body, config, policy=keep_logits) as runtime:
        for _ in range(2):
            loss = body(torch.randn(512, 128)).sum()  # 256 KiB each, then 8 MiB
            settled(runtime)  # stores have ended, so that backward loads
            loss.backward()
        assert 0 < runtime.engine.buffers.capacity <= 4 << 20


def test_rules_of_modules_choose_tiers(tmp_path: Path) -> None:
    """The first rule that fits counts, also where it fits a module around the running one."""
    plain = model()
    trained = copy.deepcopy(plain)
    rules = {"1.attention": "keep", "*.attention": "host", "*.mlp": "ssd"}
    offload = {"directories": str(tmp_path), "min_bytes": 1024, "host": "1MiB", "modules": rules}
    with ssdtrain.attach(trained, {"offload": offload}) as runtime:
        gradients = step(trained)
        assert all(torch.equal(a, b) for a, b in zip(gradients, step(plain), strict=True))
        found = runtime.statistics()
        assert (
            0 < found.offload.offloaded_bytes + found.offload.avoided_write_bytes < found.offload.saved_bytes
        )
    policy = ModulePolicy(Decides(lambda _: KEEP), rules=tuple(rules.items()))

    def place(*names: str) -> Action:
        running = tuple(Running(name, "Module") for name in names)
        return policy.decide(SavedTensorInfo(0, 0, 0, 0, BYTES, torch.float32, running))

    assert place("0.attention", "0.attention.1") == Action(True, tier="host")
    assert place("1.attention", "1.attention.1").stays
    assert place("1.mlp") == Action(True, tier="ssd")
    assert place("0") == KEEP


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"modules": {"*.mlp": "drive"}}, "has 'drive' for '\\*.mlp'.*\"ssd\""),
        ({"modules": {"*.mlp": "host"}}, 'names the tier "host", and host gives none'),
        ({"modules": {"*.mlp": "ssd"}, "amount": "auto"}, 'which amount "auto" chooses'),
    ],
)
def test_rules_that_cannot_be_kept_are_errors(keys: dict[str, object], message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        load_config({"offload": {"directories": str(tmp_path), **keys}})
