"""The string formats of JSON Schema: the grammar of each standard as a regex."""

from __future__ import annotations

from functools import lru_cache
from typing import Final

from sgl.grammar.regular.expr import Expr, concat, literal, union, words
from sgl.grammar.regular.regex import compile_regex

KNOWN_BUT_UNDECIDABLE: Final = {
    "idn-email": "the validity of an internationalised domain depends on Unicode tables and on context",
    "idn-hostname": "the validity of an internationalised domain depends on Unicode tables and on context",
    "regex": "nested groups make regular expressions a language that is not regular",
}
"""Standard formats that no regular language expresses, and why."""

# Dates (RFC 3339, section 5.6). The year 0000 is left out: no calendar library reads it back.
_YEAR = r"(?:0{3}[1-9]|0{2}[1-9]\d|0[1-9]\d{2}|[1-9]\d{3})"
_LEAP_YEAR = r"(?:\d\d(?:0[48]|[2468][048]|[13579][26])|(?:0[48]|[2468][048]|[13579][26])00)"
_DATE = (
    rf"(?:{_YEAR}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12]\d|3[01])|(?:0[469]|11)-(?:0[1-9]|[12]\d|30)"
    rf"|02-(?:0[1-9]|1\d|2[0-8]))|{_LEAP_YEAR}-02-29)"
)
_FRACTION = r"(?:\.\d+)?"
_TIME = rf"(?:[01]\d|2[0-3]):[0-5]\d:[0-5]\d{_FRACTION}(?:[Zz]|[+-](?:[01]\d|2[0-3]):[0-5]\d)"

# Durations (RFC 3339, appendix A).
_CLOCK = r"T(?:\d+H(?:\d+M(?:\d+S)?)?|\d+M(?:\d+S)?|\d+S)"
_DURATION = rf"P(?:\d+W|(?:\d+Y(?:\d+M(?:\d+D)?)?|\d+M(?:\d+D)?|\d+D)(?:{_CLOCK})?|{_CLOCK})"

# Addresses (RFC 1123, 2673, 4291, 5321).
_LABEL = r"[A-Za-z0-9](?:[A-Za-z0-9-]{0,61}[A-Za-z0-9])?"
_HOSTNAME = rf"{_LABEL}(?:\.{_LABEL})*"
_OCTET = r"(?:25[0-5]|2[0-4]\d|1\d\d|[1-9]?\d)"
_IPV4 = rf"{_OCTET}(?:\.{_OCTET}){{3}}"
_H16 = r"[0-9A-Fa-f]{1,4}"
_LAST_32_BITS = rf"(?:{_H16}:{_H16}|{_IPV4})"


def _ipv6() -> str:
    """Eight groups, the last two perhaps as IPv4, or a double colon in place of one group or more."""
    forms = [rf"(?:{_H16}:){{6}}{_LAST_32_BITS}"]
    for before in range(7):  # at most so many groups before the double colon
        head = rf"(?:(?:{_H16}:){{0,{before - 1}}}{_H16})?" if before > 0 else ""
        behind = 5 - before  # groups behind it and before the last 32 bits
        if behind >= 0:
            forms.append(rf"{head}::(?:{_H16}:){{{behind}}}{_LAST_32_BITS}")
    forms.append(rf"(?:(?:{_H16}:){{0,5}}{_H16})?::{_H16}")
    forms.append(rf"(?:(?:{_H16}:){{0,6}}{_H16})?::")
    return "(?:" + "|".join(forms) + ")"


_IPV6 = _ipv6()
_ATOM = r"[A-Za-z0-9!#$%&'*+/=?^_`{|}~-]+"
_QUOTED = r'"(?:[ !#-\[\]-~]|\\[ -~])*"'
_EMAIL = (
    rf"(?:{_ATOM}(?:\.{_ATOM})*|{_QUOTED})@"
    rf"(?:{_LABEL}(?:\.{_LABEL})*|\[(?:{_IPV4}|[Ii][Pp][Vv]6:{_IPV6})\])"
)

# Resource identifiers (RFC 3986, 3987) and templates of them (RFC 6570).
_UCS = "\u00a0-\ud7ff\uf900-\ufdcf\ufdf0-\uffef" + "".join(
    f"{chr(plane << 16)}-{chr(plane << 16 | 0xFFFD)}" for plane in range(1, 15)
)
_PRIVATE = "\ue000-\uf8ff\U000f0000-\U000ffffd\U00100000-\U0010fffd"
_ENCODED = r"%[0-9A-Fa-f]{2}"


