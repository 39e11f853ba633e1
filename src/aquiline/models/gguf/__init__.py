"""Targets from GGUF files: the file (`reader`), its metadata as a config (`metadata`), its weights (`tensors`)."""
