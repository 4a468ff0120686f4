"""Stand-ins for `transformer_engine_torch`, the compiled module of Transformer Engine 2.20, computing with torch's operators.

Signatures, shapes and types of results and what is written in place are those of the module's bindings. Nothing here is
quantized: a quantizer is an error.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from enum import IntEnum
from typing import Any

import torch
from torch import Tensor

aten = torch.ops.aten


class DType(IntEnum):
    kByte = 0
    kInt32 = 2
    kFloat32 = 4
    kFloat16 = 5
    kBFloat16 = 6
    kFloat8E4M3 = 7
    kFloat8E5M2 = 8
    kFloat4E2M1 = 10


TORCH = {
    DType.kByte: torch.uint8,
    DType.kInt32: torch.int32,
    DType.kFloat32: torch.float32,
    DType.kFloat16: torch.float16,
    DType.kBFloat16: torch.bfloat16,
}


class NVTE_Fused_Attn_Backend(IntEnum):
    NVTE_No_Backend = -1
    NVTE_F16_arbitrary_seqlen = 1
    NVTE_FP8 = 2


FP8FwdTensors = IntEnum(
    "FP8FwdTensors",
    [f"GEMM{layer}_{what}" for layer in (1, 2, 3) for what in ("INPUT", "WEIGHT", "OUTPUT")],
    start=0,
)
FP8BwdTensors = IntEnum(
    "FP8BwdTensors", [f"GRAD_{what}{layer}" for layer in (1, 2, 3) for what in ("OUTPUT", "INPUT")], start=0
)


class Name(str):
    """A member of an enumeration: its name, and a number where one is asked for."""

    def __int__(self) -> int:
        return zlib.crc32(self.encode())


class Names:
    """An enumeration that has every member it is asked for."""

    def __getattr__(self, name: str) -> Name:
        if name.startswith("__"):
            raise AttributeError(name)
        return Name(name)


NVTE_Bias_Type = NVTE_Mask_Type = NVTE_Softmax_Type = NVTE_QKV_Format = NVTE_QKV_Layout = Names()
NVTEScalingMode = NVTERoutingMapFormat = NVTEQBHistogramMode = Float8BlockScaleTensorFormat = Names()
CommOverlapType = CommOverlapAlgo = Names()


class CommOverlap:
    """Named in annotations; never made."""


class CommOverlapP2P(CommOverlap): ...


class CommOverlapHelper: ...


class FP8TensorMeta: ...


def __getattr__(name: str) -> Any:
    """Return a function that says what is missing, for every function that has no stand-in."""
    if name.startswith("__"):
        raise AttributeError(name)

    def missing(*args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError(
            f"transformer_engine_torch.{name} has no stand-in (emulated_transformer_engine/compiled.py)"
        )

    return missing


def _exact(quantizer: Any) -> None:
    if quantizer is not None:
        raise NotImplementedError(
            f"{type(quantizer).__name__}: the stand-ins of Transformer Engine do not quantize"
        )


def _into(out: Tensor | None, value: Tensor) -> Tensor:
    return value if out is None else out.copy_(value)


# ------------------------------------------------------------------------------------------------ facts


def get_cudnn_version() -> int:
    return 92400


def get_cublasLt_version() -> int:
    return 130200


def get_num_cublas_streams() -> int:
    return 4


def get_stream_priority_range(device_id: int = -1) -> tuple[int, int]:
    return 0, -5


def device_supports_multicast(device_id: int = -1) -> bool:
    return False


def ubuf_built_with_mpi() -> bool:
    return False


def nvte_built_with_cublasmp() -> bool:
    return False


# ------------------------------------------------------------------------------------------------ products


def _product(left: Tensor, right: Tensor, dtype: torch.dtype) -> Tensor:
    """Multiply in `dtype`, or in the operands' where that is wider: products are summed in fp32 in either case."""
    wide = torch.promote_types(torch.promote_types(left.dtype, right.dtype), dtype)
    return torch.matmul(left.to(wide), right.to(wide)).to(dtype)


