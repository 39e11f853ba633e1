"""Gates: rules that results must hold, and the verdict."""
