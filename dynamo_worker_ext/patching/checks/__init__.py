"""Checks of behaviour: scripts that `dynamo_worker_ext.patching.verify` runs beside an engine.

Each takes the file for its report and the names of checks, imports its engine and writes what is
wrong, by check: `{"mm-hashes": ""}` if nothing is.
"""
