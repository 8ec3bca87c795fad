"""Does a frontend hash a prompt as the worker publishes it? Asked of a real engine on one model.

    request side   the model's files (`hashing.resolve_routing_tokens`), and what the engine's own
                   processor says of its items: what Dynamo's two frontends go by
    event side     what the engine publishes, through the worker's pump and normaliser

- `engine.py`    what is asked of an engine; one implementation each in `vllm/` and `sglang/`
- `check.py`     compares the two sides block by block
- `run.py`       the prompts
- `__main__.py`  the command
"""
