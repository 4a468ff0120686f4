// Streams and events.
//
// A stream is a thread that runs its queue in order. An event is a place in a queue: it has passed when the stream has ended that much.
// Work begins late at random if EMULATED_DELAY_MS says so, by the seed, the stream's number and the work's place alone.
#include "emulation.h"

#include <pthread.h>

#include <cstdio>
#include <thread>
#include <unistd.h>

namespace emulated {
namespace {

struct Streams {
  std::mutex mutex;  // also: the order in which work of the legacy stream and of others is queued
  std::map<Stream*, StreamPointer> alive;
  StreamPointer legacy[MOST_DEVICES], per_thread_default[MOST_DEVICES];
  long created = 0;
};

Streams& streams() {
  static Streams* all = new Streams;
  return *all;
}

std::atomic<bool> stopping{false};
std::atomic<int> running{0};

uint64_t mixed(uint64_t value) {  // splitmix64
  value += 0x9E3779B97F4A7C15ull;
  value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9ull;
  value = (value ^ (value >> 27)) * 0x94D049BB133111EBull;
  return value ^ (value >> 31);
}

double fraction(uint64_t value) { return (double)(mixed(value) >> 11) / (double)(1ull << 53); }

void be_late(long stream, uint64_t place) {
  double most = setting("delay_ms");
  if (most <= 0) return;
  uint64_t key = mixed((uint64_t)setting("seed") * 1000003 + stream) + place;
  if (fraction(key) < setting("delay_share")) sleep_until(now() + fraction(~key) * most * 1e-3);
}

StreamPointer new_stream(int device, unsigned flags, int priority) {
  auto stream = std::make_shared<Stream>();
  stream->device = device;
  stream->flags = flags;
  stream->priority = priority;
  stream->number = streams().created++;
  streams().alive[stream.get()] = stream;
  return stream;
}

}  // namespace

void Stream::run() {
  char name[16];
  snprintf(name, sizeof name, "cuda:%d s%ld", device, number);
  pthread_setname_np(pthread_self(), name);
  std::unique_lock<std::mutex> lock(mutex);
  for (;;) {
    changed.wait(lock, [this] { return !queue.empty() || destroyed; });
    if (queue.empty()) return;
    Work work = std::move(queue.front());
    queue.pop_front();
    lock.unlock();
    running++;
    if (stopping) {  // the process ends: what is left never runs
      running--;
      for (;;) pause();
    }
    // Work behind an error that the device does not recover from is dropped; its waits end.
    if (work.kind == Kind::mark || !unrecoverable(device)) {
      if (work.kind != Kind::mark) be_late(number, ended);
      double begin = now();
      work.run();
      if (work.kind == Kind::kernel && setting("kernel_us") > 0) sleep_until(begin + setting("kernel_us") * 1e-6);
    }
    work.run = nullptr;  // what it refers to is let go before anybody hears of its end
    running--;
    lock.lock();
    ended++;
    changed.notify_all();
  }
}

uint64_t Stream::push(Work work) {
  std::lock_guard<std::mutex> lock(mutex);
  if (!started) {
    started = true;
    std::thread([self = shared_from_this()] { self->run(); }).detach();
  }
  queue.push_back(std::move(work));
  changed.notify_all();
  return ++queued;
}

void Stream::wait_for_room() {
  size_t most = (size_t)setting("queue");
  std::unique_lock<std::mutex> lock(mutex);
  if (queue.size() < most) return;
  count("full queues");
  changed.wait(lock, [&] { return queue.size() < most; });
}

void Stream::wait_for(uint64_t place) {
  std::unique_lock<std::mutex> lock(mutex);
  changed.wait(lock, [&] { return ended >= place; });
}

bool Stream::passed(uint64_t place) {
  std::lock_guard<std::mutex> lock(mutex);
  return ended >= place;
}

uint64_t Stream::place() {
  std::lock_guard<std::mutex> lock(mutex);
  return queued;
}

StreamPointer stream_of(cudaStream_t handle) {
  Streams& all = streams();
  std::lock_guard<std::mutex> lock(all.mutex);
  int device = current_device();
  if (handle == nullptr || handle == cudaStreamLegacy) {
    if (!all.legacy[device]) {
      all.legacy[device] = new_stream(device, cudaStreamDefault, 0);
      all.legacy[device]->legacy = true;
    }
    return all.legacy[device];
  }
  // One for all threads of the device: torch never asks for it.
  if (handle == cudaStreamPerThread) {
    if (!all.per_thread_default[device]) all.per_thread_default[device] = new_stream(device, cudaStreamDefault, 0);
    return all.per_thread_default[device];
  }
  auto found = all.alive.find((Stream*)handle);
  return found == all.alive.end() ? nullptr : found->second;
}

std::vector<StreamPointer> streams_of(int device) {
  std::vector<StreamPointer> of_device;
  std::lock_guard<std::mutex> lock(streams().mutex);
  for (auto& entry : streams().alive)
    if (device < 0 || entry.second->device == device) of_device.push_back(entry.second);
  return of_device;
}

void wait_for_device(int device) {
  std::vector<std::pair<StreamPointer, uint64_t>> places;
  for (auto& stream : streams_of(device)) places.emplace_back(stream, stream->place());
  for (auto& place : places) place.first->wait_for(place.second);
}

static void push_wait(const StreamPointer& stream, const StreamPointer& other, uint64_t place) {
  if (!other->passed(place))
    stream->push(Work{Kind::mark, "wait", [other, place] { other->wait_for(place); }});
}

cudaError_t submit(const StreamPointer& stream, Work work) {
  cudaError_t error = cudaSuccess;
  if (add_to_capture(stream, work, &error)) return error;
  if ((error = unrecoverable(stream->device))) return error;
  if (work.kind != Kind::mark) stream->wait_for_room();
  if (stream->legacy) {
    if ((error = legacy_stream_error(stream))) return error;
    std::lock_guard<std::mutex> lock(streams().mutex);
    for (auto& entry : streams().alive) {
      StreamPointer other = entry.second;
      if (other != stream && other->device == stream->device && !(other->flags & cudaStreamNonBlocking))
        push_wait(stream, other, other->place());
    }
    stream->push(std::move(work));
  } else if (!(stream->flags & cudaStreamNonBlocking)) {
    std::lock_guard<std::mutex> lock(streams().mutex);
    if (StreamPointer legacy = streams().legacy[stream->device]) push_wait(stream, legacy, legacy->place());
    stream->push(std::move(work));
  } else {
    stream->push(std::move(work));
  }
  return cudaSuccess;
}

// Lets the work end that has begun, and begins no other: threads of streams must not run while a process takes itself apart.
void stop() {
  stopping = true;
  double until = now() + 5;
  while (running && now() < until) sleep_until(now() + 1e-3);
}

}  // namespace emulated

