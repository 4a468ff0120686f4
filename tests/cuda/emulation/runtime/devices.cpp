// Devices: which one is current on a thread, their contexts, their properties, access to each other's memory.
#include "emulation.h"

#include <cstdio>
#include <cstring>

namespace emulated {
namespace {
thread_local int chosen = 0;
std::atomic<bool> contexts[MOST_DEVICES];
std::atomic<bool> peer_access[MOST_DEVICES][MOST_DEVICES];
}  // namespace

int current_device() { return chosen; }

void make_current(int device) { chosen = device; }

cudaError_t enter_context(int device) {
  contexts[device] = true;
  return unrecoverable(device);
}

bool has_context(int device) { return contexts[device]; }

bool peers(int device, int other) { return device == other || peer_access[device][other]; }

}  // namespace emulated

using namespace emulated;

EXPORT cudaError_t cudaGetDeviceCount(int* devices) {
  CALL(cudaGetDeviceCount)
  *devices = device_count();
  return *devices ? cudaSuccess : failed(cudaErrorNoDevice);
}

EXPORT cudaError_t cudaGetDevice(int* device) {
  CALL(cudaGetDevice)
  *device = current_device();
  return cudaSuccess;
}

// Since CUDA 12 this makes the context of the device at once.
EXPORT cudaError_t cudaSetDevice(int device) {
  CALL(cudaSetDevice)
  if (device < 0 || device >= device_count()) return failed(cudaErrorInvalidDevice);
  make_current(device);
  return failed(enter_context(device));
}

EXPORT cudaError_t cudaDriverGetVersion(int* version) {
  CALL(cudaDriverGetVersion)
  *version = 13000;
  return cudaSuccess;
}

EXPORT cudaError_t cudaRuntimeGetVersion(int* version) {
  CALL(cudaRuntimeGetVersion)
  *version = 13000;
  return cudaSuccess;
}

// Attributes that programs ask for one at a time; a property of cudaGetDeviceProperties has the same value.
EXPORT cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int device) {
  CALL(cudaDeviceGetAttribute)
  if (device < 0 || device >= device_count()) return failed(cudaErrorInvalidDevice);
  switch ((int)attribute) {
    case cudaDevAttrMaxThreadsPerBlock: *value = 1024; break;
    case cudaDevAttrMaxBlockDimX: case cudaDevAttrMaxBlockDimY: *value = 1024; break;
    case cudaDevAttrMaxBlockDimZ: *value = 64; break;
    case cudaDevAttrMaxGridDimX: *value = 2147483647; break;
    case cudaDevAttrMaxGridDimY: case cudaDevAttrMaxGridDimZ: *value = 65535; break;
    case cudaDevAttrMaxSharedMemoryPerBlock: *value = 48 << 10; break;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin: *value = 227 << 10; break;
    case cudaDevAttrMaxSharedMemoryPerMultiprocessor: *value = 228 << 10; break;
    case cudaDevAttrWarpSize: *value = 32; break;
    case cudaDevAttrMaxRegistersPerBlock: case cudaDevAttrMaxRegistersPerMultiprocessor: *value = 65536; break;
    case cudaDevAttrClockRate: *value = (int)(setting("clock_ghz") * 1e6); break;
    case cudaDevAttrMemoryClockRate: *value = 1000000; break;
    case cudaDevAttrGlobalMemoryBusWidth: *value = 5120; break;
    case cudaDevAttrMultiProcessorCount: *value = 8; break;
    case cudaDevAttrMaxThreadsPerMultiProcessor: *value = 2048; break;
    case cudaDevAttrL2CacheSize: *value = 32 << 20; break;
    case cudaDevAttrAsyncEngineCount: *value = 2; break;
    case cudaDevAttrUnifiedAddressing: *value = 1; break;
    case cudaDevAttrConcurrentKernels: *value = 1; break;
    case cudaDevAttrComputeCapabilityMajor: *value = 9; break;
    case cudaDevAttrComputeCapabilityMinor: *value = 0; break;
    case cudaDevAttrStreamPrioritiesSupported: *value = 1; break;
    case cudaDevAttrHostRegisterSupported: *value = 1; break;
    case cudaDevAttrCanUseHostPointerForRegisteredMem: *value = 1; break;
    case cudaDevAttrMemoryPoolsSupported: *value = 1; break;
    case cudaDevAttrPciBusId: *value = 1 + device; break;
    case cudaDevAttrHostNumaId: *value = 0; break;
    default: *value = 0;
  }
  return cudaSuccess;
}

