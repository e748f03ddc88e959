"""Timelines in the Trace Event Format, which Perfetto (https://ui.perfetto.dev) and chrome://tracing open.

The format: "Trace Event Format", https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU.
Perfetto's further rules were read from its importer (google/perfetto, src/trace_processor/importers/json): slices of
one thread must not overlap, flow ids are hexadecimal, and a time with a fraction is cut off at its nanosecond, so that
neighbours overlap by one. Times are therefore whole microseconds.

`write` writes a serving run, `training` a training step. Refused: fewer events than the run's threads need.
"""
