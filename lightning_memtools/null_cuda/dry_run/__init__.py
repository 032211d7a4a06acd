"""The dry run: an unchanged training script on PyTorch's CUDA code, without a GPU. `api.dry_run` is the way in."""
