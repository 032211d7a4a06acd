"""What filled a device that ran out of memory, and what would have helped."""
