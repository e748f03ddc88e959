"""Executors of a search, a module each: where the chunks of its points run.

An executor defines `start(space, means, at_once)`, as `search.workers.start_workers` describes it. An installed package
adds its own with an entry point in the group `windtunnel.executors`.
"""