def generic_gemm(
    A: Tensor,
    transA: bool,
    B: Tensor,
    transB: bool,
    D: Tensor | None,
    quantizer: Any,
    output_dtype: DType | None,
    bias: Tensor | None,
    bias_type: DType,
    gelu: bool,
    gelu_in: Tensor | None,
    grad: bool,
    workspace: Tensor,
    workspace_size: int,
    accumulate: bool,
    use_split_accumulator: bool,
    comm_overlap: Any = None,
    comm_type: Any = None,
    extra_output: Tensor | None = None,
    bulk_overlap: bool = False,
    alpha: float = 1.0,
    beta: float | None = None,
) -> list[Tensor | None]:
    """Multiply: op(B) @ op(A), rows flattened; `[D, gradient of the bias, input of GELU, extra output]`."""
    _exact(quantizer)
    if comm_overlap is not None:
        raise NotImplementedError("overlap of products with communication has no stand-in")
    left = B.reshape(-1, B.shape[-1])
    right = A.reshape(-1, A.shape[-1])
    rows: Sequence[int] = [B.shape[-1]] if transB else B.shape[:-1]
    columns = right.shape[0] if transA else right.shape[1]
    dtype = D.dtype if D is not None else TORCH[output_dtype] if output_dtype is not None else A.dtype
    product = _product(left.t() if transB else left, right.t() if transA else right, dtype) * alpha
    bias_gradient = before = None
    if grad:
        if bias is not None:
            bias_gradient = left.sum(0, dtype=torch.float32).to(dtype)
        if gelu:
            product = aten.gelu_backward(
                product, gelu_in.reshape(product.shape).to(dtype), approximate="tanh"
            )
    else:
        if bias is not None:
            product = product + bias.to(dtype)
        if gelu:
            before = product.view(*rows, columns)
            product = torch.nn.functional.gelu(product, approximate="tanh")
    product = product.view(*rows, columns)
    if D is None:
        D = product
    elif accumulate:
        D.mul_(1.0 if beta is None else beta).add_(product)
    else:
        D.copy_(product)
    return [D, bias_gradient, before, extra_output]


# ------------------------------------------------------------------------------------------------ norms


def _scale(weight: Tensor, zero_centered: bool) -> Tensor:
    return weight.float() + 1 if zero_centered else weight.float()


def layernorm_fwd(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    eps: float,
    ln_out: Tensor | None,
    quantizer: Any,
    otype: DType,
    sm_margin: int,
    zero_centered_gamma: bool,
) -> list[Tensor]:
    """Normalise rows; `[result, means, reciprocal deviations]`, the latter two fp32 with one number a row."""
    _exact(quantizer)
    wide = input.reshape(-1, input.shape[-1]).float()
    mean = wide.mean(-1)
    reciprocal = torch.rsqrt(wide.var(-1, correction=0) + eps)
    result = (wide - mean[:, None]) * reciprocal[:, None] * _scale(weight, zero_centered_gamma)
    if bias is not None:
        result = result + bias.float()
    return [_into(ln_out, result.to(TORCH[otype]).view(input.shape)), mean, reciprocal]


def layernorm_bwd(
    dz: Tensor,
    x: Tensor,
    mu: Tensor,
    rsigma: Tensor,
    gamma: Tensor,
    sm_margin: int,
    zero_centered_gamma: bool,
) -> list[Tensor]:
    """Return the gradients of input, weight and bias."""
    gradient, wide = dz.reshape(-1, dz.shape[-1]).float(), x.reshape(-1, x.shape[-1]).float()
    normal = (wide - mu[:, None]) * rsigma[:, None]
    scaled = gradient * _scale(gamma, zero_centered_gamma)
    of_input = scaled - scaled.mean(-1, keepdim=True) - normal * (scaled * normal).mean(-1, keepdim=True)
    of_input = of_input * rsigma[:, None]
    return [
        of_input.to(x.dtype).view(x.shape),
        (gradient * normal).sum(0).to(gamma.dtype),
        gradient.sum(0).to(gamma.dtype),
    ]


