// Operators of torch for the CUDA key: the shape of a result comes from the meta kernel, the computation runs on the CPU's kernel, on
// the stream. So it is asynchronous and ordered as on a GPU, and its bits are those of the CPU.
#include "operators.h"

#include <ATen/Parallel.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <c10/cuda/CUDAStream.h>
#include <cuda_runtime_api.h>

#include <cstdio>
#include <mutex>
#include <set>
#include <unordered_map>
#include <unordered_set>

extern "C" int emulated_launch(void*, const char*, void (*)(void*), void (*)(void*), void*);
extern "C" void* emulated_host_address(const void*);
extern "C" void emulated_fail(int device, int error);
extern "C" void emulated_count(const char* name, long amount);

namespace emulated_operators {

using at::Tensor;
using c10::IValue;
using c10::OperatorHandle;
using torch::jit::Stack;

void on_stream(const std::string& name, std::function<void()> work) {
  auto stream = c10::cuda::getCurrentCUDAStream();
  int device = stream.device_index();
  auto* guarded = new std::function<void()>([work = std::move(work), name, device] {
    // One thread computes: how a sum is divided among threads shows in its bits.
    static thread_local bool alone = (at::set_num_threads(1), true);
    (void)alone;
    try {
      at::AutoDispatchBelowADInplaceOrView below;
      work();
    } catch (const std::exception& error) {
      auto* of_torch = dynamic_cast<const c10::Error*>(&error);
      const char* text = of_torch ? of_torch->what_without_backtrace() : error.what();
      fprintf(stderr, "emulated CUDA device %d: %s failed: %s\n", device, name.c_str(), text);
      emulated_fail(device, cudaErrorAssert);
    }
  });
  auto run = [](void* work) { (*(std::function<void()>*)work)(); };
  auto drop = [](void* work) { delete (std::function<void()>*)work; };
  C10_CUDA_CHECK((cudaError_t)emulated_launch((void*)stream.stream(), name.c_str(), run, drop, guarded));
}

void wait_for_stream() { C10_CUDA_CHECK(cudaStreamSynchronize(c10::cuda::getCurrentCUDAStream().stream())); }

Tensor bytes_of(const Tensor& tensor) {
  if (!tensor.defined() || !tensor.is_cuda()) return tensor;
  TORCH_CHECK(tensor.layout() == at::kStrided, "emulated CUDA: tensors of layout ", tensor.layout(), " are not supported");
  auto options = tensor.options().device(at::kCPU).requires_grad(false).pinned_memory(false);
  Tensor bytes;
  int64_t elements = (int64_t)(tensor.storage().nbytes() / tensor.itemsize());
  if (elements == 0 || tensor.numel() == 0)
    bytes = at::empty_strided(tensor.sizes(), tensor.strides(), options);
  else
    bytes = at::from_blob(emulated_host_address(tensor.storage().mutable_data()), {elements}, options)
                .as_strided(tensor.sizes(), tensor.strides(), tensor.storage_offset());
  if (tensor.is_conj()) bytes._set_conj(true);
  if (tensor.is_neg()) bytes._set_neg(true);
  return bytes;
}

namespace {

Tensor meta_of(const Tensor& tensor) {
  if (!tensor.defined() || (tensor.is_cpu() && tensor.dim() == 0)) return tensor;
  auto meta = at::empty_strided(tensor.sizes(), tensor.strides(), tensor.options().device(at::kMeta).requires_grad(false).pinned_memory(false));
  if (tensor.is_conj()) meta._set_conj(true);
  if (tensor.is_neg()) meta._set_neg(true);
  if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) meta.unsafeGetTensorImpl()->set_wrapped_number(true);
  return meta;
}

template <class Function>
IValue each_tensor(const IValue& value, Function function) {
  if (value.isTensor()) return IValue(function(value.toTensor()));
  if (value.isTensorList()) {
    c10::List<Tensor> tensors;
    for (const Tensor& tensor : value.toTensorVector()) tensors.push_back(function(tensor));
    return IValue(tensors);
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<Tensor>> tensors;
    for (const std::optional<Tensor>& tensor : value.toOptionalTensorVector())
      tensors.push_back(tensor.has_value() ? std::optional<Tensor>(function(*tensor)) : tensor);
    return IValue(tensors);
  }
  return value;
}

// What the schema of an operator says, read once.
struct Schema {
  std::string name;
  size_t arguments;
  std::vector<bool> written, generator;
  std::vector<int> returned;  // for each result, the argument that it is; -1: a new tensor
  bool random = false, in_place = true, indexes = false;
  const char* alert = nullptr;  // the name in the error of an operator whose kernel for CUDA has no deterministic version
};

// Those that alert whatever their arguments are, and the names that they give (as found in libtorch_cuda.so 2.14.1).
const char* without_deterministic_version(const std::string& name) {
  static const std::unordered_map<std::string, const char*> names = {
      {"_adaptive_avg_pool2d_backward", "adaptive_avg_pool2d_backward_cuda"},
      {"_adaptive_avg_pool3d_backward", "adaptive_avg_pool3d_backward_cuda"},
      {"adaptive_max_pool2d_backward", "adaptive_max_pool2d_backward_cuda"},
      {"avg_pool3d_backward", "avg_pool3d_backward_cuda"},
      {"max_pool3d_with_indices_backward", "max_pool3d_with_indices_backward_cuda"},
      {"fractional_max_pool2d_backward", "fractional_max_pool2d_backward_cuda"},
      {"fractional_max_pool3d_backward", "fractional_max_pool3d_backward_cuda"},
      {"max_unpool2d", "max_unpooling2d_forward_out"},
      {"max_unpool3d", "max_unpooling3d_forward_out"},
      {"upsample_linear1d_backward", "upsample_linear1d_backward_out_cuda"},
      {"upsample_bilinear2d_backward", "upsample_bilinear2d_backward_out_cuda"},
      {"upsample_bicubic2d_backward", "upsample_bicubic2d_backward_out_cuda"},
      {"upsample_trilinear3d_backward", "upsample_trilinear3d_backward_out_cuda"},
      {"reflection_pad1d_backward", "reflection_pad1d_backward_out_cuda"},
      {"reflection_pad3d_backward", "reflection_pad3d_backward_out_cuda"},
      {"replication_pad1d_backward", "replication_pad1d_backward_cuda"},
      {"replication_pad2d_backward", "replication_pad2d_backward_cuda"},
      {"replication_pad3d_backward", "replication_pad3d_backward_cuda"},
      {"_ctc_loss_backward", "ctc_loss_backward_gpu"},
      {"grid_sampler_2d_backward", "grid_sampler_2d_backward_cuda"},
      {"grid_sampler_3d_backward", "grid_sampler_3d_backward_cuda"}};
  auto found = names.find(name.substr(0, name.find('.')).substr(name.rfind("::") + 2));
  return found == names.end() ? nullptr : found->second;
}

const Schema& schema_of(const OperatorHandle& op) {
  static std::mutex mutex;
  static auto* known = new std::unordered_map<std::string, Schema>;
  std::string name = toString(op.operator_name());
  std::lock_guard<std::mutex> lock(mutex);
  auto found = known->find(name);
  if (found != known->end()) return found->second;
  Schema schema{name};
  const auto& declared = op.schema();
  schema.arguments = declared.arguments().size();
  for (const auto& argument : declared.arguments()) {
    schema.written.push_back(argument.alias_info() && argument.alias_info()->isWrite());
    schema.generator.push_back(argument.type()->str().find("Generator") != std::string::npos);
    schema.random = schema.random || schema.generator.back();
  }
  for (const auto& result : declared.returns()) {
    int is = -1;
    if (result.alias_info() && result.alias_info()->isWrite())
      for (size_t each = 0; each < schema.arguments; each++)
        if (schema.written[each] && *declared.arguments()[each].alias_info() == *result.alias_info()) is = (int)each;
    schema.returned.push_back(is);
    schema.in_place = schema.in_place && is >= 0;
  }
  schema.indexes = name.find("index") != std::string::npos;
  schema.alert = without_deterministic_version(name);
  return known->emplace(name, std::move(schema)).first->second;
}

// Normalisations: torch's kernels for CUDA keep statistics in float beside inputs in half precision, which those of the CPU do not
// take; they get all in float.
bool mixed_statistics(const std::string& name) {
  return name.find("layer_norm_backward") != std::string::npos || name.find("group_norm_backward") != std::string::npos ||
         name.find("batch_norm") != std::string::npos;
}

Tensor in_float(const Tensor& tensor) {
  bool half = tensor.defined() && (tensor.scalar_type() == at::kHalf || tensor.scalar_type() == at::kBFloat16);
  return half ? tensor.to(at::kFloat) : tensor;
}

void store(const IValue& target, const IValue& value) {
  if (target.isTensor()) {
    const Tensor& tensor = target.toTensor();
    if (tensor.defined() && tensor.numel()) const_cast<Tensor&>(tensor).copy_(value.toTensor());
  } else if (target.isTensorList()) {
    auto targets = target.toTensorVector(), values = value.toTensorVector();
    for (size_t each = 0; each < targets.size(); each++)
      if (targets[each].defined() && targets[each].numel()) targets[each].copy_(values[each]);
  }
}

Stack computed(const OperatorHandle& op, const std::vector<IValue>& inputs, const std::vector<std::pair<size_t, Draw>>& draws,
               const Schema& schema) {
  Stack values(inputs.begin(), inputs.end());
  for (const auto& draw : draws) values[draw.first] = IValue(draw.second.on_cpu());
  if (mixed_statistics(schema.name))
    for (IValue& value : values) value = each_tensor(value, in_float);
  op.callBoxed(&values);
  return values;
}

struct BelowAll {  // neither autograd nor autocast nor modes of Python see the kernels that an operator calls
  at::AutoDispatchBelowADInplaceOrView below;
  c10::impl::ExcludeDispatchKeyGuard autocast{c10::autocast_dispatch_keyset};
};

void run_operator(const OperatorHandle& op, Stack* stack) {
  const Schema& schema = schema_of(op);
  if (schema.alert) at::globalContext().alertNotDeterministic(schema.alert);
  size_t base = stack->size() - schema.arguments;
  std::vector<IValue> arguments(stack->begin() + base, stack->end());

  // 1. The device: that of all tensors on one.
  std::optional<c10::Device> device;
  for (const IValue& argument : arguments) {
    each_tensor(argument, [&](const Tensor& tensor) {
      if (tensor.defined() && tensor.is_cuda()) {
        TORCH_CHECK(!device || *device == tensor.device(), "Expected all tensors to be on the same device, but found at least two devices, ",
                    *device, " and ", tensor.device(), "! (", schema.name, ")");
        device = tensor.device();
      }
      return tensor;
    });
    if (!device && argument.isDevice() && argument.toDevice().is_cuda()) device = argument.toDevice();
  }
  c10::cuda::OptionalCUDAGuard guard;
  if (device)
    guard.set_device(*device);
  else
    device = c10::Device(at::kCUDA, c10::cuda::current_device());

  // 2. What the CPU's kernel gets: memory of the device as it is, values of the host as they are now.
  auto to_cpu = [&](const IValue& argument) {
    if (argument.isDevice()) return IValue(c10::Device(at::kCPU));
    return each_tensor(argument, [&](const Tensor& tensor) {
      if (!tensor.defined() || tensor.is_cuda()) return bytes_of(tensor);
      TORCH_CHECK(tensor.dim() == 0 || tensor.numel() == 0 || schema.indexes,
                  "Expected all tensors to be on the same device, but found at least two devices, ", *device, " and cpu! (", schema.name, ")");
      // A copy, also of a number: what Python has made, the stream's thread must not let go of. It would wait for the GIL, whose holder may
      // wait for the stream.
      Tensor copy = tensor.clone();
      if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) copy.unsafeGetTensorImpl()->set_wrapped_number(true);
      return copy;
    });
  };
  std::vector<IValue> inputs;
  for (const IValue& argument : arguments) inputs.push_back(to_cpu(argument));
  std::vector<std::pair<size_t, Draw>> draws;
  for (size_t each = 0; each < schema.arguments; each++)
    if (schema.generator[each])
      draws.emplace_back(each, Draw(arguments[each].isNone() ? std::nullopt : std::optional<at::Generator>(arguments[each].toGenerator())));

