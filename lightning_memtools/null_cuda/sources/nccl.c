// NCCL without a GPU: communicators that know their size and rank. What NCCL itself would allocate is not counted.
#include <stdlib.h>
#include <string.h>
typedef struct { int size, rank; } Communicator;
typedef struct { char bytes[128]; } UniqueId;
static int make(Communicator **made, int size, int rank) {
  *made = malloc(sizeof **made);
  **made = (Communicator){size, rank};
  return 0;
}
int ncclGetVersion(int *version) { *version = 22907; return 0; }
int ncclGetUniqueId(UniqueId *id) { memset(id, 1, sizeof *id); return 0; }
int ncclCommInitRank(Communicator **made, int size, UniqueId id, int rank) { return make(made, size, rank); }
int ncclCommInitRankConfig(Communicator **made, int size, UniqueId id, int rank, void *config) { return make(made, size, rank); }
int ncclCommInitRankScalable(Communicator **made, int size, int rank, int ids, UniqueId *id, void *config) { return make(made, size, rank); }
int ncclCommSplit(Communicator *from, int color, int key, Communicator **made, void *config) { return make(made, from->size, from->rank); }
int ncclCommDestroy(Communicator *communicator) { free(communicator); return 0; }
int ncclCommAbort(Communicator *communicator) { free(communicator); return 0; }
int ncclCommCount(Communicator *communicator, int *size) { *size = communicator->size; return 0; }
int ncclCommUserRank(Communicator *communicator, int *rank) { *rank = communicator->rank; return 0; }
int ncclCommGetAsyncError(void *communicator, int *error) { *error = 0; return 0; }
const char *ncclGetErrorString(int error) { return "an error of NCCL"; }
const char *ncclGetLastError(void *communicator) { return ""; }
