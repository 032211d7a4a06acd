"""Steps in Lightning's own loop, on fake tensors or on PyTorch's CUDA code, and the values that they read."""
