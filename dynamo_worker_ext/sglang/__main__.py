"""``python -m dynamo_worker_ext.sglang``: an SGLang worker for Dynamo."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dynamo_worker_ext.sglang.args import Config
    from dynamo_worker_ext.worker import Worker


def main(argv: list[str] | None = None) -> None:
    """Serve until told to stop; see `dynamo_worker_ext.worker.serve` for the exit status."""
    from dynamo_worker_ext.sglang.args import parse_args
    from dynamo_worker_ext.worker import serve

    serve("dynamo_worker_ext.sglang", _worker, parse_args, argv)


def _worker(config: Config) -> Worker:
    """The worker of the role that was asked for."""
    from dynamo.common.constants import DisaggregationMode

    if config.worker.disaggregation_mode is DisaggregationMode.ENCODE:
        from dynamo_worker_ext.sglang.encoder import SglangEncodeWorker

        return SglangEncodeWorker(config)
    from dynamo_worker_ext.sglang.roles import make_worker

    return make_worker(config)


if __name__ == "__main__":
    main()
