"""Runs a batch that ran out of memory again in parts, with the result of the whole batch."""
