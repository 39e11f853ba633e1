"""transformers' own door: `model.generate(..., custom_generate=speculative(draft=...))`.

The only part beside the torch backend and training that imports torch. Nothing below imports it.
"""

from __future__ import annotations

from aquiline.transformers.speculation import Speculation, speculative

__all__ = ["Speculation", "speculative"]
