"""A training step on fake tensors: one tracer, a stand-in for the Trainer, fake modules and optimizers."""
