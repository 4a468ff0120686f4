// libcuda.so.1: what torch and expandable segments need of the driver. All state is the runtime's.
#include "emulation.h"

#include <cuda.h>

#include <cstring>

#undef cuCtxPushCurrent
#undef cuCtxPopCurrent

using namespace emulated;

namespace {

// The numbers of the runtime's errors are those of the driver, but for some names.
CUresult result(cudaError_t error) { return (CUresult)error; }

CUcontext context_of(int device) { return (CUcontext)(size_t)(device + 1); }

thread_local std::vector<CUcontext> contexts;  // pushed

int device_of(const CUmemLocation& location) { return location.id; }

}  // namespace

EXPORT CUresult cuInit(unsigned flags) { return flags ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS; }

EXPORT CUresult cuDriverGetVersion(int* version) {
  *version = 13000;
  return CUDA_SUCCESS;
}

EXPORT CUresult cuDeviceGetCount(int* devices) {
  *devices = device_count();
  return CUDA_SUCCESS;
}

EXPORT CUresult cuDeviceGet(CUdevice* device, int ordinal) {
  if (ordinal < 0 || ordinal >= device_count()) return CUDA_ERROR_INVALID_DEVICE;
  *device = ordinal;
  return CUDA_SUCCESS;
}

EXPORT CUresult cuDeviceGetName(char* name, int length, CUdevice device) {
  cudaDeviceProp properties;
  if (cudaError_t error = cudaGetDeviceProperties(&properties, device)) return result(error);
  strncpy(name, properties.name, length);
  return CUDA_SUCCESS;
}

EXPORT CUresult cuDeviceTotalMem_v2(size_t* size, CUdevice) {
  *size = memory_size();
  return CUDA_SUCCESS;
}

// Virtual memory is there; handles cannot be given to other processes.
EXPORT CUresult cuDeviceGetAttribute(int* value, CUdevice_attribute attribute, CUdevice device) {
  if (attribute == CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED) {
    *value = 1;
    return CUDA_SUCCESS;
  }
  return result(cudaDeviceGetAttribute(value, (cudaDeviceAttr)attribute, device));
}

EXPORT CUresult cuDevicePrimaryCtxGetState(CUdevice device, unsigned* flags, int* active) {
  *flags = 0;
  *active = has_context(device);
  return CUDA_SUCCESS;
}

EXPORT CUresult cuDevicePrimaryCtxRetain(CUcontext* context, CUdevice device) {
  enter_context(device);
  *context = context_of(device);
  return CUDA_SUCCESS;
}

EXPORT CUresult cuDevicePrimaryCtxRelease_v2(CUdevice) { return CUDA_SUCCESS; }

EXPORT CUresult cuCtxGetCurrent(CUcontext* context) {
  *context = has_context(current_device()) ? context_of(current_device()) : nullptr;
  return CUDA_SUCCESS;
}

EXPORT CUresult cuCtxSetCurrent(CUcontext context) {
  if (context) make_current((int)(size_t)context - 1);
  return CUDA_SUCCESS;
}

EXPORT CUresult cuCtxPushCurrent_v2(CUcontext context) {
  contexts.push_back(context_of(current_device()));
  return cuCtxSetCurrent(context);
}

EXPORT CUresult cuCtxPopCurrent_v2(CUcontext* context) {
  if (contexts.empty()) return CUDA_ERROR_INVALID_CONTEXT;
  if (context) *context = context_of(current_device());
  cuCtxSetCurrent(contexts.back());
  contexts.pop_back();
  return CUDA_SUCCESS;
}

EXPORT CUresult cuCtxGetDevice(CUdevice* device) {
  *device = current_device();
  return CUDA_SUCCESS;
}

