// Copies between tensors. What is one range of bytes on both sides goes through torch's own kernel, which asks the runtime for a copy; a
// kernel of the device would copy the rest, and does here.
#include "operators.h"

#include <ATen/native/Copy.h>

namespace emulated_operators {
namespace {

using at::Tensor;

bool one_range(const Tensor& target, const Tensor& source) {
  if (target.dtype() != source.dtype() || target.sizes() != source.sizes()) return false;
  if (target.is_conj() != source.is_conj() || target.is_neg() != source.is_neg()) return false;
  if (target.strides() == source.strides()) return target.is_non_overlapping_and_dense();
  return target.is_contiguous() && source.is_contiguous();
}

Tensor& copy_(Tensor& target, const Tensor& given, bool non_blocking) {
  if (target.is_meta() || given.is_meta() || target.numel() == 0) return at::native::copy_(target, given, non_blocking);
  Tensor source = given.sizes() == target.sizes() ? given : given.expand(target.sizes());
  c10::cuda::OptionalCUDAGuard guard;
  guard.set_device(source.is_cuda() ? source.device() : target.device());
  if (one_range(target, source)) return at::native::copy_(target, source, non_blocking);
  if (target.device() == source.device()) {
    Tensor to = bytes_of(target), from = bytes_of(source);
    on_stream("aten::copy_", [to, from] { const_cast<Tensor&>(to).copy_(from); });
    return target;
  }
  // Between devices, and between host and device: as one range in the target's type, which is laid out where it arrives.
  Tensor range = source.to(target.scalar_type()).resolve_conj().resolve_neg().contiguous();
  if (target.is_non_overlapping_and_dense() && !target.is_contiguous()) range = at::empty_like(target, target.options().device(source.device())).copy_(range);
  if (one_range(target, range)) return at::native::copy_(target, range, non_blocking);
  Tensor there = at::empty(range.sizes(), target.options().memory_format(at::MemoryFormat::Contiguous));
  at::native::copy_(there, range, target.is_cpu() ? false : non_blocking);
  target.copy_(there);
  return target;
}

at::Scalar local_scalar_dense(const Tensor& tensor) {
  c10::cuda::CUDAGuard guard(tensor.device());
  wait_for_stream();
  return bytes_of(tensor).item();
}

}  // namespace

void install_copies() {
  replace("aten::copy_", c10::KernelFunction::makeFromUnboxedRuntimeFunction(&copy_));
  replace("aten::_local_scalar_dense", c10::KernelFunction::makeFromUnboxedRuntimeFunction(&local_scalar_dense));
}

}  // namespace emulated_operators