using namespace emulated;

EXPORT void emulated_stop() { stop(); }

// Queues `run(argument)` on a stream as a kernel; `drop(argument)`, if not null, is called once it can never run again.
EXPORT int emulated_launch(void* handle, const char* name, void (*run)(void*), void (*drop)(void*), void* argument) {
  CALL_ON_DEVICE(emulated_launch)
  std::shared_ptr<void> owned(argument, [drop](void* held) {
    if (drop) drop(held);
  });
  StreamPointer stream = stream_of((cudaStream_t)handle);
  if (!stream) return failed(cudaErrorInvalidResourceHandle);
  // A kernel needs a stream of the current device.
  if (stream->device != current_device()) return failed(cudaErrorInvalidResourceHandle);
  return failed(submit(stream, Work{Kind::kernel, name, [owned, run] { run(owned.get()); }}));
}

// Called by work on a stream: the device of the thread that runs it has failed and stays so.
EXPORT void emulated_fail(int device, int error) { fail_device(device, (cudaError_t)error); }

EXPORT cudaError_t cudaStreamCreateWithPriority(cudaStream_t* handle, unsigned flags, int priority) {
  CALL_ON_DEVICE(cudaStreamCreateWithPriority)
  if (flags & ~(unsigned)cudaStreamNonBlocking) return failed(cudaErrorInvalidValue);
  std::lock_guard<std::mutex> lock(streams().mutex);
  // A priority outside of the range is brought into it.
  *handle = (cudaStream_t)new_stream(current_device(), flags, std::max(-5, std::min(0, priority))).get();
  return cudaSuccess;
}

EXPORT cudaError_t cudaStreamCreateWithFlags(cudaStream_t* handle, unsigned flags) {
  return cudaStreamCreateWithPriority(handle, flags, 0);
}

EXPORT cudaError_t cudaStreamCreate(cudaStream_t* handle) { return cudaStreamCreateWithPriority(handle, 0, 0); }

// The handle is invalid at once; what is queued still runs.
EXPORT cudaError_t cudaStreamDestroy(cudaStream_t handle) {
  CALL(cudaStreamDestroy)
  StreamPointer stream = stream_of(handle);
  if (!stream || stream->legacy) return failed(cudaErrorInvalidResourceHandle);
  {
    std::lock_guard<std::mutex> lock(streams().mutex);
    streams().alive.erase(stream.get());
  }
  std::lock_guard<std::mutex> lock(stream->mutex);
  stream->destroyed = true;
  stream->changed.notify_all();
  return cudaSuccess;
}

EXPORT cudaError_t cudaStreamGetPriority(cudaStream_t handle, int* priority) {
  CALL(cudaStreamGetPriority)
  StreamPointer stream = stream_of(handle);
  if (!stream) return failed(cudaErrorInvalidResourceHandle);
  *priority = stream->priority;
  return cudaSuccess;
}