EXPORT CUresult cuGetErrorString(CUresult error, const char** text) {
  *text = cudaGetErrorString((cudaError_t)error);
  return strcmp(*text, "unrecognized error code") ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

EXPORT CUresult cuGetErrorName(CUresult error, const char** name) {
  *name = cudaGetErrorName((cudaError_t)error);
  return strcmp(*name, "unrecognized error code") ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

EXPORT CUresult cuPointerGetAttribute(void* data, CUpointer_attribute attribute, CUdeviceptr pointer) {
  Range range = range_of((void*)pointer);
  if (range.place == Place::pageable) return CUDA_ERROR_INVALID_VALUE;
  switch (attribute) {
    case CU_POINTER_ATTRIBUTE_MEMORY_TYPE:
      *(unsigned*)data = range.place == Place::device ? CU_MEMORYTYPE_DEVICE : CU_MEMORYTYPE_HOST;
      return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL: *(int*)data = range.device; return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_DEVICE_POINTER: *(CUdeviceptr*)data = pointer; return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_RANGE_START_ADDR: *(CUdeviceptr*)data = (CUdeviceptr)range.begin; return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_RANGE_SIZE: *(size_t*)data = range.size; return CUDA_SUCCESS;
    default: return CUDA_ERROR_NOT_SUPPORTED;
  }
}

EXPORT CUresult cuMemGetAddressRange_v2(CUdeviceptr* base, size_t* size, CUdeviceptr pointer) {
  Range range = range_of((void*)pointer);
  if (range.place != Place::device) return CUDA_ERROR_NOT_FOUND;
  if (base) *base = (CUdeviceptr)range.begin;
  if (size) *size = range.size;
  return CUDA_SUCCESS;
}

// ---- Virtual memory ----

EXPORT CUresult cuMemGetAllocationGranularity(size_t* granularity, const CUmemAllocationProp*, CUmemAllocationGranularity_flags) {
  *granularity = size_t(2) << 20;
  return CUDA_SUCCESS;
}

EXPORT CUresult cuMemAddressReserve(CUdeviceptr* pointer, size_t size, size_t alignment, CUdeviceptr, unsigned long long flags) {
  CALL(cuMemAddressReserve)
  if (flags) return CUDA_ERROR_INVALID_VALUE;
  void* address = nullptr;
  cudaError_t error = reserve_addresses(size, alignment, current_device(), &address);
  *pointer = (CUdeviceptr)address;
  return result(error);
}

EXPORT CUresult cuMemAddressFree(CUdeviceptr pointer, size_t size) {
  CALL(cuMemAddressFree)
  return result(free_addresses((void*)pointer, size));
}

EXPORT CUresult cuMemCreate(CUmemGenericAllocationHandle* handle, size_t size, const CUmemAllocationProp* properties,
                            unsigned long long flags) {
  CALL(cuMemCreate)
  if (flags || properties->location.type != CU_MEM_LOCATION_TYPE_DEVICE) return CUDA_ERROR_INVALID_VALUE;
  return result(create_physical(device_of(properties->location), size, handle));
}

EXPORT CUresult cuMemRelease(CUmemGenericAllocationHandle handle) {
  CALL(cuMemRelease)
  return result(release_physical(handle));
}

EXPORT CUresult cuMemMap(CUdeviceptr pointer, size_t size, size_t offset, CUmemGenericAllocationHandle handle,
                         unsigned long long flags) {
  CALL(cuMemMap)
  if (flags) return CUDA_ERROR_INVALID_VALUE;
  return result(map_physical((void*)pointer, size, offset, handle));
}

EXPORT CUresult cuMemUnmap(CUdeviceptr pointer, size_t size) {
  CALL(cuMemUnmap)
  return result(unmap((void*)pointer, size));
}

EXPORT CUresult cuMemSetAccess(CUdeviceptr pointer, size_t size, const CUmemAccessDesc* accesses, size_t count) {
  CALL(cuMemSetAccess)
  for (size_t each = 0; each < count; each++)
    if (cudaError_t error = set_access((void*)pointer, size, device_of(accesses[each].location))) return result(error);
  return CUDA_SUCCESS;
}
