"""Gradient checkpointing: finds chains of layers, measures them, chooses ranges to recompute, and applies plans."""
