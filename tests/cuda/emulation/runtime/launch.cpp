// Kernels that are compiled into a program. Machine code of a device cannot run here: of torch's own kernels those are known whose
// body stands below, by their name; another one fails with cudaErrorNoKernelImageForDevice, and EMULATED_TRACE says its name.
#include "emulation.h"

#include <dlfcn.h>
#include <strings.h>

#include <cstring>

namespace emulated {

std::function<void()> kernel_named(const std::string& name, void** arguments) {
  // torch.cuda._sleep: cycles of the device's clock.
  if (name.find("spin_kernel") != std::string::npos) {
    int64_t cycles = *(int64_t*)arguments[0];
    return [cycles] { sleep_until(now() + (double)cycles / (setting("clock_ghz") * 1e9)); };
  }
  return nullptr;
}

namespace {

struct Kernels {
  std::mutex mutex;
  std::map<const void*, std::string> names;  // by the address of the function that stands for a kernel on the host
};

Kernels& kernels() {
  static Kernels* all = new Kernels;
  return *all;
}

struct Configuration {
  dim3 grid, block;
  size_t shared;
  void* stream;
};
thread_local std::vector<Configuration> pushed;  // of `kernel<<<...>>>`, until the kernel's host function asks for it

std::string name_of(const void* function) {
  std::lock_guard<std::mutex> lock(kernels().mutex);
  auto found = kernels().names.find(function);
  return found == kernels().names.end() ? "" : found->second;
}

cudaError_t launch(const void* function, void** arguments, cudaStream_t handle) {
  if (cudaError_t broken = enter_context(current_device())) return broken;
  StreamPointer stream = stream_of(handle);
  if (!stream || stream->device != current_device()) return cudaErrorInvalidResourceHandle;
  std::string name = name_of(function);
  if (name.empty()) return cudaErrorInvalidDeviceFunction;
  auto body = kernel_named(name, arguments);
  if (!body) {
    count(("refused kernel:" + name).c_str());
    trace("kernel %s cannot run", name.c_str());
    return cudaErrorNoKernelImageForDevice;
  }
  return submit(stream, Work{Kind::kernel, name, body});
}

}  // namespace
}  // namespace emulated

using namespace emulated;

// What nvcc has a program call when it starts, and for `<<<...>>>`.
EXPORT void** __cudaRegisterFatBinary(void*) {
  static void* registered;
  return &registered;
}
EXPORT void __cudaRegisterFatBinaryEnd(void**) {}
EXPORT void __cudaUnregisterFatBinary(void**) {}
EXPORT void __cudaRegisterVar(void**, char*, char*, const char*, int, size_t, int, int) {}
EXPORT void __cudaRegisterManagedVar(void**, void**, char*, const char*, int, size_t, int, int) {}
EXPORT char __cudaInitModule(void**) { return 0; }
EXPORT void __cudaRegisterFunction(void**, const char* host, char*, const char* name, int, void*, void*, void*, void*, int*) {
  std::lock_guard<std::mutex> lock(kernels().mutex);
  kernels().names[host] = name;
}

EXPORT unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared, void* stream) {
  pushed.push_back({grid, block, shared, stream});
  return 0;
}

EXPORT cudaError_t __cudaPopCallConfiguration(dim3* grid, dim3* block, size_t* shared, void* stream) {
  if (pushed.empty()) return failed(cudaErrorInvalidConfiguration);
  Configuration configuration = pushed.back();
  pushed.pop_back();
  *grid = configuration.grid;
  *block = configuration.block;
  *shared = configuration.shared;
  *(void**)stream = configuration.stream;
  return cudaSuccess;
}

// A kernel's handle is the address of its host function.
EXPORT cudaError_t __cudaGetKernel(cudaKernel_t* kernel, const void* function) {
  *kernel = (cudaKernel_t)function;
  return cudaSuccess;
}

EXPORT cudaError_t __cudaLaunchKernel(cudaKernel_t kernel, dim3, dim3, void** arguments, size_t, cudaStream_t stream) {
  CALL(cudaLaunchKernel)
  return failed(launch((const void*)kernel, arguments, stream));
}

EXPORT cudaError_t cudaLaunchKernel(const void* function, dim3, dim3, void** arguments, size_t, cudaStream_t stream) {
  CALL(cudaLaunchKernel)
  return failed(launch(function, arguments, stream));
}

EXPORT cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t* configuration, const void* function, void** arguments) {
  CALL(cudaLaunchKernel)
  return failed(launch(function, arguments, configuration->stream));
}

// Functions of the driver, which lies beside this library.
namespace {
void* driver_function(const char* name) {
  static void* driver = dlopen("libcuda.so.1", RTLD_NOW);
  if (!driver) return nullptr;
  for (const char* suffix : {"_v3", "_v2", ""})
    if (void* function = dlsym(driver, (std::string(name) + suffix).c_str())) return function;
  return nullptr;
}
}  // namespace

EXPORT cudaError_t cudaGetDriverEntryPointByVersion(const char* name, void** function, unsigned, unsigned long long,
                                                    cudaDriverEntryPointQueryResult* result) {
  CALL(cudaGetDriverEntryPoint)
  *function = driver_function(name);
  if (result) *result = *function ? cudaDriverEntryPointSuccess : cudaDriverEntryPointSymbolNotFound;
  if (!*function) {
    count((std::string("refused call:") + name).c_str());
    trace("the driver has no %s", name);
  }
  return *function || result ? cudaSuccess : failed(cudaErrorNotSupported);
}
