// Settings of the emulated device: EMULATED_<NAME> when the process starts, `emulated_set` while it runs.
#include "emulation.h"

#include <cctype>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <thread>

namespace emulated {
namespace {

struct Setting {
  const char* name;
  double otherwise;
  std::atomic<double> value{0};
};

Setting settings[] = {
    {"devices", 1},       // how many devices there are
    {"memory_gb", 6},     // memory of each, in 10^9 bytes
    {"h2d_gbps", 0},      // copies from the host to a device, in 10^9 bytes per second; 0: as fast as they come
    {"d2h_gbps", 0},      // copies from a device to the host
    {"d2d_gbps", 0},      // copies within a device and between devices
    {"delay_ms", 0},      // work begins late by up to this, at random
    {"delay_share", 0.25},// share of work that begins late
    {"seed", 0},          // of the delays
    {"kernel_us", 0},     // time that a kernel takes at least
    {"clock_ghz", 1},     // cycles of torch.cuda._sleep
    {"queue", 1024},      // work that a stream takes before a call that gives it more waits for room, as a device's queue does
    {"poison", 1},        // fresh and freed memory is filled with 0xCB
    {"peers", 1},         // devices can access each other's memory
    {"pageable_late", 0}, // 1: copies from pageable memory read it when they run, as a device does that can
    {"pageable_wait", 0}, // 1: copies from pageable memory wait for the stream, as a driver may
};

std::once_flag read;

void read_environment() {
  for (Setting& setting : settings) {
    std::string variable = std::string("EMULATED_") + setting.name;
    for (char& letter : variable) letter = (char)toupper(letter);
    const char* text = getenv(variable.c_str());
    setting.value = text && *text ? atof(text) : setting.otherwise;
  }
}

Setting* find(const char* name) {
  std::call_once(read, read_environment);
  for (Setting& setting : settings)
    if (!strcmp(setting.name, name)) return &setting;
  return nullptr;
}

}  // namespace

double setting(const char* name) {
  Setting* setting = find(name);
  return setting ? setting->value.load() : 0;
}

int device_count() {
  static const int devices = std::max(0, std::min(MOST_DEVICES, (int)setting("devices")));
  return devices;
}

size_t memory_size() { return (size_t)(setting("memory_gb") * 1e9); }

double now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

void sleep_until(double moment) {
  double left = moment - now();
  if (left > 0) std::this_thread::sleep_for(std::chrono::duration<double>(left));
}

}  // namespace emulated

// Returns 0, or 1 if there is no such setting. The number of devices cannot be changed.
EXPORT int emulated_set(const char* name, double value) {
  auto* setting = emulated::find(name);
  if (!setting || !strcmp(name, "devices")) return 1;
  setting->value = value;
  return 0;
}

EXPORT double emulated_get(const char* name) { return emulated::setting(name); }
