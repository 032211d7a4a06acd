"""Reading a device's memory: statistics, peaks, sizes and units. Floor 1: imports torch, never lightning."""
