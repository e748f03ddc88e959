"""Records of vLLM's multi-turn benchmark client (`benchmark_serving_multi_turn.py`), as conversations that share their
beginnings.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]


@dataclass(frozen=True)
class ChatTemplate:
    """Tokens that a chat template adds to the texts that the client counts."""

    system: int
    """In front of every conversation."""
    message: int
    """Around every message."""
    answer: int
    """Before every answer."""


LLAMA_3 = ChatTemplate(system=25, message=5, answer=4)
"""Template of Llama 3.3 Instruct (tokenizer_config.json on huggingface.co), with its dated system prompt."""


@dataclass(frozen=True, eq=False)
class RecordedConversations:
    """Turns in the order in which conversations were begun, each with its place in a forest of shared text.

    Arrays of shape [num_turns]; `node_parent` and `node_tokens` of shape [num_segments], parents first, -1 for a root.
    """

    rows: Ints
    """Recorded row of each turn."""
    input_tokens: Ints
    output_tokens: Ints
    previous: Ints
    """The turn before it, or -1."""
    node_parent: Ints
    node_tokens: Ints
    request_node: Ints
    """The segment that its prompt ends in."""
    request_output_node: Ints
    """The segment of its answer."""


def recorded_conversations(
    columns: Mapping[str, Sequence[Any]], template: ChatTemplate = LLAMA_3
) -> RecordedConversations:
    """Return the turns of one run.

    Args:
        columns: `conversation_id`, `start_s`, `input_turns` (messages of the prompt), `input_tokens` (of all texts of
            the conversation so far, without the template) and `output_tokens`, a row for each request.
        template: tokens around the texts.
    """
    conversation = np.unique(np.asarray(columns["conversation_id"]), return_inverse=True)[1]
    start_s, turns = np.asarray(columns["start_s"], np.float64), np.asarray(columns["input_turns"], np.int64)
    prompts = np.asarray(columns["input_tokens"], np.int64)
    outputs = np.asarray(columns["output_tokens"], np.int64)
    began_s = np.full(conversation.max() + 1, np.inf)
    np.minimum.at(began_s, conversation, start_s)
    rows = np.lexsort((turns, conversation, began_s[conversation]))
    parents, tokens = [-1], [template.system]
    inputs, previous, node, answer = (np.full(rows.size, -1) for _ in range(4))
    path = text = 0
    for i, row in enumerate(rows):
        if turns[row] == 1:
            parents, path, text = [*parents, 0], template.system, 0
        else:
            previous[i] = i - 1
            parents.append(int(answer[i - 1]))
        tokens.append(max(int(prompts[row]) - text, 1) + template.message + template.answer)
        node[i], path = len(parents) - 1, path + tokens[-1]
        inputs[i] = path
        parents.append(int(node[i]))
        tokens.append(int(outputs[row]) + 1)
        answer[i], path, text = len(parents) - 1, path + tokens[-1], int(prompts[row] + outputs[row])
    return RecordedConversations(
        rows, inputs, outputs[rows], previous, np.array(parents), np.array(tokens), node, answer
    )
