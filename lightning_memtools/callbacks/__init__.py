"""Thin Lightning shells, one file per callback. Floor 6: a hook's body calls the core and returns."""
