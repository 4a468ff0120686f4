// Assertions of the device. The message travels in the arguments of the kernel, in 256 bytes: a longer one is refused at once, whether or not
// the condition holds.
#include "operators.h"

namespace emulated_operators {
namespace {

using at::Tensor;

constexpr size_t MOST_OF_MESSAGE = 255;

void assert_with(const Tensor& condition, std::string message) {
  c10::cuda::CUDAGuard guard(condition.device());
  TORCH_CHECK(condition.numel() != 0, "Boolean value of Tensor with no values is ambiguous");
  TORCH_CHECK(condition.numel() < 2, "Boolean value of Tensor with more than one value is ambiguous");
  Tensor bytes = bytes_of(condition);
  on_stream("assertion", [bytes, message] { TORCH_CHECK(bytes.is_nonzero(), message); });
}

void assert_async(const Tensor& condition) { assert_with(condition, "Expected Tensor with single nonzero value, but got zero"); }

void assert_async_with_message(const Tensor& condition, std::string_view message) {
  TORCH_CHECK(message.size() < MOST_OF_MESSAGE, "Message length must be smaller than ", MOST_OF_MESSAGE);
  assert_with(condition, std::string(message));
}

}  // namespace

void install_assertions() {
  using c10::KernelFunction;
  replace("aten::_assert_async", KernelFunction::makeFromUnboxedRuntimeFunction(&assert_async));
  replace("aten::_assert_async", KernelFunction::makeFromUnboxedRuntimeFunction(&assert_async_with_message), "msg");
}

}  // namespace emulated_operators
