"""Answers of the target to prompts, written as rows that a draft trains on."""
