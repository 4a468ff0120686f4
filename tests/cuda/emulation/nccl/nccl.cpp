// NCCL's interface over shared memory between processes. A call is a kernel on the stream that it is given, so that
// ProcessGroupNCCL, its streams, events and watchdog are the real ones, and any order that streams allow can come.
//
// Source of the rules: NCCL's user guide (communicators, groups, fault tolerance) and nccl.h of the version that torch brings.

#include <cuda_runtime.h>

#include <cmath>
#include <map>
#include <mutex>
#include <random>

#include "reduce.h"
#include "transport.h"

using namespace emulated;

// Of the emulated runtime; its README says what they do.
extern "C" void* emulated_host_address(const void* address);
extern "C" int emulated_launch(void* stream, const char* name, void (*run)(void*), void (*drop)(void*), void* argument);
extern "C" void emulated_count(const char* name, long amount);

namespace {

unsigned char* bytes_at(const void* address) { return address ? static_cast<unsigned char*>(emulated_host_address(address)) : nullptr; }

enum Kind : uint32_t { ALL_REDUCE = 1, REDUCE, REDUCE_SCATTER, BROADCAST, ALL_GATHER, ALL_TO_ALL, GATHER, SCATTER, POINT_TO_POINT, SPLIT };

// Of the kernels, as a profiler shows them; by Kind.
const char* NAMES[] = {"", "ncclAllReduce", "ncclReduce", "ncclReduceScatter", "ncclBroadcast", "ncclAllGather", "ncclAlltoAll", "ncclGather",
                       "ncclScatter", "ncclSendRecv", "ncclCommSplit"};

struct Call {
    Kind kind;
    const void* source;
    void* target;
    size_t count;  // as NCCL's function of this kind counts: elements in all, or of one rank
    ncclDataType_t type;
    Reduction by{ncclSum};
    int root = 0;
    // For messages between two ranks, which a group sends together.
    struct Pair { const void* memory; size_t bytes; int peer; bool receives; };
    std::vector<Pair> pairs{};
};

thread_local std::string last_error;

ncclResult_t fail(ncclResult_t result, const std::string& why) {
    last_error = why;
    return result;
}

}  // namespace

struct ncclComm {
    ncclComm(const std::string& name, int ranks, int rank) : name(name), transport(name, ranks, rank) { cudaGetDevice(&device); }

    std::string name;
    Transport transport;
    int device = 0, splits = 0;
    std::map<int, Reduction> reductions;
    std::mutex lock;
    std::atomic<ncclResult_t> error{ncclSuccess};
    std::string error_text;  // under `lock`
    // Calls of a communicator run one after the other in the order of issue, whatever their streams are.
    std::atomic<uint64_t> issued{0}, ended{0};  // `issued` is moved under `lock`
    std::atomic<int> queued{0};

    void run(const Call& call) {
        if (error.load() != ncclSuccess) return;
        try {
            perform(call);
        } catch (const Broken& broken) {
            std::lock_guard<std::mutex> guard(lock);
            error_text = broken.what();
            if (broken.reason == Broken::PEER_GONE) error = ncclRemoteError;
            else if (broken.reason == Broken::DIFFERENT_CALLS) error = ncclInvalidUsage;
            // After an abort nobody asks for an error. What this rank does not send or take any more, others must not wait for.
            transport.leave();
        }
    }

