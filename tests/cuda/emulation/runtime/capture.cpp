// Graphs: capture of streams, and replay.
//
// A capture begins on one stream; other streams join it by waiting for an event that was recorded in it, and must come back to the
// first one before it ends. What cannot be part of a graph fails, and spoils the capture. A replay is one piece of work of its
// stream that runs the nodes in an order that their dependencies allow, another one each time while delays are on.
#include "emulation.h"

#include <algorithm>
#include <cstring>
#include <set>
#include <thread>

namespace emulated {

struct UserObject {
  void* pointer;
  cudaHostFn_t destroy;
  long references;
};

struct Node {
  Work work;
  std::vector<size_t> after;
};

struct Graph {
  std::vector<Node> nodes;
  std::map<UserObject*, long> objects;
  ~Graph();
};

struct Executable {
  std::shared_ptr<Graph> graph;
  long replays = 0;
};

struct Capture {
  unsigned long long id;
  StreamPointer origin;
  cudaStreamCaptureMode mode;
  std::thread::id thread;
  std::shared_ptr<Graph> graph;
  bool invalid = false, over = false;
  std::set<StreamPointer> streams;
};

namespace {

using CapturePointer = std::shared_ptr<Capture>;

struct Captures {
  std::mutex mutex;
  std::set<CapturePointer> active;
  std::map<Graph*, std::shared_ptr<Graph>> graphs;
  std::map<Executable*, std::shared_ptr<Executable>> executables;
  unsigned long long begun = 0;
};

Captures& captures() {
  static Captures* all = new Captures;
  return *all;
}

std::mutex& object_mutex() {
  static std::mutex* mutex = new std::mutex;
  return *mutex;
}

std::atomic<int> active_captures{0};  // so that nothing is locked while there are none
thread_local cudaStreamCaptureMode interaction = cudaStreamCaptureModeGlobal;

void release_object(UserObject* object, long references) {
  {
    std::lock_guard<std::mutex> lock(object_mutex());
    if ((object->references -= references) > 0) return;
  }
  object->destroy(object->pointer);
  delete object;
}

cudaError_t spoil(const CapturePointer& capture, cudaError_t error) {
  capture->invalid = true;
  return error;
}

std::vector<size_t> joined(std::vector<size_t> nodes, const std::vector<size_t>& others) {
  for (size_t node : others)
    if (std::find(nodes.begin(), nodes.end(), node) == nodes.end()) nodes.push_back(node);
  return nodes;
}

// The nodes that `last` depends on, and `last`.
std::set<size_t> ancestors(const Graph& graph, const std::vector<size_t>& last) {
  std::set<size_t> all;
  std::vector<size_t> open = last;
  while (!open.empty()) {
    size_t node = open.back();
    open.pop_back();
    if (!all.insert(node).second) continue;
    for (size_t before : graph.nodes[node].after) open.push_back(before);
  }
  return all;
}

void replay(const Graph& graph, uint64_t number) {
  bool any_order = setting("delay_ms") > 0;
  uint64_t state = number * 0x9E3779B97F4A7C15ull + (uint64_t)setting("seed") + 1;
  std::vector<size_t> waiting(graph.nodes.size());
  std::vector<std::vector<size_t>> behind(graph.nodes.size());
  std::vector<size_t> ready;
  for (size_t node = 0; node < graph.nodes.size(); node++) {
    waiting[node] = graph.nodes[node].after.size();
    for (size_t before : graph.nodes[node].after) behind[before].push_back(node);
    if (!waiting[node]) ready.push_back(node);
  }
  while (!ready.empty()) {
    size_t chosen = 0;
    if (any_order) {
      state = state * 6364136223846793005ull + 1442695040888963407ull;
      chosen = (state >> 33) % ready.size();
    }
    size_t node = ready[chosen];
    ready.erase(ready.begin() + chosen);
    double begin = now();
    graph.nodes[node].work.run();
    if (graph.nodes[node].work.kind == Kind::kernel && setting("kernel_us") > 0)
      sleep_until(begin + setting("kernel_us") * 1e-6);
    for (size_t next : behind[node])
      if (!--waiting[next]) ready.push_back(next);
  }
}

}  // namespace

Graph::~Graph() {
  for (auto& object : objects) release_object(object.first, object.second);
}

cudaError_t forbidden_by_capture() {
  if (!active_captures || interaction == cudaStreamCaptureModeRelaxed) return cudaSuccess;
  std::lock_guard<std::mutex> lock(captures().mutex);
  cudaError_t error = cudaSuccess;
  for (auto& capture : captures().active) {
    bool own = capture->thread == std::this_thread::get_id() && capture->mode != cudaStreamCaptureModeRelaxed;
    bool others = interaction == cudaStreamCaptureModeGlobal && capture->mode == cudaStreamCaptureModeGlobal;
    if (own || others) error = spoil(capture, cudaErrorStreamCaptureUnsupported);
  }
  return error;
}

cudaError_t capturing_error(const StreamPointer& stream) {
  if (!active_captures) return cudaSuccess;
  {
    std::lock_guard<std::mutex> lock(captures().mutex);
    if (stream->capture) return spoil(stream->capture, cudaErrorStreamCaptureUnsupported);
  }
  // Of a stream that is not captured it is one of the calls that a capture elsewhere may forbid; the legacy stream stands for all
  // blocking ones.
  if (cudaError_t error = legacy_stream_error(stream)) return error;
  return forbidden_by_capture();
}

cudaError_t device_capturing_error(int device) {
  if (!active_captures) return cudaSuccess;
  {
    std::lock_guard<std::mutex> lock(captures().mutex);
    cudaError_t error = cudaSuccess;
    for (auto& capture : captures().active)
      for (auto& stream : capture->streams)
        if (stream->device == device) error = spoil(capture, cudaErrorStreamCaptureUnsupported);
    if (error) return error;
  }
  return forbidden_by_capture();
}

cudaError_t legacy_stream_error(const StreamPointer& stream) {
  if (!active_captures || !stream->legacy) return cudaSuccess;
  std::lock_guard<std::mutex> lock(captures().mutex);
  for (auto& capture : captures().active)
    for (auto& other : capture->streams)
      if (other->device == stream->device && !(other->flags & cudaStreamNonBlocking))
        return spoil(capture, cudaErrorStreamCaptureImplicit);
  return cudaSuccess;
}

bool add_to_capture(const StreamPointer& stream, Work& work, cudaError_t* error) {
  if (!active_captures) return false;
  std::lock_guard<std::mutex> lock(captures().mutex);
  CapturePointer capture = stream->capture;
  if (!capture) return false;
  if (capture->invalid) {
    *error = cudaErrorStreamCaptureInvalidated;
    return true;
  }
  capture->graph->nodes.push_back(Node{std::move(work), stream->last_nodes});
  stream->last_nodes = {capture->graph->nodes.size() - 1};
  return true;
}

bool record_in_capture(const StreamPointer& stream, CapturedPlace* place, cudaError_t* error) {
  if (!active_captures) return false;
  std::lock_guard<std::mutex> lock(captures().mutex);
  if (!stream->capture) return false;
  if (stream->capture->invalid) *error = cudaErrorStreamCaptureInvalidated;
  *place = CapturedPlace{stream->capture, stream->last_nodes};
  return true;
}

bool wait_in_capture(const StreamPointer& stream, const CapturedPlace& place, unsigned flags, cudaError_t* error) {
  if (!place.capture && !active_captures) return false;
  std::lock_guard<std::mutex> lock(captures().mutex);
  CapturePointer own = stream->capture;
  if (!place.capture && !own) return false;
  if (own && own->invalid) {
    *error = cudaErrorStreamCaptureInvalidated;
  } else if (!place.capture) {
    // A node that waits for what is outside of the graph only if asked for.
    *error = flags & cudaEventWaitExternal ? cudaErrorNotSupported : spoil(own, cudaErrorStreamCaptureIsolation);
  } else if (place.capture->over) {
    *error = own ? spoil(own, cudaErrorStreamCaptureMerge) : cudaErrorCapturedEvent;
  } else if (place.capture->invalid) {
    *error = cudaErrorStreamCaptureInvalidated;
  } else if (!own) {
    if (stream->legacy) {
      *error = spoil(place.capture, cudaErrorStreamCaptureImplicit);
    } else {
      stream->capture = place.capture;
      stream->last_nodes = place.nodes;
      place.capture->streams.insert(stream);
    }
  } else if (own != place.capture) {
    spoil(own, cudaSuccess);
    *error = spoil(place.capture, cudaErrorStreamCaptureMerge);
  } else {
    stream->last_nodes = joined(stream->last_nodes, place.nodes);
  }
  return true;
}

cudaError_t captured_event_error(const CapturedPlace& place) {
  if (!place.capture) return cudaSuccess;
  std::lock_guard<std::mutex> lock(captures().mutex);
  if (!place.capture->over) spoil(place.capture, cudaSuccess);
  return cudaErrorCapturedEvent;
}

}  // namespace emulated

