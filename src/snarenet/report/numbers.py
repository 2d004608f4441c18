"""Numbers as text, for people: every page and table of the library and of its lab writes them with these functions.

None is a number that is not there, and becomes a dash.
"""

from __future__ import annotations

import math

DASH = "–"


def short(value: float | None, digits: int = 3) -> str:
    """So many digits, with an exponent unless the number lies between 1 and 10^digits: for gaps and violations.

    >>> short(0.0803), short(8.81), short(597.0), short(2.5e-13), short(1234.0, 2), short(0), short(None)
    ('8.03e-2', '8.81', '597', '2.50e-13', '1.2e3', '0', '–')
    """
    if value is None:
        return DASH
    if value == 0 or not math.isfinite(value):
        return f"{value:g}"
    if 1 <= abs(value) < 10**digits:
        return _exponent(f"{value:#.{digits}g}".rstrip("."))
    return _exponent(f"{value:.{digits - 1}e}")


def number(value: float | None) -> str:
    """Four digits, with an exponent only where it is short of them.

    >>> number(-11.6152), number(35), number(2.5e-7)
    ('-11.62', '35', '2.50e-7')
    """
    if value is None:
        return DASH
    plain = value == 0 or not math.isfinite(value) or 1e-3 <= abs(value) < 9999.5
    return f"{value:.4g}" if plain else short(value)


def brief(value: float | None, digits: int = 3) -> str:
    """So many digits, whole numbers with all of theirs: for measurements, which differ by orders of magnitude.

    >>> brief(1234.5678), brief(0.0123456), brief(2e-9), brief(7), brief(287.3, 2), brief(1.34e40, 2)
    ('1,235', '0.0123', '2.00e-9', '7', '287', '1.3e40')
    """
    if value is None:
        return DASH
    if value == 0 or not math.isfinite(value):
        return f"{value:g}"
    if not 1e-3 <= abs(value) < 1e9:
        return short(value, digits)
    return f"{value:,.0f}" if abs(value) >= 10 ** (digits - 1) else f"{value:.{digits}g}"


def count(value: float | None) -> str:
    """A number of things, or the mean of several.

    >>> count(30.0), count(14.52)
    ('30', '14.5')
    """
    if value is None:
        return DASH
    return f"{value:g}" if value == round(value) else f"{value:.1f}"


def percent(share: float | None) -> str:
    """A share in percent; only a whole is 100% and only nothing is 0%.

    >>> percent(832 / 833), percent(0.999999), percent(1.0)
    ('99.88%', '99.99%', '100%')
    """
    if share is None:
        return DASH
    if 0 < share < 1:
        return f"{min(max(round(100 * share, 2), 0.01), 99.99):g}%"
    return f"{100 * share:g}%"


def duration(seconds: float | None) -> str:
    """A time in the unit that suits it.

    >>> duration(1.5e-05), duration(0.0123), duration(2.5), duration(3725)
    ('15 µs', '12.3 ms', '2.5 s', '1 h 2 min')
    """
    if seconds is None:
        return DASH
    for limit, unit in ((1e-3, 1e-6), (1.0, 1e-3), (120.0, 1.0)):
        if seconds < limit:
            return f"{seconds / unit:.3g} {'s' if unit == 1 else 'ms' if unit == 1e-3 else 'µs'}"
    if not math.isfinite(seconds):
        return f"{seconds} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60} h {minutes % 60} min" if minutes >= 60 else f"{minutes} min {rest} s"


def _exponent(text: str) -> str:
    """1.5e-03 as 1.5e-3, and no exponent that is 0."""
    return text.replace("e-0", "e-").replace("e+00", "").replace("e+0", "e").replace("e+", "e")
