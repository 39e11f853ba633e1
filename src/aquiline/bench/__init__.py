"""Benchmarks, evaluation, gates and reports."""
