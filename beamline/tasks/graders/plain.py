"""One notation for many: Unicode, LaTeX spacing, wrappers and separators become plain characters and few commands."""

import re
import unicodedata

from beamline.tasks.graders.syntax import Unreadable, words

LONGEST = 1_000  # characters of an answer
LETTER_UNITS = words("m g s h t L l N J W V A K C F Hz Pa in")  # units only where the font says so

_UNICODE = str.maketrans(
    {
        "×": r"\times ",
        "·": r"\cdot ",
        "⋅": r"\cdot ",
        "∙": r"\cdot ",
        "÷": "/",
        "∕": "/",
        "⁄": "/",
        "−": "-",
        "‐": "-",
        "‑": "-",
        "﹣": "-",
        "π": r"\pi ",
        "θ": r"\theta ",
        "α": r"\alpha ",
        "β": r"\beta ",
        "λ": r"\lambda ",
        "φ": r"\phi ",
        "ω": r"\omega ",
        "∞": r"\infty ",
        "≤": r"\le ",
        "⩽": r"\le ",
        "≥": r"\ge ",
        "⩾": r"\ge ",
        "≠": r"\ne ",
        "≈": r"\approx ",
        "±": r"\pm ",
        "∓": r"\mp ",
        "°": r"^\circ ",
        "º": r"^\circ ",
        "∪": r"\cup ",
        "∈": r"\in ",
        "∅": r"\emptyset ",
        "ℝ": r"\mathbb{R}",
        "′": "'",
        "’": "'",
        "“": '"',
        "”": '"',
        "，": ",",
        "：": ":",
        "；": ";",
        "。": ".",
        "\N{NO-BREAK SPACE}": r"\,",
        "\N{NARROW NO-BREAK SPACE}": r"\,",
        "\N{THIN SPACE}": r"\,",
        "\N{ZERO WIDTH SPACE}": "",
        "\N{WORD JOINER}": "",
        "\N{ZERO WIDTH NO-BREAK SPACE}": "",
        "€": " ",
        "£": " ",
        "¥": " ",
        "…": "...",
        "％": "%",
    }
    | {sign: rf"\frac{{{top}}}{{{bottom}}}" for sign, top, bottom in ("½12", "⅓13", "⅔23", "¼14", "¾34", "⅕15", "⅖25")}
    | {
        sign: rf"\frac{{{top}}}{{{bottom}}}"
        for sign, top, bottom in ("⅗35", "⅘45", "⅙16", "⅚56", "⅛18", "⅜38", "⅝58", "⅞78")
    }
)
_SUPERSCRIPTS = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁻⁺ⁿ", "0123456789-+n")
_SUBSCRIPTS = str.maketrans("₀₁₂₃₄₅₆₇₈₉", "0123456789")
_RAISED = re.compile("[⁰¹²³⁴⁵⁶⁷⁸⁹⁻⁺ⁿ]+")
_LOWERED = re.compile("[₀₁₂₃₄₅₆₇₈₉]+")
_ROOT_SIGN = re.compile(r"√\s*([0-9]+(?:\.[0-9]+)?|[A-Za-z])?")
_RANGE = re.compile(r"[0-9]\s*[–—]\s*[0-9]")

_COMMANDS = (
    (re.compile(r"\\(?:left|right|[bB]igg?[lr]?)(?![A-Za-z])\s*"), ""),
    (re.compile(r"\\color\{[a-z]+\}|\\(?:bf|it|rm|tt|sf|large|Large|LARGE|huge|Huge)(?![A-Za-z])"), " "),
    (re.compile(r"\\(?:displaystyle|textstyle|limits|phantom\{[^{}]*\})(?![A-Za-z])"), ""),
    (re.compile(r"\\[dtc](?=frac(?![A-Za-z])|binom(?![A-Za-z]))"), r"\\"),
    (re.compile(r"\\operatorname\*?\{([A-Za-z]+)\}"), r"\\\1 "),
    (re.compile(r"\\(?:leqslant|leq)(?![A-Za-z])"), r"\\le "),
    (re.compile(r"\\(?:geqslant|geq)(?![A-Za-z])"), r"\\ge "),
    (re.compile(r"\\neq(?![A-Za-z])"), r"\\ne "),
    (re.compile(r"\\(?:varnothing|O(?![A-Za-z]))"), r"\\emptyset "),
    (re.compile(r"\\(?:dots|ldots|cdots)(?![A-Za-z])"), "..."),
    (re.compile(r"\\langle(?![A-Za-z])"), "("),
    (re.compile(r"\\rangle(?![A-Za-z])"), ")"),
    (re.compile(r"\\lbrace(?![A-Za-z])"), r"\\{"),
    (re.compile(r"\\rbrace(?![A-Za-z])"), r"\\}"),
    (re.compile(r"\\(?:Reals|R)(?![A-Za-z])|\\mathbb\s+R(?![A-Za-z])"), r"\\mathbb{R}"),
    (re.compile(r"\^\s*\\circ(?![A-Za-z])|\^\s*\{\s*\\circ\s*\}|\\degree(?![A-Za-z])"), r"\\degree "),
    (re.compile(r"\\(?:q?quad|enspace|thinspace)(?![A-Za-z])|(?<!\\)\\[;: ]|~"), " "),
)
_ABOUT = re.compile(r"[^0-9A-Za-z~]*~\s*[$\\(]*[0-9.]")
_SEPARATED = re.compile(r"(?<![0-9.,])[0-9]{1,3}(?:(?:\\,|\{,\}|,\\!|\{\\,\})[0-9]{3})+(?![0-9])")
_SEPARATOR = re.compile(r"\\,|\{,\}|,\\!|\{\\,\}")
_THOUSANDS = re.compile(r"(?<![0-9.,])[1-9][0-9]{0,2}(?:,[0-9]{3})+(?![0-9]|,[0-9])")
_STYLED = re.compile(
    r"\\(?:text(?:bf|it|rm|sf|up|normal)?|math(?:rm|bf|it|sf)|[mhf]box|boxed|boldsymbol|bm|emph|underline)\s*(?=\{)"
)
_BOLD = re.compile(r"\*\*(?=\S)([^*]*[^*\s])\*\*|(?<![0-9A-Za-z_])__(?=\S)([^_]*[^_\s])__(?![0-9A-Za-z_])")
_POWER = re.compile(r"(?<=[0-9A-Za-z)])\*\*(?=[0-9A-Za-z(])")
_FACTORIAL_OR_SHOUT = re.compile(r"[0-9](?:\s|\\[,;:!]|\{\})+!")
_DELIMITERS = re.compile(r"\\[()\[\]]|(?<!\\)\$+|`+")
_DONE = " \n✅✔✓🎉🎯∎■□\N{VARIATION SELECTOR-16}"  # what stands at the end of a proof, or of a message
_MARKERS = re.compile(r"(?:\s*(?:<\|[a-z_]{1,40}\|>|</s>|\[(?:END|EOS|DONE)\]))+\s*$", re.IGNORECASE)


