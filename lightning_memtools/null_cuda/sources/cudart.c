// A CUDA runtime without a GPU: it accounts for memory, launches nothing, and reads zeros back.
// Prototypes and structs are declared by hand from the CUDA runtime API reference (docs.nvidia.com/cuda/cuda-runtime-api);
// CUDA_MAJOR is 12 or 13. No header of NVIDIA is needed or used.
#define _GNU_SOURCE
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include "null_device.h"

typedef int Error;
typedef void *Handle;
enum { SUCCESS = 0, INVALID_VALUE = 1, OUT_OF_MEMORY = 2, INVALID_DEVICE = 101, NO_CAPTURE = 801 };

static __thread int current;
static __thread Error last_error;
int null_current_device(void) { return current; }
static Error failed(Error error) { last_error = error; return error; }

// Memory of the device: what cudaMalloc gave, by address.
typedef struct Allocation { uintptr_t at; size_t bytes; int device; int from_pool; struct Allocation *next; } Allocation;
enum { BUCKETS = 4096 };
static Allocation *allocations[BUCKETS];
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static Allocation **bucket_of(uintptr_t at) { return &allocations[(at / (2 * MIB)) % BUCKETS]; }

static Error take(void **pointer, size_t bytes, int from_pool) {
  size_t whole = (bytes + 2 * MIB - 1) / (2 * MIB) * (2 * MIB);
  *pointer = NULL;
  if (!null_take(current, whole)) return failed(OUT_OF_MEMORY);
  Allocation *made = malloc(sizeof *made);
  *made = (Allocation){null_reserve_addresses(whole), whole, current, from_pool, NULL};
  pthread_mutex_lock(&lock);
  made->next = *bucket_of(made->at);
  *bucket_of(made->at) = made;
  NullDevice *device = &null_devices[current];
  if (from_pool && (device->pool_used += whole) > device->pool_peak) device->pool_peak = device->pool_used;
  pthread_mutex_unlock(&lock);
  *pointer = (void *)made->at;
  return SUCCESS;
}
Error cudaMalloc(void **pointer, size_t bytes) { return take(pointer, bytes, 0); }
Error cudaMallocAsync(void **pointer, size_t bytes, Handle stream) { return take(pointer, bytes, 1); }
Error cudaFree(void *pointer) {
  if (!pointer) return SUCCESS;
  Allocation *found = NULL;
  pthread_mutex_lock(&lock);
  for (Allocation **one = bucket_of((uintptr_t)pointer); *one; one = &(*one)->next)
    if ((*one)->at == (uintptr_t)pointer) { found = *one; *one = found->next; break; }
  if (found && found->from_pool) null_devices[found->device].pool_used -= found->bytes;
  pthread_mutex_unlock(&lock);
  if (!found) return failed(INVALID_VALUE);
  null_give(found->device, found->bytes);
  null_free_addresses(found->at, found->bytes);
  free(found);
  return SUCCESS;
}
Error cudaFreeAsync(void *pointer, Handle stream) { return cudaFree(pointer); }
Error cudaMemGetInfo(size_t *free_bytes, size_t *total) {
  NullDevice *device = &null_devices[current];
  *total = device->total;
  *free_bytes = device->total - device->used - device->context;
  return SUCCESS;
}
Error cudaDeviceGetDefaultMemPool(Handle *pool, int device) { *pool = (Handle)(uintptr_t)(device + 1); return SUCCESS; }
Error cudaMemPoolGetAttribute(Handle pool, int attribute, void *value) {
  NullDevice *device = &null_devices[(uintptr_t)pool - 1];
  uint64_t bytes = 0;
  if (attribute == 5 || attribute == 7) bytes = device->pool_used;   // reserved, used
  if (attribute == 6 || attribute == 8) bytes = device->pool_peak;   // their peaks
  if (attribute >= 4) memcpy(value, &bytes, sizeof bytes);
  else *(int *)value = 0;
  return SUCCESS;
}
Error cudaMemPoolSetAttribute(Handle pool, int attribute, void *value) {
  NullDevice *device = &null_devices[(uintptr_t)pool - 1];
  if (attribute == 6 || attribute == 8) device->pool_peak = device->pool_used;
  return SUCCESS;
}

