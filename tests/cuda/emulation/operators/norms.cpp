// RMS norm, whose fused kernels only devices have.
#include "operators.h"

namespace emulated_operators {
namespace {

using at::Tensor;

std::vector<int64_t> last_dimensions(at::IntArrayRef shape) {
  std::vector<int64_t> dimensions;
  for (int64_t each = 1; each <= (int64_t)shape.size(); each++) dimensions.push_back(-each);
  return dimensions;
}

std::vector<int64_t> statistics_shape(const Tensor& input, at::IntArrayRef shape) {
  std::vector<int64_t> sizes = input.sizes().vec();
  for (size_t each = sizes.size() - shape.size(); each < sizes.size(); each++) sizes[each] = 1;
  return sizes;
}

at::ScalarType type_of_statistics(const Tensor& input) {
  return at::isReducedFloatingType(input.scalar_type()) ? at::kFloat : input.scalar_type();
}

std::tuple<Tensor, Tensor> rms_norm(const Tensor& input, at::IntArrayRef shape, const std::optional<Tensor>& weight,
                                    std::optional<double> epsilon) {
  c10::cuda::CUDAGuard guard(input.device());
  auto statistics = type_of_statistics(input);
  Tensor output = at::empty_like(input, at::MemoryFormat::Contiguous);
  Tensor rstd = at::empty(statistics_shape(input, shape), input.options().dtype(statistics));
  double added = epsilon.value_or(statistics == at::kDouble ? std::numeric_limits<double>::epsilon()
                                                            : (double)std::numeric_limits<float>::epsilon());
  Tensor x = bytes_of(input), to = bytes_of(output), r = bytes_of(rstd);
  Tensor scale = weight && weight->defined() ? bytes_of(*weight) : Tensor();
  auto dimensions = last_dimensions(shape);
  on_stream("aten::_fused_rms_norm", [=] {
    Tensor wide = x.to(statistics);
    Tensor reciprocal = at::rsqrt(at::pow(wide, 2).mean(dimensions, true).add_(added));
    const_cast<Tensor&>(r).copy_(reciprocal);
    Tensor normal = wide.mul(reciprocal);
    if (scale.defined()) normal = normal.mul(scale.to(statistics));
    const_cast<Tensor&>(to).copy_(normal);
  });
  return {output, rstd};
}

std::tuple<Tensor, Tensor> rms_norm_backward(const Tensor& gradient, const Tensor& input, at::IntArrayRef shape, const Tensor& rstd,
                                             const std::optional<Tensor>& weight, std::array<bool, 2> wanted) {
  c10::cuda::CUDAGuard guard(input.device());
  bool scaled = weight && weight->defined();
  Tensor of_input = wanted[0] ? at::empty_like(input, at::MemoryFormat::Contiguous) : Tensor();
  Tensor of_weight = wanted[1] && scaled ? at::empty_like(*weight, at::MemoryFormat::Contiguous) : Tensor();
  auto statistics = type_of_statistics(input);
  Tensor g = bytes_of(gradient), x = bytes_of(input), r = bytes_of(rstd), scale = scaled ? bytes_of(*weight) : Tensor();
  Tensor to_input = bytes_of(of_input), to_weight = bytes_of(of_weight);
  auto dimensions = last_dimensions(shape);
  on_stream("aten::_fused_rms_norm_backward", [=] {
    Tensor wide = g.to(statistics), normal = x.to(statistics) * r;
    if (to_weight.defined()) const_cast<Tensor&>(to_weight).copy_((wide * normal).sum_to_size(to_weight.sizes()));
    if (to_input.defined()) {
      Tensor inner = scale.defined() ? wide * scale.to(statistics) : wide;
      const_cast<Tensor&>(to_input).copy_((inner - normal * (inner * normal).mean(dimensions, true)) * r);
    }
  });
  return {of_input, of_weight};
}

}  // namespace

void install_norms() {
  replace("aten::_fused_rms_norm", c10::KernelFunction::makeFromUnboxedRuntimeFunction(&rms_norm));
  replace("aten::_fused_rms_norm_backward", c10::KernelFunction::makeFromUnboxedRuntimeFunction(&rms_norm_backward));
}

}  // namespace emulated_operators
