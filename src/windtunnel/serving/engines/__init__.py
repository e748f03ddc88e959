"""Engines, a folder each.

An engine is a folder here, or a package that an entry point of the group `windtunnel.engines` names. Its data are
`defaults.yaml` (settings by version: `defaults.EngineDefaults`), `behaviour.yaml` (`contract.Behaviour`) and
`command_line.yaml` (`command_line.Options`); the `ENGINE` of its module (`contract.Engine`) holds functions for what
data cannot say. Only the first file is needed. Shipped engines have compiled schedulers besides; an installed one forms
batches with a shipped scheduler, which its defaults name, or with a policy in Python, `module:function`. `vidur` has no
defaults: its schedulers are chosen in place of an engine's own.
"""