def rmsnorm_fwd(
    input: Tensor,
    weight: Tensor,
    eps: float,
    ln_out: Tensor | None,
    quantizer: Any,
    otype: DType,
    sm_margin: int,
    zero_centered_gamma: bool,
) -> list[Tensor | None]:
    """Divide rows by their root mean square; `[result, None, reciprocals]`."""
    _exact(quantizer)
    wide = input.reshape(-1, input.shape[-1]).float()
    reciprocal = torch.rsqrt(wide.square().mean(-1) + eps)
    result = wide * reciprocal[:, None] * _scale(weight, zero_centered_gamma)
    return [_into(ln_out, result.to(TORCH[otype]).view(input.shape)), None, reciprocal]


def rmsnorm_bwd(
    dz: Tensor, x: Tensor, rsigma: Tensor, gamma: Tensor, sm_margin: int, zero_centered_gamma: bool
) -> list[Tensor]:
    """Return the gradients of input and weight."""
    gradient, wide = dz.reshape(-1, dz.shape[-1]).float(), x.reshape(-1, x.shape[-1]).float()
    normal = wide * rsigma[:, None]
    scaled = gradient * _scale(gamma, zero_centered_gamma)
    of_input = (scaled - normal * (scaled * normal).mean(-1, keepdim=True)) * rsigma[:, None]
    return [of_input.to(x.dtype).view(x.shape), (gradient * normal).sum(0).to(gamma.dtype)]


# ------------------------------------------------------------------------------------------------ activations


def _qgelu(x: Tensor) -> Tensor:
    return x * torch.sigmoid(1.702 * x)


def _qgelu_backward(gradient: Tensor, x: Tensor) -> Tensor:
    gate = torch.sigmoid(1.702 * x)
    return gradient * (gate + 1.702 * x * gate * (1 - gate))


ACTIVATIONS: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[Tensor, Tensor], Tensor]]] = {
    "gelu": (
        lambda x: aten.gelu(x, approximate="tanh"),
        lambda gradient, x: aten.gelu_backward(gradient, x, approximate="tanh"),
    ),
    "qgelu": (_qgelu, _qgelu_backward),
    "relu": (torch.relu, lambda gradient, x: aten.threshold_backward(gradient, x, 0)),
    "srelu": (lambda x: torch.relu(x).square(), lambda gradient, x: gradient * 2 * torch.relu(x)),
    "silu": (aten.silu, aten.silu_backward),
    "glu": (torch.sigmoid, lambda gradient, x: gradient * torch.sigmoid(x) * torch.sigmoid(-x)),
}
GATED = {
    "geglu": "gelu",
    "qgeglu": "qgelu",
    "reglu": "relu",
    "sreglu": "srelu",
    "swiglu": "silu",
    "glu": "glu",
}
"""Products of an activation of the first half and the second half, by the name of the activation."""


def _activation(name: str) -> Callable[..., Tensor]:
    function, _ = ACTIVATIONS[GATED.get(name, name)]

    def forward(input: Tensor, quantizer: Any) -> Tensor:
        _exact(quantizer)
        if name not in GATED:
            return function(input.float()).to(input.dtype)
        first, second = input.float().chunk(2, -1)
        return (function(first) * second).to(input.dtype)

    return forward


def _backward(name: str) -> Callable[..., Tensor]:
    function, derivative = ACTIVATIONS[GATED.get(name, name)]

    def backward(grad: Tensor, fwd_input: Tensor, quantizer: Any) -> Tensor:
        _exact(quantizer)
        wide = fwd_input.float()
        gradient = grad.reshape(*fwd_input.shape[:-1], -1).float()
        if name not in GATED:
            return derivative(gradient, wide).to(grad.dtype)
        first, second = wide.chunk(2, -1)
        return torch.cat([derivative(gradient * second, first), gradient * function(first)], -1).to(
            grad.dtype
        )

    return backward


