// cuSOLVER without a GPU: it solves nothing, and asks for about the workspace that a blocked algorithm needs.
// Only a real cuSOLVER knows its own: these are LAPACK's optimal sizes with blocks of 32 columns, so they are near, not exact.
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
enum { BLOCK = 32 };
static int at_most(size_t count) { return count < INT32_MAX ? (int)count : INT32_MAX; }
static size_t least(size_t m, size_t n) { return m < n ? m : n; }
static size_t of_panel(size_t rows) { return rows * BLOCK; }                            // of a factorization, panel by panel
static size_t of_eigenvectors(int wanted, size_t n) { return wanted ? 1 + 6 * n + 2 * n * n : 1 + 2 * n + of_panel(n); }  // syevd
static size_t of_svd(size_t m, size_t n) { return 3 * least(m, n) + m + n + of_panel(m + n); }        // gesvd
static size_t of_jacobi(size_t m, size_t n) { return 2 * m * n + least(m, n) * least(m, n) + m + n; }  // gesvdj, gesvda

int cusolverDnCreate(void **handle) { *handle = malloc(16); return 0; }
int cusolverDnDestroy(void *handle) { free(handle); return 0; }
int cusolverDnCreateParams(void **made) { *made = malloc(16); return 0; }
int cusolverDnDestroyParams(void *made) { free(made); return 0; }
int cusolverDnCreateGesvdjInfo(void **made) { *made = malloc(16); return 0; }
int cusolverDnDestroyGesvdjInfo(void *made) { free(made); return 0; }

// Sizes in elements of a type.
#define WORKSPACES(T, un) \
  int cusolverDn##T##getrf_bufferSize(void *h, int m, int n, void *a, int lda, int *size) { *size = at_most(of_panel(m)); return 0; } \
  int cusolverDn##T##geqrf_bufferSize(void *h, int m, int n, void *a, int lda, int *size) { *size = at_most(of_panel(n)); return 0; } \
  int cusolverDn##T##potrf_bufferSize(void *h, int uplo, int n, void *a, int lda, int *size) { *size = at_most(of_panel(n)); return 0; } \
  int cusolverDn##T##sytrf_bufferSize(void *h, int n, void *a, int lda, int *size) { *size = at_most(of_panel(n)); return 0; } \
  int cusolverDn##T##un##gqr_bufferSize(void *h, int m, int n, int k, void *a, int lda, void *tau, int *size) { *size = at_most(of_panel(n)); return 0; } \
  int cusolverDn##T##un##mqr_bufferSize(void *h, int side, int trans, int m, int n, int k, void *a, int lda, void *tau, void *c, int ldc, int *size) { *size = at_most(of_panel(side ? m : n)); return 0; } \
  int cusolverDn##T##gesvd_bufferSize(void *h, int m, int n, int *size) { *size = at_most(of_svd(m, n)); return 0; } \
  int cusolverDn##T##gesvdj_bufferSize(void *h, int job, int econ, int m, int n, void *a, int lda, void *s, void *u, int ldu, void *v, int ldv, int *size, void *params) { *size = at_most(of_jacobi(m, n)); return 0; } \
  int cusolverDn##T##gesvdjBatched_bufferSize(void *h, int job, int m, int n, void *a, int lda, void *s, void *u, int ldu, void *v, int ldv, int *size, void *params, int batch) { *size = at_most(batch * of_jacobi(m, n)); return 0; } \
  int cusolverDn##T##gesvdaStridedBatched_bufferSize(void *h, int job, int rank, int m, int n, void *a, int lda, long long sa, void *s, long long ss, void *u, int ldu, long long su, void *v, int ldv, long long sv, int *size, int batch) { *size = at_most(batch * of_jacobi(m, n)); return 0; }
WORKSPACES(S, or)
WORKSPACES(D, or)
WORKSPACES(C, un)
WORKSPACES(Z, un)
#define SYMMETRIC(T, name) \
  int cusolverDn##T##name##evd_bufferSize(void *h, int job, int uplo, int n, void *a, int lda, void *w, int *size) { *size = at_most(of_eigenvectors(job, n)); return 0; } \
  int cusolverDn##T##name##evjBatched_bufferSize(void *h, int job, int uplo, int n, void *a, int lda, void *w, int *size, void *params, int batch) { *size = at_most(batch * of_eigenvectors(job, n)); return 0; }
SYMMETRIC(S, sy)
SYMMETRIC(D, sy)
SYMMETRIC(C, he)
SYMMETRIC(Z, he)

// Sizes in bytes, for any type: of cudaDataType, 0 is float, 1 double, 4 and 5 are their complex ones.
static int in_bytes(int type, size_t count, size_t *device, size_t *host) {
  *device = count * (type == 0 ? 4 : type == 5 ? 16 : 8);
  *host = 0;
  return 0;
}
int cusolverDnXpotrf_bufferSize(void *h, void *p, int uplo, int64_t n, int type, void *a, int64_t lda, int compute, size_t *device, size_t *host) { return in_bytes(type, of_panel(n), device, host); }
int cusolverDnXgeqrf_bufferSize(void *h, void *p, int64_t m, int64_t n, int type, void *a, int64_t lda, int type_tau, void *tau, int compute, size_t *device, size_t *host) { return in_bytes(type, of_panel(n), device, host); }
int cusolverDnXsyevd_bufferSize(void *h, void *p, int job, int uplo, int64_t n, int type, void *a, int64_t lda, int type_w, void *w, int compute, size_t *device, size_t *host) { return in_bytes(type, of_eigenvectors(job, n), device, host); }
int cusolverDnXsyevBatched_bufferSize(void *h, void *p, int job, int uplo, int64_t n, int type, void *a, int64_t lda, int type_w, void *w, int compute, size_t *device, size_t *host, int64_t batch) { return in_bytes(type, batch * of_eigenvectors(job, n), device, host); }
int cusolverDnXgeev_bufferSize(void *h, void *p, int job_left, int job_right, int64_t n, int type, void *a, int64_t lda, int type_w, void *w, int type_l, void *l, int64_t ldl, int type_r, void *r, int64_t ldr, int compute, size_t *device, size_t *host) { return in_bytes(type, of_panel(n) + 4 * n + n * n, device, host); }
int cusolverDnXsytrs_bufferSize(void *h, int uplo, int64_t n, int64_t nrhs, int type, void *a, int64_t lda, const int64_t *pivots, int type_b, void *b, int64_t ldb, size_t *device, size_t *host) { return in_bytes(type, n * nrhs, device, host); }