    void perform(const Call& call) {
        const int ranks = transport.ranks, rank = transport.rank;
        const size_t size = size_of(call.type), bytes = call.count * size;
        unsigned char *source = bytes_at(call.source), *target = bytes_at(call.target);
        std::vector<Message> sends, receives;
        auto to = [&](int peer, unsigned char* memory, size_t length) { sends.push_back({peer, memory, length}); };
        auto from = [&](int peer, unsigned char* memory, size_t length) { receives.push_back({peer, memory, length}); };
        auto pass = [&] { transport.exchange(call.kind, std::move(sends), std::move(receives)); sends.clear(); receives.clear(); };
        switch (call.kind) {
            case ALL_REDUCE: {  // a reduce-scatter of nearly equal parts, and an all-gather of them
                auto begin = [&](int part) { return call.count * part / ranks; };
                size_t own = begin(rank + 1) - begin(rank);
                for (int peer = 0; peer < ranks; ++peer) to(peer, source + begin(peer) * size, (begin(peer + 1) - begin(peer)) * size);
                std::vector<unsigned char> sum = reduced(call, own, from, pass);
                for (int peer = 0; peer < ranks; ++peer) {
                    to(peer, sum.data(), own * size);
                    from(peer, target + begin(peer) * size, (begin(peer + 1) - begin(peer)) * size);
                }
                return pass();
            }
            case REDUCE_SCATTER: {
                for (int peer = 0; peer < ranks; ++peer) to(peer, source + peer * bytes, bytes);
                std::vector<unsigned char> sum = reduced(call, call.count, from, pass);
                if (bytes) memcpy(target, sum.data(), bytes);
                return;
            }
            case REDUCE: {
                to(call.root, source, bytes);
                if (rank != call.root) return pass();
                std::vector<unsigned char> sum = reduced(call, call.count, from, pass);
                if (bytes) memcpy(target, sum.data(), bytes);
                return;
            }
            case BROADCAST:
                if (rank == call.root)
                    for (int peer = 0; peer < ranks; ++peer) to(peer, source, bytes);
                from(call.root, target, bytes);
                return pass();
            case ALL_GATHER:
                for (int peer = 0; peer < ranks; ++peer) to(peer, source, bytes), from(peer, target + peer * bytes, bytes);
                return pass();
            case ALL_TO_ALL:
                for (int peer = 0; peer < ranks; ++peer) to(peer, source + peer * bytes, bytes), from(peer, target + peer * bytes, bytes);
                return pass();
            case GATHER:
                to(call.root, source, bytes);
                if (rank == call.root)
                    for (int peer = 0; peer < ranks; ++peer) from(peer, target + peer * bytes, bytes);
                return pass();
            case SCATTER:
                if (rank == call.root)
                    for (int peer = 0; peer < ranks; ++peer) to(peer, source + peer * bytes, bytes);
                from(call.root, target, bytes);
                return pass();
            case POINT_TO_POINT:
            case SPLIT:
                for (auto& pair : call.pairs)
                    if (pair.receives) from(pair.peer, bytes_at(pair.memory), pair.bytes);
                    else to(pair.peer, bytes_at(pair.memory), pair.bytes);
                return pass();
        }
    }

    // What all ranks sent to this one, reduced. What this rank sends is in `sends` already.
    template <class From, class Pass>
    std::vector<unsigned char> reduced(const Call& call, size_t count, From from, Pass pass) {
        const size_t bytes = count * size_of(call.type);
        std::vector<std::vector<unsigned char>> inputs(transport.ranks, std::vector<unsigned char>(bytes));
        std::vector<const unsigned char*> addresses;
        for (int peer = 0; peer < transport.ranks; ++peer) from(peer, inputs[peer].data(), bytes), addresses.push_back(inputs[peer].data());
        pass();
        std::vector<unsigned char> sum(bytes);
        reduce(call.type, call.by, addresses.data(), transport.ranks, sum.data(), count);
        return sum;
    }
};