def _backward_with_bias(name: str) -> Callable[..., list[Tensor]]:
    backward = _backward(name)

    def both(grad: Tensor, fwd_input: Tensor, quantizer: Any) -> list[Tensor]:
        of_input = backward(grad, fwd_input, quantizer)
        of_bias = of_input.reshape(-1, of_input.shape[-1]).sum(0, dtype=torch.float32)
        return [of_bias.to(grad.dtype), of_input]

    return both


for _name in {**ACTIVATIONS, **GATED}:
    globals()[_name] = _activation(_name)
    globals()[f"d{_name}"] = _backward(_name)
    if _name not in GATED:
        globals()[f"dbias_d{_name}"] = _backward_with_bias(_name)


# ------------------------------------------------------------------------------------------------ softmax


def _softmax(scores: Tensor, scale: float, masked: Tensor | None) -> Tensor:
    wide = scores.float() * scale
    if masked is not None:
        wide = wide.masked_fill(masked, -10000.0)
    return torch.softmax(wide, -1).to(scores.dtype)


def scaled_softmax_forward(input: Tensor, scale_factor: float) -> Tensor:
    return _softmax(input, scale_factor, None)


def scaled_masked_softmax_forward(input: Tensor, mask: Tensor, scale_factor: float) -> Tensor:
    return _softmax(input, scale_factor, mask.bool())


def scaled_upper_triang_masked_softmax_forward(input: Tensor, scale_factor: float) -> Tensor:
    later = torch.ones(input.shape[-2:], dtype=torch.bool, device=input.device).triu(1)
    return _softmax(input, scale_factor, later)


def scaled_aligned_causal_masked_softmax_forward(input: Tensor, scale_factor: float) -> Tensor:
    later = torch.ones(input.shape[-2:], dtype=torch.bool, device=input.device)
    return _softmax(input, scale_factor, later.triu(1 + input.shape[-1] - input.shape[-2]))


def scaled_softmax_backward(output_grad: Tensor, softmax_results: Tensor, scale_factor: float) -> Tensor:
    gradient, weights = output_grad.float(), softmax_results.float()
    inner = (gradient * weights).sum(-1, keepdim=True)
    return (scale_factor * weights * (gradient - inner)).to(output_grad.dtype)


scaled_masked_softmax_backward = scaled_upper_triang_masked_softmax_backward = scaled_softmax_backward
scaled_aligned_causal_masked_softmax_backward = scaled_softmax_backward


# ------------------------------------------------------------------------------------------------ attention


def get_fused_attn_backend(fused_attn_params: Any) -> tuple[NVTE_Fused_Attn_Backend, str]:
    """Return the backend for half precision where torch's flash attention computes what is asked for, else none and why."""
    asked = fused_attn_params
    reasons = [
        (asked.qkv_dtype not in (DType.kFloat16, DType.kBFloat16), "not half precision"),
        (asked.bias_type != "NVTE_NO_BIAS", "a bias"),
        (asked.attn_mask_type not in ("NVTE_NO_MASK", "NVTE_CAUSAL_MASK"), "a padding mask"),
        (asked.softmax_type != "NVTE_VANILLA_SOFTMAX", "a softmax with an offset"),
        (asked.window_size_left != -1, "a sliding window"),
        (asked.return_max_logit, "the maximum of the logits"),
        ("THD" in asked.qkv_layout, "packed sequences"),
    ]
    missing = [reason for refused, reason in reasons if refused]
    if missing:
        return NVTE_Fused_Attn_Backend.NVTE_No_Backend, f"the stand-in has no {', '.join(missing)}"
    return NVTE_Fused_Attn_Backend.NVTE_F16_arbitrary_seqlen, ""


def _heads_first(tensor: Tensor, format: str) -> Tensor:
    """Return a view (batch, heads, sequence, size) of a tensor in the format BSHD or SBHD."""
    return tensor.transpose(1, 2) if format == "BSHD" else tensor.permute(1, 2, 0, 3)


