"""A bad step as a file, and how to run it again from there."""
