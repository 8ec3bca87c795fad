"""``python -m dynamo_worker_ext.vllm``: a vLLM worker for Dynamo."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dynamo_worker_ext.vllm.args import Config
    from dynamo_worker_ext.worker import Worker


def main(argv: list[str] | None = None) -> None:
    """Serve until told to stop; see `dynamo_worker_ext.worker.serve` for the exit status."""
    from dynamo_worker_ext.vllm.args import parse_args
    from dynamo_worker_ext.worker import serve

    serve("dynamo_worker_ext.vllm", _worker, parse_args, argv)


def _worker(config: Config) -> Worker:
    """The worker of the role that was asked for."""
    from dynamo.common.constants import DisaggregationMode

    if config.worker.disaggregation_mode is DisaggregationMode.ENCODE:
        from dynamo_worker_ext.vllm.encoder import VllmEncodeWorker

        return VllmEncodeWorker(config)
    from dynamo_worker_ext.vllm.handler import VllmWorker

    return VllmWorker(config)


if __name__ == "__main__":
    main()