EXPORT cudaError_t cudaStreamGetFlags(cudaStream_t handle, unsigned* flags) {
  CALL(cudaStreamGetFlags)
  StreamPointer stream = stream_of(handle);
  if (!stream) return failed(cudaErrorInvalidResourceHandle);
  *flags = stream->flags;
  return cudaSuccess;
}

EXPORT cudaError_t cudaStreamGetDevice(cudaStream_t handle, int* device) {
  CALL(cudaStreamGetDevice)
  StreamPointer stream = stream_of(handle);
  if (!stream) return failed(cudaErrorInvalidResourceHandle);
  *device = stream->device;
  return cudaSuccess;
}

EXPORT cudaError_t cudaStreamQuery(cudaStream_t handle) {
  CALL(cudaStreamQuery)
  StreamPointer stream = stream_of(handle);
  if (!stream) return failed(cudaErrorInvalidResourceHandle);
  if (cudaError_t error = capturing_error(stream)) return failed(error);
  if (cudaError_t broken = unrecoverable(stream->device)) return failed(broken);
  return stream->passed(stream->place()) ? cudaSuccess : failed(cudaErrorNotReady);
}

EXPORT cudaError_t cudaStreamSynchronize(cudaStream_t handle) {
  CALL(cudaStreamSynchronize)
  StreamPointer stream = stream_of(handle);
  if (!stream) return failed(cudaErrorInvalidResourceHandle);
  if (cudaError_t error = capturing_error(stream)) return failed(error);
  count_wait("cudaStreamSynchronize");
  stream->wait_for(stream->place());
  return failed(unrecoverable(stream->device));
}

EXPORT cudaError_t cudaLaunchHostFunc(cudaStream_t handle, cudaHostFn_t function, void* argument) {
  CALL(cudaLaunchHostFunc)
  StreamPointer stream = stream_of(handle);
  if (!stream) return failed(cudaErrorInvalidResourceHandle);
  return failed(submit(stream, Work{Kind::host, "host function", [=] { function(argument); }}));
}

// Unlike a host function, a callback runs behind an error too, and is told of it.
EXPORT cudaError_t cudaStreamAddCallback(cudaStream_t handle, cudaStreamCallback_t callback, void* argument, unsigned flags) {
  CALL(cudaStreamAddCallback)
  StreamPointer stream = stream_of(handle);
  if (!stream) return failed(cudaErrorInvalidResourceHandle);
  if (flags) return failed(cudaErrorInvalidValue);
  if (cudaError_t error = capturing_error(stream)) return failed(error);
  int device = stream->device;
  return failed(submit(stream, Work{Kind::mark, "callback", [=] { callback(handle, unrecoverable(device), argument); }}));
}

// ---- Events ----

namespace {

struct Event {
  std::mutex mutex;
  int device;
  unsigned flags;
  StreamPointer stream;  // of the last record; null: never recorded
  uint64_t place = 0;
  std::shared_ptr<std::atomic<double>> moment;  // with timing: when the stream came to it; 0 before
  CapturedPlace captured;
};

struct Recorded {
  StreamPointer stream;
  uint64_t place;
  std::shared_ptr<std::atomic<double>> moment;
  CapturedPlace captured;
};

std::mutex& events_mutex() {
  static std::mutex* mutex = new std::mutex;
  return *mutex;
}

std::map<Event*, std::shared_ptr<Event>>& events() {
  static auto* all = new std::map<Event*, std::shared_ptr<Event>>;
  return *all;
}

std::shared_ptr<Event> event_of(cudaEvent_t handle) {
  std::lock_guard<std::mutex> lock(events_mutex());
  auto found = events().find((Event*)handle);
  return found == events().end() ? nullptr : found->second;
}

Recorded recorded(const std::shared_ptr<Event>& event) {
  std::lock_guard<std::mutex> lock(event->mutex);
  return Recorded{event->stream, event->place, event->moment, event->captured};
}

bool passed(const Recorded& record) { return !record.stream || record.stream->passed(record.place); }

}  // namespace

EXPORT cudaError_t cudaEventCreateWithFlags(cudaEvent_t* handle, unsigned flags) {
  CALL_ON_DEVICE(cudaEventCreateWithFlags)
  constexpr unsigned known = cudaEventBlockingSync | cudaEventDisableTiming | cudaEventInterprocess;
  if (flags & ~known) return failed(cudaErrorInvalidValue);
  if ((flags & cudaEventInterprocess) && !(flags & cudaEventDisableTiming)) return failed(cudaErrorInvalidValue);
  auto event = std::make_shared<Event>();
  event->device = current_device();
  event->flags = flags;
  std::lock_guard<std::mutex> lock(events_mutex());
  events()[event.get()] = event;
  *handle = (cudaEvent_t)event.get();
  return cudaSuccess;
}