def _formats(layout: str) -> list[str]:
    """Return the formats of query, key and value in a layout such as NVTE_SBHD_SB2HD."""
    parts = [part.replace("2", "").replace("3", "") for part in layout.removeprefix("NVTE_").split("_")]
    return [parts[0], parts[-1], parts[-1]] if len(parts) < 3 else parts


def fused_attn_fwd(
    max_seqlen_q: int,
    max_seqlen_kv: int,
    is_training: bool,
    attn_scale: float,
    p_dropout: float,
    set_zero: bool,
    qkv_layout: str,
    o_format: str,
    qkv_scale_inv_format: Any,
    bias_type: str,
    attn_mask_type: str,
    softmax_type: str,
    window_size: Any,
    bottom_right_diagonal: bool,
    cu_seqlens_q: Tensor,
    cu_seqlens_kv: Tensor,
    Q: Tensor,
    K: Tensor,
    V: Tensor,
    *_: Any,
) -> list[Tensor]:
    """Attend; `[output, logarithms of sums (batch, heads, queries, 1), state of the generator]`."""
    query, key, value = (
        _heads_first(tensor, format) for tensor, format in zip((Q, K, V), _formats(qkv_layout), strict=True)
    )
    output, sums, *_rest, state, _offset, _debug = aten._scaled_dot_product_flash_attention(
        query, key, value, p_dropout, attn_mask_type == "NVTE_CAUSAL_MASK", False, scale=attn_scale
    )
    output = output.permute(2, 0, 1, 3) if o_format == "NVTE_SBHD" else output.transpose(1, 2)
    return [output.contiguous(), sums.unsqueeze(-1), state]


