"""What lets unmodified megatron-core train on the CPU with gloo, and scripts of Megatron-LM too.

`arrange()` comes before the first import of megatron, `finish()` after it. Everything is a replacement in torch or in a
module of Megatron inside this process; no file changes. As a program it arranges and then runs another one:

```
torchrun --nproc-per-node 4 -m tests.megatron.cpu -m examples.megatron_gpt --tensor-model-parallel-size 2 ...
torchrun --nproc-per-node 2 -m tests.megatron.cpu .../pretrain_gpt.py ...
```
"""

from __future__ import annotations

import contextlib
import functools
import importlib.machinery
import importlib.util
import os
import runpy
import sys
import time
import types
import typing
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

# Read when megatron is imported: its fusions are torch.compile'd functions.
os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")

import torch
import torch._dynamo  # indexes torch's functions at its import: before they are replaced
import torch.distributed as dist
import typing_extensions

from tests.support import processes

CPU = torch.device("cpu")
ON_GPU = processes.DEVICE == "cuda"
"""Whether the ranks have a CUDA device: then nothing that asks for one is replaced. `make test-cuda` has Transformer Engine, too,
with stand-ins for its kernels."""
DEVICE = torch.device("cuda") if ON_GPU else CPU

FACTORIES = ["zeros", "ones", "empty", "full", "tensor", "as_tensor", "arange", "rand", "randn", "randint"]
FACTORIES += ["zeros_like", "ones_like", "empty_like"]


def arrange() -> None:
    """Replace what asks for a CUDA device, where there is none. Call it before megatron is imported."""
    _arrange_fused_gradient()
    if ON_GPU:
        return
    for name in FACTORIES:
        setattr(torch, name, _on_cpu(getattr(torch, name)))
    _arrange_tensors()
    _arrange_runtime(torch.cuda)
    _arrange_collectives()


def join() -> None:
    """Meet the other ranks, each on a device of its own where there is one."""
    if ON_GPU:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if ON_GPU else "gloo")


def _is_cuda(device: Any) -> bool:
    return str(device).startswith("cuda") or (isinstance(device, int) and not isinstance(device, bool))


