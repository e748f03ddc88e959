"""What a running server emits: Prometheus metrics and logs of vLLM and SGLang, and OpenTelemetry spans of requests.

Metrics are read as text, a scrape a file, or as the answer of Prometheus to a range query. All become a `ServerRecord`:
intervals of time with counts and sums, and what is known of the requests' lengths.

Versions: vLLM 0.6 to 0.24, SGLang 0.4 and 0.5, spans with `gen_ai` attributes in OTLP's JSON encoding. Refused: metrics
of several models together, and other metrics.
"""

from windtunnel.formats.recognise import FileFormat
from windtunnel.formats.telemetry import logs, prometheus, spans

FORMATS = (
    FileFormat(prometheus.TEXT, "server telemetry", prometheus.is_text, prometheus.read_text_file),
    FileFormat("Prometheus range query", "server telemetry", prometheus.is_range_query, prometheus.read_range_query),
    FileFormat("vLLM log", "server telemetry", logs.is_log("Avg prompt throughput: "), logs.read_log),
    FileFormat("SGLang log", "server telemetry", logs.is_log("Decode batch"), logs.read_sglang_log),
    FileFormat("OTLP spans", "server telemetry", spans.has_spans, spans.read_spans),
)
