// Devices that account for memory and compute nothing. They are described by the environment:
//   NULL_CUDA_DEVICES  how many there are
//   NULL_CUDA_TOTAL    bytes of each          NULL_CUDA_CONTEXT  bytes that its context takes
//   NULL_CUDA_NAME     its name               NULL_CUDA_CAPABILITY  its compute capability, as 86 for 8.6
//   NULL_CUDA_MULTIPROCESSORS  their number
#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include "null_device.h"

// Between the heap of a program at a fixed address and that of one at a random address (0x55...), far below mmap (0x7f...).
static const uintptr_t FIRST = 0x200000000000ull, LAST = 0x500000000000ull;

typedef struct FreeRange { uintptr_t at; size_t bytes; struct FreeRange *next; } FreeRange;

NullDevice null_devices[MAX_DEVICES];
int null_device_count = 1;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static uintptr_t next_address = 0x200000000000ull, next_handle = 0x1000;
static FreeRange *free_ranges;

static unsigned long long number(const char *name, unsigned long long otherwise) {
  const char *text = getenv(name);
  return text && *text ? strtoull(text, NULL, 0) : otherwise;
}

__attribute__((constructor)) void null_begin(void) {
  const char *name = getenv("NULL_CUDA_NAME");
  int capability = (int)number("NULL_CUDA_CAPABILITY", 86);
  null_device_count = (int)number("NULL_CUDA_DEVICES", 1);
  if (null_device_count > MAX_DEVICES) null_device_count = MAX_DEVICES;
  for (int i = 0; i < null_device_count; i++) {
    NullDevice *device = &null_devices[i];
    strncpy(device->name, name ? name : "a device that computes nothing", sizeof device->name - 1);
    device->total = number("NULL_CUDA_TOTAL", 12ull << 30);
    device->context = number("NULL_CUDA_CONTEXT", 0);
    device->major = capability / 10;
    device->minor = capability % 10;
    device->multiprocessors = (int)number("NULL_CUDA_MULTIPROCESSORS", 28);
  }
}

int null_take(int index, size_t bytes) {
  NullDevice *device = &null_devices[index];
  pthread_mutex_lock(&lock);
  int fits = device->used + bytes + device->context <= device->total;
  if (fits) device->used += bytes;
  if (device->used > device->peak) device->peak = device->used;
  pthread_mutex_unlock(&lock);
  return fits;
}

void null_give(int index, size_t bytes) {
  pthread_mutex_lock(&lock);
  null_devices[index].used -= bytes;
  pthread_mutex_unlock(&lock);
}

uintptr_t null_reserve_addresses(size_t bytes) {
  bytes = (bytes + 2 * MIB - 1) / (2 * MIB) * (2 * MIB);
  pthread_mutex_lock(&lock);
  FreeRange **best = NULL;
  for (FreeRange **range = &free_ranges; *range; range = &(*range)->next)
    if ((*range)->bytes == bytes && (!best || (*range)->at < (*best)->at)) best = range;
  uintptr_t at = 0;  // where no addresses are left
  if (best) {
    FreeRange *found = *best;
    at = found->at;
    *best = found->next;
    free(found);
  } else if (bytes <= LAST - next_address) {
    at = next_address;
    next_address += bytes;
  }
  pthread_mutex_unlock(&lock);
  return at;
}

void null_free_addresses(uintptr_t at, size_t bytes) {
  FreeRange *range = malloc(sizeof *range);
  range->at = at;
  range->bytes = (bytes + 2 * MIB - 1) / (2 * MIB) * (2 * MIB);
  pthread_mutex_lock(&lock);
  range->next = free_ranges;
  free_ranges = range;
  pthread_mutex_unlock(&lock);
}

int null_is_device_address(const void *pointer) { return (uintptr_t)pointer >= FIRST && (uintptr_t)pointer < LAST; }

