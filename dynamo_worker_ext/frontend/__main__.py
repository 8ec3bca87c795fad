"""``python -m dynamo_worker_ext.frontend``: Dynamo's frontend, same flags, with our senders.

    DYNAMO_MM_TRANSFER   auto (the default), arena, shm, nixl or off

``auto`` sends media to workers on this host through memory, to others over NIXL, and leaves it to
the workers where neither will do; a request keeps its raw media unless every worker that may get
it can read what was sent. Only the vLLM chat processor sends (``--dyn-chat-processor vllm``).
"""

from __future__ import annotations

import importlib.metadata
import os
import runpy
import sys
from argparse import Namespace
from typing import Any, Final

from dynamo_worker_ext.errors import StartupError
from dynamo_worker_ext.frontend.plan import check_mode

#: Versions of ai-dynamo that this was tested with: it overrides a private method.
PROVEN: Final = ("1.6.1",)


def check_dynamo(version: str) -> None:
    """Refuse a Dynamo that this was not tested with.

    Raises:
        StartupError: it is another one.
    """
    if version not in PROVEN:
        raise StartupError(
            f"ai-dynamo {version} is installed; this frontend was tested with "
            f"{', '.join(PROVEN)}. Install that, or start python -m dynamo.frontend, which these "
            "workers understand as well"
        )


def main() -> None:
    if {"-h", "--help"} & set(sys.argv[1:]):
        print(__doc__)
    try:
        check_dynamo(importlib.metadata.version("ai-dynamo"))
        mode = check_mode(os.environ.get("DYNAMO_MM_TRANSFER", "auto"))
    except StartupError as error:
        sys.exit(f"error: {error}")
    if mode == "off":
        # Upstream's name for it; it also decides how upstream caches what it processed.
        os.environ["DYNAMO_DISABLE_NIXL_MM"] = "1"
    if os.environ.get("DYNAMO_DISABLE_NIXL_MM") != "1":
        _replace_factory(mode)
    runpy.run_module("dynamo.frontend", run_name="__main__", alter_sys=True)


def _replace_factory(mode: str) -> None:
    from dynamo.frontend import main as upstream

    run_input = upstream.run_input
    to_close: list[Any] = []

    def setup_engine_factory(config: Any, vllm_flags: Namespace) -> Any:
        # Imported only for the vLLM chat processor; the others do not need vLLM.
        from dynamo_worker_ext.frontend.processor import Outbox, install

        try:
            outbox = Outbox(mode)
        except StartupError as error:
            sys.exit(f"error: {error}")
        to_close.append(outbox)
        return install(outbox)(config, vllm_flags)

    async def run_and_close(*args: Any) -> None:
        try:
            await run_input(*args)
        finally:
            for outbox in to_close:
                await outbox.close()

    upstream.setup_engine_factory = setup_engine_factory
    upstream.run_input = run_and_close


if __name__ == "__main__":
    main()