def _gradients_like(layout: str, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Allocate the gradients, side by side in one tensor where the layout has its inputs so."""

    def packed(count: int, like: Tensor, dimension: int) -> tuple[Tensor, ...]:
        shape = list(like.shape)
        shape.insert(len(shape) + dimension + 1, count)
        return like.new_empty(shape).unbind(dimension)

    parts = layout.removeprefix("NVTE_").split("_")
    inside = parts[-1][-2:] in ("2D", "3D")  # number before the size of a head, or before the heads
    place = -2 if inside else -3
    if "3" in parts[-1]:
        first, second, third = packed(3, query, place)
        return first, second, third
    if "2" in parts[-1]:
        second, third = packed(2, key, place)
        return query.new_empty(query.shape), second, third
    return query.new_empty(query.shape), key.new_empty(key.shape), value.new_empty(value.shape)


def fused_attn_bwd(
    max_seqlen_q: int,
    max_seqlen_kv: int,
    attn_scale: float,
    p_dropout: float,
    set_zero: bool,
    qkv_layout: str,
    o_format: str,
    do_format: str,
    dqkv_layout: str,
    qkv_scale_inv_format: Any,
    do_scale_inv_format: Any,
    bias_type: str,
    attn_mask_type: str,
    softmax_type: str,
    window_size: Any,
    bottom_right_diagonal: bool,
    deterministic: bool,
    cu_seqlens_q: Tensor,
    cu_seqlens_kv: Tensor,
    Q: Tensor,
    K: Tensor,
    V: Tensor,
    O: Tensor,
    dO: Tensor,
    fake_dtype: torch.dtype,
    Aux_CTX_Tensors: Sequence[Tensor],
    *_: Any,
) -> list[Tensor | None]:
    """Return the gradients of query, key and value, then of the bias and of the softmax's offset, which are None."""
    sums, state = Aux_CTX_Tensors
    query, key, value = (
        _heads_first(tensor, format) for tensor, format in zip((Q, K, V), _formats(qkv_layout), strict=True)
    )
    gradient = _heads_first(dO, do_format.removeprefix("NVTE_"))
    output = _heads_first(O, o_format.removeprefix("NVTE_"))
    found = aten._scaled_dot_product_flash_attention_backward(
        gradient,
        query,
        key,
        value,
        output,
        sums.squeeze(-1),
        None,
        None,
        query.shape[2],
        key.shape[2],
        p_dropout,
        attn_mask_type == "NVTE_CAUSAL_MASK",
        state,
        state,
        scale=attn_scale,
    )
    targets = _gradients_like(dqkv_layout, Q, K, V)
    for target, format, source in zip(targets, _formats(dqkv_layout), found, strict=True):
        _heads_first(target, format).copy_(source)
    return [*targets, None, None]


# ------------------------------------------------------------------------------------------------ optimizers


def multi_tensor_scale(
    chunk_size: int, is_infinite: Tensor, tensor_lists: list[list[Tensor]], scale: float
) -> None:
    """Write the first list, scaled, into the second; `is_infinite` becomes 1 where a number is not finite."""
    for source, target in zip(*tensor_lists, strict=True):
        target.copy_(source.float() * scale)
        is_infinite.logical_or_((~torch.isfinite(source)).any())


def multi_tensor_scale_tensor(
    chunk_size: int, is_infinite: Tensor, tensor_lists: list[list[Tensor]], scale: Tensor
) -> None:
    """Do the same, the scale being on the device."""
    multi_tensor_scale(chunk_size, is_infinite, tensor_lists, scale)  # type: ignore[arg-type]


def multi_tensor_l2norm(
    chunk_size: int, noop_flag: Tensor, tensor_lists: list[list[Tensor]], per_tensor: bool | None = None
) -> tuple[Tensor, Tensor]:
    """Return the norm of all tensors, and that of each where it is asked for; fp32, on the device."""
    squares = torch.stack([tensor.float().square().sum() for tensor in tensor_lists[0]])
    return squares.sum().sqrt().view(1), squares.sqrt() if per_tensor else squares.new_empty(0)


def multi_tensor_unscale_l2norm(
    chunk_size: int,
    noop_flag: Tensor,
    tensor_lists: list[list[Tensor]],
    inv_scale: Tensor,
    per_tensor: bool | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the same norms of the tensors times a scale."""
    total, each = multi_tensor_l2norm(chunk_size, noop_flag, tensor_lists, per_tensor)
    return total * inv_scale, each * inv_scale


def multi_tensor_adam(
    chunk_size: int,
    noop_flag: Tensor,
    tensor_lists: list[list[Tensor]],
    lr: float,
    beta1: float,
    beta2: float,
    epsilon: float,
    step: int,
    mode: int,
    bias_correction: int,
    weight_decay: float,
) -> None:
    """Update parameters in place, from lists of gradients, parameters, both moments and, perhaps, parameters in fp32."""
    gradients, parameters, firsts, seconds, *copies = tensor_lists
    corrections = [1 - beta**step if bias_correction else 1.0 for beta in (beta1, beta2)]
    for gradient, parameter, first, second, master in zip(
        gradients, parameters, firsts, seconds, copies[0] if copies else parameters, strict=True
    ):
        wide, weight = gradient.float(), master.float()
        if not mode:  # decay as a part of the gradient
            wide = wide + weight_decay * weight
        first.copy_(beta1 * first.float() + (1 - beta1) * wide)
        second.copy_(beta2 * second.float() + (1 - beta2) * wide * wide)
        update = (first.float() / corrections[0]) / ((second.float() / corrections[1]).sqrt() + epsilon)
        if mode:
            update = update + weight_decay * weight
        weight = weight - lr * update
        master.copy_(weight)
        if copies:
            parameter.copy_(weight)


def multi_tensor_sgd(*args: Any) -> None:
    raise NotImplementedError("transformer_engine_torch.multi_tensor_sgd has no stand-in")


# ------------------------------------------------------------------------------------------------ others


def swap_first_dims(tensor: Tensor, *, out: Tensor | None = None) -> Tensor:
    return _into(out, tensor.transpose(0, 1).contiguous())
