"""The Memory tab of TensorBoard. TensorBoard loads it at start-up, so it imports neither torch nor lightning."""
