"""Parsers for numbers and lists in compiler texts: integers, parts between separators, dtypes."""

import re

_INTEGER = re.compile(r"\d+")
# Bytes by dtype. Values of less than a byte take a byte each, unless the layout gives their bits.
_BYTES = {"token": 0, "opaque": 0, "f16": 2, "bf16": 2, "f32": 4, "f64": 8, "c64": 8, "c128": 16}
_BYTES |= dict.fromkeys(("pred", "s1", "u1", "s2", "u2", "s4", "u4", "f4e2m1fn"), 1)
_BYTES |= {f"{sign}{8 * size}": size for sign in "su" for size in (1, 2, 4, 8)}
_JAX_NAMES = {"bf16": "bfloat16", "s8": "int8", "u8": "uint8", "s4": "int4", "u4": "uint4"}


def integers(text: str) -> tuple[int, ...]:
    """Returns the integers in a text.

    >>> integers("{0,1},{2,<=3}")
    (0, 1, 2, 3)
    """
    return tuple(map(int, _INTEGER.findall(text)))


def split_outside(text: str, separator: str, brackets: str = "()[]{}") -> list[str]:
    """Splits a text at the separators outside of brackets.

    >>> split_outside("f32[2,4]{1,0}, (s32[], f32[8])", ",")
    ['f32[2,4]{1,0}', ' (s32[], f32[8])']

    ``brackets`` has the opening and the closing bracket of each kind in turn.
    """
    parts, depth = [""], 0
    for char in text:
        # `brackets` has opening brackets at even positions, closing brackets at odd positions.
        place = brackets.find(char)
        depth += 0 if place < 0 else 1 - 2 * (place % 2)
        if char == separator and depth == 0:
            parts.append("")
        else:
            parts[-1] += char
    return parts


def bytes_of(dtype: str) -> int:
    """Returns the bytes of a single value with an HLO dtype, such as 2 for "bf16" and 1 for "f8e4m3fn".

    Dtypes of less than a byte, such as "s4", count 1; "token" and "opaque" count 0.

    Raises:
      ValueError: an unknown dtype.
    """
    if dtype.startswith("f8"):
        return 1
    if dtype not in _BYTES:
        raise ValueError(
            f"HLO text holds the dtype {dtype!r}, whose size is not known here; known: {sorted(_BYTES)}, f8*."
        )
    return _BYTES[dtype]


def float_bytes_of(dtype: str) -> int:
    """Returns the bytes of a single value of a float dtype in HLO's notation ("bf16"); 0 for any other text.

    Other texts are integer and complex dtypes, and "mixed", which stands for arrays of different dtypes.

    Raises:
      ValueError: a float dtype of unknown size.
    """
    return bytes_of(dtype) if dtype.startswith(("f", "bf")) else 0


def jax_name_of(dtype: str) -> str:
    """Returns JAX's name of an HLO dtype that operands of a matrix product can have.

    >>> jax_name_of("f8e4m3fn"), jax_name_of("s8"), jax_name_of("f32")
    ('float8_e4m3fn', 'int8', 'float32')

    Any other dtype is returned unchanged.
    """
    if dtype.startswith("f8"):
        return f"float8_{dtype[2:]}"
    return _JAX_NAMES.get(dtype, f"float{dtype[1:]}" if dtype.startswith("f") else dtype)
