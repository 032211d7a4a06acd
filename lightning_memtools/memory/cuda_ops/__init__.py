"""CUDA's kernels, for operators that a CPU computes in another way."""
