"""Adaptive drafting: the costs of steps, how often drafts are right, and the choice for each sequence at each step."""
