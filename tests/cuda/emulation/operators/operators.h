// What the files of the operators share: work on the current stream, and tensors on the bytes behind a device's addresses.
#pragma once

#include <ATen/ATen.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/cuda/CUDAGeneratorImpl.h>
#include <c10/cuda/CUDAGuard.h>

#include <functional>
#include <string>

namespace emulated_operators {

// Queues `work` on the current stream. What it throws is an error that the device does not recover from, as an assertion in a kernel.
void on_stream(const std::string& name, std::function<void()> work);

// Waits for the current stream, as an operator does whose result has a shape that depends on values.
void wait_for_stream();

// A CPU tensor on the bytes of a tensor of a device. It keeps nothing alive: the allocator's rules decide when memory may be used again,
// as they do for a kernel.
at::Tensor bytes_of(const at::Tensor& tensor);

// The random numbers of one operator: seed and offset of the device's generator, read when the work runs where a graph is captured.
class Draw {
 public:
  explicit Draw(const std::optional<at::Generator>& generator);
  at::Generator on_cpu() const;  // a new generator with these draws
  at::PhiloxCudaState state() const { return state_; }
  std::pair<uint64_t, uint64_t> seed_and_offset() const;

 private:
  at::PhiloxCudaState state_;
};
at::Generator cpu_generator(uint64_t seed, uint64_t offset);

// Registers a kernel for the CUDA key in place of torch's own.
void replace(const char* name, c10::KernelFunction kernel, const char* overload = "");

void install_copies();
void install_random();
void install_attention();
void install_norms();
void install_assertions();

}  // namespace emulated_operators
