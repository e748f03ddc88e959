"""Kinds of feed-forward, one module each; `KIND` of a module is its schema, a `model.shape.FeedForward`."""
