"""A pair on one GPU: a step is a list of launches over buffers whose addresses do not change (ops/triton)."""
