"""The verdict in a Trainer: the callback that measures a fit, and the callbacks that `memtools run` adds."""