using namespace emulated;

EXPORT cudaError_t cudaStreamBeginCapture(cudaStream_t handle, cudaStreamCaptureMode mode) {
  CALL_ON_DEVICE(cudaStreamBeginCapture)
  StreamPointer stream = stream_of(handle);
  if (!stream) return failed(cudaErrorInvalidResourceHandle);
  if (stream->legacy) return failed(cudaErrorStreamCaptureUnsupported);
  std::lock_guard<std::mutex> lock(captures().mutex);
  if (stream->capture) return failed(spoil(stream->capture, cudaErrorIllegalState));
  auto capture = std::make_shared<Capture>();
  capture->id = ++captures().begun;
  capture->origin = stream;
  capture->mode = mode;
  capture->thread = std::this_thread::get_id();
  capture->graph = std::make_shared<Graph>();
  capture->streams.insert(stream);
  stream->capture = capture;
  stream->last_nodes.clear();
  captures().active.insert(capture);
  active_captures++;
  return cudaSuccess;
}

EXPORT cudaError_t cudaStreamEndCapture(cudaStream_t handle, cudaGraph_t* graph) {
  CALL(cudaStreamEndCapture)
  if (graph) *graph = nullptr;
  StreamPointer stream = stream_of(handle);
  if (!stream) return failed(cudaErrorInvalidResourceHandle);
  std::lock_guard<std::mutex> lock(captures().mutex);
  CapturePointer capture = stream->capture;
  if (!capture) return failed(cudaErrorIllegalState);
  if (capture->origin != stream) return failed(spoil(capture, cudaErrorStreamCaptureUnmatched));
  if (capture->mode != cudaStreamCaptureModeRelaxed && capture->thread != std::this_thread::get_id())
    return failed(cudaErrorStreamCaptureWrongThread);
  cudaError_t error = capture->invalid ? cudaErrorStreamCaptureInvalidated : cudaSuccess;
  std::set<size_t> reached = ancestors(*capture->graph, stream->last_nodes);
  for (auto& each : capture->streams) {
    for (size_t node : each->last_nodes)
      if (!error && !reached.count(node)) error = cudaErrorStreamCaptureUnjoined;
  }
  for (auto& each : capture->streams) {
    each->capture = nullptr;
    each->last_nodes.clear();
  }
  capture->streams.clear();
  capture->over = true;
  captures().active.erase(capture);
  active_captures--;
  if (error) return failed(error);
  captures().graphs[capture->graph.get()] = capture->graph;
  *graph = (cudaGraph_t)capture->graph.get();
  return cudaSuccess;
}

