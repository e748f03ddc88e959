"""Kinds of attention, one module each; `KIND` of a module is its schema, which derives from `model.shape.Attention`."""
