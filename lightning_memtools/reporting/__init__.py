"""Where results go: loggers, tables, report files, and values of all ranks. Knows Lightning, on floor 2."""
