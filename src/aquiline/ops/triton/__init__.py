"""Kernels in Triton and what launches them; a wrapper per kernel checks its buffers and returns a `Launch`."""
