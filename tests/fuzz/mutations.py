"""Mutations of bytes, as by damage or malice: flipped, cut, repeated, joined with others, with tokens inserted."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Sequence

NUMBER = re.compile(rb"-?\d+(\.\d+)?([eE][+-]?\d+)?")
TOKENS = (
    *(
        b"\0",
        b"\xff",
        b"\xfe\xff",
        b"\xef\xbb\xbf",
        b"\xed\xa0\x80",
        b"\xc3",
        b"\xf4\x90\x80\x80",
        b"\n",
        b"\r\n",
        b"\r",
        b"\t",
        b" ",
    ),
    *(
        b"[",
        b"]",
        b"{",
        b"}",
        b'"',
        b"'",
        b'"""',
        b",",
        b"=",
        b":",
        b";",
        b"#",
        b"\\",
        b"\\u0000",
        b"\\ud800",
        b"|",
        b"$X",
        b"`",
        b"--",
    ),
    *(
        b"nan",
        b"NaN",
        b"Infinity",
        b"-inf",
        b"null",
        b"true",
        b"1e999",
        b"-1",
        b"0",
        b"1" * 400,
        b"9" * 5000,
        b"0.0000000001",
        b"1979-05-27",
    ),
    *(b"[" * 2000, b"{" * 500, b'{"a":' * 1500, b"]" * 2000, b"a" * 70000, b"a.b.c.d = 1\n", b"[x]\n", b"[[x]]\n", b"\\\n"),
)
NUMBERS = (
    b"0",
    b"-1",
    b"1e308",
    b"1e-320",
    b"9" * 400,
    b"9" * 20,
    b"4294967296",
    b"9223372036854775808",
    b"NaN",
    b"Infinity",
    b"1e999",
    b"0.5",
)
Mutation = Callable[[bytes, random.Random, Sequence[bytes]], bytes]


def mutated(data: bytes, rng: random.Random, others: Sequence[bytes] = ()) -> bytes:
    """Return the data after one to four mutations; `others` are what it may be joined with."""
    for _ in range(rng.choice((1, 1, 1, 2, 3, 4))):
        data = rng.choice(MUTATIONS)(data, rng, others or (data,))
    return data


def _flip(data: bytes, rng: random.Random, others: Sequence[bytes]) -> bytes:
    if not data:
        return data
    changed = bytearray(data)
    for _ in range(rng.choice((1, 1, 1, 4, 16))):
        changed[rng.randrange(len(changed))] ^= 1 << rng.randrange(8)
    return bytes(changed)


def _overwrite(data: bytes, rng: random.Random, others: Sequence[bytes]) -> bytes:
    at = rng.randrange(len(data) + 1)
    piece = bytes(rng.choice((0, 255, 127, 128, rng.randrange(256))) for _ in range(rng.choice((1, 2, 4, 8))))
    return data[:at] + piece + data[at + len(piece) :]


def _cut(data: bytes, rng: random.Random, others: Sequence[bytes]) -> bytes:
    return data[: rng.randrange(len(data) + 1)]


def _delete(data: bytes, rng: random.Random, others: Sequence[bytes]) -> bytes:
    at = rng.randrange(len(data) + 1)
    return data[:at] + data[at + rng.choice((1, 2, 8, 64, 512)) :]


def _repeat(data: bytes, rng: random.Random, others: Sequence[bytes]) -> bytes:
    at = rng.randrange(len(data) + 1)
    piece = data[at : at + rng.choice((1, 8, 64, 512))]
    return data[:at] + piece * rng.choice((2, 3, 50)) + data[at:]


def _splice(data: bytes, rng: random.Random, others: Sequence[bytes]) -> bytes:
    other = rng.choice(others)
    return data[: rng.randrange(len(data) + 1)] + other[rng.randrange(len(other) + 1) :]


def _insert(data: bytes, rng: random.Random, others: Sequence[bytes]) -> bytes:
    at = rng.randrange(len(data) + 1)
    return data[:at] + rng.choice(TOKENS) + data[at:]


def _number(data: bytes, rng: random.Random, others: Sequence[bytes]) -> bytes:
    numbers = list(NUMBER.finditer(data[:20000]))
    if not numbers:
        return data
    found = rng.choice(numbers)
    return data[: found.start()] + rng.choice(NUMBERS) + data[found.end() :]


def _swap_lines(data: bytes, rng: random.Random, others: Sequence[bytes]) -> bytes:
    lines = data.split(b"\n")
    a, b = rng.randrange(len(lines)), rng.randrange(len(lines))
    lines[a], lines[b] = lines[b], lines[a]
    return b"\n".join(lines)


MUTATIONS: tuple[Mutation, ...] = (
    _flip,
    _flip,
    _overwrite,
    _cut,
    _delete,
    _repeat,
    _splice,
    _insert,
    _insert,
    _number,
    _number,
    _swap_lines,
)
