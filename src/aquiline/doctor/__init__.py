"""What an installation has, what would run on it, and what is wrong with it."""
