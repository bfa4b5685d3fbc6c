"""The instructions that data sets put around a problem: one to add, all known ones to take off."""

import re

BEFORE = (
    "Solve the following math problem step by step. The last line of your response should be of the form "
    "Answer: $Answer (without quotes) where $Answer is the answer to the problem."
)
AFTER = 'Remember to put your answer on its own line after "Answer:".'
"""The wording of DAPO-Math-17k, above and below the problem. Source: the data set itself."""

# Other editions ask for ``Answer: \boxed{$Answer}``, write "must" for "should", or leave the quotes out.
_BEFORE = re.compile(
    r"\s*Solve the following math problem step by step\. The last line of your response (?:should|must) be of the form "
    r"\S?Answer: [^\n]{1,60}? where \$Answer is the answer to the problem\.\s+"
)


def bare(text: str) -> str:
    """The problem without the instructions of a known wording around it; other text comes back as it is."""
    begin = _BEFORE.match(text)
    start = begin.end() if begin else 0
    after = text.rfind(AFTER)
    ends = after >= start and not text[after + len(AFTER) :].strip()
    inner = text[start:after].rstrip() if ends else text[start:]
    return inner if inner.strip() else text


def dapo(text: str) -> str:
    """The problem in the wording of DAPO-Math-17k, whatever known wording it has."""
    return f"{BEFORE}\n\n{bare(text)}\n\n{AFTER}"
