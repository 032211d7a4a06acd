"""Runs a batch that ran out of memory again, in parts that give what the whole batch would have given."""
