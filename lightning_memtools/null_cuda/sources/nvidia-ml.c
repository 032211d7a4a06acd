// NVML without a GPU: it answers for the devices that compute nothing, through the functions that nvidia-ml-py calls.
#include <stdio.h>
#include <string.h>
#include <unistd.h>
#include "null_device.h"
typedef void *Handle;
enum { SUCCESS = 0, INVALID_ARGUMENT = 2, NOT_SUPPORTED = 3, NOT_FOUND = 6, INSUFFICIENT_SIZE = 7 };
static NullDevice *device_of(Handle handle) { return &null_devices[(uintptr_t)handle - 1]; }
int nvmlInit_v2(void) { return SUCCESS; }
int nvmlInitWithFlags(unsigned flags) { return SUCCESS; }
int nvmlShutdown(void) { return SUCCESS; }
const char *nvmlErrorString(int error) { return error ? "not known on a device that computes nothing" : "success"; }
int nvmlSystemGetDriverVersion(char *text, unsigned size) { snprintf(text, size, "0.0 (dry run)"); return SUCCESS; }
int nvmlSystemGetCudaDriverVersion_v2(int *version) { *version = CUDA_MAJOR * 1000; return SUCCESS; }
int nvmlDeviceGetCount_v2(unsigned *count) { *count = null_device_count; return SUCCESS; }
int nvmlDeviceGetHandleByIndex_v2(unsigned index, Handle *handle) {
  if ((int)index >= null_device_count) return INVALID_ARGUMENT;
  *handle = (Handle)(uintptr_t)(index + 1);
  return SUCCESS;
}
int nvmlDeviceGetHandleByUUID(const char *uuid, Handle *handle) {
  unsigned byte = 0;
  if (!sscanf(uuid, "GPU-%2x", &byte) || byte < NULL_UUID_BYTE || (int)(byte - NULL_UUID_BYTE) >= null_device_count) return NOT_FOUND;
  return nvmlDeviceGetHandleByIndex_v2(byte - NULL_UUID_BYTE, handle);
}
int nvmlDeviceGetHandleByPciBusId_v2(const char *bus, Handle *handle) {
  unsigned number = 1;
  sscanf(bus, "%*x:%x", &number);
  return nvmlDeviceGetHandleByIndex_v2(number - 1, handle);
}
int nvmlDeviceGetIndex(Handle handle, unsigned *index) { *index = (unsigned)(uintptr_t)handle - 1; return SUCCESS; }
int nvmlDeviceGetName(Handle handle, char *name, unsigned size) { snprintf(name, size, "%s", device_of(handle)->name); return SUCCESS; }
int nvmlDeviceGetUUID(Handle handle, char *text, unsigned size) {
  unsigned byte = NULL_UUID_BYTE + (unsigned)(uintptr_t)handle - 1;
  char hex[33];
  for (int i = 0; i < 16; i++) snprintf(hex + 2 * i, 3, "%02x", byte);
  snprintf(text, size, "GPU-%.8s-%.4s-%.4s-%.4s-%.12s", hex, hex, hex, hex, hex);
  return SUCCESS;
}
int nvmlDeviceGetMemoryInfo(Handle handle, unsigned long long *memory) {  // total, free, used
  NullDevice *device = device_of(handle);
  memory[0] = device->total;
  memory[2] = device->used + device->context;
  memory[1] = memory[0] - memory[2];
  return SUCCESS;
}
int nvmlDeviceGetMemoryInfo_v2(Handle handle, char *info) {  // version, then total, reserved, free, used
  NullDevice *device = device_of(handle);
  unsigned long long *memory = (unsigned long long *)(info + 8);
  memory[0] = device->total;
  memory[1] = 0;
  memory[3] = device->used + device->context;
  memory[2] = memory[0] - memory[3];
  return SUCCESS;
}
typedef struct { unsigned pid; unsigned long long used; unsigned gpu_instance, compute_instance; } Process;  // nvmlProcessInfo_v2_t
int nvmlDeviceGetComputeRunningProcesses_v3(Handle handle, unsigned *count, Process *processes) {
  unsigned room = *count;
  *count = 1;
  if (!room || !processes) return INSUFFICIENT_SIZE;
  NullDevice *device = device_of(handle);
  processes[0] = (Process){(unsigned)getpid(), device->used + device->context, ~0u, ~0u};
  return SUCCESS;
}
int nvmlDeviceGetComputeRunningProcesses(Handle handle, unsigned *count, Process *processes) { return nvmlDeviceGetComputeRunningProcesses_v3(handle, count, processes); }
int nvmlDeviceGetGraphicsRunningProcesses_v3(Handle handle, unsigned *count, Process *processes) { *count = 0; return SUCCESS; }
int nvmlDeviceGetGraphicsRunningProcesses(Handle handle, unsigned *count, Process *processes) { *count = 0; return SUCCESS; }
// torch looks for NVLink when it uses several devices, and for these names when it opens the library.
int nvmlDeviceGetNvLinkRemoteDeviceType(Handle handle, unsigned link, int *type) { return NOT_SUPPORTED; }
int nvmlDeviceGetNvLinkRemotePciInfo_v2(Handle handle, unsigned link, void *pci) { return NOT_SUPPORTED; }
int nvmlDeviceGetUtilizationRates(Handle handle, unsigned *rates) { rates[0] = rates[1] = 0; return SUCCESS; }
