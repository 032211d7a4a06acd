// cuBLAS without a GPU. Each handle is a new one: torch keys its workspaces by handle and stream.
#include <stdlib.h>
int cublasCreate_v2(void **handle) { *handle = malloc(16); return 0; }
int cublasDestroy_v2(void *handle) { free(handle); return 0; }
int cublasGetVersion_v2(void *handle, int *version) { *version = CUDA_MAJOR * 10000; return 0; }
int cublasGetProperty(int type, int *value) { *value = type == 0 ? CUDA_MAJOR : 0; return 0; }
int cublasGetPointerMode_v2(void *handle, int *mode) { *mode = 0; return 0; }
int cublasGetMathMode(void *handle, int *mode) { *mode = 0; return 0; }
const char *cublasGetStatusString(int status) { return "a status of cuBLAS"; }
// What torch reads on the host of batched factorizations: that each argument was accepted.
#define BATCHED(T) \
  int cublas##T##geqrfBatched(void *h, int m, int n, void *a, int lda, void *tau, int *info, int batch) { *info = 0; return 0; } \
  int cublas##T##gelsBatched(void *h, int trans, int m, int n, int nrhs, void *a, int lda, void *c, int ldc, int *info, int *infos, int batch) { *info = 0; return 0; }
BATCHED(S)
BATCHED(D)
BATCHED(C)
BATCHED(Z)
