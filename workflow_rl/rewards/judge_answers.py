"""What a judge answered, as numbers; anything else is an error, never a number."""

import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

LABEL = re.compile(r"\D*(\d)\D*")
"""A token that is one digit, with whatever blanks or punctuation the tokenizer put beside it."""

MIN_MASS = 0.5
"""Probability that the labels must have together."""


@dataclass(frozen=True)
class Token:
    """A token of an answer.

    Attributes
    ----------
    text : str
    alternatives : sequence of (str, float)
        The likeliest tokens in its place and the natural logarithm of their probability.
    """

    text: str
    alternatives: Sequence[tuple[str, float]]


def answer_schema(criteria: Sequence[str], labels: Sequence[int]) -> dict[str, Any]:
    """JSON schema of an answer: one of the labels for each criterion, and nothing else."""
    return {
        "type": "object",
        "properties": {name: {"type": "integer", "enum": list(labels)} for name in criteria},
        "required": list(criteria),
        "additionalProperties": False,
    }


def parse_answer(text: object, criteria: Sequence[str], labels: Sequence[int]) -> dict[str, float]:
    """The label of each criterion in an answer that fits :func:`answer_schema`.

    Raises
    ------
    ValueError
        The answer is anything else.
    """
    shown = " ".join(str(text).split())[:80]
    try:
        answer = json.loads(text, object_pairs_hook=_each_once) if isinstance(text, str) else None
    except ValueError:
        answer = None
    if not isinstance(answer, dict) or set(answer) != set(criteria):
        raise ValueError(f"the judge did not answer with {', '.join(criteria)} but: {shown}")
    for name, label in answer.items():
        if type(label) is not int or label not in labels:
            raise ValueError(f"the judge gave {name} {label!r}, which is none of {list(labels)}")
    return {name: float(answer[name]) for name in criteria}


def _each_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Refuse an object that has a key twice: which of the two is meant, nobody knows."""
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a key twice")
    return found


def expected_labels(
    tokens: Sequence[Token], criteria: Sequence[str], labels: Sequence[int]
) -> dict[str, float]:
    """The expected label of each criterion: Σ label·p / Σ p over the labels in its place.

    Finer than the label that was written, and without its ties. Labels are single digits.

    Raises
    ------
    ValueError
        The answer does not fit, has no probabilities, or gives the labels less than half of it.
    """
    text = "".join(token.text for token in tokens)
    parse_answer(text, criteria, labels)
    ends = list(accumulate(len(token.text) for token in tokens))
    expected = {}
    for name in criteria:
        match = re.search(rf'"{re.escape(name)}"\s*:\s*(\d)', text)
        if match is None:
            raise ValueError(f"the judge's answer has no label for {name}: {text[:80]}")
        place = next(i for i, end in enumerate(ends) if end > match.start(1))
        expected[name] = _expectation(tokens[place].alternatives, labels)
    return expected


def _expectation(alternatives: Sequence[tuple[str, float]], labels: Sequence[int]) -> float:
    """Expected label over the alternatives that are one; the same label may come in two forms."""
    mass = dict.fromkeys(labels, 0.0)
    for text, log_prob in alternatives:
        match = LABEL.fullmatch(text)
        if match and int(match[1]) in mass:
            mass[int(match[1])] += math.exp(log_prob)
    total = sum(mass.values())
    if not total >= MIN_MASS:
        raise ValueError(f"the labels have only {total:.2f} of the judge's probability")
    return sum(label * part for label, part in mass.items()) / total
