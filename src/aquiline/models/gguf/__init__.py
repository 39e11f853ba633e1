"""Targets from GGUF files: the file (`reader`), its metadata as a config (`config`), its weights (`tensors`)."""
