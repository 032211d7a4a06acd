"""NaN and Inf: detect them before the update, undo what the bad step did, say what caused them. Imports torch only."""
