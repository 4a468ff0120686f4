// What the files of the emulated runtime share. One library, `libcudart.so.13`, holds all state; `libcuda.so.1` calls it.
//
// Host memory plays the device's. A stream is a thread with a queue; an event is a place in the queue of a stream. An address of
// the device is never readable: its bytes lie at a fixed distance from it, in a second mapping that only work on a stream uses.
#pragma once

#include <cuda_runtime_api.h>

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#define EXPORT extern "C" __attribute__((visibility("default")))

namespace emulated {

constexpr int MOST_DEVICES = 8;

// ---- settings.cpp: what a run asks for, from EMULATED_* and changed while it runs by emulated_set ----
double setting(const char* name);
int device_count();
size_t memory_size();
double now();                       // seconds
void sleep_until(double moment);

// ---- counts.cpp: what the program asked the device for ----
struct Counter {
  const char* name;
  std::atomic<long> calls{0};
};
Counter& counter(const char* name);
void count(const char* name, long amount = 1);
// A call that makes the host wait for the device, by the name of the call and of the thread.
void count_wait(const char* call);
bool tracing();
void trace(const char* format, ...);

// ---- errors.cpp: the last error of a thread, and errors that a device does not recover from ----
cudaError_t failed(cudaError_t error);            // remembers an error as the thread's last one; returns it
cudaError_t unrecoverable(int device);            // cudaSuccess unless work on the device has failed
void fail_device(int device, cudaError_t error);  // first error stays

#define CALL(function)                                                                     \
  static ::emulated::Counter& calls_of_this_function = ::emulated::counter(#function);     \
  calls_of_this_function.calls++;
// A call that needs a usable device, and makes its context.
#define CALL_ON_DEVICE(function)                                                           \
  CALL(function)                                                                           \
  if (cudaError_t broken = ::emulated::enter_context(::emulated::current_device())) return ::emulated::failed(broken);

// ---- devices.cpp ----
int current_device();
void make_current(int device);
cudaError_t enter_context(int device);  // makes the primary context; returns the device's unrecoverable error
bool has_context(int device);
bool peers(int device, int other);

// ---- memory.cpp ----
enum class Place { pageable, pinned, device };
struct Range {
  Place place;
  int device;         // of device memory; -1
  char* begin;        // of the allocation or registration, or of what was mapped
  size_t size;
};
// Where an address lies. Pageable memory has no range that the runtime knows.
Range range_of(const void* address);
char* host_address(const void* address);  // of device memory: its bytes; another address stays as it is
void poison(const void* address, size_t size);
cudaError_t allocate(int device, size_t size, void** address);
cudaError_t release(void* address);
size_t used_memory(int device);
size_t free_memory(int device);
// Memory of the virtual memory calls: addresses, physical memory, and the one mapped to the other.
cudaError_t reserve_addresses(size_t size, size_t alignment, int device, void** address);
cudaError_t free_addresses(void* address, size_t size);
cudaError_t create_physical(int device, size_t size, unsigned long long* handle);
cudaError_t release_physical(unsigned long long handle);
cudaError_t map_physical(void* address, size_t size, size_t offset, unsigned long long handle);
cudaError_t unmap(void* address, size_t size);
cudaError_t set_access(void* address, size_t size, int device);

// ---- streams.cpp ----
enum class Kind { kernel, copy, host, mark };
struct Work {
  Kind kind;
  std::string name;
  std::function<void()> run;  // may run several times, in replays of a graph
};
struct Capture;

// The queue of a stream and its thread. Places in it are numbers: work n has ended when `ended` >= n.
struct Stream : std::enable_shared_from_this<Stream> {
  int device = 0;
  unsigned flags = 0;
  int priority = 0;
  bool legacy = false;
  long number = 0;  // in the order of creation: delays depend on it

  std::mutex mutex;
  std::condition_variable changed;
  std::deque<Work> queue;
  uint64_t queued = 0, ended = 0;
  bool started = false, destroyed = false;

  // Guarded by the mutex of captures (capture.cpp).
  std::shared_ptr<Capture> capture;
  std::vector<size_t> last_nodes;  // nodes of the graph that the next work of this stream depends on

  uint64_t push(Work work);
  void wait_for_room();  // the queue of a device has an end
  void wait_for(uint64_t place);
  bool passed(uint64_t place);
  uint64_t place();  // of the last work
  void run();
};
using StreamPointer = std::shared_ptr<Stream>;

StreamPointer stream_of(cudaStream_t handle);   // null: not a stream
std::vector<StreamPointer> streams_of(int device);  // -1: of all devices
void wait_for_device(int device);
// Queues work with the rules of the legacy default stream, or adds it to the graph that is being captured.
cudaError_t submit(const StreamPointer& stream, Work work);
void stop();

// ---- capture.cpp ----
std::mutex& capture_mutex();
// cudaSuccess, or why this thread may not make a call that a capture forbids. `certain`: the call is about a stream or event that is
// captured, else it is one of those that CUDA calls potentially unsafe.
cudaError_t forbidden_by_capture();
cudaError_t capturing_error(const StreamPointer& stream);  // synchronising or querying this stream
cudaError_t device_capturing_error(int device);
bool add_to_capture(const StreamPointer& stream, Work& work, cudaError_t* error);  // false: not captured
cudaError_t legacy_stream_error(const StreamPointer& stream);
struct CapturedPlace {
  std::shared_ptr<Capture> capture;
  std::vector<size_t> nodes;
};
bool record_in_capture(const StreamPointer& stream, CapturedPlace* place, cudaError_t* error);
// A wait for an event: true if capture dealt with it.
bool wait_in_capture(const StreamPointer& stream, const CapturedPlace& place, unsigned flags, cudaError_t* error);
cudaError_t captured_event_error(const CapturedPlace& place);

// ---- launch.cpp ----
// The body of work that is a kernel of ours; null for a name that is unknown.
std::function<void()> kernel_named(const std::string& name, void** arguments);

}  // namespace emulated