namespace {

struct Queued {
    ncclComm* comm;
    Call call;
    uint64_t turn;
    bool captured;  // in a graph: it runs at each launch of it, among whatever runs then
};

void run_queued(void* argument) {
    auto* queued = static_cast<Queued*>(argument);
    ncclComm* comm = queued->comm;
    if (queued->captured) return comm->run(queued->call);
    Patience patience;
    while (comm->ended.load() != queued->turn && !comm->transport.aborted.load()) patience.wait();
    comm->run(queued->call);
    comm->ended.store(queued->turn + 1);
    comm->queued.fetch_sub(1);
}

void drop_queued(void* argument) { delete static_cast<Queued*>(argument); }

ncclResult_t launch(ncclComm* comm, Call call, cudaStream_t stream) {
    int device = 0;
    cudaGetDevice(&device);
    if (device != comm->device) return fail(ncclInvalidUsage, "the current device is not the communicator's");
    cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
    if (cudaStreamIsCapturing(stream, &status) != cudaSuccess) return fail(ncclUnhandledCudaError, "cudaStreamIsCapturing failed");
    bool captured = status == cudaStreamCaptureStatusActive;
    auto queued = std::make_unique<Queued>(Queued{comm, std::move(call), 0, captured});
    std::lock_guard<std::mutex> guard(comm->lock);
    if (!captured) queued->turn = comm->issued.load(), comm->queued.fetch_add(1);
    emulated_count("nccl calls", 1);
    if (emulated_launch(stream, NAMES[queued->call.kind], run_queued, drop_queued, queued.get()) == cudaSuccess) {
        queued.release();
        if (!captured) comm->issued.fetch_add(1);
        return ncclSuccess;
    }
    if (!captured) comm->queued.fetch_sub(1);
    return fail(ncclUnhandledCudaError, "the call cannot be put on the stream");
}

// What ncclGroupStart has opened on this thread.
struct Group {
    struct Entry { ncclComm* comm; Call call; cudaStream_t stream; };
    int depth = 0;
    std::vector<Entry> entries;
    std::vector<ncclComm*> joining;
    ncclResult_t error = ncclSuccess;
};

thread_local Group group;

ncclResult_t issue(ncclComm* comm, Call call, cudaStream_t stream) {
    if (!group.depth) return launch(comm, std::move(call), stream);
    if (call.kind == POINT_TO_POINT)
        for (auto& entry : group.entries)
            if (entry.comm == comm && entry.stream == stream && entry.call.kind == POINT_TO_POINT) {
                entry.call.pairs.insert(entry.call.pairs.end(), call.pairs.begin(), call.pairs.end());
                return ncclSuccess;
            }
    group.entries.push_back({comm, std::move(call), stream});
    return ncclSuccess;
}

bool on_device(const void* address) {
    cudaPointerAttributes attributes;
    return cudaPointerGetAttributes(&attributes, address) == cudaSuccess && attributes.type != cudaMemoryTypeUnregistered;
}

ncclResult_t check(ncclComm* comm, size_t count, ncclDataType_t type, int root, std::initializer_list<const void*> buffers) {
    if (!comm) return fail(ncclInvalidArgument, "the communicator is null");
    if (comm->error.load() != ncclSuccess) return fail(comm->error.load(), "the communicator has failed");
    if (comm->transport.aborted.load()) return fail(ncclInvalidUsage, "the communicator was aborted");
    if (!size_of(type)) return fail(ncclInvalidArgument, "unknown data type");
    if (root < 0 || root >= comm->transport.ranks) return fail(ncclInvalidArgument, "a root or peer outside of the communicator");
    if (count)
        for (const void* buffer : buffers)
            if (!buffer || !on_device(buffer)) return fail(ncclInvalidArgument, "a buffer is not memory of a device or pinned memory");
    return ncclSuccess;
}

ncclResult_t issue_checked(Kind kind, const void* source, void* target, size_t count, ncclDataType_t type, int root, ncclComm* comm,
                           cudaStream_t stream, ncclRedOp_t op = ncclSum) {
    // Where only the root reads or writes a buffer, others may give null.
    bool at_root = comm && comm->transport.rank == root;
    const void* reads = kind == SCATTER && !at_root ? target : source;
    const void* writes = (kind == REDUCE || kind == GATHER) && !at_root ? source : target;
    if (kind == BROADCAST && !at_root) reads = target;
    if (auto result = check(comm, count, type, root, {reads, writes})) return result;
    Call call{kind, source, target, count, type};
    call.root = root;
    call.by.op = op;
    if (op >= ncclNumOps) {
        std::lock_guard<std::mutex> guard(comm->lock);
        auto own = comm->reductions.find(op);
        if (own == comm->reductions.end()) return fail(ncclInvalidArgument, "unknown reduction");
        call.by = own->second;
    }
    return issue(comm, std::move(call), stream);
}

ncclResult_t issue_pair(bool receives, const void* memory, size_t count, ncclDataType_t type, int peer, ncclComm* comm, cudaStream_t stream) {
    if (auto result = check(comm, count, type, peer, {memory})) return result;
    Call call{POINT_TO_POINT, nullptr, nullptr, 0, type};
    call.pairs.push_back({memory, count * size_of(type), peer, receives});
    return issue(comm, std::move(call), stream);
}

std::string name_of(const ncclUniqueId& id) { return std::string(id.internal, strnlen(id.internal, sizeof id.internal)); }

ncclResult_t make(ncclComm_t* made, const std::string& name, int ranks, int rank) {
    if (!made || ranks < 1 || rank < 0 || rank >= ranks) return fail(ncclInvalidArgument, "ranks and rank of a communicator");
    try {
        auto comm = std::make_unique<ncclComm>(name, ranks, rank);
        if (group.depth) group.joining.push_back(comm.get());
        else comm->transport.join();
        *made = comm.release();
        return ncclSuccess;
    } catch (const std::exception& error) {
        return fail(ncclSystemError, error.what());
    }
}

void wait_for_queued(ncclComm* comm) {
    Patience patience;
    while (comm->queued.load()) patience.wait();
}

ncclResult_t not_emulated(const char* function) { return fail(ncclInvalidUsage, std::string(function) + " is not emulated"); }

double as_double(ncclDataType_t type, const void* scalar) {
    switch (type) {
        case ncclFloat16: return *static_cast<const c10::Half*>(scalar);
        case ncclBfloat16: return *static_cast<const c10::BFloat16*>(scalar);
        case ncclFloat32: return *static_cast<const float*>(scalar);
        case ncclFloat64: return *static_cast<const double*>(scalar);
        case ncclInt32: return *static_cast<const int32_t*>(scalar);
        case ncclInt64: return static_cast<double>(*static_cast<const int64_t*>(scalar));
        default: return NAN;
    }
}

}  // namespace

