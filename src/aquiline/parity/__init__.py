"""Whether the engine computes what its models say: stages beside a reference, and the cause where they differ."""
