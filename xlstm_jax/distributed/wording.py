"""Numbers, lists and axes as people read them."""

import math

UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")


def format_bytes(count: float) -> str:
    """1234567 -> "1.18 MiB": three digits, in the largest unit of which there is one."""
    power = min(max(int(math.log2(abs(count) or 1)) // 10, 0), len(UNITS) - 1)
    scaled = count / 1024**power
    if power and abs(scaled) >= 999.5 and power + 1 < len(UNITS):
        power, scaled = power + 1, scaled / 1024
    digits = 0 if power == 0 or abs(scaled) >= 99.95 else 1 if abs(scaled) >= 9.995 else 2
    text = f"{scaled:.{digits}f}"
    return f"{text.rstrip('0').rstrip('.') if digits else text} {UNITS[power]}"


def format_fraction(fraction: float) -> str:
    """0.0312 -> "3.1%": two digits, however small."""
    percent = 100 * fraction
    return f"{percent:.0f}%" if percent >= 9.95 else f"{percent:.2g}%"


def format_axes(axes: tuple[str, ...]) -> str:
    """("fsdp",) -> "'fsdp'"; ("dp", "fsdp") -> "('dp', 'fsdp')"."""
    return repr(axes[0]) if len(axes) == 1 else repr(axes)
