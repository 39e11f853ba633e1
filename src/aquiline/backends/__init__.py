"""Where steps are computed: the seam, and one package for each way to compute them."""
