"""`aquiline eval`: baseline against drafts on the same questions."""
