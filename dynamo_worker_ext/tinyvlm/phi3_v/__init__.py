"""Python files that a tiny Phi-3-vision brings along for `--trust-remote-code`."""