extern "C" {

ncclResult_t ncclGetVersion(int* version) {
    *version = NCCL_VERSION_CODE;
    return ncclSuccess;
}

const char* ncclGetErrorString(ncclResult_t result) {
    static const char* texts[] = {"no error", "unhandled cuda error", "unhandled system error", "internal error", "invalid argument", "invalid usage",
                                  "remote process exited or there was a network error", "NCCL operation in progress", "timeout"};
    return result >= 0 && result < ncclNumResults ? texts[result] : "unknown result code";
}

const char* ncclGetLastError(ncclComm_t comm) {
    if (comm) {
        std::lock_guard<std::mutex> guard(comm->lock);
        if (!comm->error_text.empty()) last_error = comm->error_text;
    }
    return last_error.c_str();
}

// ---- communicators

ncclResult_t ncclGetUniqueId(ncclUniqueId* id) {
    std::random_device random;
    memset(id, 0, sizeof *id);
    snprintf(id->internal, sizeof id->internal, "%d-%08x%08x", (int)getpid(), random(), random());
    return ncclSuccess;
}

ncclResult_t ncclCommInitRank(ncclComm_t* comm, int ranks, ncclUniqueId id, int rank) { return make(comm, name_of(id), ranks, rank); }

// A communicator that is asked not to block does: it is ready when the call returns.
ncclResult_t ncclCommInitRankConfig(ncclComm_t* comm, int ranks, ncclUniqueId id, int rank, ncclConfig_t*) { return make(comm, name_of(id), ranks, rank); }

ncclResult_t ncclCommInitRankScalable(ncclComm_t* comm, int ranks, int rank, int ids, ncclUniqueId* id, ncclConfig_t*) {
    return ids < 1 ? fail(ncclInvalidArgument, "no unique id") : make(comm, name_of(id[0]), ranks, rank);
}

ncclResult_t ncclCommInitAll(ncclComm_t* comms, int devices, const int* list) {
    ncclUniqueId id;
    ncclGetUniqueId(&id);
    int current = 0;
    cudaGetDevice(&current);
    ncclGroupStart();
    ncclResult_t result = ncclSuccess;
    for (int rank = 0; rank < devices && result == ncclSuccess; ++rank) {
        cudaSetDevice(list ? list[rank] : rank);
        result = make(comms + rank, name_of(id), devices, rank);
    }
    ncclResult_t joined = ncclGroupEnd();
    cudaSetDevice(current);
    return result ? result : joined;
}

ncclResult_t ncclCommSplit(ncclComm_t comm, int color, int key, ncclComm_t* made, ncclConfig_t*) {
    if (auto result = check(comm, 0, ncclInt8, 0, {})) return result;
    if (group.depth) return not_emulated("ncclCommSplit in a group");
    wait_for_queued(comm);
    struct Wish { int color, key; };
    Wish own{color, key};
    std::vector<Wish> wishes(comm->transport.ranks);
    std::vector<Message> sends, receives;
    for (int peer = 0; peer < comm->transport.ranks; ++peer) {
        sends.push_back({peer, reinterpret_cast<unsigned char*>(&own), sizeof own});
        receives.push_back({peer, reinterpret_cast<unsigned char*>(&wishes[peer]), sizeof own});
    }
    try {
        comm->transport.exchange(SPLIT, sends, receives);
    } catch (const Broken& broken) {
        return fail(ncclRemoteError, broken.what());
    }
    std::string name = comm->name + "." + std::to_string(comm->splits++) + "." + std::to_string(color);
    *made = nullptr;
    if (color == NCCL_SPLIT_NOCOLOR) return ncclSuccess;
    std::vector<int> members;  // ranks of the parent, in the order of their keys
    for (int rank = 0; rank < comm->transport.ranks; ++rank)
        if (wishes[rank].color == color) members.push_back(rank);
    std::stable_sort(members.begin(), members.end(), [&](int one, int other) { return wishes[one].key < wishes[other].key; });
    int rank = std::find(members.begin(), members.end(), comm->transport.rank) - members.begin();
    return make(made, name, members.size(), rank);
}

ncclResult_t ncclCommFinalize(ncclComm_t comm) {
    if (!comm) return fail(ncclInvalidArgument, "the communicator is null");
    wait_for_queued(comm);
    return ncclSuccess;
}

ncclResult_t ncclCommDestroy(ncclComm_t comm) {
    if (!comm) return ncclSuccess;
    wait_for_queued(comm);
    delete comm;
    return ncclSuccess;
}

ncclResult_t ncclCommAbort(ncclComm_t comm) {
    if (!comm) return ncclSuccess;
    comm->transport.aborted = true;
    comm->transport.leave();
    // Calls that are queued return at once when the stream comes to them; until then the communicator has to be there for them.
    if (!comm->queued.load()) delete comm;
    return ncclSuccess;
}

ncclResult_t ncclCommRevoke(ncclComm_t comm, int) {
    comm->transport.aborted = true;
    return ncclSuccess;
}

ncclResult_t ncclCommGetAsyncError(ncclComm_t comm, ncclResult_t* error) {
    if (!comm) return fail(ncclInvalidArgument, "the communicator is null");
    *error = comm->error.load();
    return ncclSuccess;
}

ncclResult_t ncclCommCount(const ncclComm_t comm, int* count) {
    *count = comm->transport.ranks;
    return ncclSuccess;
}

ncclResult_t ncclCommCuDevice(const ncclComm_t comm, int* device) {
    *device = comm->device;
    return ncclSuccess;
}

ncclResult_t ncclCommUserRank(const ncclComm_t comm, int* rank) {
    *rank = comm->transport.rank;
    return ncclSuccess;
}

// ---- memory: nothing is gained by registering it

ncclResult_t ncclMemAlloc(void** address, size_t bytes) { return cudaMalloc(address, bytes) == cudaSuccess ? ncclSuccess : ncclUnhandledCudaError; }
ncclResult_t ncclMemFree(void* address) { return cudaFree(address) == cudaSuccess ? ncclSuccess : ncclUnhandledCudaError; }

ncclResult_t ncclCommRegister(const ncclComm_t, void* buffer, size_t, void** handle) {
    *handle = buffer;
    return ncclSuccess;
}
ncclResult_t ncclCommDeregister(const ncclComm_t, void*) { return ncclSuccess; }

ncclResult_t ncclCommMemStats(ncclComm_t, ncclCommMemStat_t, uint64_t* value) {
    *value = 0;
    return ncclSuccess;
}

// ---- groups

ncclResult_t ncclGroupStart() {
    ++group.depth;
    return ncclSuccess;
}

ncclResult_t ncclGroupEnd() {
    if (!group.depth) return fail(ncclInvalidUsage, "ncclGroupEnd without ncclGroupStart");
    if (--group.depth) return ncclSuccess;
    std::vector<Group::Entry> entries;
    std::vector<ncclComm*> joining;
    entries.swap(group.entries);
    joining.swap(group.joining);
    try {
        for (auto* comm : joining) comm->transport.join();
    } catch (const std::exception& error) {
        return fail(ncclSystemError, error.what());
    }
    int current = 0;
    cudaGetDevice(&current);
    ncclResult_t result = ncclSuccess;
    for (auto& entry : entries) {
        cudaSetDevice(entry.comm->device);  // a group may be of several devices
        if (auto one = launch(entry.comm, std::move(entry.call), entry.stream)) result = one;
    }
    cudaSetDevice(current);
    return result;
}

ncclResult_t ncclGroupSimulateEnd(ncclSimInfo_t*) { return not_emulated("ncclGroupSimulateEnd"); }

// ---- reductions

ncclResult_t ncclRedOpCreatePreMulSum(ncclRedOp_t* op, void* scalar, ncclDataType_t type, ncclScalarResidence_t residence, ncclComm_t comm) {
    if (!comm) return fail(ncclInvalidArgument, "the communicator is null");
    // NCCL reads a scalar of the device while the call runs; torch's stays as it is from here on.
    if (residence == ncclScalarDevice) cudaDeviceSynchronize();
    std::lock_guard<std::mutex> guard(comm->lock);
    int number = ncclNumOps;
    while (comm->reductions.count(number)) ++number;
    comm->reductions[number] = {ncclSum, true, as_double(type, residence == ncclScalarDevice ? bytes_at(scalar) : scalar)};
    *op = static_cast<ncclRedOp_t>(number);
    return ncclSuccess;
}

ncclResult_t ncclRedOpDestroy(ncclRedOp_t op, ncclComm_t comm) {
    std::lock_guard<std::mutex> guard(comm->lock);
    return comm->reductions.erase(op) ? ncclSuccess : fail(ncclInvalidArgument, "unknown reduction");
}

// ---- collectives

ncclResult_t ncclAllReduce(const void* source, void* target, size_t count, ncclDataType_t type, ncclRedOp_t op, ncclComm_t comm, cudaStream_t stream) {
    return issue_checked(ALL_REDUCE, source, target, count, type, 0, comm, stream, op);
}

ncclResult_t ncclReduce(const void* source, void* target, size_t count, ncclDataType_t type, ncclRedOp_t op, int root, ncclComm_t comm,
                        cudaStream_t stream) {
    return issue_checked(REDUCE, source, target, count, type, root, comm, stream, op);
}

ncclResult_t ncclReduceScatter(const void* source, void* target, size_t count, ncclDataType_t type, ncclRedOp_t op, ncclComm_t comm,
                               cudaStream_t stream) {
    return issue_checked(REDUCE_SCATTER, source, target, count, type, 0, comm, stream, op);
}

ncclResult_t ncclBroadcast(const void* source, void* target, size_t count, ncclDataType_t type, int root, ncclComm_t comm, cudaStream_t stream) {
    return issue_checked(BROADCAST, source, target, count, type, root, comm, stream);
}

ncclResult_t ncclBcast(void* buffer, size_t count, ncclDataType_t type, int root, ncclComm_t comm, cudaStream_t stream) {
    return ncclBroadcast(buffer, buffer, count, type, root, comm, stream);
}

ncclResult_t ncclAllGather(const void* source, void* target, size_t count, ncclDataType_t type, ncclComm_t comm, cudaStream_t stream) {
    return issue_checked(ALL_GATHER, source, target, count, type, 0, comm, stream);
}

ncclResult_t ncclAlltoAll(const void* source, void* target, size_t count, ncclDataType_t type, ncclComm_t comm, cudaStream_t stream) {
    return issue_checked(ALL_TO_ALL, source, target, count, type, 0, comm, stream);
}

ncclResult_t ncclGather(const void* source, void* target, size_t count, ncclDataType_t type, int root, ncclComm_t comm, cudaStream_t stream) {
    return issue_checked(GATHER, source, target, count, type, root, comm, stream);
}

ncclResult_t ncclScatter(const void* source, void* target, size_t count, ncclDataType_t type, int root, ncclComm_t comm, cudaStream_t stream) {
    return issue_checked(SCATTER, source, target, count, type, root, comm, stream);
}

ncclResult_t ncclSend(const void* source, size_t count, ncclDataType_t type, int peer, ncclComm_t comm, cudaStream_t stream) {
    return issue_pair(false, source, count, type, peer, comm, stream);
}

ncclResult_t ncclRecv(void* target, size_t count, ncclDataType_t type, int peer, ncclComm_t comm, cudaStream_t stream) {
    return issue_pair(true, target, count, type, peer, comm, stream);
}

// ---- what torch links to and nothing here uses: an error by name

ncclResult_t ncclCommShrink(ncclComm_t, int*, int, ncclComm_t*, ncclConfig_t*, int) { return not_emulated(__func__); }
ncclResult_t ncclCommGetUniqueId(ncclComm_t, ncclUniqueId*) { return not_emulated(__func__); }
ncclResult_t ncclCommGrow(ncclComm_t, int, const ncclUniqueId*, int, ncclComm_t*, ncclConfig_t*) { return not_emulated(__func__); }
ncclResult_t ncclCommSuspend(ncclComm_t, int) { return not_emulated(__func__); }
ncclResult_t ncclCommResume(ncclComm_t) { return not_emulated(__func__); }
ncclResult_t ncclCommWindowRegister(ncclComm_t, void*, size_t, ncclWindow_t*, int) { return not_emulated(__func__); }
ncclResult_t ncclCommWindowDeregister(ncclComm_t, ncclWindow_t) { return not_emulated(__func__); }
ncclResult_t ncclWinGetUserPtr(ncclComm_t, ncclWindow_t, void**) { return not_emulated(__func__); }
ncclResult_t ncclPutSignal(const void*, size_t, ncclDataType_t, int, ncclWindow_t, size_t, int, int, unsigned int, ncclComm_t, cudaStream_t) {
    return not_emulated(__func__);
}
ncclResult_t ncclSignal(int, int, int, unsigned int, ncclComm_t, cudaStream_t) { return not_emulated(__func__); }
ncclResult_t ncclWaitSignal(int, ncclWaitSignalDesc_t*, ncclComm_t, cudaStream_t) { return not_emulated(__func__); }
ncclResult_t ncclDevCommCreate() { return not_emulated(__func__); }
ncclResult_t ncclDevCommDestroy() { return not_emulated(__func__); }
ncclResult_t ncclGetLsaMultimemDevicePointer() { return not_emulated(__func__); }
ncclResult_t ncclGetPeerDevicePointer() { return not_emulated(__func__); }

}  // extern "C"