def _identifier(extra: str, private: str, *, is_absolute: bool) -> str:
    """A URI or IRI, or a reference to one; `extra` and `private` are what an IRI allows beyond a URI."""
    plain = rf"A-Za-z0-9._~!$&'()*+,;=\-{extra}"
    char = rf"(?:[{plain}:@]|{_ENCODED})"
    host = rf"(?:\[(?:{_IPV6}|[Vv][0-9A-Fa-f]+\.[{plain}:]+)\]|(?:[{plain}]|{_ENCODED})*)"
    authority = rf"//(?:(?:[{plain}:]|{_ENCODED})*@)?{host}(?::\d*)?(?:/{char}*)*"
    rooted = rf"/(?:{char}+(?:/{char}*)*)?"
    end = rf"(?:\?(?:[{plain}:@/?{private}]|{_ENCODED})*)?(?:#(?:[{plain}:@/?]|{_ENCODED})*)?"
    absolute = rf"[A-Za-z][A-Za-z0-9+.-]*:(?:{authority}|{rooted}|{char}+(?:/{char}*)*|){end}"
    if is_absolute:
        return absolute
    first = rf"(?:[{plain}@]|{_ENCODED})+"  # a colon here would end a scheme
    return rf"(?:{absolute}|(?:{authority}|{rooted}|{first}(?:/{char}*)*|){end})"


_VARIABLE = rf"(?:[A-Za-z0-9_]|{_ENCODED})(?:\.?(?:[A-Za-z0-9_]|{_ENCODED}))*(?::[1-9]\d{{0,3}}|\*)?"
_TEMPLATE = (
    rf"(?:[!#$&-;=?-\[\]_a-z~{_UCS}{_PRIVATE}]|{_ENCODED}|\{{[+#./;?&=,!@|]?{_VARIABLE}(?:,{_VARIABLE})*\}})*"
)
_POINTER = r"(?:/(?:[^~/]|~[01])*)*"

_PATTERNS: Final = {
    "date": _DATE,
    "duration": _DURATION,
    "email": _EMAIL,
    "hostname": _HOSTNAME,
    "ipv4": _IPV4,
    "ipv6": _IPV6,
    "iri": _identifier(_UCS, _PRIVATE, is_absolute=True),
    "iri-reference": _identifier(_UCS, _PRIVATE, is_absolute=False),
    "json-pointer": _POINTER,
    "relative-json-pointer": rf"(?:0|[1-9]\d*)(?:#|{_POINTER})",
    "uri": _identifier("", "", is_absolute=True),
    "uri-reference": _identifier("", "", is_absolute=False),
    "uri-template": _TEMPLATE,
    "uuid": r"[0-9A-Fa-f]{8}(?:-[0-9A-Fa-f]{4}){3}-[0-9A-Fa-f]{12}",
}
FORMATS: Final = frozenset((*_PATTERNS, "time", "date-time"))
"""The formats that are enforced."""


LONGEST: Final = {"hostname": 253}
"""The most characters of a format, if its regex does not limit them."""


@lru_cache(maxsize=64)
def format_text(name: str) -> Expr | None:
    """The canonical JSON texts of a format's strings, without quotes; None for an unknown format."""
    if name == "time":
        return union(_regex(_TIME), *_leap_seconds())
    if name == "date-time":
        time = format_text("time")
        assert time is not None
        return concat(_regex(_DATE + "[Tt]"), time)
    return _regex(_PATTERNS[name]) if name in _PATTERNS else None


def _regex(pattern: str) -> Expr:
    return compile_regex(pattern, search=False, json=True)


def _leap_seconds() -> list[Expr]:
    """The texts of 23:59:60 UTC in local time. Since leap seconds began, in 1972, offsets are whole quarters of an
    hour."""
    offsets: dict[int, list[bytes]] = {}
    for ahead in range(0, 24 * 60, 15):
        for sign, minutes in ((b"+", ahead), (b"-", -ahead)):
            local = (24 * 60 - 1 + minutes) % (24 * 60)
            offsets.setdefault(local, []).append(sign + _clock(ahead))
    offsets[24 * 60 - 1] += [b"Z", b"z"]
    fraction = _regex(_FRACTION)
    return [concat(literal(_clock(local) + b":60"), fraction, words(found)) for local, found in offsets.items()]


def _clock(minutes: int) -> bytes:
    return b"%02d:%02d" % divmod(minutes, 60)
