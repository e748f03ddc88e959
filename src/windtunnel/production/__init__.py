"""A server in production beside its prediction: what a change does to it, and what a measured run should have been."""
