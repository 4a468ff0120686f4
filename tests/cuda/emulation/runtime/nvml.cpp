// libnvidia-ml.so.1: torch asks it how devices are connected before it maps memory that other nodes could reach. There is no NVLink
// and no fabric here, and no device has other processes.
#include "emulation.h"

#include <cstdlib>
#include <cstring>

namespace {
constexpr int SUCCESS = 0, NOT_SUPPORTED = 3, NOT_FOUND = 6;  // nvmlReturn_t
}

EXPORT int nvmlInit_v2() { return SUCCESS; }
EXPORT int nvmlShutdown() { return SUCCESS; }

EXPORT int nvmlSystemGetCudaDriverVersion_v2(int* version) {
  *version = 13000;
  return SUCCESS;
}

EXPORT int nvmlDeviceGetCount_v2(unsigned* devices) {
  *devices = (unsigned)emulated::device_count();
  return SUCCESS;
}

// DOMAIN:BUS:DEVICE.0; the bus is the number of the device and one (cudaDeviceGetPCIBusId).
EXPORT int nvmlDeviceGetHandleByPciBusId_v2(const char* bus, void** device) {
  const char* colon = strchr(bus, ':');
  long number = colon ? strtol(colon + 1, nullptr, 16) : 0;
  if (number < 1 || number > emulated::device_count()) return NOT_FOUND;
  *device = (void*)number;
  return SUCCESS;
}

// What is not written stays as the caller made it, which means "not part of a fabric".
EXPORT int nvmlDeviceGetGpuFabricInfoV(void*, void*) { return SUCCESS; }

EXPORT int nvmlDeviceGetComputeRunningProcesses(void*, unsigned* count, void*) {
  *count = 0;
  return SUCCESS;
}

EXPORT int nvmlDeviceGetNvLinkRemoteDeviceType(void*, unsigned, void*) { return NOT_SUPPORTED; }
EXPORT int nvmlDeviceGetNvLinkRemotePciInfo_v2(void*, unsigned, void*) { return NOT_SUPPORTED; }