def _on_cpu(factory: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(factory)
    def made(*args: Any, **kwargs: Any) -> Any:
        if kwargs.get("device") is not None and _is_cuda(kwargs["device"]):
            kwargs["device"] = CPU
        if kwargs.get("pin_memory"):
            kwargs["pin_memory"] = False
        return factory(*args, **kwargs)

    return made


def _arrange_tensors() -> None:
    plain_to, plain_type = torch.Tensor.to, torch.Tensor.type

    def to(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if args and not isinstance(args[0], torch.Tensor | torch.dtype) and _is_cuda(args[0]):
            args = (CPU, *args[1:])
        if kwargs.get("device") is not None and _is_cuda(kwargs["device"]):
            kwargs["device"] = CPU
        return plain_to(self, *args, **kwargs)

    def kind(self: torch.Tensor, dtype: Any = None, *args: Any, **kwargs: Any) -> Any:
        # Optimizers group parameters by names such as "torch.cuda.FloatTensor".
        if dtype is None:
            return plain_type(self).replace("torch.", "torch.cuda.", 1)
        return plain_type(
            self, dtype.replace("torch.cuda.", "torch.") if isinstance(dtype, str) else dtype, *args, **kwargs
        )

    torch.Tensor.to, torch.Tensor.type = to, kind
    torch.Tensor.cuda = torch.nn.Module.cuda = lambda self, *args, **kwargs: self
    torch.Tensor.pin_memory = lambda self, *args, **kwargs: self
    torch.Tensor.record_stream = lambda self, stream: None


class Stream(contextlib.AbstractContextManager):
    """A stream that is always idle."""

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    def wait_stream(self, stream: Any) -> None: ...

    def wait_event(self, event: Any) -> None: ...

    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True

    def record_event(self, event: Any = None) -> Any:
        return event or Event()

    def __exit__(self, *_: object) -> None: ...


class Event:
    """An event that has always happened, and knows when."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.record()

    def record(self, *args: Any) -> None:
        self.at = time.perf_counter()

    def wait(self, *args: Any) -> None: ...

    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True

    def elapsed_time(self, other: Event) -> float:
        return 1e3 * (other.at - self.at)


def _nothing(*args: Any, **kwargs: Any) -> None: ...


def _arrange_runtime(cuda: Any) -> None:
    stream = Stream()
    cuda.current_device = lambda: CPU
    cuda.set_device = cuda.synchronize = cuda.empty_cache = cuda.reset_peak_memory_stats = _nothing
    cuda.manual_seed = lambda seed: torch.default_generator.manual_seed(int(seed)) and None
    cuda.manual_seed_all = _nothing  # torch.manual_seed itself calls it
    # One generator plays both parts: the CPU's and the device's.
    cuda.get_rng_state = cuda.random.get_rng_state = lambda *args, **kwargs: torch.get_rng_state()
    cuda.set_rng_state = cuda.random.set_rng_state = lambda state, *args, **kwargs: torch.set_rng_state(state)
    cuda.current_stream = cuda.default_stream = lambda *args: stream
    cuda.stream = lambda stream: contextlib.nullcontext()
    cuda.Stream, cuda.Event = Stream, Event
    cuda.nvtx = types.SimpleNamespace(
        range_push=_nothing,
        range_pop=_nothing,
        mark=_nothing,
        range=lambda *args, **kwargs: contextlib.nullcontext(),
    )


def _arrange_collectives() -> None:
    plain_isend, plain_all_to_all = dist.isend, dist.all_to_all_single

    def isend(tensor: Any = None, dst: Any = None, group: Any = None, tag: int = 0, **kwargs: Any) -> Any:
        # gloo holds the tensor, not its storage, and schedules replace `.data` of a tensor that is still on its way.
        return plain_isend(tensor.detach(), dst, group=group, tag=tag, **kwargs)

    def all_to_all_single(
        output: Any,
        input: Any,
        output_split_sizes: Any = None,
        input_split_sizes: Any = None,
        group: Any = None,
        async_op: bool = False,
    ) -> Any:
        # The MoE dispatcher leaves split sizes as tensors when they are on the CPU already.
        sizes = (x.tolist() if hasattr(x, "tolist") else x for x in (output_split_sizes, input_split_sizes))
        return plain_all_to_all(output, input, *sizes, group, async_op)

    # P2POp compares functions by identity with those of distributed_c10d.
    dist.isend = dist.distributed_c10d.isend = isend
    dist.all_to_all_single = all_to_all_single


def _arrange_fused_gradient() -> None:
    """Apex's kernel: the weight's gradient of a linear layer, added to its sum."""
    name = "fused_weight_gradient_mlp_cuda"
    module = types.ModuleType(name)
    module.__spec__ = importlib.machinery.ModuleSpec(name, None)

    def accumulate(inputs: torch.Tensor, gradient: torch.Tensor, total: torch.Tensor) -> None:
        total.add_(gradient.t().matmul(inputs).to(total.dtype))

    module.wgrad_gemm_accum_fp32 = module.wgrad_gemm_accum_fp16 = accumulate  # type: ignore[attr-defined]
    sys.modules[name] = module


def finish() -> None:
    """Replace what megatron.core bound at its import, and mend what only works beside Transformer Engine."""
    if ON_GPU and importlib.util.find_spec("transformer_engine") is not None:
        return
    from megatron.core.tensor_parallel import random
    from megatron.core.transformer.moe import moe_utils
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    if not ON_GPU:
        random._get_cuda_rng_state = lambda *args, **kwargs: torch.get_rng_state()
        random._set_cuda_rng_state = lambda state, *args, **kwargs: torch.set_rng_state(state)

    # Without Transformer Engine `fp8=False` counts as fp8.
    plain_init = random.CheckpointWithoutOutput.__init__
    if "fp8" in plain_init.__code__.co_varnames:
        random.CheckpointWithoutOutput.__init__ = lambda self, fp8=None, **kwargs: plain_init(
            self, fp8=fp8 or None, **kwargs
        )
    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None  # read without a check whether it was imported

    # The torch norm rejects sequence parallelism because it does not mark its parameters; marking is all there is to do.
    plain_new = WrappedTorchNorm.__new__

    def new(cls: Any, config: Any, *args: Any, **kwargs: Any) -> Any:
        parallel, config.sequence_parallel = config.sequence_parallel, False
        try:
            norm = plain_new(cls, config, *args, **kwargs)
        finally:
            config.sequence_parallel = parallel
        for parameter in norm.parameters():
            parameter.sequence_parallel = parallel
        return norm

    WrappedTorchNorm.__new__ = staticmethod(new)


def arrange_training() -> None:
    """More of the same for megatron.training: device properties, start-up barriers, fused kernels."""
    if not hasattr(typing, "override"):
        typing.override = typing_extensions.override  # type: ignore[attr-defined]  # of Python 3.12
    if ON_GPU:
        return
    cuda = torch.cuda
    cuda.device_count = lambda: 1
    cuda.get_device_capability = lambda *args: (8, 0)
    cuda.get_device_properties = lambda *args: types.SimpleNamespace(
        major=8, minor=0, total_memory=16 << 30, name="cpu", multi_processor_count=1
    )
    cuda.memory_stats = lambda *args: defaultdict(int)
    plain_init, plain_barrier = dist.init_process_group, dist.barrier

    def init_process_group(*args: Any, **kwargs: Any) -> Any:
        kwargs.pop("device_id", None)
        return plain_init(*args, **kwargs)

    def barrier(group: Any = None, async_op: bool = False, device_ids: Any = None) -> Any:
        return plain_barrier(group=group, async_op=async_op)

    dist.init_process_group, dist.barrier = init_process_group, barrier
    try:
        import triton  # noqa: F401
    except ImportError:
        _without_triton()


def _without_triton() -> None:
    """One module imports triton at its head, and is not used here."""
    name = "megatron.core.transformer.custom_layers.batch_invariant_kernels"
    module = types.ModuleType(name)
    module.__file__ = "<replaced>"
    module.enable_batch_invariant_mode = _nothing  # type: ignore[attr-defined]
    module.is_batch_invariant_mode_enabled = lambda: False  # type: ignore[attr-defined]
    module.BatchInvariantRMSNormFn = module.set_batch_invariant_mode = _nothing  # type: ignore[attr-defined]
    sys.modules[name] = module


def finish_training() -> None:
    """Start Megatron-LM's training without a GPU, and without building what the installed package has built."""
    from megatron.training import initialize

    initialize._compile_dependencies = _nothing
    _with_built_helpers()
    if ON_GPU:
        return
    plain = initialize.initialize_megatron

    @functools.wraps(plain)
    def initialize_megatron(*args: Any, **kwargs: Any) -> Any:
        return plain(*args, **{**kwargs, "allow_no_cuda": True})

    from megatron.training import training

    initialize.initialize_megatron = training.initialize_megatron = initialize_megatron
    for module in (initialize, training):
        for name in ("_warmup_jit_function", "set_jit_fusion_options"):
            if hasattr(module, name):
                setattr(module, name, _nothing)


def _with_built_helpers() -> None:
    """A checkout has the source of the dataset helpers only; the installed package has them built."""
    from megatron.core import datasets

    for place in sys.path:
        built = Path(place, "megatron", "core", "datasets")
        if any(built.glob("helpers_cpp*.so")):
            datasets.__path__.append(str(built))


def main(arguments: list[str]) -> None:
    """Run `[-m MODULE | SCRIPT] ...` under the arrangement."""
    as_module = arguments[0] == "-m"
    target, rest = (arguments[1], arguments[2:]) if as_module else (arguments[0], arguments[1:])
    # The launcher runs a script of Megatron-LM too.
    script = (rest[0] if target == "ssdtrain_megatron.run" else None) if as_module else target
    torch.set_num_threads(1)
    arrange()
    if script is not None:
        sys.path.insert(0, str(Path(script).resolve().parent))
        arrange_training()
    import megatron.core  # noqa: F401

    finish()
    if script is not None:
        finish_training()
    sys.argv = [target, *rest]
    if as_module:
        runpy.run_module(target, run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(target, run_name="__main__")


if __name__ == "__main__":
    main(sys.argv[1:])
