"""A draft that learns from what it serves: what is kept on disk, and the engine's side of it."""
