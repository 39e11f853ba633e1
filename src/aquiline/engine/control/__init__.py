"""Which way to draft each sequence takes at each step: what steps cost, how often drafts are right, the choice."""
