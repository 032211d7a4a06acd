"""Runs PyTorch's CUDA build without a GPU: stubs of NVIDIA's libraries account for memory, and compute nothing."""
