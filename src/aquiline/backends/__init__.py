"""Where steps are computed: `base` is the seam to the engine; each backend has a package of its own."""
