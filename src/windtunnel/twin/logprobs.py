"""Log-probabilities of tokens that no model has computed: plausible ones, the same for the same token and place."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

MOST_LOGPROBS = 20
"""Most likely tokens that a request may ask for, as of vLLM's `--max-logprobs`."""
LEAST_SHARE = 0.5
"""Smallest probability of a token of an answer, which is always the most likely one."""


@dataclass(eq=False)
class Logprobs:
    """The log-probabilities of an answer, and of the prompt before it where that is part of the text.

    A token has a probability between a half and one, by its id and place. Each next likely one has half of the rest.
    """

    is_chat: bool
    """In the form of chat completions; otherwise of completions."""
    most: int
    """How many of the most likely tokens each place names."""
    ids: Sequence[int]
    texts: Sequence[str]
    num_prompt: int
    """How many of the tokens are the prompt's."""
    others: Mapping[int, str]
    """Id -> text of the tokens that answers are made of."""

    def __post_init__(self) -> None:
        self._others = list(self.others.values())
        self._offsets = [0, *accumulate(len(text) for text in self.texts)]

    def _likely(self, place: int) -> list[tuple[str, float]]:
        """Return (text, logprob) of a token and of the next likely ones, as many as are asked for but at least one."""
        mixed = (self.ids[place] * 2654435761 + 40503 * place) & 0xFFFFFFFF
        share = LEAST_SHARE + (1 - LEAST_SHARE) * ((mixed >> 8) % 9973) / 9974
        text, rest = self.texts[place], 1 - share
        rows, first = [(text, math.log(share))], mixed % len(self._others)
        candidates = (self._others[(first + step) % len(self._others)] for step in range(len(self._others)))
        while len(rows) < self.most and (other := next(candidates, None)) is not None:
            if other != text:
                rest /= 2
                rows.append((other, math.log(rest)))
        return rows

    def document(self, begin: int, end: int) -> dict[str, Any]:
        """Return what the API says of the answer's tokens from `begin` to `end`; the prompt's come with the first."""
        places = range(begin + self.num_prompt if begin else 0, end + self.num_prompt)
        rows = [self._likely(place) for place in places]
        if self.is_chat:
            return {
                "content": [
                    _entry(*row[0]) | {"top_logprobs": [_entry(*each) for each in row[: self.most]]} for row in rows
                ]
            }
        is_unknown = [place == 0 and self.num_prompt > 0 for place in places]
        return {
            "text_offset": [self._offsets[place] for place in places],
            "tokens": [row[0][0] for row in rows],
            "token_logprobs": [None if unknown else row[0][1] for unknown, row in zip(is_unknown, rows, strict=True)],
            "top_logprobs": [None if unknown else dict(row) for unknown, row in zip(is_unknown, rows, strict=True)],
        }


def _entry(text: str, logprob: float) -> dict[str, Any]:
    return {"token": text, "logprob": logprob, "bytes": list(text.encode())}
