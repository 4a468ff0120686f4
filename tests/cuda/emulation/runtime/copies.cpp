// Copies and fills, by the kind of memory on each side, with the waits of the host that CUDA's "API synchronization behavior" lists:
// pinned memory and devices copy in the order of the stream; a copy to pageable memory returns when it has ended; a copy from
// pageable memory takes the bytes at once and goes on by itself (or later, where the device reads such memory: `pageable_late`).
#include "emulation.h"

#include <cstring>

namespace emulated {
namespace {

enum Direction { TO_DEVICE, FROM_DEVICE, IN_DEVICES, IN_HOST };

const char* BYTES[] = {"bytes:h2d", "bytes:d2h", "bytes:d2d", "bytes:h2h"};
const char* SPEED[] = {"h2d_gbps", "d2h_gbps", "d2d_gbps", ""};

// One copy at a time goes each way over the link of a device.
std::mutex& engine(int device, Direction direction) {
  static auto* engines = new std::mutex[MOST_DEVICES * 3];
  return engines[device * 3 + direction];
}

void move_bytes(void* target, const void* source, size_t size, Direction direction, int device) {
  double speed = direction == IN_HOST ? 0 : setting(SPEED[direction]);
  if (speed <= 0) {
    memmove(host_address(target), host_address(source), size);
    return;
  }
  std::lock_guard<std::mutex> lock(engine(device, direction));
  double begin = now();
  memmove(host_address(target), host_address(source), size);
  sleep_until(begin + size / (speed * 1e9));
}

struct Side {
  Range range;
  bool device;
};

Side side_of(const void* address) {
  Range range = range_of(address);
  return {range, range.place == Place::device};
}

// Whether [address, address + size) lies in what the runtime knows of. Mappings of virtual memory that follow each other count as one.
bool inside(Side side, const void* address, size_t size) {
  if (side.range.place == Place::pageable) return true;
  const char* end = (const char*)address + size;
  const char* reached = side.range.begin + side.range.size;
  while (reached < end) {
    Range next = range_of(reached);
    if (!side.device || next.place != Place::device || next.begin != reached || next.device != side.range.device) return false;
    reached = next.begin + next.size;
  }
  return true;
}

bool kind_agrees(cudaMemcpyKind kind, Side target, Side source) {
  switch (kind) {
    case cudaMemcpyHostToHost: return !target.device && !source.device;
    case cudaMemcpyHostToDevice: return target.device && !source.device;
    case cudaMemcpyDeviceToHost: return !target.device && source.device;
    case cudaMemcpyDeviceToDevice: return target.device && source.device;
    default: return true;
  }
}

cudaError_t copy(const char* call, void* target, const void* source, size_t size, cudaMemcpyKind kind, cudaStream_t handle) {
  StreamPointer stream = stream_of(handle);
  if (!stream) return cudaErrorInvalidResourceHandle;
  if (!size) return cudaSuccess;
  Side to = side_of(target), from = side_of(source);
  if (!inside(to, target, size) || !inside(from, source, size) || !kind_agrees(kind, to, from)) return cudaErrorInvalidValue;
  Direction direction = to.device ? (from.device ? IN_DEVICES : TO_DEVICE) : (from.device ? FROM_DEVICE : IN_HOST);
  count(BYTES[direction], (long)size);
  int device = stream->device;
  bool from_pageable = direction == TO_DEVICE && from.range.place == Place::pageable && !stream->capture;
  if (from_pageable) count("pageable copies");
  if (from_pageable && !setting("pageable_late")) {
    if (setting("pageable_wait")) {
      count_wait(call);
      stream->wait_for(stream->place());
    }
    auto staged = std::make_shared<std::string>((const char*)source, size);
    return submit(stream, Work{Kind::copy, call, [=] { move_bytes(target, staged->data(), size, direction, device); }});
  }
  cudaError_t error = submit(stream, Work{Kind::copy, call, [=] { move_bytes(target, source, size, direction, device); }});
  if (error) return error;
  bool waits = direction == IN_HOST || (direction == FROM_DEVICE && to.range.place == Place::pageable);
  if (direction == FROM_DEVICE && to.range.place == Place::pageable) count("pageable copies");
  if (waits && !stream->capture) {
    count_wait(call);
    stream->wait_for(stream->place());
    return unrecoverable(device);
  }
  return cudaSuccess;
}

cudaError_t fill(const char* call, void* target, int value, size_t size, cudaStream_t handle) {
  StreamPointer stream = stream_of(handle);
  if (!stream) return cudaErrorInvalidResourceHandle;
  if (!size) return cudaSuccess;
  Side to = side_of(target);
  if (to.range.place == Place::pageable || !inside(to, target, size)) return cudaErrorInvalidValue;
  return submit(stream, Work{Kind::copy, call, [=] { memset(host_address(target), value, size); }});
}

}  // namespace
}  // namespace emulated

using namespace emulated;

EXPORT cudaError_t cudaMemcpyAsync(void* target, const void* source, size_t size, cudaMemcpyKind kind, cudaStream_t stream) {
  CALL(cudaMemcpyAsync)
  return failed(copy("cudaMemcpyAsync", target, source, size, kind, stream));
}

// Waits for the copy, except within one device.
EXPORT cudaError_t cudaMemcpy(void* target, const void* source, size_t size, cudaMemcpyKind kind) {
  CALL_ON_DEVICE(cudaMemcpy)
  if (cudaError_t error = forbidden_by_capture()) return failed(error);
  cudaError_t error = copy("cudaMemcpy", target, source, size, kind, nullptr);
  if (error) return failed(error);
  if (!(side_of(target).device && side_of(source).device)) {
    StreamPointer stream = stream_of(nullptr);
    count_wait("cudaMemcpy");
    stream->wait_for(stream->place());
    return failed(unrecoverable(stream->device));
  }
  return cudaSuccess;
}

EXPORT cudaError_t cudaMemcpyPeerAsync(void* target, int, const void* source, int, size_t size, cudaStream_t stream) {
  CALL(cudaMemcpyPeerAsync)
  return failed(copy("cudaMemcpyPeerAsync", target, source, size, cudaMemcpyDeviceToDevice, stream));
}

EXPORT cudaError_t cudaMemcpy2DAsync(void* target, size_t target_pitch, const void* source, size_t source_pitch, size_t width,
                                     size_t height, cudaMemcpyKind kind, cudaStream_t stream) {
  CALL(cudaMemcpy2DAsync)
  if (width > target_pitch || width > source_pitch) return failed(cudaErrorInvalidValue);
  for (size_t row = 0; row < height; row++)
    if (cudaError_t error = copy("cudaMemcpy2DAsync", (char*)target + row * target_pitch, (const char*)source + row * source_pitch,
                                 width, kind, stream))
      return failed(error);
  return cudaSuccess;
}

EXPORT cudaError_t cudaMemsetAsync(void* target, int value, size_t size, cudaStream_t stream) {
  CALL(cudaMemsetAsync)
  return failed(fill("cudaMemsetAsync", target, value, size, stream));
}

EXPORT cudaError_t cudaMemset(void* target, int value, size_t size) {
  CALL_ON_DEVICE(cudaMemset)
  if (cudaError_t error = forbidden_by_capture()) return failed(error);
  return failed(fill("cudaMemset", target, value, size, nullptr));
}
