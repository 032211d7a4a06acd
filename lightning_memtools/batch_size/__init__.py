"""The largest batch that fits: the search, its limits, and resizing data loaders. Knows torch, not lightning."""
