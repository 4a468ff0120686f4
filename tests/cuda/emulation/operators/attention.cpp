// Fused attention, with the signatures and the saved tensors of the kernels for CUDA. Without dropout the CPU's flash kernel computes; with
// dropout plain products do, whose mask comes from the seed and the offset that the forward saves for its backward. Without dropout torch
// saves them too, and nobody writes them: they hold what was in memory, which here is something else each time.
#include "operators.h"

#include <c10/cuda/CUDAGraphsC10Utils.h>

#include <atomic>
#include <cmath>
#include <limits>

namespace emulated_operators {
namespace {

using at::Tensor;
using OptionalTensor = std::optional<Tensor>;

Tensor present(const OptionalTensor& tensor) { return tensor && tensor->defined() ? *tensor : Tensor(); }

// Several heads of the query may share one of key and value.
Tensor for_heads(const Tensor& tensor, int64_t heads) {
  return tensor.size(1) == heads ? tensor : tensor.repeat_interleave(heads / tensor.size(1), 1);
}

Tensor summed_over_shared_heads(const Tensor& gradient, int64_t heads) {
  if (gradient.size(1) == heads) return gradient;
  return gradient.unflatten(1, {heads, gradient.size(1) / heads}).sum(2);
}

struct Attention {
  Tensor query, key, value, bias;  // of the CPU, on the bytes of the device
  double dropout;
  bool causal;
  std::optional<double> scale;

  bool plain() const { return dropout == 0; }
  double factor() const { return scale.value_or(1.0 / std::sqrt((double)query.size(-1))); }

  // Probabilities (batch, heads, queries, keys) in float, and the logarithms of their sums.
  std::pair<Tensor, Tensor> probabilities() const {
    Tensor scores = at::matmul(query.to(at::kFloat) * factor(), for_heads(key, query.size(1)).to(at::kFloat).transpose(-2, -1));
    if (bias.defined()) scores = scores + bias.to(at::kFloat);
    if (causal) {
      Tensor later = at::ones({query.size(-2), key.size(-2)}, at::kBool).triu(1);
      scores = scores.masked_fill(later, -std::numeric_limits<float>::infinity());
    }
    Tensor sums = scores.logsumexp(-1);
    return {(scores - sums.unsqueeze(-1)).exp(), sums};
  }

  Tensor kept(const Tensor& like, const at::Generator& generator) const {
    return at::empty_like(like).bernoulli_(1 - dropout, generator).div_(1 - dropout);
  }

  std::pair<Tensor, Tensor> forward(const std::function<at::Generator()>& generator) const {
    if (plain()) {
      auto [output, sums] = at::_scaled_dot_product_flash_attention_for_cpu(
          query, for_heads(key, query.size(1)), for_heads(value, query.size(1)), 0.0, causal,
          bias.defined() ? OptionalTensor(bias) : std::nullopt, scale);
      return {output, sums};
    }
    auto [weights, sums] = probabilities();
    Tensor output = at::matmul(weights * kept(weights, generator()), for_heads(value, query.size(1)).to(at::kFloat));
    return {output, sums};
  }

  struct Gradients {
    Tensor query, key, value, bias;
  };

