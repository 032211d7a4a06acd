"""CUDA's kernels where a CPU would take another path."""
