"""SGLang's own limits on its settings."""

from typing import Any

import msgspec

from windtunnel.serving.deployment import EngineSettings
from windtunnel.versions import version_key

SPLIT_CONSERVATIVENESS = 0.3


def split_over_ranks(settings: dict[str, Any], attention_dp: int) -> None:
    """Divide the limits over the attention data-parallel ranks; admission is bolder with several.

    Source: `server_args.py` (`chunked_prefill_size // dp_size`, `schedule_conservativeness * 0.3`) and
    `model_executor/model_runner.py` (`max_running_requests // dp_size`), 0.5.
    """
    if attention_dp > 1:
        for name in ("max_num_batched_tokens", "max_num_seqs"):
            settings[name] = max(settings[name] // attention_dp, 1)
        settings["schedule_conservativeness"] *= SPLIT_CONSERVATIVENESS


def graphs_for_requests(given: EngineSettings, resolved: EngineSettings) -> EngineSettings:
    """Limit the default graphs to the running requests that were asked for (0.5.22, `arg_groups/memory_hook.py`)."""
    largest, limit = resolved.max_cudagraph_capture_size, given.max_num_seqs
    is_old = version_key(str(resolved.version)) < version_key("0.5.22")
    if is_old or limit is None or largest is None or given.max_cudagraph_capture_size is not None:
        return resolved
    return msgspec.structs.replace(resolved, max_cudagraph_capture_size=min(largest, limit))
