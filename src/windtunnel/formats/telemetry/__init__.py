"""What a running server emits: Prometheus metrics and logs of vLLM and SGLang, and OpenTelemetry spans of requests.

Metrics are read as text, a scrape a file or a dump of `promtool tsdb`, as the answers of Prometheus to a range query
and of VictoriaMetrics to an export, and as tables of Grafana. All become a `ServerRecord`: intervals of time with
counts and sums, and what is known of the requests' lengths.

Versions: vLLM 0.6 to 0.24, SGLang 0.4 and 0.5, spans with `gen_ai` attributes. Refused: metrics of several models
together, other metrics, and what a server emitted that decodes speculatively.
"""

from windtunnel.formats.recognise import FileFormat
from windtunnel.formats.telemetry import logs, prometheus, spans

FORMATS = (
    FileFormat(prometheus.TEXT, "server telemetry", prometheus.is_text, prometheus.read_text_file),
    FileFormat("Prometheus range query", "server telemetry", prometheus.is_series, prometheus.read_series),
    FileFormat("Grafana table", "server telemetry", prometheus.is_grafana, prometheus.read_grafana),
    FileFormat("vLLM log", "server telemetry", logs.is_log("Avg prompt throughput: "), logs.read_log),
    FileFormat("SGLang log", "server telemetry", logs.is_log("(Decode|Prefill) batch.* #run"), logs.read_sglang_log),
    FileFormat("file of OpenTelemetry spans", "server telemetry", spans.has_spans, spans.read_spans),
)
