"""`custom_generate/generate.py` of a repository on the Hugging Face hub: transformers runs it for `model.generate`."""

from typing import Any

from transformers import GenerationMixin, PreTrainedModel

from aquiline.transformers import speculative

DRAFT = "smollm2"  # a folder, a hub id such as OWNER/DRAFT, or the name of a known pair


def generate(model: PreTrainedModel, streamer: Any = None, **arguments: Any) -> Any:
    return GenerationMixin.generate(model, custom_generate=speculative(DRAFT, streamer=streamer), **arguments)
