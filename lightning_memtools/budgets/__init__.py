"""Memory under test: budgets, their recorded file, and what changed between two results."""
