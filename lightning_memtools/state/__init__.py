"""Recorded and restored state: everything that can be reached (`state_snapshot`), random streams, copies of buffers."""
