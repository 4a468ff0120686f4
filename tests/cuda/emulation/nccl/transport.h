// Bytes between the ranks of one communicator: one file in shared memory with a ring for each ordered pair of ranks.
//
// Everything that NCCL does is made of one step, `exchange`: a set of messages to send and to receive, all of which make
// progress together. Messages of a pair arrive in the order in which they were sent, and each begins with a header, so that
// ranks that call different collectives get an error in place of each other's bytes.

#pragma once

#include <fcntl.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

namespace emulated {

constexpr size_t RING_BYTES = 256 << 10;

// What ends a wait before its peers have answered.
struct Broken : std::runtime_error {
    enum Reason { ABORTED, PEER_GONE, DIFFERENT_CALLS };
    Reason reason;
    Broken(Reason reason, const std::string& what) : std::runtime_error(what), reason(reason) {}
};

// Bytes from one rank to another. `written` is moved by the sender only, `taken` by the receiver only.
struct Ring {
    alignas(64) std::atomic<uint64_t> written;
    alignas(64) std::atomic<uint64_t> taken;
    alignas(64) unsigned char bytes[RING_BYTES];

    size_t put(const unsigned char* source, size_t count) {
        uint64_t begin = written.load(std::memory_order_relaxed);
        size_t fits = std::min<size_t>(count, RING_BYTES - (begin - taken.load(std::memory_order_acquire)));
        copy(begin, fits, [&](size_t at, size_t done, size_t part) { memcpy(bytes + at, source + done, part); });
        written.store(begin + fits, std::memory_order_release);
        return fits;
    }

    size_t take(unsigned char* target, size_t count) {
        uint64_t begin = taken.load(std::memory_order_relaxed);
        size_t there = std::min<size_t>(count, written.load(std::memory_order_acquire) - begin);
        copy(begin, there, [&](size_t at, size_t done, size_t part) { memcpy(target + done, bytes + at, part); });
        taken.store(begin + there, std::memory_order_release);
        return there;
    }

  private:
    template <class Part> static void copy(uint64_t begin, size_t count, Part part) {
        size_t at = begin % RING_BYTES, first = std::min(count, RING_BYTES - at);
        if (first) part(at, 0, first);
        if (count > first) part(0, first, count - first);
    }
};

struct RankState {
    std::atomic<int32_t> process;  // 0 until the rank has joined
    std::atomic<int32_t> left;     // by destroying or aborting its communicator
};

struct Header {
    uint32_t call;
    uint32_t reserved;
    uint64_t bytes;
};

struct Message {
    int peer;
    unsigned char* memory;  // to send: read only
    size_t bytes;
    size_t done = 0;
    Header header = {};
    size_t header_done = 0;

    bool ended() const { return header_done == sizeof(Header) && done == bytes; }
};

// Sleeps longer the longer nothing has happened: ranks are more than cores.
class Patience {
  public:
    void progressed() { idle_ = 0; }
    void wait() {
        if (++idle_ < 64) std::this_thread::yield();
        else std::this_thread::sleep_for(std::chrono::microseconds(idle_ < 512 ? 50 : 500));
    }
    bool long_idle() const { return idle_ > 600 && idle_ % 200 == 0; }

  private:
    uint64_t idle_ = 0;
};

class Transport {
  public:
    // Opens the file of `name`, which the first rank that comes makes. `join` waits for the others.
    Transport(const std::string& name, int ranks, int rank) : ranks(ranks), rank(rank), path_(file_of(name)) {
        bytes_ = STATE_BYTES + sizeof(Ring) * ranks * ranks;
        int descriptor = open(path_.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600);
        if (descriptor < 0) throw std::runtime_error("cannot open " + path_ + ": " + strerror(errno));
        // A file that grows is zeros: rings are empty, and nobody has joined.
        void* memory = ftruncate(descriptor, bytes_) ? MAP_FAILED
                     : mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_SHARED, descriptor, 0);
        close(descriptor);
        if (memory == MAP_FAILED) throw std::runtime_error("cannot map " + path_ + ": " + strerror(errno));
        states_ = static_cast<RankState*>(memory);
        rings_ = reinterpret_cast<Ring*>(static_cast<unsigned char*>(memory) + STATE_BYTES);
        states_[rank].process.store(getpid());
    }

    ~Transport() {
        leave();
        munmap(states_, bytes_);
    }

    void join() {
        Patience patience;
        for (int other = 0; other < ranks;)
            if (states_[other].process.load()) ++other;
            else if (aborted.load()) throw Broken(Broken::ABORTED, "aborted while waiting for ranks to join");
            else patience.wait();
        unlink(path_.c_str());  // by every rank: the others hold it open
    }

    void leave() { states_[rank].left.store(1); }