// Pinned memory of the host, which cudaPointerGetAttributes must tell from other memory.
typedef struct Pinned { char *at; size_t bytes; int ours; struct Pinned *next; } Pinned;
static Pinned *pinned;
static Error pin(void *pointer, size_t bytes, int ours) {
  Pinned *made = malloc(sizeof *made);
  *made = (Pinned){pointer, bytes, ours, NULL};
  pthread_mutex_lock(&lock);
  made->next = pinned;
  pinned = made;
  pthread_mutex_unlock(&lock);
  return SUCCESS;
}
static int unpin(void *pointer) {
  Pinned *found = NULL;
  pthread_mutex_lock(&lock);
  for (Pinned **one = &pinned; *one; one = &(*one)->next)
    if ((*one)->at == pointer) { found = *one; *one = found->next; break; }
  pthread_mutex_unlock(&lock);
  int ours = found && found->ours;
  free(found);
  return ours;
}
Error cudaHostAlloc(void **pointer, size_t bytes, unsigned flags) {
  if (posix_memalign(pointer, 4096, bytes ? bytes : 1)) return failed(OUT_OF_MEMORY);
  return pin(*pointer, bytes, 1);
}
Error cudaFreeHost(void *pointer) { if (unpin(pointer)) free(pointer); return SUCCESS; }
Error cudaHostRegister(void *pointer, size_t bytes, unsigned flags) { return pin(pointer, bytes, 0); }
Error cudaHostUnregister(void *pointer) { unpin(pointer); return SUCCESS; }
Error cudaHostGetDevicePointer(void **device, void *host, unsigned flags) { *device = host; return SUCCESS; }

typedef struct { int type, device; void *device_pointer, *host_pointer; } PointerAttributes;
Error cudaPointerGetAttributes(PointerAttributes *attributes, const void *pointer) {
  // CUDA 13 appends reserved words, which are left alone.
  *attributes = (PointerAttributes){0, current, NULL, NULL};
  if (null_is_device_address(pointer)) {
    attributes->type = 2;  // cudaMemoryTypeDevice
    attributes->device_pointer = (void *)pointer;
    pthread_mutex_lock(&lock);
    for (Allocation *one = *bucket_of((uintptr_t)pointer); one; one = one->next)
      if ((uintptr_t)pointer >= one->at && (uintptr_t)pointer < one->at + one->bytes) attributes->device = one->device;
    pthread_mutex_unlock(&lock);
    return SUCCESS;
  }
  pthread_mutex_lock(&lock);
  for (Pinned *one = pinned; one; one = one->next)
    if ((char *)pointer >= one->at && (char *)pointer < one->at + one->bytes) {
      attributes->type = 1;  // cudaMemoryTypeHost
      attributes->device_pointer = attributes->host_pointer = (void *)pointer;
    }
  pthread_mutex_unlock(&lock);
  return SUCCESS;
}

Error cudaMemcpy(void *to, const void *from, size_t bytes, int kind) { null_copy(to, from, bytes); return SUCCESS; }
Error cudaMemcpyAsync(void *to, const void *from, size_t bytes, int kind, Handle stream) { null_copy(to, from, bytes); return SUCCESS; }
Error cudaMemcpy2DAsync(void *to, size_t to_pitch, const void *from, size_t from_pitch, size_t width, size_t height, int kind, Handle stream) {
  for (size_t row = 0; row < height; row++) null_copy((char *)to + row * to_pitch, (const char *)from + row * from_pitch, width);
  return SUCCESS;
}
Error cudaMemset(void *to, int value, size_t bytes) {
  null_forget_copy();
  if (!null_is_device_address(to)) memset(to, value, bytes);
  return SUCCESS;
}
Error cudaMemsetAsync(void *to, int value, size_t bytes, Handle stream) { return cudaMemset(to, value, bytes); }

// The devices.
Error cudaGetDeviceCount(int *count) { *count = null_device_count; return SUCCESS; }
Error cudaGetDevice(int *device) { *device = current; return SUCCESS; }
Error cudaSetDevice(int device) {
  if (device < 0 || device >= null_device_count) return failed(INVALID_DEVICE);
  current = device;
  return SUCCESS;
}
Error cudaDriverGetVersion(int *version) { *version = CUDA_MAJOR * 1000; return SUCCESS; }
Error cudaRuntimeGetVersion(int *version) { *version = CUDA_MAJOR * 1000; return SUCCESS; }
Error cudaDeviceGetAttribute(int *value, int attribute, int device) { *value = null_device_attribute(attribute, &null_devices[device]); return SUCCESS; }
Error cudaDeviceGetPCIBusId(char *text, int size, int device) { snprintf(text, size, "0000:%02x:00.0", device + 1); return SUCCESS; }
Error cudaDeviceCanAccessPeer(int *can, int device, int peer) { *can = 0; return SUCCESS; }
Error cudaDeviceGetStreamPriorityRange(int *least, int *greatest) { *least = 0; *greatest = -5; return SUCCESS; }

