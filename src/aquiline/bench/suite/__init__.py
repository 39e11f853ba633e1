"""What `aquiline bench`, `aquiline profile` and `aquiline demo` run."""