EXPORT cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int device) {
  CALL(cudaGetDeviceProperties)
  if (device < 0 || device >= device_count()) return failed(cudaErrorInvalidDevice);
  auto attribute = [device](cudaDeviceAttr name) {
    int value = 0;
    cudaDeviceGetAttribute(&value, name, device);
    return value;
  };
  memset(properties, 0, sizeof *properties);
  snprintf(properties->name, sizeof properties->name, "Emulated CUDA device %d", device);
  memset(properties->uuid.bytes, device + 1, sizeof properties->uuid.bytes);
  properties->totalGlobalMem = memory_size();
  properties->sharedMemPerBlock = attribute(cudaDevAttrMaxSharedMemoryPerBlock);
  properties->sharedMemPerBlockOptin = attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin);
  properties->sharedMemPerMultiprocessor = attribute(cudaDevAttrMaxSharedMemoryPerMultiprocessor);
  properties->regsPerBlock = attribute(cudaDevAttrMaxRegistersPerBlock);
  properties->regsPerMultiprocessor = attribute(cudaDevAttrMaxRegistersPerMultiprocessor);
  properties->warpSize = attribute(cudaDevAttrWarpSize);
  properties->maxThreadsPerBlock = attribute(cudaDevAttrMaxThreadsPerBlock);
  properties->maxThreadsPerMultiProcessor = attribute(cudaDevAttrMaxThreadsPerMultiProcessor);
  properties->multiProcessorCount = attribute(cudaDevAttrMultiProcessorCount);
  properties->major = attribute(cudaDevAttrComputeCapabilityMajor);
  properties->minor = attribute(cudaDevAttrComputeCapabilityMinor);
  properties->l2CacheSize = attribute(cudaDevAttrL2CacheSize);
  properties->asyncEngineCount = attribute(cudaDevAttrAsyncEngineCount);
  properties->memoryBusWidth = attribute(cudaDevAttrGlobalMemoryBusWidth);
  properties->unifiedAddressing = 1;
  properties->concurrentKernels = 1;
  properties->streamPrioritiesSupported = 1;
  properties->hostRegisterSupported = 1;
  properties->canUseHostPointerForRegisteredMem = 1;
  properties->memoryPoolsSupported = 1;
  properties->pciBusID = attribute(cudaDevAttrPciBusId);
  int dimensions[] = {1024, 1024, 64}, grid[] = {2147483647, 65535, 65535};
  memcpy(properties->maxThreadsDim, dimensions, sizeof dimensions);
  memcpy(properties->maxGridSize, grid, sizeof grid);
  return cudaSuccess;
}

EXPORT cudaError_t cudaDeviceGetPCIBusId(char* text, int length, int device) {
  CALL(cudaDeviceGetPCIBusId)
  if (device < 0 || device >= device_count()) return failed(cudaErrorInvalidDevice);
  snprintf(text, length, "0000:%02x:00.0", device + 1);
  return cudaSuccess;
}

// A lower number is a higher priority.
EXPORT cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
  CALL(cudaDeviceGetStreamPriorityRange)
  if (least) *least = 0;
  if (greatest) *greatest = -5;
  return cudaSuccess;
}

EXPORT cudaError_t cudaDeviceCanAccessPeer(int* can, int device, int other) {
  CALL(cudaDeviceCanAccessPeer)
  if (device < 0 || other < 0 || device >= device_count() || other >= device_count())
    return failed(cudaErrorInvalidDevice);
  *can = device != other && setting("peers") != 0;
  return cudaSuccess;
}

EXPORT cudaError_t cudaDeviceEnablePeerAccess(int other, unsigned flags) {
  CALL_ON_DEVICE(cudaDeviceEnablePeerAccess)
  if (other < 0 || other >= device_count() || other == current_device()) return failed(cudaErrorInvalidDevice);
  if (flags) return failed(cudaErrorInvalidValue);
  if (!setting("peers")) return failed(cudaErrorPeerAccessUnsupported);
  if (peer_access[current_device()][other].exchange(true)) return failed(cudaErrorPeerAccessAlreadyEnabled);
  return cudaSuccess;
}

EXPORT cudaError_t cudaDeviceDisablePeerAccess(int other) {
  CALL_ON_DEVICE(cudaDeviceDisablePeerAccess)
  if (other < 0 || other >= device_count()) return failed(cudaErrorInvalidDevice);
  if (!peer_access[current_device()][other].exchange(false)) return failed(cudaErrorPeerAccessNotEnabled);
  return cudaSuccess;
}

EXPORT cudaError_t cudaDeviceSynchronize() {
  CALL_ON_DEVICE(cudaDeviceSynchronize)
  if (cudaError_t error = device_capturing_error(current_device())) return failed(error);
  count_wait("cudaDeviceSynchronize");
  wait_for_device(current_device());
  return failed(unrecoverable(current_device()));
}

EXPORT cudaError_t cudaProfilerStart() { return cudaSuccess; }
EXPORT cudaError_t cudaProfilerStop() { return cudaSuccess; }