EXPORT cudaError_t cudaStreamIsCapturing(cudaStream_t handle, cudaStreamCaptureStatus* status) {
  CALL(cudaStreamIsCapturing)
  *status = cudaStreamCaptureStatusNone;
  if (!active_captures) return cudaSuccess;
  StreamPointer stream = stream_of(handle);
  if (!stream) return failed(cudaErrorInvalidResourceHandle);
  if (cudaError_t error = legacy_stream_error(stream)) return failed(error);
  std::lock_guard<std::mutex> lock(captures().mutex);
  if (stream->capture)
    *status = stream->capture->invalid ? cudaStreamCaptureStatusInvalidated : cudaStreamCaptureStatusActive;
  return cudaSuccess;
}

EXPORT cudaError_t cudaStreamGetCaptureInfo(cudaStream_t handle, cudaStreamCaptureStatus* status, unsigned long long* id,
                                            cudaGraph_t* graph, const cudaGraphNode_t** after, const cudaGraphEdgeData** edges,
                                            size_t* count) {
  CALL(cudaStreamGetCaptureInfo)
  *status = cudaStreamCaptureStatusNone;
  StreamPointer stream = stream_of(handle);
  if (!stream) return failed(cudaErrorInvalidResourceHandle);
  if (cudaError_t error = legacy_stream_error(stream)) return failed(error);
  std::lock_guard<std::mutex> lock(captures().mutex);
  CapturePointer capture = stream->capture;
  if (!capture) return cudaSuccess;
  *status = capture->invalid ? cudaStreamCaptureStatusInvalidated : cudaStreamCaptureStatusActive;
  if (id) *id = capture->id;
  if (graph) *graph = (cudaGraph_t)capture->graph.get();
  if (edges) *edges = nullptr;
  static thread_local std::vector<cudaGraphNode_t> nodes;  // valid until the next call of this thread
  nodes.clear();
  for (size_t node : stream->last_nodes) nodes.push_back((cudaGraphNode_t)(node + 1));
  if (after) *after = nodes.data();
  if (count) *count = nodes.size();
  return cudaSuccess;
}

EXPORT cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode* mode) {
  CALL(cudaThreadExchangeStreamCaptureMode)
  std::swap(*mode, interaction);
  return cudaSuccess;
}

EXPORT cudaError_t cudaGraphGetNodes(cudaGraph_t handle, cudaGraphNode_t* nodes, size_t* count) {
  CALL(cudaGraphGetNodes)
  std::lock_guard<std::mutex> lock(captures().mutex);
  auto found = captures().graphs.find((Graph*)handle);
  if (found == captures().graphs.end()) return failed(cudaErrorInvalidValue);
  size_t all = found->second->nodes.size();
  if (nodes)
    for (size_t node = 0; node < *count; node++) nodes[node] = node < all ? (cudaGraphNode_t)(node + 1) : nullptr;
  *count = nodes ? std::min(*count, all) : all;
  return cudaSuccess;
}

