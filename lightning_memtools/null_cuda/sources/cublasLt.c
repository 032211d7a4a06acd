// cuBLASLt without a GPU: it always finds one algorithm, which needs no workspace.
#include <string.h>
static char handle[64];
int cublasLtCreate(void **made) { *made = handle; return 0; }
int cublasLtMatmulPreferenceCreate(void **made) { *made = handle; return 0; }
int cublasLtMatmulDescCreate(void **made, int compute, int scale) { *made = handle; return 0; }
int cublasLtMatrixLayoutCreate(void **made, int type, unsigned long rows, unsigned long columns, long stride) { *made = handle; return 0; }
int cublasLtMatmulAlgoGetHeuristic(void *lt, void *operation, void *a, void *b, void *c, void *d, void *preference, int wanted, void *results, int *found) {
  memset(results, 0, 96);  // sizeof(cublasLtMatmulHeuristicResult_t)
  *found = 1;
  return 0;
}
