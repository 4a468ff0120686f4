// Errors: the last one of each thread, and those of a device, which stay until the process ends.
#include "emulation.h"

#include <cstdio>

namespace emulated {
namespace {
thread_local cudaError_t last_error = cudaSuccess;
std::atomic<int> device_errors[MOST_DEVICES];
}  // namespace

cudaError_t failed(cudaError_t error) {
  if (error != cudaSuccess) last_error = error;
  return error;
}

cudaError_t unrecoverable(int device) { return (cudaError_t)device_errors[device].load(); }

void fail_device(int device, cudaError_t error) {
  int none = cudaSuccess;
  device_errors[device].compare_exchange_strong(none, error);
}

}  // namespace emulated

using namespace emulated;

// An unrecoverable error of the device is not forgotten by reading it.
EXPORT cudaError_t cudaGetLastError() {
  CALL(cudaGetLastError)
  cudaError_t error = last_error;
  last_error = cudaSuccess;
  if (cudaError_t broken = unrecoverable(current_device())) return broken;
  return error;
}

EXPORT cudaError_t cudaPeekAtLastError() {
  CALL(cudaPeekAtLastError)
  if (cudaError_t broken = unrecoverable(current_device())) return broken;
  return last_error;
}

namespace {
struct Named {
  cudaError_t error;
  const char* name;
  const char* text;
};
// Names are those of driver_types.h; the sentences are ours.
const Named NAMES[] = {
#define ERROR(error, text) {error, #error, text}
    ERROR(cudaSuccess, "no error"),
    ERROR(cudaErrorInvalidValue, "invalid argument"),
    ERROR(cudaErrorMemoryAllocation, "out of memory"),
    ERROR(cudaErrorInitializationError, "initialization error"),
    ERROR(cudaErrorCudartUnloading, "driver shutting down"),
    ERROR(cudaErrorInvalidDevice, "invalid device ordinal"),
    ERROR(cudaErrorNoDevice, "no CUDA-capable device is detected"),
    ERROR(cudaErrorInvalidResourceHandle, "invalid resource handle"),
    ERROR(cudaErrorNotReady, "device not ready"),
    ERROR(cudaErrorIllegalAddress, "an illegal memory access was encountered"),
    ERROR(cudaErrorIllegalState, "the operation cannot be performed in the present state"),
    ERROR(cudaErrorPeerAccessAlreadyEnabled, "peer access is already enabled"),
    ERROR(cudaErrorPeerAccessNotEnabled, "peer access has not been enabled"),
    ERROR(cudaErrorPeerAccessUnsupported, "peer access is not supported between these two devices"),
    ERROR(cudaErrorHostMemoryAlreadyRegistered, "part or all of the requested memory range is already mapped"),
    ERROR(cudaErrorHostMemoryNotRegistered, "pointer does not correspond to a registered memory region"),
    ERROR(cudaErrorAssert, "device-side assert triggered"),
    ERROR(cudaErrorLaunchFailure, "unspecified launch failure"),
    ERROR(cudaErrorNotSupported, "operation not supported"),
    ERROR(cudaErrorNoKernelImageForDevice, "no kernel image is available for execution on the device"),
    ERROR(cudaErrorInvalidDeviceFunction, "invalid device function"),
    ERROR(cudaErrorStreamCaptureUnsupported, "operation not permitted when stream is capturing"),
    ERROR(cudaErrorStreamCaptureInvalidated, "operation failed due to a previous error during capture"),
    ERROR(cudaErrorStreamCaptureMerge, "operation would result in a merge of separate capture sequences"),
    ERROR(cudaErrorStreamCaptureUnmatched, "capture was not ended in the same stream as it began"),
    ERROR(cudaErrorStreamCaptureUnjoined, "capturing stream has unjoined work"),
    ERROR(cudaErrorStreamCaptureIsolation, "dependency created on uncaptured work in another stream"),
    ERROR(cudaErrorStreamCaptureImplicit, "operation would make the legacy stream depend on a capturing blocking stream"),
    ERROR(cudaErrorStreamCaptureWrongThread, "attempt to terminate a thread-local capture sequence from another thread"),
    ERROR(cudaErrorCapturedEvent, "operation not permitted on an event last recorded in a capturing stream"),
    ERROR(cudaErrorUnknown, "unknown error"),
#undef ERROR
};
}  // namespace

EXPORT const char* cudaGetErrorName(cudaError_t error) {
  for (const Named& named : NAMES)
    if (named.error == error) return named.name;
  return "unrecognized error code";
}

EXPORT const char* cudaGetErrorString(cudaError_t error) {
  for (const Named& named : NAMES)
    if (named.error == error) return named.text;
  return "unrecognized error code";
}
