"""Words that take an answer back, or set another beside it."""

import re

_GUESSING = (
    r"maybe|perhaps|probabl[ey]|possibly|guess(?:es|ed|ing)?|unsure|uncertain|unclear|unknown|hm{1,5}|oops|correction|"
    r"scratch that|wait|not (?:entirely |quite |really |so |very )?(?:sure|certain|confident)"
)
_HARD = re.compile(
    rf"\b(?:{_GUESSING}|actually|alternatively|likely|doubt\w*|might|mistaken?|wrong(?:ly)?|incorrect(?:ly)?|rather|"
    r"instead|not (?:correct|right|true|the case)|i\.e|sorry|either|suppos(?:e|es|ing)|assum(?:e|es|ing)|versus|vs|"
    r"unless|whichever|bounds?|estimate[ds]?|approximations?|"
    r"unverified|unchecked|unproven|needs? checking)\b|\?|\bor\b(?=[\s$\\(*{]*[-+.]?[0-9])",
    re.IGNORECASE,
)
_SOFT = re.compile(
    r"\b(?:or|not|no|never|cannot|if|also|another|and|about|approximately|roughly|around|almost|nearly|could|would|may|"
    r"should|can|both|neither|nor|too|otherwise|except|but|though|although|however|whether|plus|minus|times|divided|to|"
    r"zero|one|two|three|four|five|six|seven|eight|nine|ten|eleven|twelve|[a-z]{3,6}teen|twenty|thirty|forty|fifty|sixty|"
    r"seventy|eighty|ninety|hundred|thousand|million)\b|n't\b",
    re.IGNORECASE,
)
_DIGIT = re.compile("[0-9]")
_GIVEN = re.compile(r"[A-Za-z]\s*=\s*-?[0-9]+(?:[./][0-9]+)?")
_BESIDE = re.compile(
    r"\A[\W_]*(?:(?:or|and|not|no|if|but|unless|though|although|plus|minus|times|divided|over|to|hundred|thousand|million|"
    r"billion|percent|dozen)\b|[0-9])|\A.{0,30}?(?:\b(?:not|never|cannot)\b|n't\b)|"
    r"\b(?:and|but)\b[\s$\\(*{]*[-+.]?[0-9]",
    re.IGNORECASE | re.DOTALL,
)
_TAKEN_BACK = re.compile(
    rf"\b(?:{_GUESSING}|actually|alternatively|i made a mistake|"
    r"(?:is|was|were|be|am) (?:\w{1,20} )?(?:wrong|incorrect|mistaken|not correct|not right)|"
    r"(?:another|alternative|other|second) (?:possible |valid |correct )?(?:answer|solution|possibility))\b|"
    r"(?:'m|'s|it|that) (?:wrong|incorrect|mistaken)\b|n't (?:correct|right)\b|"
    r"\A[\W_]*(?:or|no|nope)\b|[.!\n]\s*(?:or|no,|nope)\b",
    re.IGNORECASE,
)
_NUMBER = r"[\s$\\(*{]*[-+.]?[0-9][0-9.,/]*[\s$\\)*}]*"
_ALSO_RIGHT = re.compile(
    rf"{_NUMBER}(?:is |are |would be )?(?:(?:also|equally) (?:an? )?(?:acceptable|possible|valid|correct|right|works?|"
    r"fine|fits|answer|solution)|(?:works?|acceptable|possible|valid|correct|right|fine|fits) (?:too|as well))\b",
    re.IGNORECASE,
)
_CASES = re.compile(
    rf"[,;]\s*(?:(?:but|and|or|also) )*{_NUMBER}(?:using|given|by|because|since|as|for|when|if|with|under|otherwise)\b|"
    rf"\band also{_NUMBER}|\A\W*which (?:may|might|can|could)\b",
    re.IGNORECASE,
)
_BESIDE_IT = re.compile(
    r"(?:\A|[.;!\n])[\W_]*(?:also|equally|equivalently|similarly|sorry|another|the other)\b(?:[ \t]+[a-z]+){0,4}?"
    r"[ \t,:]+(?=[-+.$\\(*]*[0-9])([^\n;]{1,100}?)(?=[.!;]?(?:\s|\Z))",
    re.IGNORECASE,
)
_BEFORE = re.compile(
    r"\b(?:i(?:'m| am)? (?:not|un)\s?(?:entirely |quite |really |so |very )?(?:sure|certain)|"
    r"i(?:'ll| will| would| can only| have to)? guess|"
    r"an? (?:wild |random )?guess|my (?:best )?guess|guessing|at random|no idea|(?:don't|do not) know|not sure|"
    r"(?:cannot|can't|could not|couldn't) (?:solve|find|determine))\b",
    re.IGNORECASE,
)
_CONDITION = re.compile(
    r"\b(?:if|whether|unless|would|could|claim\w*|isn't|wasn't|(?:cannot|can't|must not) be|"
    r"not (?:true|the case|correct|that|because)|says?|said|thinks? that the|one of|some|false)\b",
    re.IGNORECASE,
)
_DENIED = re.compile(
    r"\b(?:not|isn't|never|cannot|can't|least|most|about|approximately|roughly|around|nearly|almost|over|under|above|below|"
    r"than|except|unless|another|neither|or|and)\b(?:\W+[a-z]+){0,2}[\s$\\(\[*{:]*$",
    re.IGNORECASE,
)
_OR_ELSE = re.compile(r"\b(?:or|and)[\s$\\(\[*{:,]*$", re.IGNORECASE)
_NEAR = 200  # characters before an answer in which a confession of guessing counts


def confessed(before: str) -> bool:
    """Whether the text that leads to an answer says that it is a guess, or ends in ``or``."""
    return bool(before) and bool(_BEFORE.search(before[-_NEAR:]) or _OR_ELSE.search(before[-12:]))


def doubted(sentence: str) -> bool:
    """Whether the beginning of a sentence, up to its answer, makes that answer conditional, doubtful or denied."""
    return bool(sentence) and bool(_HARD.search(sentence) or _CONDITION.search(sentence) or _DENIED.search(sentence))


def guessed(sentence: str) -> bool:
    """As ``doubted``, for an answer that is set off so clearly that conditions before it belong to its derivation."""
    return bool(sentence) and bool(_HARD.search(sentence) or _DENIED.search(sentence))


def doubted_behind(rest: str, reason: bool) -> bool:
    """Whether what stands directly behind an answer casts doubt on it; where it gives a reason, more may be said."""
    if not rest:
        return False
    if _HARD.search(rest) or _CASES.search(rest):
        return True
    return not reason and bool(_SOFT.search(rest) or _DIGIT.search(_GIVEN.sub("", rest)))


def doubted_beside(rest: str) -> bool:
    """Whether what stands behind an answer in a box denies it, joins another to it, or makes it part of something."""
    return bool(rest) and bool(_HARD.search(rest) or _BESIDE.search(rest))


def taken_back(following: str) -> bool:
    """Whether the text that follows an answer takes it back."""
    return bool(following) and bool(_TAKEN_BACK.search(following) or _ALSO_RIGHT.search(following))


def set_beside(following: str) -> list[str]:
    """The numbers that the text behind an answer names as others: ``Also 35``, ``The other root is 35``."""
    return _BESIDE_IT.findall(following)
