"""What both engines' workers share: options, lifecycle, a request's way, errors."""

from dynamo_worker_ext.worker.base import Worker
from dynamo_worker_ext.worker.dynamo_errors import to_dynamo_error
from dynamo_worker_ext.worker.main import check_system_port, serve
from dynamo_worker_ext.worker.media import MediaWorker
from dynamo_worker_ext.worker.options import WorkerOptions, add_worker_arguments, worker_options

__all__ = [
    "MediaWorker",
    "Worker",
    "WorkerOptions",
    "add_worker_arguments",
    "check_system_port",
    "serve",
    "to_dynamo_error",
    "worker_options",
]
