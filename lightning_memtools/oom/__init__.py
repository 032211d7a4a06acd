"""Explains an out-of-memory error: what filled the device, and what would have helped."""
