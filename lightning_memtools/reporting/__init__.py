"""Writes results: loggers, tables, report files, and values gathered over ranks. Knows Lightning."""
