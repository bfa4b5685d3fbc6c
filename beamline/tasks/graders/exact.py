"""The strictest grader: the whole response is the expected text."""

from beamline.tasks.graders.verdict import Verdict


def grade_exact(response: str, answer: str) -> Verdict:
    """Right when response and expected answer are the same text, blanks at both ends aside."""
    text = response.strip()
    return Verdict(bool(text) and text == answer.strip(), text or None)