  // 3. Shapes of the results, and of arguments that the operator resizes.
  bool known = true;
  Stack results;
  std::vector<IValue> metas;
  if (!schema.returned.empty()) {
    try {
      BelowAll below;
      for (size_t each = 0; each < schema.arguments; each++) {
        if (schema.generator[each])
          metas.push_back(IValue());
        else
          metas.push_back(arguments[each].isDevice() ? IValue(c10::Device(at::kMeta)) : each_tensor(arguments[each], meta_of));
      }
      results = Stack(metas.begin(), metas.end());
      op.callBoxed(&results);
      for (const IValue& result : results) {
        if (!result.isTensor() && !result.isTensorList() && !result.isNone()) known = false;
        if (result.isTensor() && result.toTensor().defined() && !result.toTensor().is_meta()) known = false;
      }
    } catch (const std::exception&) {
      known = false;
      metas.clear();
    }
  }

  std::vector<IValue> outputs;
  // 4. The shape depends on values, or nobody knows it without the computation: the host waits.
  if (!known && !schema.in_place) {
    emulated_count("synchronous operators", 1);
    emulated_count(("synchronous operator:" + schema.name).c_str(), 1);
    wait_for_stream();
    Stack values;
    {
      BelowAll below;
      values = computed(op, inputs, draws, schema);
    }
    for (size_t each = 0; each < values.size(); each++) {
      if (schema.returned[each] >= 0) {
        // It may have been resized on the CPU.
        const IValue& argument = arguments[schema.returned[each]];
        if (argument.isTensor() && argument.toTensor().sizes() != values[each].toTensor().sizes()) {
          Tensor target = argument.toTensor();
          target.resize_(values[each].toTensor().sizes());
          bytes_of(target).copy_(values[each].toTensor());
        }
        outputs.push_back(argument);
        continue;
      }
      outputs.push_back(each_tensor(values[each], [&](const Tensor& tensor) {
        if (!tensor.defined()) return tensor;
        Tensor output = at::empty_strided(tensor.sizes(), tensor.strides(), tensor.options().device(*device));
        if (tensor.numel()) bytes_of(output).copy_(tensor);
        return output;
      }));
    }
    stack->resize(base);
    for (IValue& output : outputs) stack->push_back(std::move(output));
    return;
  }

