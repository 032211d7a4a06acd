"""The dry run: an unchanged training script runs on PyTorch's CUDA code without a GPU. Call `api.dry_run`."""
