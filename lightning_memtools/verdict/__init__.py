"""One verdict on a training run: what limits its speed, by measured times and memory, and what to try next."""
