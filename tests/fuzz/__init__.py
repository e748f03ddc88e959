"""The fuzzer: good inputs, edits of them, and what every answer must keep."""