def notation(text: str) -> str:
    """A text in the one notation that the readers know, its words and units still in it.

    Raises:
        Unreadable: the text is longer than any answer, a range of numbers, struck out, or leaves something out.
    """
    if len(text) > LONGEST:
        raise Unreadable(f"over {LONGEST} characters")
    text = _MARKERS.sub("", text).rstrip(_DONE)
    if "~~" in text or _FACTORIAL_OR_SHOUT.search(text):
        raise Unreadable("struck out" if "~~" in text else "a factorial or a shout")
    if "*" in text or "_" in text:
        text = _unstarred(text)
    if not text.isascii():
        text = _from_unicode(text)
    if _ABOUT.match(text):
        raise Unreadable("only about a value")
    if "\\" in text or "~" in text or "{" in text:
        for pattern, new in _COMMANDS:
            text = pattern.sub(new, text)
        text = _SEPARATED.sub(lambda found: _SEPARATOR.sub("", found[0]), text)
        text = text.replace("\\,", " ").replace("\\!", " ").replace("{,}", ",")
    if "..." in text:
        raise Unreadable("something is left out")
    return trimmed(_undressed(text))


def unseparated(text: str) -> str:
    """A text without the commas that group the digits of its numbers, brackets left alone."""
    if "," not in text or any(opening in text for opening in "([{"):
        return text
    return _THOUSANDS.sub(lambda found: found[0].replace(",", ""), text)


def trimmed(text: str) -> str:
    """A text without blanks and stops around it, and without quotes or braces around the whole of it."""
    while True:
        before = text
        text = text.strip().strip('"').lstrip(",;: \n").rstrip(".,;: \n" if _ends_in_factorial(text) else ".,;:! \n")
        if len(text) > 1 and text[0] == "{" and text[-1] == "}" and closing(text, 0) == len(text) - 1:
            text = text[1:-1]
        if text == before:
            return text


def closing(text: str, at: int) -> int:
    """Where the brace that opens at ``at`` is closed, escaped braces aside; -1 if nowhere."""
    depth = 0
    while at < len(text):
        match text[at]:
            case "\\":
                at += 1
            case "{":
                depth += 1
            case "}":
                depth -= 1
                if not depth:
                    return at
        at += 1
    return -1


def squeezed(text: str) -> str:
    """A text without any blanks."""
    return "".join(text.split())


def _ends_in_factorial(text: str) -> bool:
    bare = text.strip()
    cried = bare.rstrip("!")
    return 0 < len(cried) < len(bare) and (cried[-1].isalnum() or cried[-1] in ")}")


def _from_unicode(text: str) -> str:
    if _RANGE.search(text):
        raise Unreadable("a range of numbers")
    text = _RAISED.sub(lambda found: "^{" + found[0].translate(_SUPERSCRIPTS) + "}", text)
    text = _LOWERED.sub(lambda found: "_{" + found[0].translate(_SUBSCRIPTS) + "}", text)
    text = _ROOT_SIGN.sub(lambda found: r"\sqrt" + (f"{{{found[1]}}}" if found[1] else ""), text)
    text = text.replace("–", "-").translate(_UNICODE)
    return "".join(map(_narrow, text))


def _narrow(character: str) -> str:
    """Full-width letters, digits and signs as their ASCII forms; everything else unchanged."""
    return unicodedata.normalize("NFKC", character) if "！" <= character <= "～" else character


def _unstarred(text: str) -> str:
    """Without the marks of bold and italic text; ``2**3`` is a power."""
    text = _POWER.sub("^", _BOLD.sub(lambda found: f" {found[1] or found[2]} ", text)).strip()
    return (text.rstrip("*") if text.startswith("*") or text.endswith("**") else text).lstrip("*")


def _undressed(text: str) -> str:
    """Without delimiters of mathematics and font commands: blanks take their place, so that nothing is joined."""
    text = _DELIMITERS.sub(" ", text)
    at = 0
    while found := _STYLED.search(text, at):
        end = closing(text, found.end())
        if end < 0:
            raise Unreadable("a brace that is not closed")
        content = text[found.end() + 1 : end]
        kept = rf" \unit{{{content.strip()}}} " if content.strip() in LETTER_UNITS else f" {content} "
        text = text[: found.start()] + kept + text[end + 1 :]
        at = found.start()
    return text
