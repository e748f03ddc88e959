"""Command lines of the servers of engines.

Each engine's folder (`serving/engines/`) says what its options are, with sources. `read` turns a command into a
deployment, `write` does the reverse, `scripts` makes shell scripts, Kubernetes manifests and Helm charts. Refused:
commands that start no such server, name no model, or have a value that its option does not take. Options that are
ignored, not modelled or unknown are listed, never skipped in silence.
"""
