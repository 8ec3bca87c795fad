"""Version-pinned engine patches: `python -m dynamo_worker_ext.patching`.

```
manifest   what is known about each engine version: reasons, files, SHA-256 before and after
diff       unified diffs, applied strictly
engines    finds installed engines, without importing them
state      what state an engine's patches are in; reads only
apply      apply and revert: all or nothing
verify     checks of behaviour, in a process of their own
report     what a worker says about the patches of its engine
```
"""
