"""The schedulers of Vidur, which may be chosen in place of an engine's own; they have no engine of their own here."""
