// cuDNN without a GPU, through the functions that torch's cuDNN 7 interface calls (TORCH_CUDNN_V8_API_DISABLED=1).
// Workspaces are 0: what real ones take is estimated apart, because torch does without them when memory is short.
#include <stddef.h>
#include <stdlib.h>
#include <string.h>
static char descriptor[256];
#define CREATES(name) int name(void **made) { *made = descriptor; return 0; }
CREATES(cudnnCreateActivationDescriptor)
CREATES(cudnnCreateCTCLossDescriptor)
CREATES(cudnnCreateConvolutionDescriptor)
CREATES(cudnnCreateDropoutDescriptor)
CREATES(cudnnCreateFilterDescriptor)
CREATES(cudnnCreatePoolingDescriptor)
CREATES(cudnnCreateRNNDataDescriptor)
CREATES(cudnnCreateRNNDescriptor)
CREATES(cudnnCreateSpatialTransformerDescriptor)
CREATES(cudnnCreateTensorDescriptor)
int cudnnCreate(void **handle) { *handle = malloc(16); return 0; }
int cudnnDestroy(void *handle) { free(handle); return 0; }
size_t cudnnGetVersion(void) { return 92000; }
size_t cudnnGetCudartVersion(void) { return CUDA_MAJOR * 1000; }
const char *cudnnGetErrorString(int status) { return "a status of cuDNN"; }
void cudnnGetLastErrorString(char *text, size_t size) { if (size) text[0] = 0; }
int cudnnGetProperty(int type, int *value) { *value = type == 0 ? 9 : type == 1 ? 20 : 0; return 0; }  // major, minor, patch
int cudnnDropoutGetStatesSize(void *handle, size_t *bytes) { *bytes = 1 << 20; return 0; }

// struct cudnnConvolution*AlgoPerf_t: algo, status, time, memory, determinism, mathType, and three reserved words.
typedef struct { int algorithm, status; float time; size_t memory; int deterministic, math, reserved[3]; } Performance;
static int found(Performance *result, int *count, int algorithm) {
  memset(result, 0, sizeof *result);
  result->algorithm = algorithm;
  result->deterministic = 1;
  *count = 1;
  return 0;
}
int cudnnGetConvolutionForwardAlgorithm_v7(void *h, void *x, void *w, void *c, void *y, int wanted, int *n, Performance *r) { return found(r, n, 1); }
int cudnnGetConvolutionBackwardDataAlgorithm_v7(void *h, void *w, void *dy, void *c, void *dx, int wanted, int *n, Performance *r) { return found(r, n, 1); }
int cudnnGetConvolutionBackwardFilterAlgorithm_v7(void *h, void *x, void *dy, void *c, void *dw, int wanted, int *n, Performance *r) { return found(r, n, 1); }
int cudnnGetConvolutionForwardWorkspaceSize(void *h, void *x, void *w, void *c, void *y, int a, size_t *bytes) { *bytes = 0; return 0; }
int cudnnGetConvolutionBackwardDataWorkspaceSize(void *h, void *w, void *dy, void *c, void *dx, int a, size_t *bytes) { *bytes = 0; return 0; }
int cudnnGetConvolutionBackwardFilterWorkspaceSize(void *h, void *x, void *dy, void *c, void *dw, int a, size_t *bytes) { *bytes = 0; return 0; }
int cudnnGetBatchNormalizationForwardTrainingExWorkspaceSize(void *h, int m, int o, void *x, void *z, void *y, void *b, void *a, size_t *bytes) { *bytes = 0; return 0; }
int cudnnGetBatchNormalizationBackwardExWorkspaceSize(void *h, int m, int o, void *x, void *y, void *dy, void *dz, void *dx, void *b, void *a, size_t *bytes) { *bytes = 0; return 0; }
int cudnnGetBatchNormalizationTrainingExReserveSpaceSize(void *h, int m, int o, void *a, void *x, size_t *bytes) { *bytes = 0; return 0; }
