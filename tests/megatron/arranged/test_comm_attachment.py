"""What a comm section changes before anything is sent: errors, ranges that go exactly, one rank."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron.core.distributed import param_and_grad_buffer
from megatron.core.tensor_parallel import mappings

import ssdtrain_megatron
from ssdtrain.comm import Bucket, Policy
from ssdtrain.config import Config, ConfigError, load_config
from ssdtrain_megatron import _compat_comm
from ssdtrain_megatron.comm.classification import Classification
from ssdtrain_megatron.conflicts import check_conflicts
from tests.megatron.rows import Row
from tests.megatron.training import Trainer


def compressing(**comm: Any) -> Config:
    return load_config({"comm": {"preset": "balanced", **comm}})


@pytest.mark.parametrize(
    ("option", "value", "off"),
    [
        ("context_parallel_size", 2, ()),
        ("tp_comm_overlap", True, ("tp",)),
        ("use_ring_exchange_p2p", True, ("pp_forward", "pp_backward")),
        ("moe_token_dispatcher_type", "flex", ("ep",)),
        ("overlap_moe_expert_parallel_comm", True, ("ep",)),
        ("external_cuda_graph", True, ()),
    ],
)
def test_options_of_the_model_that_pass_by_the_hooks_are_rejected(
    trainer: Trainer, option: str, value: Any, off: tuple[str, ...]
) -> None:
    check_conflicts(trainer.chunks, compressing())
    setattr(trainer.config, option, value)
    with pytest.raises(ConfigError, match="--" + option.replace("_", "-")) as error:
        check_conflicts(trainer.chunks, compressing())
    assert all(f'"{name}": "off"' in str(error.value) for name in off)
    if off:
        check_conflicts(trainer.chunks, compressing(**dict.fromkeys(off, "off")))


@pytest.mark.parametrize("option", ["nccl_ub", "fp8_param_gather", "reuse_grad_buf_for_mxfp8_param_ag"])
def test_options_of_data_parallelism_that_pass_by_the_hooks_are_rejected(
    trainer: Trainer, option: str
) -> None:
    setattr(trainer.chunks[0].ddp_config, option, True)
    with pytest.raises(ConfigError, match="--" + option.replace("_", "-")):
        check_conflicts(trainer.chunks, compressing())
    check_conflicts(trainer.chunks, compressing(dp="off", dp_gather="off", zero_gather="off"))


def test_other_data_parallelism_is_rejected(trainer: Trainer) -> None:
    class MegatronFSDP(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.config = trainer.config

    with pytest.raises(ConfigError, match="Megatron FSDP"):
        check_conflicts([MegatronFSDP()], compressing())


def test_a_chunk_whose_gradients_would_go_uncompressed_is_rejected(
    trainer: Trainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    inner = trainer.chunks[0].module
    check_conflicts([inner], compressing())  # one rank: nothing is reduced
    monkeypatch.setattr(_compat_comm, "layout", lambda: {"dp": 2})
    check_conflicts(trainer.chunks, compressing())
    with pytest.raises(ConfigError, match="DistributedDataParallel wraps"):
        check_conflicts([inner], compressing())
    check_conflicts([inner], compressing(dp="off", dp_gather="off", zero_gather="off"))


def test_a_rejection_leaves_nothing_replaced(trainer: Trainer) -> None:
    before = [vars(place.owner)[place.name] for places in _compat_comm.places().values() for place in places]
    trainer.config.context_parallel_size = 2
    with pytest.raises(ConfigError):
        ssdtrain_megatron.attach(trainer.chunks, {"comm": {"preset": "safe"}}, optimizer=trainer.optimizer)
    assert [
        vars(place.owner)[place.name] for places in _compat_comm.places().values() for place in places
    ] == before


def test_with_one_rank_there_is_nothing_to_compress(trainer: Trainer) -> None:
    before = mappings.dist_all_gather_func, dist.all_reduce, param_and_grad_buffer._coalescing_manager
    with ssdtrain_megatron.attach(
        trainer.chunks, {"comm": {"preset": "safe"}}, optimizer=trainer.optimizer
    ) as attachment:
        assert attachment.statistics() is None
        assert "step" not in vars(trainer.optimizer)
        now = mappings.dist_all_gather_func, dist.all_reduce, param_and_grad_buffer._coalescing_manager
        assert now == before


@pytest.mark.parametrize("excludes", [("norm", "bias", "embedding"), ("none",), ("*.linear_fc1.*",)])
def test_excluded_parameters_are_found_in_their_buckets(excludes: tuple[str, ...]) -> None:
    trainer = Trainer(Row("buckets", ddp={"use_distributed_optimizer": True, "bucket_size": 20_000}))
    config = compressing(exclude=list(excludes)).comm
    assert config is not None
    comm: Any = SimpleNamespace(policy=Policy.from_config(config), keep_excluded=lambda _: None)
    classification = Classification(comm, trainer.chunks, params_are_master=False)
    wanted = {"norm": ("layernorm",), "*.linear_fc1.*": ("linear_fc1",), "none": ()}[excludes[0]]
    marked = 0
    for _, bucket in _compat_comm.buckets(trainer.chunks[0]):
        gradients = classification.of_buffers(bucket.grad_data, None)
        parameters = classification.of_buffers(bucket.param_data, None)
        assert (gradients.dimension, parameters.dimension) == ("dp", "zero_gather")
        known = gradients.bucket
        assert isinstance(known, Bucket) and known is parameters.bucket
        # What the ranges say, written where the gradients are, and read through the parameters.
        bucket.grad_data.zero_()
        for start, stop in known.uncompressed_ranges:
            bucket.grad_data[start:stop] = 1.0
        names = {id(parameter): name for name, parameter in trainer.chunks[0].named_parameters()}
        for parameter in bucket.params:
            name = names[id(parameter)]
            exact = any(part in name for part in wanted)
            if excludes[0] == "norm":
                exact = exact or name.endswith("bias") or "embedding" in name
            assert parameter.main_grad.unique().tolist() == [float(exact)], name
            marked += exact
    assert bool(marked) == (excludes != ("none",))


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"use_precision_aware_optimizer": True, "store_param_remainders": True, "bf16": True}, True),
        ({"use_precision_aware_optimizer": True, "store_param_remainders": False, "bf16": True}, False),
        ({"use_precision_aware_optimizer": False, "store_param_remainders": True, "bf16": True}, False),
    ],
)
def test_parameters_that_hold_bits_of_the_master_copy_are_known(
    options: dict[str, bool], expected: bool
) -> None:
    one = SimpleNamespace(config=SimpleNamespace(**options))
    assert _compat_comm.params_are_master(one) == expected
    assert _compat_comm.params_are_master(SimpleNamespace(chained_optimizers=[one])) == expected
