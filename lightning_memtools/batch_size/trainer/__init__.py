"""Runs a batch size in a Trainer, restores everything, and applies the size that was found."""
