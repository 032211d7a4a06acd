"""Finds the classic training mistakes in a model, its data and its first steps, each with evidence."""
