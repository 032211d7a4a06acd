"""Records and restores state: all reachable objects (`state_snapshot`), random streams, and buffers."""
