"""The Memory tab of TensorBoard, which loads it at start-up: it imports neither torch nor lightning."""