// struct cudaDeviceProp by the offsets of its fields, which differ between CUDA 12 and 13 because 13 dropped the clock
// rates and a few others. The struct has 1,032 bytes in 12 and 1,008 in 13.
Error cudaGetDeviceProperties(char *properties, int index) {
  if (index < 0 || index >= null_device_count) return failed(INVALID_DEVICE);
  const NullDevice *device = &null_devices[index];
  memset(properties, 0, CUDA_MAJOR >= 13 ? 1008 : 1032);
  #define INT(in12, in13, value) *(int *)(properties + (CUDA_MAJOR >= 13 ? (in13) : (in12))) = (value)
  #define SIZE(in12, in13, value) *(size_t *)(properties + (CUDA_MAJOR >= 13 ? (in13) : (in12))) = (value)
  strncpy(properties, device->name, 255);
  memset(properties + 256, NULL_UUID_BYTE + index, 16);           // uuid
  SIZE(288, 288, device->total);
  SIZE(296, 296, 49152);                                          // sharedMemPerBlock
  INT(304, 304, 65536);                                           // regsPerBlock
  INT(308, 308, 32);                                              // warpSize
  SIZE(312, 312, 2147483647);                                     // memPitch
  INT(320, 320, 1024);                                            // maxThreadsPerBlock
  INT(324, 324, 1024), INT(328, 328, 1024), INT(332, 332, 64);    // maxThreadsDim
  INT(336, 336, 2147483647), INT(340, 340, 65535), INT(344, 344, 65535);  // maxGridSize
  SIZE(352, 352, 65536);                                          // totalConstMem
  INT(360, 360, device->major), INT(364, 364, device->minor);
  SIZE(368, 368, 512), SIZE(376, 376, 32);                        // textureAlignment, texturePitchAlignment
  INT(388, 384, device->multiprocessors);
  INT(576, 560, 1);                                               // concurrentKernels
  INT(584, 568, index + 1);                                       // pciBusID
  INT(600, 584, 2);                                               // asyncEngineCount
  INT(604, 588, 1);                                               // unifiedAddressing
  INT(612, 592, 192);                                             // memoryBusWidth
  INT(616, 596, (int)(3 * MIB));                                  // l2CacheSize
  INT(624, 604, null_device_attribute(39, device));               // maxThreadsPerMultiProcessor
  SIZE(640, 624, 102400);                                         // sharedMemPerMultiprocessor
  INT(648, 632, 65536);                                           // regsPerMultiprocessor
  INT(652, 636, 1);                                               // managedMemory
  INT(676, 656, 1);                                               // concurrentManagedAccess
  INT(688, 668, 1);                                               // cooperativeLaunch
  SIZE(696, 672, 101376);                                         // sharedMemPerBlockOptin
  INT(712, 688, 16);                                              // maxBlocksPerMultiProcessor
  return SUCCESS;
}
Error cudaGetDeviceProperties_v2(char *properties, int device) { return cudaGetDeviceProperties(properties, device); }

// Errors, streams and events: nothing is ever pending.
Error cudaGetLastError(void) { Error error = last_error; last_error = SUCCESS; return error; }
Error cudaPeekAtLastError(void) { return last_error; }
const char *cudaGetErrorString(Error error) {
  switch (error) {
    case SUCCESS: return "no error";
    case INVALID_VALUE: return "invalid argument";
    case OUT_OF_MEMORY: return "out of memory";
    case INVALID_DEVICE: return "invalid device ordinal";
    case NO_CAPTURE: return "CUDA graphs cannot be captured on a device that computes nothing (dry run)";
    default: return "unknown error";
  }
}
const char *cudaGetErrorName(Error error) {
  return error == SUCCESS ? "cudaSuccess" : error == OUT_OF_MEMORY ? "cudaErrorMemoryAllocation" : error == NO_CAPTURE ? "cudaErrorNotSupported" : "cudaErrorUnknown";
}
Error cudaStreamCreate(Handle *stream) { *stream = null_handle(); return SUCCESS; }
Error cudaStreamCreateWithFlags(Handle *stream, unsigned flags) { *stream = null_handle(); return SUCCESS; }
Error cudaStreamCreateWithPriority(Handle *stream, unsigned flags, int priority) { *stream = null_handle(); return SUCCESS; }
Error cudaStreamGetPriority(Handle stream, int *priority) { *priority = 0; return SUCCESS; }
Error cudaStreamAddCallback(Handle stream, void (*callback)(Handle, Error, void *), void *data, unsigned flags) { callback(stream, SUCCESS, data); return SUCCESS; }
Error cudaLaunchKernel(const void *kernel, ...) { null_forget_copy(); return SUCCESS; }
Error __cudaLaunchKernel(Handle kernel, ...) { null_forget_copy(); return SUCCESS; }  // of CUDA 13's compiler
Error cudaLaunchKernelExC(const void *config, ...) { null_forget_copy(); return SUCCESS; }
Error cudaLaunchHostFunc(Handle stream, void (*function)(void *), void *data) { function(data); return SUCCESS; }
Error cudaEventCreate(Handle *event) { *event = null_handle(); return SUCCESS; }
Error cudaEventCreateWithFlags(Handle *event, unsigned flags) { *event = null_handle(); return SUCCESS; }
Error cudaEventElapsedTime(float *milliseconds, Handle begin, Handle end) { *milliseconds = 0; return SUCCESS; }

