// Memory of devices and pinned memory of the host.
//
// An address of a device belongs to a range that the process reserves and never may touch: a host that reads or writes it gets
// a fault, as with a real device. The bytes lie at a fixed distance in a second range, where memory is mapped for as long as it is
// allocated. Only work on streams uses the second range, through `host_address`.
#include "emulation.h"

#include <sys/mman.h>
#include <unistd.h>

#include <cstring>
#include <shared_mutex>

namespace emulated {
namespace {

constexpr size_t SPAN = size_t(512) << 30;  // addresses of one device: far more than its memory, for reservations
constexpr size_t ALL = SPAN * MOST_DEVICES;
constexpr size_t PAGE = size_t(2) << 20;    // granularity of virtual memory calls, as on devices
constexpr size_t SMALL = 4096;              // of allocations
constexpr int POISON = 0xCB;                // a NaN in no type, a huge negative number in all

struct Physical {
  int file;
  int device;
  size_t size;
  int mappings = 0;
  bool released = false;
};

struct Mapping {
  size_t size;
  unsigned long long handle;
};

struct Memory {
  std::shared_mutex mutex;
  char* addresses = nullptr;  // of devices
  char* bytes = nullptr;      // what they stand for
  std::map<char*, Range> device_ranges, pinned_ranges;
  std::map<char*, bool> allocated_pinned;  // by cudaHostAlloc; else registered
  std::map<char*, size_t> reserved;        // address ranges in use, allocations among them
  std::map<char*, Mapping> mapped;
  std::map<unsigned long long, Physical> physical;
  unsigned long long next_handle = 1;
  char* next[MOST_DEVICES];
  size_t used[MOST_DEVICES] = {};

