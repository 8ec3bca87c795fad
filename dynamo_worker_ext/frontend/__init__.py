"""Dynamo's own frontend with our senders in it; see `__main__`."""
