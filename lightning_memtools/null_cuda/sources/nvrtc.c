// NVRTC without a GPU: what it compiles is empty, and is loaded and launched by stubs that do nothing.
#include <stddef.h>
static char program[64];
int nvrtcVersion(int *major, int *minor) { *major = CUDA_MAJOR, *minor = 0; return 0; }
int nvrtcCreateProgram(void **made, const char *source, const char *name, int count, const char *const *headers, const char *const *names) { *made = program; return 0; }
const char *nvrtcGetErrorString(int status) { return "a status of NVRTC"; }
int nvrtcGetCUBINSize(void *made, size_t *bytes) { *bytes = 1; return 0; }
int nvrtcGetPTXSize(void *made, size_t *bytes) { *bytes = 1; return 0; }
int nvrtcGetCUBIN(void *made, char *code) { *code = 0; return 0; }
int nvrtcGetPTX(void *made, char *code) { *code = 0; return 0; }
int nvrtcGetProgramLogSize(void *made, size_t *bytes) { *bytes = 1; return 0; }
int nvrtcGetProgramLog(void *made, char *log) { *log = 0; return 0; }
int nvrtcGetLoweredName(void *made, const char *name, const char **lowered) { *lowered = name; return 0; }
