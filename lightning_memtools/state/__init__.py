"""Records what a step changes, and restores it.

`state_snapshot`: everything that can be reached from some objects. Parts of it, for each step of a training run:
`random_state`, `buffer_keeper` (and what else forward passes write), `starts` (of a batch, of an
update). `capsule`: a file.
"""
