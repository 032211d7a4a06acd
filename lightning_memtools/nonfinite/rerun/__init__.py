"""Runs a step once more, from the state it began with, and leaves everything as it was."""