  // 5. Else it is queued.
  for (size_t each = 0; each < schema.arguments && !metas.empty(); each++) {
    if (!schema.written[each] || !arguments[each].isTensor() || !metas[each].isTensor()) continue;
    Tensor target = arguments[each].toTensor(), meta = metas[each].toTensor();
    if (!target.defined() || !target.is_cuda() || target.sizes() == meta.sizes()) continue;
    target.resize_(meta.sizes());
    if (target.strides() != meta.strides()) target.as_strided_(meta.sizes(), meta.strides());
    inputs[each] = IValue(bytes_of(target));
  }
  std::vector<IValue> targets;
  for (size_t each = 0; each < schema.returned.size(); each++) {
    if (schema.returned[each] >= 0) {
      outputs.push_back(arguments[schema.returned[each]]);
      targets.push_back(IValue());
      continue;
    }
    outputs.push_back(each_tensor(results[each], [&](const Tensor& tensor) {
      return tensor.defined() ? at::empty_strided(tensor.sizes(), tensor.strides(), tensor.options().device(*device)) : tensor;
    }));
    targets.push_back(each_tensor(outputs.back(), bytes_of));
  }
  auto queued = [op, inputs, draws, targets, &schema] {
    Stack values = computed(op, inputs, draws, schema);
    for (size_t each = 0; each < targets.size(); each++)
      if (!targets[each].isNone()) store(targets[each], values[each]);
  };
  on_stream(schema.name, queued);
  stack->resize(base);
  for (IValue& output : outputs) stack->push_back(std::move(output));
}

