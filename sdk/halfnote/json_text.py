"""Read JSON that has a message's body in it: the body stays as it was sent, byte for byte.

To parse a body and encode it again would change it (`1.10`, `1e999`), and a single body that Python cannot parse, such
as one with a number of 5,000 digits, would make the other messages of the same answer unreadable.
"""

import json
import re
from collections.abc import Iterator, Mapping
from decimal import Decimal
from typing import Any

_at_value = json.JSONDecoder().raw_decode
_past_space = re.compile(r"[ \t\n\r]*").match
_mark = re.compile(r'["\[\]{}]').search
_scalar = re.compile(r"[^\s,\]}]+").match


def _integer(digits: str) -> int | Decimal:
    """Return an integer. Python refuses to make an `int` of more than 4,300 digits (sys.set_int_max_str_digits)."""
    try:
        return int(digits)
    except ValueError:
        return Decimal(digits)


_lenient = json.JSONDecoder(parse_int=_integer)


def parsed(content: bytes) -> Any:
    """Return the value of JSON; an integer that Python does not parse is a `Decimal`.

    Raises ValueError or RecursionError.
    """
    try:
        return json.loads(content)
    except json.JSONDecodeError:
        raise
    except ValueError:
        return _lenient.decode(content.decode())


class JsonText:
    """Reads a JSON text from its start, part by part. Each part must be read before the next one.

    Raises ValueError, also for what follows the text; RecursionError for a value that is nested too deeply.
    """

    def __init__(self, content: bytes) -> None:
        self._text = content.decode()
        self._at = self._skip(0)

    @property
    def is_object(self) -> bool:
        """Whether an object is next."""
        return self._is_next("{")

    @property
    def is_array(self) -> bool:
        """Whether an array is next."""
        return self._is_next("[")

    def members(self) -> Iterator[str]:
        """Yield the name of each member of an object. Its value is to be read before the next name."""
        for _ in self._parts("{", "}"):
            name, at = _at_value(self._text, self._at)
            if not isinstance(name, str):
                raise ValueError("a name in JSON is a string")
            self._at = self._skip(at)
            self._expect(":")
            yield name

    def items(self) -> Iterator[None]:
        """Yield for each item of an array. The item is to be read before the next one."""
        yield from self._parts("[", "]")

    def value(self) -> Any:
        """Return a value."""
        start = self._at
        try:
            found, self._at = _at_value(self._text, start)
        except json.JSONDecodeError:
            raise
        except ValueError:
            found, self._at = _lenient.raw_decode(self._text, start)
        return found

    def exact(self) -> bytes:
        """Return the text of a value as it stands, also of one that Python cannot parse."""
        start = self._at
        try:
            _, self._at = _at_value(self._text, start)
        except json.JSONDecodeError:
            raise
        except (ValueError, RecursionError):
            self._at = self._end(start)
        return self._text[start : self._at].encode()

    def end(self) -> None:
        """Raise ValueError if anything follows."""
        if self._skip(self._at) != len(self._text):
            raise ValueError("something follows the JSON")

    def _parts(self, opening: str, closing: str) -> Iterator[None]:
        self._expect(opening)
        if self._is_next(closing):
            self._expect(closing)
            return
        while True:
            yield
            self._at = self._skip(self._at)
            if self._is_next(closing):
                self._expect(closing)
                return
            self._expect(",")

    def _is_next(self, expected: str) -> bool:
        return self._text.startswith(expected, self._at)

    def _expect(self, expected: str) -> None:
        if not self._is_next(expected):
            raise ValueError(f"{expected} is missing at character {self._at} of the JSON")
        self._at = self._skip(self._at + 1)

    def _skip(self, at: int) -> int:
        found = _past_space(self._text, at)
        assert found is not None
        return found.end()

    def _end(self, start: int) -> int:
        """Return the end of a value without parsing it."""
        if self._text[start : start + 1] not in ("{", "["):
            scalar = _scalar(self._text, start)
            return start if scalar is None else scalar.end()
        depth, at = 0, start
        while (found := _mark(self._text, at)) is not None:
            at = found.end()
            if found[0] == '"':
                # One pass, which fails at once if there is no end.
                _, at = _at_value(self._text, found.start())
            elif found[0] in "{[":
                depth += 1
            else:
                depth -= 1
                if depth == 0:
                    return at
        raise ValueError("the JSON ends within a value")


def with_exact(text: JsonText, name: str) -> Mapping[str, Any]:
    """Return an object whose member `name`, if there is one, has its text in bytes as its value."""
    return {found: text.exact() if found == name else text.value() for found in text.members()}
