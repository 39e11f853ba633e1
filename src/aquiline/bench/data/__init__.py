"""Benchmarks by name and where they come from; prompts of real text."""
