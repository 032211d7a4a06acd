"""How BatchSizeTuner runs a batch size in a Trainer, puts everything back, and applies what was found."""
