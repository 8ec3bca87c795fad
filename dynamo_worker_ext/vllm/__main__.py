"""``python -m dynamo_worker_ext.vllm``: a vLLM worker for Dynamo."""

from __future__ import annotations

import sys

from dynamo_worker_ext.errors import StartupError


def main(argv: list[str] | None = None) -> None:
    """Serve until told to stop.

    Exits with 0 after an orderly stop, 2 when it cannot serve as it was started, 1 when the
    engine died.
    """
    from dynamo.common.backend.run import run

    from dynamo_worker_ext.vllm.args import parse_args
    from dynamo_worker_ext.vllm.handler import VllmWorker
    from dynamo_worker_ext.worker import check_system_port

    worker: VllmWorker | None = None

    async def make(_argv: list[str] | None) -> tuple[VllmWorker, object]:
        nonlocal worker
        worker = VllmWorker(config)
        return worker, config.worker

    try:
        config = parse_args(argv)
        check_system_port()
        run(VllmWorker, engine_factory=make)
    except Exception as error:
        # What `start` raises comes back from the SDK without its type.
        reason = worker.startup_error if worker is not None else None
        if reason is None and not isinstance(error, StartupError):
            raise
        print(f"dynamo_worker_ext.vllm: {reason or error}", file=sys.stderr)
        sys.exit(2)
    if worker is not None and worker.engine_failed:
        sys.exit(1)


if __name__ == "__main__":
    main()
