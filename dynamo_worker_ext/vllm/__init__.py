"""The vLLM worker. Nothing outside this package imports vLLM."""
