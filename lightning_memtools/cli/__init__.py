"""The `memtools` command."""
