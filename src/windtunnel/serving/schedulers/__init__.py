"""How an engine forms the next batch, and whom a router sends a request to: a file for each family of engines.

A policy fills the lists BATCH and BATCH_TOKENS of its slot with `batch_size` prefill chunks, takes the blocks that the
step needs, and returns how many requests decode in it. Without pipeline parallelism a rank has one slot.
"""
