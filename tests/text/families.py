"""Chat formats of public model families, and a byte-level tokenizer that knows their markers.

The templates are written here, for messages of text alone; tools are left out but in Harmony's, where a message has one
call. What they write is the published format:
SmolLM2 and Qwen: ChatML, with the default system prompts of HuggingFaceTB/SmolLM2-135M-Instruct and
Qwen/Qwen2.5-7B-Instruct; Qwen/Qwen3-8B, whose template drops the reasoning of earlier answers and opens the last one
with a block for it; meta-llama/Llama-3.1-8B-Instruct; openai/gpt-oss-20b: Harmony (developers.openai.com/cookbook,
"OpenAI harmony response format"), which shows reasoning in the last answer alone and ends it with <|return|>, earlier
ones with <|end|>.
"""

from __future__ import annotations

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

SMOLLM2 = """\
{% if messages[0].role != 'system' %}
<|im_start|>system
You are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>
{% endif %}
{% for message in messages %}
<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>
{% endfor %}
{% if add_generation_prompt %}
<|im_start|>assistant
{% endif %}
"""

QWEN25 = SMOLLM2.replace(
    "a helpful AI assistant named SmolLM, trained by Hugging Face",
    "Qwen, created by Alibaba Cloud. You are a helpful assistant.",
)

QWEN3 = """\
{% set state = namespace(last_question=-1) %}
{% for message in messages if message.role == 'user' %}
{% set state.last_question = messages.index(message) %}
{% endfor %}
{% for message in messages %}
{% set text = message.content %}
{% set thought = '' %}
{% if message.role == 'assistant' and '</think>' in text %}
{% set thought = text.split('</think>')[0].split('<think>')[-1].strip('\\n') %}
{% set text = text.split('</think>')[-1].lstrip('\\n') %}
{% endif %}
<|im_start|>{{ message.role }}
{% if message.role == 'assistant' and loop.last and loop.index0 > state.last_question %}
<think>
{{ thought }}
</think>

{% endif %}
{{ text }}<|im_end|>
{% endfor %}
{% if add_generation_prompt %}
<|im_start|>assistant
{% if enable_thinking is defined and enable_thinking is false %}
<think>

</think>

{% endif %}
{% endif %}
"""

LLAMA31 = """\
{{ bos_token }}{% set rest = messages[1:] if messages[0].role == 'system' else messages -%}
<|start_header_id|>system<|end_header_id|>

Cutting Knowledge Date: December 2023
Today Date: {{ date_string | default('26 Jul 2024') }}

{{ messages[0].content | trim if messages[0].role == 'system' }}<|eot_id|>
{%- for message in rest -%}
<|start_header_id|>{{ message.role }}<|end_header_id|>

{{ message.content | trim }}<|eot_id|>
{%- endfor %}
{% if add_generation_prompt %}
<|start_header_id|>assistant<|end_header_id|>

{% endif %}
"""

MARKED = """\
{{ bos_token }}
{%- for message in messages -%}
<|start_header_id|>{{ message.role }}<|end_header_id|>

{% if message.role == 'assistant' -%}
{% generation %}{{ message.content }}<|eot_id|>{% endgeneration %}
{%- else -%}
{{ message.content }}<|eot_id|>
{%- endif -%}
{% endfor %}
{% if add_generation_prompt %}
<|start_header_id|>assistant<|end_header_id|>

{% endif %}
"""

HARMONY = """\
<|start|>system<|message|>You are ChatGPT, a large language model trained by OpenAI.
Knowledge cutoff: 2024-06
Current date: {{ strftime_now('%Y-%m-%d') }}

Reasoning: {{ reasoning_effort | default('medium') }}

# Valid channels: analysis, commentary, final. Channel must be included for every message.<|end|>
{%- if messages[0].role == 'system' or tools -%}
<|start|>developer<|message|>
{%- if messages[0].role == 'system' %}
# Instructions

{{ messages[0].content }}

{% endif -%}
{% if tools %}
# Tools

## functions

namespace functions {

{% for tool in tools %}
// {{ tool.function.description }}
type {{ tool.function.name }} = (_: {
{% for name, kind in tool.function.parameters.properties.items() %}
{{ name }}: {{ kind.type }},
{% endfor %}
}) => any;

{% endfor %}
} // namespace functions
{%- endif -%}
<|end|>
{%- endif -%}
{% set called = namespace(name='') -%}
{% for message in messages if message.role != 'system' %}
{% set is_last = loop.last and not add_generation_prompt -%}
{% if message.role == 'user' -%}
<|start|>user<|message|>{{ message.content }}<|end|>
{%- elif message.role == 'tool' -%}
<|start|>functions.{{ called.name }} to=assistant<|channel|>commentary<|message|>{{ message.content | tojson }}<|end|>
{%- elif message.tool_calls -%}
{% if message.content and message.thinking %}
{{ raise_exception('Cannot pass both content and thinking in an assistant message with tool calls!') }}
{% endif -%}
{% if message.content or message.thinking -%}
<|start|>assistant<|channel|>analysis<|message|>{{ message.content or message.thinking }}<|end|>
{%- endif -%}
{% set call = message.tool_calls[0].function %}
{% set called.name = call.name -%}
<|start|>assistant to=functions.{{ call.name }}<|channel|>commentary json<|message|>
{{- call.arguments | tojson }}<|call|>
{%- else -%}
{% if is_last and message.thinking -%}
<|start|>assistant<|channel|>analysis<|message|>{{ message.thinking }}<|end|>
{%- endif -%}
<|start|>assistant<|channel|>final<|message|>{{ message.content }}{{ '<|return|>' if is_last else '<|end|>' }}
{%- endif -%}
{% endfor -%}
{% if add_generation_prompt -%}
<|start|>assistant
{%- endif -%}
"""

MARKERS = (
    "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>",
    "<|eot_id|>", "<|start|>", "<|message|>", "<|channel|>", "<|end|>", "<|return|>", "<|constrain|>", "<|call|>",
)  # fmt: skip
SPECIAL = {"bos_token": "<|begin_of_text|>", "eos_token": "<|eot_id|>"}


def byte_tokenizer() -> Tokenizer:
    """A token per byte, one for an empty line, one for a space with an a; markers are special, <think> is a plain
    added token, as Qwen3 has it."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("Ċ", "Ċ"), ("Ġ", "a")]
    vocabulary = {token: i for i, token in enumerate([*letters, *(a + b for a, b in merges)])}
    tokenizer = Tokenizer(models.BPE(vocabulary, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(MARKERS))
    tokenizer.add_tokens(["<think>", "</think>"])
    return tokenizer
