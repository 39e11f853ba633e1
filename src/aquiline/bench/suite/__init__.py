"""The runs of `aquiline bench`, `aquiline profile` and `aquiline demo`."""
