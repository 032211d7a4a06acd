// The few functions of the CUDA driver that torch and Triton call: devices, virtual memory for expandable segments, and kernels
// that were compiled while the program runs, which are launched and do nothing.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdlib.h>
#include <string.h>
#include "null_device.h"

typedef unsigned long long Address;
typedef struct { size_t bytes; int device; } Memory;  // what a handle of cuMemCreate points to
enum { OUT_OF_MEMORY = 2 };

int cuInit(unsigned flags) { return 0; }
int cuDriverGetVersion(int *version) { *version = CUDA_MAJOR * 1000; return 0; }
int cuDeviceGetCount(int *count) { *count = null_device_count; return 0; }
int cuDeviceGet(int *device, int ordinal) { *device = ordinal; return 0; }
int cuDeviceGetAttribute(int *value, int attribute, int device) { *value = null_device_attribute(attribute, &null_devices[device]); return 0; }
int cuDeviceGetName(char *name, int size, int device) { strncpy(name, null_devices[device].name, size - 1); return 0; }
int cuDeviceTotalMem_v2(size_t *bytes, int device) { *bytes = null_devices[device].total; return 0; }
int cuCtxGetCurrent(void **context) { *context = (void *)16; return 0; }
int cuCtxGetDevice(int *device) { *device = null_current_device(); return 0; }
int cuDevicePrimaryCtxGetState(int device, unsigned *flags, int *active) { *flags = 0; *active = 1; return 0; }
int cuDevicePrimaryCtxRetain(void **context, int device) { *context = (void *)16; return 0; }
int cuGetErrorString(int error, const char **text) { *text = "driver error"; return 0; }
int cuPointerGetAttribute(void *value, int attribute, Address pointer) { *(Address *)value = 0; return 0; }

int cuMemAddressReserve(Address *at, size_t bytes, size_t alignment, Address hint, Address flags) { *at = null_reserve_addresses(bytes); return *at ? 0 : OUT_OF_MEMORY; }
int cuMemAddressFree(Address at, size_t bytes) { null_free_addresses(at, bytes); return 0; }
// struct CUmemAllocationProp: type, requestedHandleTypes, then the location's type and id.
int cuMemCreate(Address *handle, size_t bytes, const int *properties, Address flags) {
  int device = properties[3];
  if (!null_take(device, bytes)) return OUT_OF_MEMORY;
  Memory *memory = malloc(sizeof *memory);
  *memory = (Memory){bytes, device};
  *handle = (Address)memory;
  return 0;
}
int cuMemRelease(Address handle) {
  Memory *memory = (Memory *)handle;
  null_give(memory->device, memory->bytes);
  free(memory);
  return 0;
}
int cuMemGetAllocationGranularity(size_t *bytes, const void *properties, int option) { *bytes = 2 * MIB; return 0; }

int cuCtxSetCurrent(void *context) { return 0; }
int cuCtxGetLimit(size_t *value, int limit) { *value = 0; return 0; }
int cuCtxSetLimit(int limit, size_t value) { return 0; }
int cuModuleLoadData(void **module, const void *image) { *module = null_handle(); return 0; }
int cuModuleGetFunction(void **function, void *module, const char *name) { *function = null_handle(); return 0; }
enum { MAX_THREADS_PER_BLOCK = 0, REGISTERS = 4 };  // of CUfunction_attribute
int cuFuncGetAttribute(int *value, int attribute, void *function) { *value = attribute == MAX_THREADS_PER_BLOCK ? 1024 : attribute == REGISTERS ? 32 : 0; return 0; }
int cuFuncSetAttribute(void *function, int attribute, int value) { return 0; }
int cuFuncSetCacheConfig(void *function, int config) { return 0; }
int cuLaunchKernel(void *function, unsigned x, unsigned y, unsigned z, unsigned bx, unsigned by, unsigned bz, unsigned shared, void *stream, void **arguments, void **extra) { null_forget_copy(); return 0; }
int cuLaunchKernelEx(const void *config, void *function, void **arguments, void **extra) { null_forget_copy(); return 0; }

static int does_nothing(void) { return 0; }
void *null_driver_function(const char *name) {
  static const struct { const char *name; void *function; } known[] = {
    #define KNOWN(function) {#function, (void *)function}
    KNOWN(cuInit), KNOWN(cuDriverGetVersion), KNOWN(cuDeviceGetCount), KNOWN(cuDeviceGet), KNOWN(cuDeviceGetAttribute),
    KNOWN(cuDeviceGetName), KNOWN(cuCtxGetCurrent), KNOWN(cuCtxGetDevice), KNOWN(cuDevicePrimaryCtxGetState),
    KNOWN(cuDevicePrimaryCtxRetain), KNOWN(cuGetErrorString), KNOWN(cuPointerGetAttribute), KNOWN(cuMemAddressReserve),
    KNOWN(cuMemAddressFree), KNOWN(cuMemCreate), KNOWN(cuMemRelease), KNOWN(cuMemGetAllocationGranularity),
    KNOWN(cuModuleLoadData), KNOWN(cuModuleGetFunction), KNOWN(cuFuncGetAttribute), KNOWN(cuLaunchKernel),
    KNOWN(cuLaunchKernelEx),
  };
  for (size_t i = 0; i < sizeof known / sizeof *known; i++)
    if (!strcmp(known[i].name, name)) return known[i].function;
  return (void *)does_nothing;
}
