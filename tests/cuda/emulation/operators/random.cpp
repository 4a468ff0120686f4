// Random numbers: those of the CPU's generator, seeded by the seed and the offset of the device's generator. An operator moves the offset on
// by what it is said to use, so that a recomputation from a saved state has the same draws.
#include "operators.h"

#include <ATen/CPUGeneratorImpl.h>

extern "C" void* emulated_host_address(const void*);

namespace emulated_operators {

using at::Tensor;

Draw::Draw(const std::optional<at::Generator>& given) {
  auto* generator =
      at::get_generator_or_default<at::CUDAGeneratorImpl>(given, at::cuda::detail::getDefaultCUDAGenerator());
  std::lock_guard<std::mutex> lock(generator->mutex_);
  state_ = generator->philox_cuda_state(4);
}

std::pair<uint64_t, uint64_t> Draw::seed_and_offset() const {
  if (!state_.captured_) return {state_.seed_.val, state_.offset_.val};
  // In a graph, a replay has written both into memory of the device.
  return {*(uint64_t*)emulated_host_address(state_.seed_.ptr),
          *(uint64_t*)emulated_host_address(state_.offset_.ptr) + state_.offset_intragraph_};
}

at::Generator cpu_generator(uint64_t seed, uint64_t offset) {
  // An odd factor each: other seeds, and other offsets, give other streams of numbers.
  return at::detail::createCPUGenerator(seed * 0x9E3779B97F4A7C15ull + offset * 0xD1B54A32D192ED03ull + 1);
}

at::Generator Draw::on_cpu() const {
  auto [seed, offset] = seed_and_offset();
  return cpu_generator(seed, offset);
}

namespace {

std::tuple<Tensor, Tensor> native_dropout(const Tensor& input, double probability, std::optional<bool> train) {
  c10::cuda::CUDAGuard guard(input.device());
  Tensor output = at::empty_like(input);
  Tensor mask = at::empty_like(input, input.options().dtype(at::kBool));
  Tensor from = bytes_of(input), to = bytes_of(output), kept = bytes_of(mask);
  if (!train.value_or(true) || probability == 0) {
    on_stream("aten::native_dropout", [from, to, kept] {
      const_cast<Tensor&>(kept).fill_(true);
      const_cast<Tensor&>(to).copy_(from);
    });
    return {output, mask};
  }
  Draw draw(std::nullopt);
  on_stream("aten::native_dropout", [=] {
    const_cast<Tensor&>(kept).bernoulli_(1 - probability, draw.on_cpu());
    double scale = probability == 1 ? 0.0 : 1.0 / (1.0 - probability);
    const_cast<Tensor&>(to).copy_(from * kept.to(from.dtype()) * scale);
  });
  return {output, mask};
}

}  // namespace

void install_random() {
  replace("aten::native_dropout", c10::KernelFunction::makeFromUnboxedRuntimeFunction(&native_dropout));
}

}  // namespace emulated_operators
