"""Multimodal workers for vLLM and SGLang under NVIDIA Dynamo.

Importing this package imports neither an engine nor Dynamo; only ``dynamo_worker_ext.vllm``
imports vLLM and only ``dynamo_worker_ext.sglang`` imports SGLang.
"""

__version__ = "0.1.0"
