"""docs/numerics.md states the constants of ca.h: the hexadecimal ones are the decimal ones."""

from __future__ import annotations

import math
import re
import struct
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
HEADER = (ROOT / "kernels/csrc/common/ca.h").read_text()
DOCUMENT = (ROOT / "docs/numerics.md").read_text()
NAMED = {"ROUND_MAGIC": 12582912.0, "LOG2_E": 1.44269504}


def bits(value: float) -> str:
    return f"{struct.unpack('<I', struct.pack('<f', value))[0]:08X}"


def body(name: str) -> str:
    """The body of a function of the header, without comments."""
    text = HEADER[HEADER.index(f"CA_FN float {name}(float x) {{") :]
    return re.sub(r"//.*", "", text[: text.index("\n}\n")])


@pytest.mark.parametrize(("name", "said"), [("exp2c", "exp2"), ("expc", "exp"), ("logc", "ln")])
def test_the_document_has_the_constants_of_the_polynomials(name: str, said: str) -> None:
    rule = re.search(rf"^`{said}\(x\)`.*?(?=\n\n)", DOCUMENT, re.MULTILINE | re.DOTALL)
    assert rule is not None
    code = body(name)
    literals = re.findall(r"(?<![\w.])-?\d+\.\d+(?:e-?\d+)?(?=f\b)", code)
    needed = {
        bits(float(text)) for text in literals if float(text) not in (0.0, -126.0, -87.0, 88.0)
    }
    needed |= {bits(value) for key, value in NAMED.items() if key in code}
    needed.discard(bits(1.0))  # "p + 1"
    stated = set(re.findall(r"\b[0-9A-F]{8}\b", rule[0])) - {"3F3504F3", "007FFFFF", bits(1.0)}
    assert stated == needed


@pytest.mark.parametrize(
    ("name", "value"), [("TINY", 2.0**-90), ("LARGE", 2.0**96), ("ROUND_MAGIC", 12582912.0)]
)
def test_the_document_has_the_bounds_of_a_group(name: str, value: float) -> None:
    literal = re.search(rf"constexpr float {name} = (\S+)f;", HEADER)
    assert literal is not None
    assert float.fromhex(literal[1]) == value if "0x" in literal[1] else float(literal[1]) == value
    assert bits(value) in DOCUMENT


def test_the_document_has_the_constants_of_gelu() -> None:
    rule = re.search(r"^gelu\(x\) = .*?(?=\n\n)", DOCUMENT, re.MULTILINE | re.DOTALL)
    found = re.search(r"c = (\d\.\d+)\.", rule[0]) if rule else None
    assert rule is not None
    assert found is not None
    linear = 2 * math.sqrt(2 / math.pi)
    for name, value in (("CUBIC", linear * float(found[1])), ("LINEAR", linear)):
        literal = re.search(rf"constexpr float GELU_{name} = (\S+)f;", HEADER)
        assert literal is not None
        assert bits(float(literal[1])) == bits(value)
    cubic = bits(linear * float(found[1]))
    assert f"x · fma(x · x, {cubic}, {bits(linear)})" in rule[0]


def test_the_document_has_the_constants_of_oai() -> None:
    rule = re.search(r"^oai\(g, u\) = .*?(?=\n\n)", DOCUMENT, re.MULTILINE | re.DOTALL)
    literals = [
        re.search(rf"constexpr float OAI_{n} = (\S+)f;", HEADER) for n in ("SLOPE", "LIMIT")
    ]
    assert rule is not None
    slope, limit = (float(found[1]) for found in literals if found is not None)
    assert bits(slope) in rule[0]
    assert f"value of {slope}" in rule[0]
    assert f"min(g, {limit:g})" in rule[0]
    assert f"min(max(u, −{limit:g}), {limit:g})" in rule[0]