std::vector<c10::RegistrationHandleRAII>& registrations() {
  static auto* all = new std::vector<c10::RegistrationHandleRAII>;
  return *all;
}

// Operators that only make, resize or describe tensors: torch's own work on any memory.
const std::set<std::string>& own_of_torch() {
  static const std::set<std::string> names = {
      "aten::empty", "aten::empty_strided", "aten::resize_", "aten::set_", "aten::record_stream", "aten::is_set_to", "aten::_pin_memory",
      "aten::is_pinned", "aten::resize_as_", "aten::_efficientzerotensor", "aten::lift_fresh", "aten::_has_compatible_shallow_copy_type",
      "aten::_fused_sdp_choice", "aten::_cudnn_init_dropout_state", "aten::_nested_view_from_buffer"};
  return names;
}

int replaced = 0;

std::unordered_set<c10::OperatorName>& with_own_kernel() {
  static auto* all = new std::unordered_set<c10::OperatorName>;
  return *all;
}

// torch warns of a kernel that takes another's place: here each does.
class Silent : public c10::WarningHandler {
  void process(const c10::Warning&) override {}
};

}  // namespace

void replace(const char* name, c10::KernelFunction kernel, const char* overload) {
  c10::OperatorName whole(name, overload);
  with_own_kernel().insert(whole);
  registrations().push_back(c10::Dispatcher::singleton().registerImpl(whole, c10::DispatchKey::CUDA, std::move(kernel), std::nullopt, nullptr,
                                                                      "emulated"));
  replaced++;
}

}  // namespace emulated_operators

// Registers all operators; returns how many.
extern "C" __attribute__((visibility("default"))) int emulated_install_operators() {
  using namespace emulated_operators;
  Silent silent;
  c10::WarningUtils::WarningHandlerGuard guard(&silent);
  install_copies();
  install_random();
  install_attention();
  install_norms();
  install_assertions();
  auto& dispatcher = c10::Dispatcher::singleton();
  for (const auto& name : dispatcher.getAllOpNames()) {
    if (name.name.rfind("aten::", 0) != 0 || own_of_torch().count(name.name)) continue;
    if (with_own_kernel().count(name)) continue;
    auto op = dispatcher.findOp(name);
    if (!op || !op->hasSchema() || !op->hasKernelForDispatchKey(c10::DispatchKey::CUDA)) continue;
    bool view = false;
    for (const auto& result : op->schema().returns()) view = view || (result.alias_info() && !result.alias_info()->isWrite());
    if (view) continue;
    registrations().push_back(dispatcher.registerImpl(name, c10::DispatchKey::CUDA,
                                                      c10::KernelFunction::makeFromBoxedFunction<&run_operator>(), std::nullopt,
                                                      nullptr, "emulated"));
    replaced++;
  }
  return replaced;
}
