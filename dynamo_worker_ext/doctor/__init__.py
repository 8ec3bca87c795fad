"""What is wrong with this machine or this deployment, and what to do about it.

- `findings.py`     one finding, and how they are printed
- `environment.py`  this machine: versions, memory, ports
- `discovery.py`    the workers' cards, read through Dynamo's own bindings
- `deployment.py`   the cards side by side
- `probe.py`        one tiny image through a frontend
- `__main__.py`     the command
"""
