"""Memory under test: budgets, the file of recorded peaks, and the difference between two results."""
