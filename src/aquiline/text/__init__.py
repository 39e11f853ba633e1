"""Text in and out of token ids: tokenizers, chat templates, loss masks, detokenizing."""
