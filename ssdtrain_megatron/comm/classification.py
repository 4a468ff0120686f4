"""Which parallel dimension a collective of Megatron belongs to.

Note: [Activations only]
    Activations have at least two dimensions. Vectors in tensor-parallel and expert-parallel groups are routing probabilities,
    counts and the like. Where experts get their tokens by gathering all of them, probabilities are a matrix, of (tokens,
    experts).

Note: [Parameters that are also the master copy]
    Parameters are gathered by difference, after which this rank's own part holds what the others have, too. That is right where
    the optimizer keeps a float32 master copy, and would ruin training where the parameter itself is the master: in float32
    training, and where the optimizer stores only the bits that bfloat16 lacks.

Note: [Repeated parameters]
    What tensor-parallel ranks repeat (norms, routers, biases of row-parallel layers), and the word embedding that the first and
    the last stage both hold, has to stay equal on ranks that reduce it in different groups. A quantised block is coded with its
    neighbours, and those differ from group to group. So such parameters are always sent uncompressed, whatever the config
    excludes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ssdtrain.comm import Bucket, Communicator
from ssdtrain.comm.exclusion import excluded, ranges_of
from ssdtrain.integration.traffic import Traffic
from ssdtrain_megatron import _compat, _compat_comm


class Classification:
    """What the collectives of one rank carry.

    Args:
        chunks: wrapped by Megatron's DistributedDataParallel; others have no buckets, and their gradients are uncompressed.
        params_are_master: see Note: [Parameters that are also the master copy].
    """

    def __init__(self, comm: Communicator, chunks: Sequence[nn.Module], params_are_master: bool) -> None:
        self._comm = comm
        self._dimensions = _compat_comm.groups(chunks)
        self._experts = {getattr(_compat.model_config(chunk), "num_moe_experts", None) for chunk in chunks}
        # Between instances of the distributed optimizer, or of a model that nothing is attached to.
        self._unknown = Traffic(comm, "dp", uncompressed="no whole bucket of the attached model")
        # By identity of the tensor that the bucket's collectives get, which is kept so that no other gets its identity.
        self._buckets: dict[int, tuple[Tensor, Traffic]] = {}
        sizes: list[tuple[int, bool]] = []
        dtypes: dict[str, torch.dtype] = {}
        for index, chunk in enumerate(chunks):
            repeated = _repeated(chunk)
            comm.keep_excluded(repeated)
            chosen = excluded(chunk, comm.policy.exclude) | repeated
            for name, bucket in _compat_comm.buckets(chunk):
                known = Bucket(f"chunk{index}.{name}", ranges_of(_places(bucket), chosen))
                self._add(bucket.grad_data, Traffic(comm, "dp", known))
                sizes += [(parameter.numel(), parameter in chosen) for parameter in bucket.params]
                dtypes["dp"] = bucket.grad_data.dtype
                dtypes["dp_gather" if bucket.param_data is None else "zero_gather"] = (
                    bucket.grad_data if bucket.param_data is None else bucket.param_data
                ).dtype
                if bucket.param_data is not None:
                    why = _reason_against_delta(bucket.param_data, params_are_master)
                    if comm.policy.rules["zero_gather"].exact:
                        why = None  # nothing is rounded
                    weights = Traffic(comm, "zero_gather", known, delta=True, uncompressed=why)
                    self._add(bucket.param_data, weights)
        if _compat_comm.data_parallel_size() > 1:
            comm.announce(sizes, dtypes)

    def _add(self, tensor: Tensor, traffic: Traffic) -> None:
        self._buckets[id(tensor)] = (tensor, traffic)

    def of_layers(self, tensor: Tensor, group: Any) -> Traffic | None:
        """Activations, their gradients and tokens. See Note: [Activations only]."""
        dimension = self._dimensions.get(group) if group is not None else None
        if dimension is None or tensor.dim() < 2 or not tensor.is_floating_point():
            return None
        if tensor.dim() == 2 and tensor.shape[1] in self._experts:
            return None
        return Traffic(self._comm, dimension)

    def of_buffers(self, tensor: Tensor, group: Any) -> Traffic:
        """Gradients and parameters of data parallelism, bucket by bucket."""
        found = self._buckets.get(id(tensor))
        return self._unknown if found is None else found[1]


def _reason_against_delta(parameters: Tensor, params_are_master: bool) -> str | None:
    """See Note: [Parameters that are also the master copy]."""
    if parameters.dtype == torch.float32:
        return "float32 parameters are the optimizer's own, and gathering by difference would round them"
    if params_are_master:
        return "the optimizer stores only the remainders of parameters (store_param_remainders)"
    return None


def _places(bucket: Any) -> dict[nn.Parameter, tuple[int, int]]:
    """(start, stop) of each parameter in its bucket. Their gradients lie where the parameters do, alignment included."""
    start = bucket.grad_data.storage_offset()
    return {
        parameter: (at := parameter.main_grad.storage_offset() - start, at + parameter.numel())
        for parameter in bucket.params
    }


def _repeated(chunk: nn.Module) -> set[nn.Parameter]:
    """See Note: [Repeated parameters]."""
    return {
        parameter
        for parameter in chunk.parameters()
        if getattr(parameter, "shared_embedding", False)
        or (
            not getattr(parameter, "tensor_model_parallel", False)
            and _compat_comm.tensor_parallel_size(parameter) > 1
        )
    }