  Gradients backward(const Tensor& gradient, const Tensor& output, const Tensor& sums, bool bias_too,
                     const std::function<at::Generator()>& generator) const {
    int64_t heads = key.size(1);
    if (plain() && !bias_too) {
      auto [to_query, to_key, to_value] = at::_scaled_dot_product_flash_attention_for_cpu_backward(
          gradient, query, for_heads(key, query.size(1)), for_heads(value, query.size(1)), output, sums, 0.0, causal,
          bias.defined() ? OptionalTensor(bias) : std::nullopt, scale);
      return {to_query, summed_over_shared_heads(to_key, heads), summed_over_shared_heads(to_value, heads), Tensor()};
    }
    Tensor weights = probabilities().first;
    Tensor mask = plain() ? at::ones_like(weights) : kept(weights, generator());
    Tensor wide = gradient.to(at::kFloat);
    Tensor of_values = at::matmul(wide, for_heads(value, query.size(1)).to(at::kFloat).transpose(-2, -1)) * mask;
    Tensor of_scores = weights * (of_values - (of_values * weights).sum(-1, true));
    return {at::matmul(of_scores, for_heads(key, query.size(1)).to(at::kFloat)) * factor(),
            summed_over_shared_heads(at::matmul(of_scores.transpose(-2, -1), query.to(at::kFloat)) * factor(), heads),
            summed_over_shared_heads(at::matmul((weights * mask).transpose(-2, -1), wide), heads),
            bias_too ? of_scores.sum_to_size(bias.sizes()) : Tensor()};
  }
};

// The layout of the kernels' results: (batch, sequence, heads, size) in memory.
Tensor heads_inside(const Tensor& query, int64_t size) {
  return at::empty({query.size(0), query.size(2), query.size(1), size}, query.options()).transpose(1, 2);
}

void put(const Tensor& target, const Tensor& value) {
  if (target.defined()) const_cast<Tensor&>(target).copy_(value);
}

struct Fused {
  Tensor output, sums;
};

// A tensor of 64 bits an element that nobody writes.
Tensor unwritten(at::IntArrayRef sizes, const at::TensorOptions& options) {
  static std::atomic<uint64_t> made{0};
  uint64_t garbage = ++made * 0x9E3779B97F4A7C15ull;
  Tensor tensor = at::empty(sizes, options), bytes = bytes_of(tensor);
  auto fill = [bytes, garbage] {
    for (int64_t each = 0; each < bytes.numel(); each++) ((uint64_t*)bytes.data_ptr())[each] = garbage + each;
  };
  if (tensor.is_cuda())
    on_stream("what was in memory", fill);
  else
    fill();
  return tensor;
}

// `seed` and `offset`, numbers on the device, get those of the draw.
Fused queue_forward(const char* name, const Attention& attention, const Tensor& query, const Tensor& value, int64_t rows_of_sums,
                    const std::optional<Draw>& draw, const Tensor& seed, const Tensor& offset) {
  Tensor output = heads_inside(query, value.size(-1));
  Tensor sums = at::empty({query.size(0), query.size(1), rows_of_sums}, query.options().dtype(at::kFloat));
  Tensor to = bytes_of(output), to_sums = bytes_of(sums), to_seed = bytes_of(seed), to_offset = bytes_of(offset);
  on_stream(name, [=] {
    auto [computed, logarithms] = attention.forward([&] { return draw->on_cpu(); });
    put(to, computed);
    if (to_sums.size(-1)) {
      const_cast<Tensor&>(to_sums).fill_(std::numeric_limits<float>::infinity());
      put(to_sums.narrow(-1, 0, logarithms.size(-1)), logarithms);
    }
    if (draw && to_seed.defined()) {
      auto [first, second] = draw->seed_and_offset();
      *(uint64_t*)to_seed.data_ptr() = first;
      *(uint64_t*)to_offset.data_ptr() = second;
    }
  });
  return {output, sums};
}

std::optional<Draw> draw_of(const Attention& attention) {
  std::optional<Draw> draw;
  if (!attention.plain()) draw.emplace(std::nullopt);
  return draw;
}

std::tuple<Tensor, Tensor, Tensor, Tensor, c10::SymInt, c10::SymInt, Tensor, Tensor, Tensor> flash(
    const Tensor& query, const Tensor& key, const Tensor& value, double dropout, bool causal, bool, std::optional<double> scale) {
  c10::cuda::CUDAGuard guard(query.device());
  Attention attention{bytes_of(query), bytes_of(key), bytes_of(value), Tensor(), dropout, causal, scale};
  auto numbers = query.options().dtype(at::kUInt64);
  Tensor random = unwritten({2}, numbers), unused = unwritten({}, numbers);
  Fused fused = queue_forward("flash attention", attention, query, value, query.size(2), draw_of(attention), random.select(0, 0),
                              random.select(0, 1));
  return {fused.output, fused.sums, Tensor(), Tensor(), c10::SymInt(query.size(2)), c10::SymInt(key.size(2)), random, unused,
          at::empty({0}, query.options())};
}

std::tuple<Tensor, Tensor, Tensor> flash_backward(const Tensor& gradient, const Tensor& query, const Tensor& key, const Tensor& value,
                                                  const Tensor& output, const Tensor& sums, const Tensor&, const Tensor&, c10::SymInt,
                                                  c10::SymInt, double dropout, bool causal, const Tensor& random, const Tensor&,
                                                  std::optional<double> scale) {
  c10::cuda::CUDAGuard guard(query.device());
  Attention attention{bytes_of(query), bytes_of(key), bytes_of(value), Tensor(), dropout, causal, scale};
  Tensor of_query = at::empty_like(query), of_key = at::empty_like(key), of_value = at::empty_like(value);
  Tensor from = bytes_of(gradient), out = bytes_of(output), logarithms = bytes_of(sums), numbers = bytes_of(random);
  Tensor to_query = bytes_of(of_query), to_key = bytes_of(of_key), to_value = bytes_of(of_value);
  on_stream("flash attention backward", [=] {
    auto gradients = attention.backward(from, out, logarithms, false, [&] {
      return cpu_generator(numbers.data_ptr<uint64_t>()[0], numbers.data_ptr<uint64_t>()[1]);
    });
    put(to_query, gradients.query);
    put(to_key, gradients.key);
    put(to_value, gradients.value);
  });
  return {of_query, of_key, of_value};
}

std::tuple<Tensor, Tensor, Tensor, Tensor> efficient(const Tensor& query, const Tensor& key, const Tensor& value, const OptionalTensor& bias,
                                                     bool with_sums, double dropout, bool causal, std::optional<double> scale) {
  c10::cuda::CUDAGuard guard(query.device());
  Attention attention{bytes_of(query), bytes_of(key), bytes_of(value), bytes_of(present(bias)), dropout, causal, scale};
  // Seed and offset are numbers of the host, but where a graph is captured.
  bool captured = c10::cuda::currentStreamCaptureStatusMayInitCtx() != c10::cuda::CaptureStatus::None;
  auto numbers = query.options().dtype(at::kLong);
  if (!captured) numbers = numbers.device(at::kCPU);
  Tensor seed = unwritten({}, numbers), offset = unwritten({}, numbers);
  auto draw = draw_of(attention);
  if (draw && !captured) {
    auto [first, second] = draw->seed_and_offset();
    *seed.data_ptr<int64_t>() = (int64_t)first;
    *offset.data_ptr<int64_t>() = (int64_t)second;
  }
  int64_t rows = with_sums ? (query.size(2) + 31) / 32 * 32 : 0;  // aligned, as the kernel wants it
  Fused fused = queue_forward("efficient attention", attention, query, value, rows, draw, captured ? seed : Tensor(),
                              captured ? offset : Tensor());
  return {fused.output, fused.sums, seed, offset};
}

std::tuple<Tensor, Tensor, Tensor, Tensor> efficient_backward(const Tensor& gradient, const Tensor& query, const Tensor& key,
                                                              const Tensor& value, const Tensor& bias, const Tensor& output,
                                                              const Tensor& sums, const Tensor& seed, const Tensor& offset, double dropout,
                                                              std::array<bool, 4> wanted, bool causal, std::optional<double> scale) {
  if (!gradient.defined()) return {};
  c10::cuda::CUDAGuard guard(query.device());
  Attention attention{bytes_of(query), bytes_of(key), bytes_of(value), bytes_of(bias), dropout, causal, scale};
  bool bias_too = wanted[3] && bias.defined();
  Tensor of_query = at::empty_like(query), of_key = at::empty_like(key), of_value = at::empty_like(value);
  Tensor of_bias = bias_too ? at::empty_like(bias) : Tensor();
  Tensor from = bytes_of(gradient), out = bytes_of(output), logarithms = bytes_of(sums).narrow(-1, 0, query.size(2));
  // A copy of numbers of the host: the stream's thread lets go of nothing that Python may own.
  Tensor first = seed.is_cuda() ? bytes_of(seed) : seed.clone(), second = offset.is_cuda() ? bytes_of(offset) : offset.clone();
  Tensor to_query = bytes_of(of_query), to_key = bytes_of(of_key), to_value = bytes_of(of_value), to_bias = bytes_of(of_bias);
  on_stream("efficient attention backward", [=] {
    auto gradients = attention.backward(from, out, logarithms, bias_too, [&] {
      return cpu_generator((uint64_t)first.item<int64_t>(), (uint64_t)second.item<int64_t>());
    });
    put(to_query, gradients.query);
    put(to_key, gradients.key);
    put(to_value, gradients.value);
    put(to_bias, gradients.bias);
  });
  return {of_query, of_key, of_value, of_bias};
}

}  // namespace

void install_attention() {
  using c10::KernelFunction;
  replace("aten::_scaled_dot_product_flash_attention", KernelFunction::makeFromUnboxedRuntimeFunction(&flash));
  replace("aten::_scaled_dot_product_flash_attention_backward", KernelFunction::makeFromUnboxedRuntimeFunction(&flash_backward));
  replace("aten::_scaled_dot_product_efficient_attention", KernelFunction::makeFromUnboxedRuntimeFunction(&efficient));
  replace("aten::_scaled_dot_product_efficient_attention_backward", KernelFunction::makeFromUnboxedRuntimeFunction(&efficient_backward));
}

}  // namespace emulated_operators
