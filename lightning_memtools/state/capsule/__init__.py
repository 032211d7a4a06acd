"""The state of a step in a file."""
