"""Puts tests/ on the import path, for checkpoints.py."""
