// The devices that compute nothing, shared by the stubs of CUDA's runtime, its driver and NVML.
#pragma once
#include <stddef.h>
#include <stdint.h>

#define MIB ((size_t)1 << 20)
#define MAX_DEVICES 120  // of C10_COMPILE_TIME_MAX_GPUS in torch

typedef struct {
  char name[256];
  size_t total;          // bytes of the device
  size_t context;        // bytes that the CUDA context holds
  size_t used;           // bytes given to the program
  size_t pool_used;      // bytes of them that cudaMallocAsync's pool gave
  size_t peak, pool_peak;
  int major, minor, multiprocessors;
} NullDevice;

extern NullDevice null_devices[MAX_DEVICES];
extern int null_device_count;

int null_take(int device, size_t bytes);       // 1: the device had the bytes; 0: it is full
void null_give(int device, size_t bytes);
enum { NULL_UUID_BYTE = 7 };  // each byte of the first device's UUID; the next device has the next number
uintptr_t null_reserve_addresses(size_t bytes);
void null_free_addresses(uintptr_t at, size_t bytes);
int null_is_device_address(const void *pointer);
// Reading the device gives zeros, unless it was written by the copy before and by nothing since.
void null_copy(void *to, const void *from, size_t bytes);
void null_forget_copy(void);
void *null_handle(void);                       // a handle that no one else has
int null_current_device(void);
int null_device_attribute(int attribute, const NullDevice *device);
