"""Gradient checkpointing: find chains of layers, profile them, choose what to recompute, apply and undo."""
