"""Define patterns for the string formats of JSON Schema. Each matches valid texts only (RFC 3339, 3986, 4122, 5321,
6901).

If a format is wider than a regular expression of reasonable size can express, the pattern is narrower (for example
ASCII host names of up to four labels). It is never wider, so generated texts are always valid.
"""

from __future__ import annotations

_LEAP = r"(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:[02468][048]|[13579][26])00)"
_DATE = (
    r"(?:[0-9]{4}-(?:(?:0[1-9]|1[0-2])-(?:0[1-9]|1[0-9]|2[0-8])|(?:0[13-9]|1[0-2])-(?:29|30)"
    rf"|(?:0[13578]|1[02])-31)|{_LEAP}-02-29)"
)
_TIME = r"(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](?:\.[0-9]{1,9})?(?:Z|[+-](?:[01][0-9]|2[0-3]):[0-5][0-9])"
_DAY_PART = r"(?:T(?:[0-9]+H(?:[0-9]+M(?:[0-9]+S)?)?|[0-9]+M(?:[0-9]+S)?|[0-9]+S))"
_DURATION = rf"P(?:[0-9]+W|{_DAY_PART}|(?:[0-9]+Y(?:[0-9]+M(?:[0-9]+D)?)?|[0-9]+M(?:[0-9]+D)?|[0-9]+D){_DAY_PART}?)"
_LABEL = r"[A-Za-z0-9](?:[A-Za-z0-9]{0,20}(?:-[A-Za-z0-9]{1,20}){0,2})"
_HOST = rf"{_LABEL}(?:\.{_LABEL}){{0,3}}"
_BYTE = r"(?:25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
_IPV4 = rf"{_BYTE}(?:\.{_BYTE}){{3}}"
_H = r"[0-9A-Fa-f]{1,4}"
_IPV6 = "(?:" + "|".join(
    [rf"(?:{_H}:){{7}}{_H}", rf"::(?:{_H}(?::{_H}){{0,6}})?"]
    + [rf"{_H}(?::{_H}){{{left - 1}}}::(?:{_H}(?::{_H}){{0,{6 - left}}})?" for left in range(1, 7)]
    + [rf"(?:{_H}:){{7}}:"]
) + ")"  # fmt: skip
_ATOM = r"[A-Za-z0-9!#$%&'*+/=?^_`{|}~-]{1,20}"
_EMAIL = rf"{_ATOM}(?:\.{_ATOM}){{0,2}}@{_HOST}"
_UUID = r"[0-9A-Fa-f]{8}(?:-[0-9A-Fa-f]{4}){3}-[0-9A-Fa-f]{12}"
_PATH_CHAR = r"(?:[A-Za-z0-9._~!$&'()*+,;=:@-]|%[0-9A-Fa-f]{2})"
_URI = (
    rf"[A-Za-z][A-Za-z0-9+.-]*:(?://{_HOST}(?::[0-9]{{1,5}})?(?:/{_PATH_CHAR}*)*|{_PATH_CHAR}+(?:/{_PATH_CHAR}*)*)"
    rf"(?:\?(?:{_PATH_CHAR}|[/?])*)?(?:#(?:{_PATH_CHAR}|[/?])*)?"
)
_POINTER = r"(?:/(?:[^/~]|~[01])*)*"

FORMATS: dict[str, str] = {
    "date": _DATE,
    "time": _TIME,
    "date-time": f"{_DATE}T{_TIME}",
    "duration": _DURATION,
    "email": _EMAIL,
    "idn-email": _EMAIL,
    "hostname": _HOST,
    "idn-hostname": _HOST,
    "ipv4": _IPV4,
    "ipv6": _IPV6,
    "uri": _URI,
    "uri-reference": _URI,
    "iri": _URI,
    "iri-reference": _URI,
    "uuid": _UUID,
    "json-pointer": _POINTER,
}
"""Maps a format name to the pattern of its whole text, in the syntax of ``regex_parser``."""

UNSUPPORTED_FORMATS = frozenset({"regex", "uri-template", "relative-json-pointer"})
"""Formats that JSON Schema defines and that no pattern here covers. Names that it does not define are annotations."""
