"""The ledger: which tensors stay on the device, since when, and who holds them. Imports torch only."""
