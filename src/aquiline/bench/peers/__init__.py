"""Other engines on the same weights."""
