"""Chat templates in the ChatML form that the Qwen families use.

They are written for both renderers that meet them, Jinja2 (transformers, vLLM, SGLang) and
minijinja (Dynamo's Rust frontend), and give the same text whether blocks are trimmed or not.
A part of a message that the template does not know is an error, never silence: an image that is
dropped unseen is the fault that this project exists to prevent.
"""

_CHATML = """\
{%- for message in messages -%}
{%- if loop.first and message['role'] != 'system' -%}
{{- '<|im_start|>system\\nYou are a helpful assistant.<|im_end|>\\n' -}}
{%- endif -%}
{{- '<|im_start|>' + message['role'] + '\\n' -}}
{%- if message['content'] is string -%}
{{- message['content'] -}}
{%- elif message['content'] -%}
{%- for content in message['content'] -%}
MEDIA_BRANCHES
{%- if content['type'] == 'text' or 'text' in content -%}
{{- content['text'] -}}
{%- else -%}
{{- raise_exception('this model takes no content part of type ' + content['type']) -}}
{%- endif -%}
MEDIA_ENDS
{%- endfor -%}
{%- endif -%}
{{- '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{- '<|im_start|>assistant\\n' -}}
{%- endif -%}
"""

_MEDIA_BRANCH = """\
{%- if content['type'] in ['KIND', 'KIND_url'] or 'KIND' in content or 'KIND_url' in content -%}
{{- 'PLACEHOLDER' -}}
{%- else -%}"""


def chatml(**placeholders: str) -> str:
    """The ChatML template of a model that takes these kinds of media beside text.

    Args:
        placeholders: what stands in the prompt for one item of a kind, such as
            `image="<|vision_start|><|image_pad|><|vision_end|>"`. Content parts of type `image`
            and `image_url` both become it; kinds that are not named are refused when rendering.

    Returns:
        The template. It ends without a line break, as the files on the hub do.
    """
    branches = [
        _MEDIA_BRANCH.replace("KIND", kind).replace("PLACEHOLDER", text)
        for kind, text in placeholders.items()
    ]
    ends = ["{%- endif -%}"] * len(branches)
    template = _CHATML.replace("MEDIA_BRANCHES\n", _lines(branches))
    return template.replace("MEDIA_ENDS\n", _lines(ends)).rstrip("\n")


def _lines(parts: list[str]) -> str:
    return "".join(part + "\n" for part in parts)


VICUNA = """\
{%- for message in messages -%}
{%- if message['role'] == 'system' -%}
{{- message['content'] + ' ' -}}
{%- else -%}
{{- 'USER: ' if message['role'] == 'user' else 'ASSISTANT: ' -}}
{%- if message['content'] is string -%}
{{- message['content'] -}}
{%- else -%}
{%- for content in message['content'] -%}
{%- if content['type'] in ['image', 'image_url'] -%}
{{- '<image>\\n' -}}
{%- elif content['type'] == 'text' -%}
{{- content['text'] -}}
{%- else -%}
{{- raise_exception('this model takes no content part of type ' + content['type']) -}}
{%- endif -%}
{%- endfor -%}
{%- endif -%}
{{- ' ' if message['role'] == 'user' else '</s>' -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{- 'ASSISTANT:' -}}
{%- endif -%}"""
"""LLaVA's form. It begins without `<s>`: that is the tokenizer's to add."""

PHI3 = """\
{%- for message in messages -%}
{{- '<|' + message['role'] + '|>\\n' + message['content'] + '<|end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{- '<|assistant|>\\n' -}}
{%- endif -%}"""
"""Phi-3-vision's form, which takes text only: a frontend numbers the images, `<|image_1|>`."""