// What was copied to the device last, until a kernel may have changed it. DDP writes the order of its buckets to the
// device for the other ranks, reads it back, and indexes with it.
static struct { const void *at; size_t bytes; char *data; } last_copy;

void null_forget_copy(void) { __atomic_store_n(&last_copy.bytes, 0, __ATOMIC_RELEASE); }

void null_copy(void *to, const void *from, size_t bytes) {
  int to_device = null_is_device_address(to), from_device = null_is_device_address(from);
  if (!to_device && !from_device) { memmove(to, from, bytes); return; }
  pthread_mutex_lock(&lock);
  if (!to_device && last_copy.at == from && last_copy.bytes == bytes) memcpy(to, last_copy.data, bytes);
  else if (!to_device) memset(to, 0, bytes);
  else {
    null_forget_copy();
    if (!from_device && bytes && bytes <= MIB) {
      if (!last_copy.data) last_copy.data = malloc(MIB);
      memcpy(last_copy.data, from, bytes);
      last_copy.at = to;
      last_copy.bytes = bytes;
    }
  }
  pthread_mutex_unlock(&lock);
}

void *null_handle(void) { return (void *)__sync_add_and_fetch(&next_handle, 16); }

// "Maximum number of resident threads per SM", table of compute capabilities, CUDA C++ programming guide.
static int threads_per_multiprocessor(int capability) {
  if (capability == 75) return 1024;
  return (capability > 80 && capability < 90) || capability >= 120 ? 1536 : 2048;
}

// The numbers are those of enum cudaDeviceAttr, which CUdevice_attribute shares (CUDA runtime API reference, 12 and 13).
int null_device_attribute(int attribute, const NullDevice *device) {
  switch (attribute) {
    case 1: case 2: case 3: return 1024;              // threads per block; block dimensions x and y
    case 4: return 64;                                // block dimension z
    case 5: return 2147483647;                        // grid dimension x
    case 6: case 7: return 65535;                     // grid dimensions y and z
    case 8: return 49152;                             // shared memory per block
    case 10: return 32;                               // warp size
    case 12: case 82: return 65536;                   // registers per block and per multiprocessor
    case 13: return 1700000;                          // clock rate in kHz
    case 14: return 512;                              // texture alignment
    case 16: return device->multiprocessors;
    case 31: case 41: case 95: return 1;              // concurrent kernels, unified addressing, cooperative launch
    case 36: return 7501000;                          // memory clock rate in kHz
    case 38: return (int)(3 * MIB);                   // L2 cache
    case 39: return threads_per_multiprocessor(device->major * 10 + device->minor);
    case 75: return device->major;
    case 76: return device->minor;
    case 81: return 102400;                           // shared memory per multiprocessor
    case 97: return 101376;                           // shared memory per block, opt-in
    case 102: return 1;                               // virtual memory management, for expandable segments
    case 106: return 16;                              // blocks per multiprocessor
    case 115: return 1;                               // memory pools, for cudaMallocAsync
    default: return 0;
  }
}

// c10::utils::check_env. torch decides in libtorch_cpu which convolutions go to cuDNN (those of bfloat16 only with the
// interface of cuDNN 8), and calls it in libtorch_cuda, where the interface of cuDNN 7 is the one that is stood in for.
// So the switch between the two has another answer in each. std::optional<bool>: the value, then whether there is one.
unsigned short null_check_env(const char *name) __asm__("_ZN3c105utils9check_envEPKc");
unsigned short null_check_env(const char *name) {
  if (!strcmp(name, "TORCH_CUDNN_V8_API_DISABLED")) {
    Dl_info caller;
    int in_cuda = dladdr(__builtin_return_address(0), &caller) && caller.dli_fname && strstr(caller.dli_fname, "libtorch_cuda");
    return in_cuda ? 0x101 : 0;
  }
  const char *text = getenv(name);
  if (!text || (strcmp(text, "0") && strcmp(text, "1"))) return 0;
  return 0x100 | (*text == '1');
}