// CUDA graphs are refused by name.
Error cudaStreamBeginCapture(Handle stream, int mode) { return failed(NO_CAPTURE); }
Error cudaStreamBeginCaptureToGraph(Handle stream, Handle graph, const Handle *nodes, const void *edges, size_t count, int mode) { return failed(NO_CAPTURE); }
Error cudaStreamIsCapturing(Handle stream, int *status) { *status = 0; return SUCCESS; }
static Error not_capturing(int *status, unsigned long long *id, Handle *graph, const Handle **nodes, size_t *count) {
  if (status) *status = 0;
  if (id) *id = 0;
  if (graph) *graph = NULL;
  if (nodes) *nodes = NULL;
  if (count) *count = 0;
  return SUCCESS;
}
#if CUDA_MAJOR >= 13
Error cudaStreamGetCaptureInfo(Handle stream, int *status, unsigned long long *id, Handle *graph, const Handle **nodes, const void **edges, size_t *count) {
  if (edges) *edges = NULL;
  return not_capturing(status, id, graph, nodes, count);
}
#else
Error cudaStreamGetCaptureInfo(Handle stream, int *status, unsigned long long *id) { return not_capturing(status, id, NULL, NULL, NULL); }
Error cudaStreamGetCaptureInfo_v2(Handle stream, int *status, unsigned long long *id, Handle *graph, const Handle **nodes, size_t *count) {
  return not_capturing(status, id, graph, nodes, count);
}
#endif
Error cudaThreadExchangeStreamCaptureMode(int *mode) { return SUCCESS; }

// Kernels: every one is known and none runs.
typedef struct {
  size_t shared, constant, local;
  int max_threads_per_block, registers, ptx_version, binary_version, cache_mode, max_dynamic_shared;
} FunctionAttributes;  // the first fields of struct cudaFuncAttributes, which has 144 bytes
// A device runs the kernels of the newest architecture that is not newer than itself; CUB looks for them by version.
static int kernel_version(const NullDevice *device) {
  static const int architectures[] = {ARCHITECTURES};
  int version = architectures[0];
  for (size_t i = 0; i < sizeof architectures / sizeof *architectures; i++)
    if (architectures[i] <= device->major * 10 + device->minor) version = architectures[i];
  return version;
}
Error cudaFuncGetAttributes(FunctionAttributes *attributes, const void *function) {
  int version = kernel_version(&null_devices[current]);
  memset(attributes, 0, 144);
  *attributes = (FunctionAttributes){0, 0, 0, 1024, 32, version, version, 0, 101376};
  return SUCCESS;
}
Error cudaOccupancyMaxActiveBlocksPerMultiprocessor(int *blocks, const void *function, int threads, size_t shared) { *blocks = 2; return SUCCESS; }
Error cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *blocks, const void *function, int threads, size_t shared, unsigned flags) { *blocks = 2; return SUCCESS; }
Error cudaGetSymbolAddress(void **pointer, const void *symbol) { *pointer = (void *)0x2effffe00000ull; return SUCCESS; }
void **__cudaRegisterFatBinary(void *binary) { static void *handle[1]; return handle; }
char __cudaInitModule(void **binary) { return 1; }
Error __cudaGetKernel(Handle *kernel, const void *function) { *kernel = (Handle)function; return SUCCESS; }
typedef struct { unsigned x, y, z; } Dimensions;
static __thread struct { Dimensions grid, block; size_t shared; void *stream; } launch;
unsigned __cudaPushCallConfiguration(Dimensions grid, Dimensions block, size_t shared, void *stream) {
  launch.grid = grid, launch.block = block, launch.shared = shared, launch.stream = stream;
  return 0;
}
Error __cudaPopCallConfiguration(Dimensions *grid, Dimensions *block, size_t *shared, void **stream) {
  *grid = launch.grid, *block = launch.block, *shared = launch.shared, *stream = launch.stream;
  return SUCCESS;
}

// The driver's functions, which torch asks the runtime for: expandable segments need those of virtual memory.
void *null_driver_function(const char *name);
Error cudaGetDriverEntryPointByVersion(const char *name, void **function, unsigned version, unsigned long long flags, int *result) {
  *function = null_driver_function(name);
  if (result) *result = 0;
  return SUCCESS;
}
Error cudaGetDriverEntryPoint(const char *name, void **function, unsigned long long flags, int *result) {
  return cudaGetDriverEntryPointByVersion(name, function, 0, flags, result);
}
