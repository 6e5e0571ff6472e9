"""How the report writes numbers. A number that is not known is an en dash."""

import math

MINUS = "−"
UNKNOWN = "–"


def number(value: float, digits: int = 3) -> str:
    """Write ``value`` with ``digits`` significant digits, such as 0.123, 12300 or 1.2e−5.

    With more than three digits, zeros at the end are left out.
    """
    if not math.isfinite(value):
        return UNKNOWN
    if value == 0:
        return "0"
    magnitude = abs(value)
    if 1e-3 <= magnitude < 1e5:
        decimals = max(0, digits - 1 - math.floor(math.log10(magnitude)))
        text = f"{value:.{decimals}f}"
        text = _short(text) if digits > 3 else text
    else:
        mantissa, exponent = f"{value:.{digits - 2}e}".split("e")
        mantissa = _short(mantissa) if digits > 3 else mantissa
        text = f"{mantissa}e{int(exponent)}"
    return text.replace("-", MINUS)


def signed(value: float, digits: int = 3) -> str:
    """Write ``value`` with its sign."""
    text = number(value, digits)
    return f"+{text}" if value > 0 else text


def credit(value: float) -> str:
    """Write an advantage with its sign and two decimals."""
    if not math.isfinite(value):
        return UNKNOWN
    return f"{value:+.2f}".replace("-", MINUS)


def percent(value: float) -> str:
    """Write a share in [0, 1] as a percentage."""
    return f"{100 * value:.0f} %" if math.isfinite(value) else UNKNOWN


def duration(seconds: float) -> str:
    """Write seconds as ``41 s``, ``5 min 30 s`` or ``3 h 05 min``."""
    if not math.isfinite(seconds):
        return UNKNOWN
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"


def _short(decimal: str) -> str:
    return decimal.rstrip("0").rstrip(".") if "." in decimal else decimal
