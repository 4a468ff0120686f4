// Counts of what a program asked the device for: calls by name, waits of the host by call and thread, copies by kind and bytes.
#include "emulation.h"

#include <pthread.h>

#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>

namespace emulated {
namespace {

struct Counts {
  std::mutex mutex;
  std::map<std::string, Counter> by_name;  // a node never moves: references stay valid
};

Counts& counts() {
  static Counts* all = new Counts;  // never destroyed: threads of streams may outlive static objects
  return *all;
}

}  // namespace

Counter& counter(const char* name) {
  std::lock_guard<std::mutex> lock(counts().mutex);
  auto found = counts().by_name.find(name);
  if (found == counts().by_name.end()) {
    found = counts().by_name.try_emplace(name).first;
    found->second.name = found->first.c_str();
  }
  return found->second;
}

void count(const char* name, long amount) { counter(name).calls += amount; }

void count_wait(const char* call) {
  char thread[32] = "?";
  pthread_getname_np(pthread_self(), thread, sizeof thread);
  count((std::string("wait:") + call + "@" + thread).c_str());
}

bool tracing() {
  static const bool on = getenv("EMULATED_TRACE") != nullptr;
  return on;
}

void trace(const char* format, ...) {
  if (!tracing()) return;
  va_list arguments;
  va_start(arguments, format);
  fputs("emulated: ", stderr);
  vfprintf(stderr, format, arguments);
  fputc('\n', stderr);
  va_end(arguments);
}

}  // namespace emulated

// Writes "name=number\n" for each count that is not zero; returns the length of the whole text.
EXPORT long emulated_counts(char* text, long size) {
  std::string all;
  {
    std::lock_guard<std::mutex> lock(emulated::counts().mutex);
    for (auto& entry : emulated::counts().by_name)
      if (long calls = entry.second.calls) all += entry.first + "=" + std::to_string(calls) + "\n";
  }
  if (text && size > 0) {
    size_t length = std::min(all.size(), (size_t)size - 1);
    memcpy(text, all.data(), length);
    text[length] = 0;
  }
  return (long)all.size();
}

EXPORT void emulated_count(const char* name, long amount) { emulated::count(name, amount); }
