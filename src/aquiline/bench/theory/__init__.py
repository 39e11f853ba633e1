"""The most that a device can do, and the least time that a step can take on it."""
