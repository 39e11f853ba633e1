"""One JSON per setting: what it must hold, every reason not to believe or compare it, medians and tables."""