  Memory() {
    auto reserve = [] {
      void* range = mmap(nullptr, ALL, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
      if (range == MAP_FAILED) {
        perror("emulated CUDA: cannot reserve addresses");
        abort();
      }
      madvise(range, ALL, MADV_DONTDUMP);
      madvise(range, ALL, MADV_DONTFORK);  // a context does not survive a fork
      return (char*)range;
    };
    addresses = reserve();
    bytes = reserve();
    for (int device = 0; device < MOST_DEVICES; device++) next[device] = addresses + device * SPAN;
  }

  bool of_device(const void* address) const {
    return (const char*)address >= addresses && (const char*)address < addresses + ALL;
  }

  char* behind(const void* address) const { return bytes + ((const char*)address - addresses); }

  // Addresses are not used again until the device has run through all: an access to freed memory finds nothing.
  char* place(int device, size_t size, size_t alignment) {
    char* first = addresses + device * SPAN;
    char* last = first + SPAN;
    for (int round = 0; round < 2; round++) {
      char* start = round ? first : next[device];
      for (;;) {
        start = (char*)(((size_t)start + alignment - 1) / alignment * alignment);
        if (start + size > last) break;
        auto after = reserved.lower_bound(start);
        if (after != reserved.begin()) {
          auto before = std::prev(after);
          if (before->first + before->second > start) {
            start = before->first + before->second;
            continue;
          }
        }
        if (after != reserved.end() && after->first < start + size) {
          start = after->first + after->second;
          continue;
        }
        next[device] = start + size;
        return start;
      }
    }
    return nullptr;
  }

  static const Range* find(const std::map<char*, Range>& ranges, const void* address) {
    auto after = ranges.upper_bound((char*)address);
    if (after == ranges.begin()) return nullptr;
    const Range& range = std::prev(after)->second;
    return (char*)address < range.begin + range.size ? &range : nullptr;
  }
};

Memory& memory() {
  static Memory* all = new Memory;
  return *all;
}

size_t rounded(size_t size, size_t unit) { return (std::max(size, size_t(1)) + unit - 1) / unit * unit; }

void unmap_bytes(Memory& all, char* address, size_t size) {
  mmap(all.behind(address), size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
  madvise(all.behind(address), size, MADV_DONTFORK);
}

}  // namespace

Range range_of(const void* address) {
  Memory& all = memory();
  std::shared_lock<std::shared_mutex> lock(all.mutex);
  const Range* range = Memory::find(all.of_device(address) ? all.device_ranges : all.pinned_ranges, address);
  return range ? *range : Range{Place::pageable, -1, (char*)address, 0};
}

char* host_address(const void* address) {
  Memory& all = memory();
  return all.of_device(address) ? all.behind(address) : (char*)address;
}

void poison(const void* address, size_t size) {
  if (setting("poison")) memset(host_address(address), POISON, size);
}

size_t used_memory(int device) {
  std::shared_lock<std::shared_mutex> lock(memory().mutex);
  return memory().used[device];
}

size_t free_memory(int device) {
  size_t used = used_memory(device), size = memory_size();
  return size > used ? size - used : 0;
}

cudaError_t allocate(int device, size_t size, void** address) {
  Memory& all = memory();
  size_t whole = rounded(size, SMALL);
  {
    std::unique_lock<std::shared_mutex> lock(all.mutex);
    if (all.used[device] + whole > memory_size()) return cudaErrorMemoryAllocation;
    char* start = all.place(device, whole, SMALL);
    if (!start) return cudaErrorMemoryAllocation;
    void* bytes = mmap(all.behind(start), whole, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0);
    if (bytes == MAP_FAILED) return cudaErrorMemoryAllocation;
    madvise(bytes, whole, MADV_DONTFORK);
    all.used[device] += whole;
    all.reserved[start] = whole;
    all.device_ranges[start] = Range{Place::device, device, start, size ? size : 1};
    *address = start;
  }
  poison(*address, whole);
  return cudaSuccess;
}

cudaError_t release(void* address) {
  Memory& all = memory();
  std::unique_lock<std::shared_mutex> lock(all.mutex);
  auto found = all.device_ranges.find((char*)address);
  if (found == all.device_ranges.end() || all.mapped.count((char*)address)) return cudaErrorInvalidValue;
  size_t whole = all.reserved[(char*)address];
  unmap_bytes(all, (char*)address, whole);
  all.used[found->second.device] -= whole;
  all.reserved.erase((char*)address);
  all.device_ranges.erase(found);
  return cudaSuccess;
}

cudaError_t reserve_addresses(size_t size, size_t alignment, int device, void** address) {
  if (!size || size % PAGE) return cudaErrorInvalidValue;
  Memory& all = memory();
  std::unique_lock<std::shared_mutex> lock(all.mutex);
  char* start = all.place(device, size, std::max(alignment, PAGE));
  if (!start) return cudaErrorMemoryAllocation;
  all.reserved[start] = size;
  *address = start;
  return cudaSuccess;
}

cudaError_t free_addresses(void* address, size_t size) {
  Memory& all = memory();
  std::unique_lock<std::shared_mutex> lock(all.mutex);
  auto found = all.reserved.find((char*)address);
  if (found == all.reserved.end() || found->second != size) return cudaErrorInvalidValue;
  auto inside = all.mapped.lower_bound((char*)address);
  if (inside != all.mapped.end() && inside->first < (char*)address + size) return cudaErrorInvalidValue;
  all.reserved.erase(found);
  return cudaSuccess;
}

cudaError_t create_physical(int device, size_t size, unsigned long long* handle) {
  if (!size || size % PAGE) return cudaErrorInvalidValue;
  Memory& all = memory();
  std::unique_lock<std::shared_mutex> lock(all.mutex);
  if (all.used[device] + size > memory_size()) return cudaErrorMemoryAllocation;
  int file = memfd_create("emulated-cuda", MFD_CLOEXEC);
  if (file < 0 || ftruncate(file, (off_t)size)) {
    if (file >= 0) close(file);
    return cudaErrorMemoryAllocation;
  }
  all.used[device] += size;
  *handle = all.next_handle++;
  all.physical[*handle] = Physical{file, device, size};
  return cudaSuccess;
}

namespace {
// Physical memory lives until it is released and mapped nowhere.
void drop_physical(Memory& all, unsigned long long handle) {
  Physical& physical = all.physical[handle];
  if (!physical.released || physical.mappings) return;
  close(physical.file);
  all.used[physical.device] -= physical.size;
  all.physical.erase(handle);
}
}  // namespace

cudaError_t release_physical(unsigned long long handle) {
  Memory& all = memory();
  std::unique_lock<std::shared_mutex> lock(all.mutex);
  auto found = all.physical.find(handle);
  if (found == all.physical.end() || found->second.released) return cudaErrorInvalidValue;
  found->second.released = true;
  drop_physical(all, handle);
  return cudaSuccess;
}

cudaError_t map_physical(void* address, size_t size, size_t offset, unsigned long long handle) {
  Memory& all = memory();
  std::unique_lock<std::shared_mutex> lock(all.mutex);
  auto found = all.physical.find(handle);
  if (found == all.physical.end() || found->second.released || offset || size != found->second.size)
    return cudaErrorInvalidValue;
  auto after = all.reserved.upper_bound((char*)address);
  if (after == all.reserved.begin()) return cudaErrorInvalidValue;
  auto around = std::prev(after);
  if ((char*)address + size > around->first + around->second) return cudaErrorInvalidValue;
  if (all.mapped.count((char*)address)) return cudaErrorInvalidValue;
  // No access until cuMemSetAccess.
  void* bytes = mmap(all.behind(address), size, PROT_NONE, MAP_SHARED | MAP_FIXED, found->second.file, 0);
  if (bytes == MAP_FAILED) return cudaErrorMemoryAllocation;
  madvise(bytes, size, MADV_DONTFORK);
  found->second.mappings++;
  all.mapped[(char*)address] = Mapping{size, handle};
  all.device_ranges[(char*)address] = Range{Place::device, found->second.device, (char*)address, size};
  return cudaSuccess;
}

// The caller sees to it that no work still uses the memory: unlike cudaFree, this does not wait for it.
cudaError_t unmap(void* address, size_t size) {
  Memory& all = memory();
  std::unique_lock<std::shared_mutex> lock(all.mutex);
  char* end = (char*)address + size;
  for (char* at = (char*)address; at < end;) {  // all there or nothing is done
    auto found = all.mapped.find(at);
    if (found == all.mapped.end() || at + found->second.size > end) return cudaErrorInvalidValue;
    at += found->second.size;
  }
  for (char* at = (char*)address; at < end;) {
    Mapping mapping = all.mapped[at];
    unmap_bytes(all, at, mapping.size);
    all.mapped.erase(at);
    all.device_ranges.erase(at);
    all.physical[mapping.handle].mappings--;
    drop_physical(all, mapping.handle);
    at += mapping.size;
  }
  return cudaSuccess;
}

cudaError_t set_access(void* address, size_t size, int device) {
  Memory& all = memory();
  std::unique_lock<std::shared_mutex> lock(all.mutex);
  char* end = (char*)address + size;
  for (char* at = (char*)address; at < end;) {
    auto found = all.mapped.find(at);
    if (found == all.mapped.end()) return cudaErrorInvalidValue;
    int owner = all.physical[found->second.handle].device;
    if (owner != device && !setting("peers")) return cudaErrorInvalidDevice;
    if (mprotect(all.behind(at), found->second.size, PROT_READ | PROT_WRITE)) return cudaErrorUnknown;
    if (owner == device) poison(at, found->second.size);
    at += found->second.size;
  }
  return cudaSuccess;
}

}  // namespace emulated

using namespace emulated;

EXPORT void* emulated_host_address(const void* address) { return host_address(address); }

namespace {
cudaError_t forbidden() {
  cudaError_t error = forbidden_by_capture();
  return error ? failed(error) : cudaSuccess;
}

// Memory is not given back while work may use it: CUDA waits for the device.
void wait_before_release(const char* call, int device) {
  count_wait(call);
  if (device >= 0)
    wait_for_device(device);
  else
    for (int each = 0; each < device_count(); each++) wait_for_device(each);
}
}  // namespace

EXPORT cudaError_t cudaMalloc(void** address, size_t size) {
  CALL_ON_DEVICE(cudaMalloc)
  if (cudaError_t error = forbidden()) return error;
  if (!address) return failed(cudaErrorInvalidValue);
  *address = nullptr;
  return size ? failed(allocate(current_device(), size, address)) : cudaSuccess;
}

EXPORT cudaError_t cudaFree(void* address) {
  CALL_ON_DEVICE(cudaFree)
  if (!address) return cudaSuccess;
  if (cudaError_t error = forbidden()) return error;
  Range range = range_of(address);
  if (range.place != Place::device || range.begin != address) return failed(cudaErrorInvalidValue);
  wait_before_release("cudaFree", range.device);
  return failed(release(address));
}

EXPORT cudaError_t cudaMemGetInfo(size_t* available, size_t* total) {
  CALL_ON_DEVICE(cudaMemGetInfo)
  *total = memory_size();
  *available = free_memory(current_device());
  return cudaSuccess;
}

// ---- Memory in the order of a stream ----
//
// A block of the pool is one allocation. It is ours again when the stream comes to the free; until an allocation is allowed to
// fail, the host waits for that.

EXPORT cudaError_t cudaMallocAsync(void** address, size_t size, cudaStream_t handle) {
  CALL_ON_DEVICE(cudaMallocAsync)
  StreamPointer stream = stream_of(handle);
  if (!stream) return failed(cudaErrorInvalidResourceHandle);
  cudaError_t error = allocate(stream->device, size, address);
  if (error == cudaErrorMemoryAllocation) {
    wait_before_release("cudaMallocAsync", stream->device);
    error = allocate(stream->device, size, address);
  }
  return failed(error);
}

EXPORT cudaError_t cudaFreeAsync(void* address, cudaStream_t handle) {
  CALL_ON_DEVICE(cudaFreeAsync)
  StreamPointer stream = stream_of(handle);
  Range range = range_of(address);
  if (!stream) return failed(cudaErrorInvalidResourceHandle);
  if (range.place != Place::device || range.begin != address) return failed(cudaErrorInvalidValue);
  return failed(submit(stream, Work{Kind::mark, "cudaFreeAsync", [address] { release(address); }}));
}

EXPORT cudaError_t cudaDeviceGetDefaultMemPool(cudaMemPool_t* pool, int device) {
  CALL(cudaDeviceGetDefaultMemPool)
  if (device < 0 || device >= device_count()) return failed(cudaErrorInvalidDevice);
  *pool = (cudaMemPool_t)(size_t)(device + 1);
  return cudaSuccess;
}

EXPORT cudaError_t cudaMemPoolGetAttribute(cudaMemPool_t pool, cudaMemPoolAttr attribute, void* value) {
  CALL(cudaMemPoolGetAttribute)
  int device = (int)(size_t)pool - 1;
  if (device < 0 || device >= device_count()) return failed(cudaErrorInvalidValue);
  *(uint64_t*)value = (attribute == cudaMemPoolAttrReservedMemCurrent || attribute == cudaMemPoolAttrUsedMemCurrent ||
                       attribute == cudaMemPoolAttrReservedMemHigh || attribute == cudaMemPoolAttrUsedMemHigh)
                          ? used_memory(device)
                          : 0;
  return cudaSuccess;
}

// A pool here keeps nothing that is freed, so there is nothing to set and nothing to trim.
EXPORT cudaError_t cudaMemPoolSetAttribute(cudaMemPool_t, cudaMemPoolAttr, void*) {
  CALL(cudaMemPoolSetAttribute)
  return cudaSuccess;
}
EXPORT cudaError_t cudaMemPoolTrimTo(cudaMemPool_t, size_t) {
  CALL(cudaMemPoolTrimTo)
  return cudaSuccess;
}
EXPORT cudaError_t cudaMemPoolSetAccess(cudaMemPool_t, const cudaMemAccessDesc*, size_t) {
  CALL(cudaMemPoolSetAccess)
  return cudaSuccess;
}

// ---- Pinned memory ----

EXPORT cudaError_t cudaHostAlloc(void** address, size_t size, unsigned) {
  CALL_ON_DEVICE(cudaHostAlloc)
  if (cudaError_t error = forbidden()) return error;
  *address = nullptr;
  if (!size) return cudaSuccess;
  void* block = mmap(nullptr, rounded(size, SMALL), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (block == MAP_FAILED) return failed(cudaErrorMemoryAllocation);
  poison(block, size);
  Memory& all = memory();
  std::unique_lock<std::shared_mutex> lock(all.mutex);
  all.pinned_ranges[(char*)block] = Range{Place::pinned, current_device(), (char*)block, size};
  all.allocated_pinned[(char*)block] = true;
  *address = block;
  return cudaSuccess;
}

EXPORT cudaError_t cudaMallocHost(void** address, size_t size) { return cudaHostAlloc(address, size, 0); }

EXPORT cudaError_t cudaFreeHost(void* address) {
  CALL_ON_DEVICE(cudaFreeHost)
  if (!address) return cudaSuccess;
  if (cudaError_t error = forbidden()) return error;
  Range range = range_of(address);
  if (range.place != Place::pinned || range.begin != address) return failed(cudaErrorInvalidValue);
  wait_before_release("cudaFreeHost", -1);
  Memory& all = memory();
  std::unique_lock<std::shared_mutex> lock(all.mutex);
  if (!all.allocated_pinned.erase((char*)address)) return failed(cudaErrorInvalidValue);
  all.pinned_ranges.erase((char*)address);
  munmap(address, rounded(range.size, SMALL));
  return cudaSuccess;
}

EXPORT cudaError_t cudaHostRegister(void* address, size_t size, unsigned) {
  CALL_ON_DEVICE(cudaHostRegister)
  if (cudaError_t error = forbidden()) return error;
  Memory& all = memory();
  if (!address || !size || all.of_device(address)) return failed(cudaErrorInvalidValue);
  std::unique_lock<std::shared_mutex> lock(all.mutex);
  auto after = all.pinned_ranges.lower_bound((char*)address);
  bool overlaps = after != all.pinned_ranges.end() && after->first < (char*)address + size;
  if (after != all.pinned_ranges.begin()) {
    const Range& before = std::prev(after)->second;
    overlaps = overlaps || before.begin + before.size > (char*)address;
  }
  if (overlaps) return failed(cudaErrorHostMemoryAlreadyRegistered);
  all.pinned_ranges[(char*)address] = Range{Place::pinned, current_device(), (char*)address, size};
  return cudaSuccess;
}

EXPORT cudaError_t cudaHostUnregister(void* address) {
  CALL_ON_DEVICE(cudaHostUnregister)
  if (cudaError_t error = forbidden()) return error;
  Range range = range_of(address);
  if (range.place != Place::pinned || range.begin != address) return failed(cudaErrorHostMemoryNotRegistered);
  wait_before_release("cudaHostUnregister", -1);
  Memory& all = memory();
  std::unique_lock<std::shared_mutex> lock(all.mutex);
  if (all.allocated_pinned.count((char*)address)) return failed(cudaErrorInvalidValue);
  all.pinned_ranges.erase((char*)address);
  return cudaSuccess;
}

EXPORT cudaError_t cudaHostGetDevicePointer(void** device, void* host, unsigned) {
  CALL(cudaHostGetDevicePointer)
  if (range_of(host).place != Place::pinned) return failed(cudaErrorInvalidValue);
  *device = host;
  return cudaSuccess;
}

EXPORT cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* attributes, const void* address) {
  CALL(cudaPointerGetAttributes)
  Range range = range_of(address);
  memset(attributes, 0, sizeof *attributes);
  attributes->device = range.device;
  switch (range.place) {
    case Place::device:
      attributes->type = cudaMemoryTypeDevice;
      attributes->devicePointer = (void*)address;
      break;
    case Place::pinned:
      attributes->type = cudaMemoryTypeHost;
      attributes->devicePointer = attributes->hostPointer = (void*)address;
      break;
    default:
      attributes->type = cudaMemoryTypeUnregistered;
  }
  return cudaSuccess;
}
