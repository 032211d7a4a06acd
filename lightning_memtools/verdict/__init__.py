"""One verdict on a training run: what limits it, by its measured times and memory, and what to try next."""
