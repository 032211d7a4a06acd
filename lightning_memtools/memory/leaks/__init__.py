"""Leaks: the tensors that stay on the device, since when, and what holds them. Imports torch only."""