EXPORT cudaError_t cudaGraphInstantiateWithFlags(cudaGraphExec_t* handle, cudaGraph_t graph, unsigned long long) {
  CALL_ON_DEVICE(cudaGraphInstantiateWithFlags)
  std::lock_guard<std::mutex> lock(captures().mutex);
  auto found = captures().graphs.find((Graph*)graph);
  if (found == captures().graphs.end()) return failed(cudaErrorInvalidValue);
  auto executable = std::make_shared<Executable>(Executable{found->second});
  captures().executables[executable.get()] = executable;
  *handle = (cudaGraphExec_t)executable.get();
  return cudaSuccess;
}

EXPORT cudaError_t cudaGraphInstantiate(cudaGraphExec_t* handle, cudaGraph_t graph, unsigned long long flags) {
  return cudaGraphInstantiateWithFlags(handle, graph, flags);
}

EXPORT cudaError_t cudaGraphLaunch(cudaGraphExec_t handle, cudaStream_t stream_handle) {
  CALL_ON_DEVICE(cudaGraphLaunch)
  StreamPointer stream = stream_of(stream_handle);
  std::shared_ptr<Executable> executable;
  uint64_t number = 0;
  {
    std::lock_guard<std::mutex> lock(captures().mutex);
    auto found = captures().executables.find((Executable*)handle);
    if (found != captures().executables.end()) {
      executable = found->second;
      number = (uint64_t)executable->replays++;
    }
  }
  if (!stream || !executable) return failed(cudaErrorInvalidValue);
  std::shared_ptr<Graph> graph = executable->graph;
  return failed(submit(stream, Work{Kind::host, "graph", [graph, number] { replay(*graph, number); }}));
}

// What is queued keeps its graph.
EXPORT cudaError_t cudaGraphExecDestroy(cudaGraphExec_t handle) {
  CALL(cudaGraphExecDestroy)
  std::shared_ptr<Executable> last;
  std::lock_guard<std::mutex> lock(captures().mutex);
  auto found = captures().executables.find((Executable*)handle);
  if (found == captures().executables.end()) return failed(cudaErrorInvalidValue);
  last = found->second;
  captures().executables.erase(found);
  return cudaSuccess;
}

EXPORT cudaError_t cudaGraphDestroy(cudaGraph_t handle) {
  CALL(cudaGraphDestroy)
  std::shared_ptr<Graph> last;
  std::lock_guard<std::mutex> lock(captures().mutex);
  auto found = captures().graphs.find((Graph*)handle);
  if (found == captures().graphs.end()) return failed(cudaErrorInvalidValue);
  last = found->second;
  captures().graphs.erase(found);
  return cudaSuccess;
}

EXPORT cudaError_t cudaUserObjectCreate(cudaUserObject_t* handle, void* pointer, cudaHostFn_t destroy, unsigned references,
                                        unsigned) {
  CALL(cudaUserObjectCreate)
  *handle = (cudaUserObject_t) new UserObject{pointer, destroy, (long)references};
  return cudaSuccess;
}

EXPORT cudaError_t cudaUserObjectRelease(cudaUserObject_t handle, unsigned references) {
  CALL(cudaUserObjectRelease)
  release_object((UserObject*)handle, references);
  return cudaSuccess;
}

EXPORT cudaError_t cudaGraphRetainUserObject(cudaGraph_t handle, cudaUserObject_t object, unsigned references, unsigned flags) {
  CALL(cudaGraphRetainUserObject)
  std::lock_guard<std::mutex> lock(captures().mutex);
  auto found = captures().graphs.find((Graph*)handle);
  Graph* graph = found != captures().graphs.end() ? found->second.get() : nullptr;
  for (auto& capture : captures().active)  // of a capture that goes on
    if (capture->graph.get() == (Graph*)handle) graph = capture->graph.get();
  if (!graph) return failed(cudaErrorInvalidValue);
  if (!(flags & cudaGraphUserObjectMove)) {
    std::lock_guard<std::mutex> objects(object_mutex());
    ((UserObject*)object)->references += references;
  }
  graph->objects[(UserObject*)object] += references;
  return cudaSuccess;
}

// Graphs own no memory here.
EXPORT cudaError_t cudaDeviceGetGraphMemAttribute(int, cudaGraphMemAttributeType, void* value) {
  CALL(cudaDeviceGetGraphMemAttribute)
  *(uint64_t*)value = 0;
  return cudaSuccess;
}
EXPORT cudaError_t cudaDeviceSetGraphMemAttribute(int, cudaGraphMemAttributeType, void*) { return cudaSuccess; }
EXPORT cudaError_t cudaDeviceGraphMemTrim(int) { return cudaSuccess; }
