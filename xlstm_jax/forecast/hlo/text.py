"""Numbers and lists in the texts that compilers print: integers, what stands between separators, dtypes."""

import re

_INTEGER = re.compile(r"\d+")
# Bytes by dtype. Values of less than a byte take a byte each, unless their layout says how many bits they take.
_BYTES = {"token": 0, "opaque": 0, "f16": 2, "bf16": 2, "f32": 4, "f64": 8, "c64": 8, "c128": 16}
_BYTES |= dict.fromkeys(("pred", "s1", "u1", "s2", "u2", "s4", "u4", "f4e2m1fn"), 1)
_BYTES |= {f"{sign}{8 * size}": size for sign in "su" for size in (1, 2, 4, 8)}
_JAX_NAMES = {"bf16": "bfloat16", "s8": "int8", "u8": "uint8", "s4": "int4", "u4": "uint4"}


def integers(text: str) -> tuple[int, ...]:
    """All whole numbers in a text.

    >>> integers("{0,1},{2,<=3}")
    (0, 1, 2, 3)
    """
    return tuple(map(int, _INTEGER.findall(text)))


def split_outside(text: str, separator: str, brackets: str = "()[]{}") -> list[str]:
    """The parts of a text between the separators that are in no bracket.

    >>> split_outside("f32[2,4]{1,0}, (s32[], f32[8])", ",")
    ['f32[2,4]{1,0}', ' (s32[], f32[8])']
    """
    parts, depth = [""], 0
    for char in text:
        # Brackets open at even places of `brackets` and close at odd ones.
        place = brackets.find(char)
        depth += 0 if place < 0 else 1 - 2 * (place % 2)
        if char == separator and depth == 0:
            parts.append("")
        else:
            parts[-1] += char
    return parts


def bytes_of(dtype: str) -> int:
    """Bytes of a value of a dtype as HLO writes it: "bf16", "f8e4m3fn".

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
    """Bytes of a value of a float dtype; 0 of any other, and of "mixed"."""
    return bytes_of(dtype) if dtype.startswith(("f", "bf")) else 0


def jax_name_of(dtype: str) -> str:
    """The name in JAX of a dtype that a matrix product has.

    >>> jax_name_of("f8e4m3fn"), jax_name_of("s8"), jax_name_of("f32")
    ('float8_e4m3fn', 'int8', 'float32')
    """
    if dtype.startswith("f8"):
        return f"float8_{dtype[2:]}"
    return _JAX_NAMES.get(dtype, f"float{dtype[1:]}" if dtype.startswith("f") else dtype)
