"""Measurements that operators can repeat: ``python -m dynamo_worker_ext.bench --help``."""
