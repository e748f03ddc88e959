"""ShareGPT's conversations: texts of people and the model, in turn, without times.

As in vLLM's benchmark, the first text is the prompt and the second the answer. Conversations of fewer than two texts
are left out.
"""

from typing import Any

from windtunnel.workload.traces.columns import shown
from windtunnel.workload.traces.layouts import Layout


def first_exchange(conversation: Any) -> tuple[str, str] | None:
    """Return the first two texts of a conversation; None where it has fewer.

    Raises:
        ValueError: a part has no text.
    """
    texts = []
    for said in conversation or []:
        text = said.get("value", said.get("content")) if isinstance(said, dict) else None
        if not isinstance(text, str):
            raise ValueError(f"a part of conversations has no text: {shown(said)}")
        texts.append(text)
    return (texts[0], texts[1]) if len(texts) >= 2 else None


LAYOUT = Layout(
    source="https://huggingface.co/datasets/anon8231489123/ShareGPT_Vicuna_unfiltered",
    input_tokens="conversations",
    output_tokens="conversations",
    texts_of=first_exchange,
)
