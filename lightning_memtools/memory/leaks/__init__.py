"""Leaks: which tensors stay on the device, since when, and what holds them. Imports torch only."""
