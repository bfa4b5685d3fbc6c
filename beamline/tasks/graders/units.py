"""Units, currencies and counted things around a value."""

import re

from beamline.tasks.graders.syntax import OF_ANGLES, words

_LENGTHS = {
    "cm": "cm centimeter centimetre centimeters centimetres",
    "mm": "mm millimeter millimetre millimeters millimetres",
    "km": "km kilometer kilometre kilometers kilometres",
    "m": "meter metre meters metres",
    "inch": "inch inches",
    "foot": "ft foot feet",
    "yard": "yd yard yards",
    "mile": "mi mile miles",
}
_OTHERS = {
    "kg": "kg kilogram kilograms",
    "g": "gram grams",
    "mg": "mg milligram milligrams",
    "pound": "lb lbs pound pounds",
    "ounce": "oz ounce ounces",
    "l": "liter litre liters litres",
    "ml": "ml mL milliliter milliliters",
    "s": "sec second seconds",
    "min": "min mins minute minutes",
    "h": "hr hrs hour hours",
    "day": "day days",
    "week": "week weeks",
    "month": "month months",
    "year": "yr yrs year years",
    "dollar": "dollar dollars USD",
    "cent": "cent cents",
    "euro": "euro euros EUR",
    "mph": "mph",
    "km/h": "km/h kmh kmph",
    "m/s": "m/s",
    "ft/s": "ft/s",
    "degree": "degree degrees deg",
    "rad": "rad radian radians",
    "": "unit units",
}
_NAMES = {name: unit for unit, names in (_LENGTHS | _OTHERS).items() for name in names.split()}
_NAME = "|".join(sorted(_NAMES, key=len, reverse=True))
_UNIT = rf"(?:\\unit\{{(?:[A-Za-z]+)\}}|(?:{_NAME})(?![A-Za-z]))"
_MEASURE = re.compile(
    rf"(?P<before>[0-9A-Za-z)}}\]|!])\s*(?P<shape>(?:square|sq|cubic|cu)\b\.?\s*)?(?P<unit>{_UNIT})"
    rf"\s*(?P<power>\^?\s*(?:\{{[23]\}}|[23])|squared|cubed)?(?:\s*(?:/|per)\s*(?P<per>{_UNIT}))?$"
)
_PERCENT = re.compile(r"\s*(?:\\?%|(?:\s|(?<=[0-9]))per\s?cent(?:age)?(?: points?)?)$")
_DEGREE = re.compile(r"\s*\\degree\s*(?:\\unit\{)?[CF]?\}?$")
_ANGLE = re.compile(rf"(?<![A-Za-z])(?:{'|'.join(sorted(OF_ANGLES))})(?![A-Za-z])")
_DOLLAR = re.compile(r"^(-?)\s*\\\$\s*|\s*\\\$$")
_SCALE = re.compile(r"^(-?[0-9.]+)\s+(hundred|thousand|million|billion|trillion)$")
_ZEROS = {"hundred": 2, "thousand": 3, "million": 6, "billion": 9, "trillion": 12}

_THINGS = re.compile(r"(?<=[0-9)}])((?:\s+[a-z]{2,}(?:-[a-z]+)?){1,4})$")
_PLURAL = re.compile(r"[a-z]{2,}s|people|children|men|women|mice|dice|vertices|matrices")
_NO_THINGS = words(
    "or and not nor is was has does its this us yes as plus minus times less unless versus perhaps besides always "
    "equals of in to at by from than between dozen dozens tens hundreds thousands millions billions percents halves "
    "thirds fourths quarters fifths sixths sevenths eighths ninths tenths hundredths thousandths sometimes maybe thus "
    "hundred thousand million billion half third if but mod modulus remains radians previous various trillions "
    "quadrillions lakhs crores grosses millionths billionths negatives opposites reciprocals inverses factorials"
)


def split_unit(text: str) -> tuple[str, str]:
    """A text without the unit at its end (or the currency at its start), and that unit.

    The unit is ``%``, a measure such as ``cm^2`` or ``km/h``, or empty: none, or things that are counted. The degrees
    of ``\\sin 30^\\circ`` belong to the angle.
    """
    if text and text[-1].isdigit() and not text.startswith(("\\$", "-\\$")) and "^" not in text and " " not in text:
        return text, ""
    for pattern, unit in ((_PERCENT, "%"), (_DEGREE, "degree"), (_DOLLAR, "dollar")):
        rest, found = pattern.subn(r"\1" if pattern is _DOLLAR else "", text, count=1)
        if found and rest.strip() and not (unit == "degree" and _ANGLE.search(rest)):
            return _scaled(rest.strip()), unit
    measure = _MEASURE.search(text)
    if measure and _canonical(measure) == "degree" and _ANGLE.search(text):
        return text, ""
    if measure and _may_precede(text, measure):
        return _scaled(text[: measure.end("before")]), _canonical(measure)
    things = _THINGS.search(text)
    if things:
        words = things[1].split()
        if _PLURAL.fullmatch(words[-1]) and not _NO_THINGS & set(words):
            return _scaled(text[: things.start()]), ""
    return _scaled(text), ""


def _may_precede(text: str, measure: re.Match[str]) -> bool:
    """A letter may stand before a unit only across a blank: ``2x cm``, but not ``xcm``."""
    before = measure["before"]
    following = text[measure.end("before")]
    return not before.isalpha() or following.isspace() or following == "\\"


def _canonical(measure: re.Match[str]) -> str:
    power = measure["power"] or ""
    shape = measure["shape"] or ""
    exponent = "2" if shape.startswith("sq") or "2" in power or power == "squared" else ""
    exponent = "3" if shape.startswith("cu") or "3" in power or power == "cubed" else exponent
    unit = _unit(measure["unit"])
    return (
        unit + (f"^{exponent}" if exponent and unit else "") + (f"/{_unit(measure['per'])}" if measure["per"] else "")
    )


def _unit(name: str) -> str:
    letter = name.removeprefix("\\unit{").removesuffix("}")
    return "inch" if letter == "in" else _NAMES.get(letter, letter)


def _scaled(text: str) -> str:
    found = _SCALE.match(text)
    return rf"{found[1]}\cdot 10^{_ZEROS[found[2]]}" if found else text
