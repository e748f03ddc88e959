"""Engines, a folder each: defaults by version, limits, memory, launches, command line, and the compiled scheduler.

An engine is a folder here, or a package that an entry point of the group `windtunnel.engines` names. Its
`defaults.yaml` holds the settings by version, and its module an `ENGINE` (`contract.Engine`) with everything else that
differs from other engines. An installed engine forms batches with a shipped scheduler, which its defaults name, or with
a policy in Python, `module:function`. `vidur` has no defaults: its schedulers are chosen in place of an engine's own.
"""
