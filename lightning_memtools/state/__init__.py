"""Snapshot and restore: the state of objects, models, optimizers and every random stream."""
