"""The SGLang worker. The only place that imports sglang."""