EXPORT cudaError_t cudaEventCreate(cudaEvent_t* handle) { return cudaEventCreateWithFlags(handle, 0); }

// Waits that are queued for it stay.
EXPORT cudaError_t cudaEventDestroy(cudaEvent_t handle) {
  CALL(cudaEventDestroy)
  std::lock_guard<std::mutex> lock(events_mutex());
  return events().erase((Event*)handle) ? cudaSuccess : failed(cudaErrorInvalidResourceHandle);
}

EXPORT cudaError_t cudaEventRecordWithFlags(cudaEvent_t handle, cudaStream_t stream_handle, unsigned) {
  CALL(cudaEventRecord)
  auto event = event_of(handle);
  StreamPointer stream = stream_of(stream_handle);
  if (!event || !stream || event->device != stream->device) return failed(cudaErrorInvalidResourceHandle);
  CapturedPlace place;
  cudaError_t error = cudaSuccess;
  if (record_in_capture(stream, &place, &error)) {
    if (error) return failed(error);
    std::lock_guard<std::mutex> lock(event->mutex);
    event->captured = place;
    event->stream = nullptr;
    return cudaSuccess;
  }
  if ((error = unrecoverable(stream->device))) return failed(error);
  bool timing = !(event->flags & cudaEventDisableTiming);
  auto moment = timing ? std::make_shared<std::atomic<double>>(0) : nullptr;
  // The event is work of its stream: on the legacy stream it waits for the others.
  if (timing || stream->legacy) {
    error = submit(stream, Work{Kind::mark, "event", [moment] {
                                  if (moment) *moment = now();
                                }});
    if (error) return failed(error);
  }
  std::lock_guard<std::mutex> lock(event->mutex);
  event->captured = CapturedPlace{};
  event->stream = stream;
  event->place = stream->place();
  event->moment = moment;
  return cudaSuccess;
}

EXPORT cudaError_t cudaEventRecord(cudaEvent_t handle, cudaStream_t stream) {
  return cudaEventRecordWithFlags(handle, stream, 0);
}

// Among the calls that a capture in progress may forbid, whatever the event.
EXPORT cudaError_t cudaEventQuery(cudaEvent_t handle) {
  CALL(cudaEventQuery)
  auto event = event_of(handle);
  if (!event) return failed(cudaErrorInvalidResourceHandle);
  Recorded record = recorded(event);
  if (cudaError_t error = captured_event_error(record.captured)) return failed(error);
  if (cudaError_t error = forbidden_by_capture()) return failed(error);
  if (cudaError_t broken = unrecoverable(event->device)) return failed(broken);
  return passed(record) ? cudaSuccess : failed(cudaErrorNotReady);
}

EXPORT cudaError_t cudaEventSynchronize(cudaEvent_t handle) {
  CALL(cudaEventSynchronize)
  auto event = event_of(handle);
  if (!event) return failed(cudaErrorInvalidResourceHandle);
  Recorded record = recorded(event);
  if (cudaError_t error = captured_event_error(record.captured)) return failed(error);
  if (cudaError_t error = forbidden_by_capture()) return failed(error);
  if (record.stream) {
    count_wait("cudaEventSynchronize");
    record.stream->wait_for(record.place);
  }
  return failed(unrecoverable(event->device));
}

EXPORT cudaError_t cudaEventElapsedTime(float* milliseconds, cudaEvent_t first, cudaEvent_t last) {
  CALL(cudaEventElapsedTime)
  auto begin = event_of(first), end = event_of(last);
  if (!begin || !end || begin->device != end->device) return failed(cudaErrorInvalidResourceHandle);
  Recorded from = recorded(begin), to = recorded(end);
  if (!from.moment || !to.moment) return failed(cudaErrorInvalidResourceHandle);  // not recorded, or without timing
  if (!passed(from) || !passed(to)) return failed(cudaErrorNotReady);
  *milliseconds = (float)((to.moment->load() - from.moment->load()) * 1e3);
  return cudaSuccess;
}

// Waits for what the event stands for now: recording it again later changes nothing.
EXPORT cudaError_t cudaStreamWaitEvent(cudaStream_t stream_handle, cudaEvent_t handle, unsigned flags) {
  CALL(cudaStreamWaitEvent)
  auto event = event_of(handle);
  StreamPointer stream = stream_of(stream_handle);
  if (!event || !stream) return failed(cudaErrorInvalidResourceHandle);
  Recorded record = recorded(event);
  cudaError_t error = cudaSuccess;
  if (wait_in_capture(stream, record.captured, flags, &error)) return failed(error);
  if (!record.stream || record.stream == stream || passed(record)) return cudaSuccess;
  return failed(submit(stream, Work{Kind::mark, "wait", [record] { record.stream->wait_for(record.place); }}));
}
