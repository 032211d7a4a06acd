"""Where results go: loggers, chart layouts, tables, reports. Floor 1: the one lower floor that knows Lightning."""
