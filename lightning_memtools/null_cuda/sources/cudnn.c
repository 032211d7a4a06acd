// cuDNN without a GPU, through the functions that torch's cuDNN 7 interface calls (TORCH_CUDNN_V8_API_DISABLED=1).
// Workspaces are 0: only a real cuDNN knows them, and torch does without them when memory is short.
#include <stddef.h>
#include <stdlib.h>
#include <string.h>
#include "null_device.h"
#define CUDNN 99900  // 9.99.0, since torch refuses a version that is older than the one that it was built with
static char descriptor[256];
#define CREATES(name) int name(void **made) { *made = descriptor; return 0; }
CREATES(cudnnCreateActivationDescriptor)
CREATES(cudnnCreateCTCLossDescriptor)
CREATES(cudnnCreatePoolingDescriptor)
CREATES(cudnnCreateSpatialTransformerDescriptor)
int cudnnCreate(void **handle) { *handle = malloc(16); return 0; }
int cudnnDestroy(void *handle) { free(handle); return 0; }
size_t cudnnGetVersion(void) { return CUDNN; }
size_t cudnnGetCudartVersion(void) { return CUDA_MAJOR * 1000; }
const char *cudnnGetErrorString(int status) { return "a status of cuDNN"; }
void cudnnGetLastErrorString(char *text, size_t size) { if (size) text[0] = 0; }
int cudnnGetProperty(int type, int *value) { *value = type == 0 ? CUDNN / 10000 : type == 1 ? CUDNN / 100 % 100 : CUDNN % 100; return 0; }  // major, minor, patch
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

#define MAX_DIMENSIONS 8
typedef struct { int type, count, sizes[MAX_DIMENSIONS]; } Descriptor;
static int create(Descriptor **made) { *made = calloc(1, sizeof **made); return 0; }
static int destroy(Descriptor *made) { free(made); return 0; }
int cudnnCreateTensorDescriptor(Descriptor **made) { return create(made); }
int cudnnCreateFilterDescriptor(Descriptor **made) { return create(made); }
int cudnnCreateConvolutionDescriptor(Descriptor **made) { return create(made); }
int cudnnDestroyTensorDescriptor(Descriptor *made) { return destroy(made); }
int cudnnDestroyFilterDescriptor(Descriptor *made) { return destroy(made); }
int cudnnDestroyConvolutionDescriptor(Descriptor *made) { return destroy(made); }
static int set(Descriptor *made, int type, int count, const int *sizes) {
  made->type = type, made->count = count < MAX_DIMENSIONS ? count : MAX_DIMENSIONS;
  memcpy(made->sizes, sizes, made->count * sizeof *sizes);
  return 0;
}
int cudnnSetTensorNdDescriptor(Descriptor *made, int type, int count, const int *sizes, const int *strides) { return set(made, type, count, sizes); }
int cudnnSetFilterNdDescriptor(Descriptor *made, int type, int format, int count, const int *sizes) { return set(made, type, count, sizes); }
static size_t element_bytes(int type) {
  static const char bytes[] = {4, 8, 2, 1, 4, 4, 1, 4, 32, 2};  // by cudnnDataType_t
  return type < (int)sizeof bytes ? bytes[type] : 1;
}