    // Sends and receives all of these, in the order given for each peer. A message to oneself is copied.
    void exchange(uint32_t call, std::vector<Message> sends, std::vector<Message> receives) {
        copy_own(sends, receives);
        for (auto& message : sends) message.header = {call, 0, message.bytes};
        std::vector<size_t> next_send(ranks), next_receive(ranks);
        Patience patience;
        for (;;) {
            bool moved = false, pending = false;
            for (int peer = 0; peer < ranks; ++peer) {
                moved |= advance(sends, next_send[peer], peer, [&](Message& one) { return push(one); }, pending);
                moved |= advance(receives, next_receive[peer], peer, [&](Message& one) { return pull(call, one); }, pending);
            }
            if (!pending) return;
            if (aborted.load()) throw Broken(Broken::ABORTED, "the communicator was aborted");
            if (moved) patience.progressed();
            else {
                if (patience.long_idle()) check_peers(sends, receives);
                patience.wait();
            }
        }
    }

    const int ranks, rank;
    std::atomic<bool> aborted{false};

  private:
    static constexpr size_t STATE_BYTES = 64 << 10;

    static std::string file_of(const std::string& name) {
        const char* folder = getenv("EMULATED_NCCL_FOLDER");
        return std::string(folder ? folder : "/dev/shm") + "/emulated-nccl-" + name;
    }

    Ring& ring(int source, int target) { return rings_[source * ranks + target]; }

    void copy_own(std::vector<Message>& sends, std::vector<Message>& receives) {
        auto own = [this](const Message& one) { return one.peer == rank; };
        auto send = sends.begin();
        for (auto receive = receives.begin(); receive != receives.end(); ++receive) {
            if (!own(*receive)) continue;
            send = std::find_if(send, sends.end(), own);
            if (send == sends.end() || send->bytes != receive->bytes)
                throw Broken(Broken::DIFFERENT_CALLS, "a rank receives from itself what it does not send");
            if (receive->bytes) memmove(receive->memory, send->memory, send->bytes);
            ++send;
        }
        sends.erase(std::remove_if(sends.begin(), sends.end(), own), sends.end());
        receives.erase(std::remove_if(receives.begin(), receives.end(), own), receives.end());
    }

    // Moves the first message of `peer` that has not ended; `next` is where to look for it.
    template <class Move>
    bool advance(std::vector<Message>& messages, size_t& next, int peer, Move move, bool& pending) {
        while (next < messages.size() && (messages[next].peer != peer || messages[next].ended())) ++next;
        if (next == messages.size()) return false;
        pending = true;
        return move(messages[next]);
    }

    bool push(Message& message) {
        Ring& to = ring(rank, message.peer);
        size_t moved = 0;
        if (message.header_done < sizeof(Header))
            message.header_done += moved = to.put(reinterpret_cast<unsigned char*>(&message.header) + message.header_done,
                                                  sizeof(Header) - message.header_done);
        if (message.header_done == sizeof(Header) && message.done < message.bytes) {
            size_t part = to.put(message.memory + message.done, message.bytes - message.done);
            message.done += part;
            moved += part;
        }
        return moved;
    }

    bool pull(uint32_t call, Message& message) {
        Ring& from = ring(message.peer, rank);
        size_t moved = 0;
        if (message.header_done < sizeof(Header)) {
            message.header_done += moved = from.take(reinterpret_cast<unsigned char*>(&message.header) + message.header_done,
                                                     sizeof(Header) - message.header_done);
            if (message.header_done == sizeof(Header) && (message.header.call != call || message.header.bytes != message.bytes)) {
                char text[160];
                snprintf(text, sizeof text, "rank %d sends call %u of %llu bytes where rank %d expects call %u of %zu bytes", message.peer,
                         message.header.call, (unsigned long long)message.header.bytes, rank, call, message.bytes);
                throw Broken(Broken::DIFFERENT_CALLS, text);
            }
        }
        if (message.header_done == sizeof(Header) && message.done < message.bytes) {
            size_t part = from.take(message.memory + message.done, message.bytes - message.done);
            message.done += part;
            moved += part;
        }
        return moved;
    }

    void check_peers(const std::vector<Message>& sends, const std::vector<Message>& receives) {
        for (auto* messages : {&sends, &receives})
            for (auto& message : *messages)
                if (!message.ended() && gone(message.peer))
                    throw Broken(Broken::PEER_GONE, "rank " + std::to_string(message.peer) + " is gone");
    }

    bool gone(int peer) {
        if (states_[peer].left.load()) return true;
        int process = states_[peer].process.load();
        if (kill(process, 0) && errno == ESRCH) return true;
        // A process that has ended and is not yet waited for still takes signals.
        char path[64], state = 'R';
        snprintf(path, sizeof path, "/proc/%d/stat", process);
        if (FILE* file = fopen(path, "r")) {
            if (fscanf(file, "%*d (%*[^)]) %c", &state) != 1) state = 'R';
            fclose(file);
        }
        return state == 'Z' || state == 'X';
    }

    std::string path_;
    size_t bytes_;
    RankState* states_;
    Ring* rings_;
};

}  // namespace emulated
