"""Checkpoints in the formats of other engines, for `aquiline compare`; the wheel leaves them out."""