// Recurrent layers. The weights lie in one buffer, layer after layer: all gates of the input, all of the state, a projection,
// then the biases. Only a real cuDNN knows its workspace and reserve space: here as the estimate has them (cuda_ops/functions.py).
enum { LSTM = 2, GRU = 3 };  // of cudnnRNNMode_t; 0 and 1 have one gate
typedef struct { float share; } Dropout;
typedef struct { size_t places; } Sequences;
typedef struct { int mode, biased, directions, type; size_t input, hidden, out, layers; Dropout *dropout; } Layers;
int cudnnCreateDropoutDescriptor(Dropout **made) { *made = calloc(1, sizeof **made); return 0; }
int cudnnCreateRNNDataDescriptor(Sequences **made) { *made = calloc(1, sizeof **made); return 0; }
int cudnnCreateRNNDescriptor(Layers **made) { *made = calloc(1, sizeof **made); return 0; }
int cudnnDestroyDropoutDescriptor(Dropout *made) { free(made); return 0; }
int cudnnDestroyRNNDataDescriptor(Sequences *made) { free(made); return 0; }
int cudnnDestroyRNNDescriptor(Layers *made) { free(made); return 0; }
int cudnnSetDropoutDescriptor(Dropout *made, void *h, float share, void *states, size_t bytes, unsigned long long seed) { made->share = share; return 0; }
int cudnnRestoreDropoutDescriptor(Dropout *made, void *h, float share, void *states, size_t bytes, unsigned long long seed) { made->share = share; return 0; }
int cudnnSetRNNDataDescriptor(Sequences *made, int type, int layout, int longest, int batch, int width, const int *lengths, void *padding) {
  made->places = 0;
  for (int i = 0; i < batch; i++) made->places += lengths[i];
  return 0;
}
int cudnnSetRNNDescriptor_v8(Layers *made, int algorithm, int mode, int bias, int direction, int input_mode, int type, int precision, int math, int input, int hidden, int projection, int layers, Dropout *dropout, unsigned flags) {
  *made = (Layers){mode, bias != 0, direction ? 2 : 1, type, input, hidden, projection ? projection : hidden, layers, dropout};
  return 0;
}
static size_t gates(const Layers *of) { return of->mode == LSTM ? 4 : of->mode == GRU ? 3 : 1; }
static size_t layer_input(const Layers *of, size_t layer) { return layer < (size_t)of->directions ? of->input : of->out * of->directions; }
static size_t projection_size(const Layers *of) { return of->out == of->hidden ? 0 : of->out * of->hidden; }
static size_t layer_weights(const Layers *of, size_t layer) { return gates(of) * of->hidden * (layer_input(of, layer) + of->out) + projection_size(of); }
static size_t first_weight(const Layers *of, size_t layer) {
  size_t at = 0;
  for (size_t i = 0; i < layer; i++) at += layer_weights(of, i);
  return at;
}
int cudnnGetRNNWeightSpaceSize(void *h, Layers *of, size_t *bytes) {
  size_t count = of->layers * of->directions;
  *bytes = (first_weight(of, count) + (of->biased ? 2 * count * gates(of) * of->hidden : 0)) * element_bytes(of->type);
  return 0;
}
int cudnnGetRNNTempSpaceSizes(void *h, Layers *of, int training, Sequences *x, size_t *work, size_t *reserve) {
  size_t units = x->places * of->hidden * of->directions * of->layers, outs = x->places * of->out * of->directions;
  size_t kept = ((of->mode == LSTM ? 5 : of->mode == GRU ? 6 : 1) * units + outs * (of->layers - 1)) * element_bytes(of->type);
  if (of->dropout && of->dropout->share > 0) kept += (of->layers - 1) * ((outs + 7) / 8);
  if (work) *work = (of->layers * of->directions << 23) + (5 * outs + gates(of) * units) * element_bytes(of->type);
  if (reserve) *reserve = training ? (kept + 31) / 32 * 32 + 256 : 0;
  return 0;
}
int cudnnGetRNNWeightParams(void *h, Layers *of, int layer, size_t bytes, char *weights, int linear, Descriptor *matrix, char **matrix_at, Descriptor *bias, char **bias_at) {
  size_t n = gates(of), in = layer_input(of, layer), at = first_weight(of, layer), count = of->layers * of->directions;
  int is_state = linear >= (int)n, is_projection = linear >= (int)(2 * n);
  at += is_projection ? n * of->hidden * (in + of->out) : is_state ? n * of->hidden * in + (linear - n) * of->hidden * of->out : linear * of->hidden * in;
  if (matrix) set(matrix, of->type, 3, (int[]){1, is_projection ? of->out : of->hidden, is_projection ? of->hidden : is_state ? of->out : in});
  if (matrix_at) *matrix_at = weights + at * element_bytes(of->type);
  if (bias) set(bias, of->type, 3, (int[]){1, of->hidden, 1});
  at = first_weight(of, count) + (2 * n * layer + linear) * of->hidden;
  if (bias_at) *bias_at = of->biased && !is_projection ? weights + at * element_bytes(of->type) : NULL;
  return 0;
}
int cudnnGetTensorNdDescriptor(Descriptor *of, int wanted, int *type, int *count, int *sizes, int *strides) {
  *type = of->type, *count = of->count;
  for (int i = of->count - 1, stride = 1; i >= 0; stride *= of->sizes[i--]) sizes[i] = of->sizes[i], strides[i] = stride;
  return 0;
}
