"""Which operation made the first bad value, and why: traced, sliced backwards, tried out."""
