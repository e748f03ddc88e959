"""SGLang's own limits on its settings."""

from typing import Any

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
