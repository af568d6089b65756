"""How a report, or anything else that is public, is shown: in one line of 100 characters, or in a few lines."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeVar

_WIDTH = 100  # characters
_NUM_WORST = 5
_Item = TypeVar("_Item")


def one_line(shown: object, said: str) -> str:
    """Return ``<Class: said>``, cut to 100 characters: what a ``repr`` returns.

    >>> one_line("text", "4 characters")
    '<str: 4 characters>'
    """
    name = type(shown).__name__
    return f"<{name}: {cut(said, _WIDTH - len(name) - 4)}>"


def printable(text: str) -> str:
    """Return ``text`` with what a terminal would obey, and not print, as Python writes it; line ends stay.

    >>> printable("red \\x1b[31m")
    'red \\\\x1b[31m'
    """
    return "".join(one if one.isprintable() or one == "\n" else ascii(one)[1:-1] for one in text)


def cut(text: str, width: int = _WIDTH) -> str:
    """Return ``text`` in one line of at most ``width`` characters.

    >>> cut("down_proj", 7)
    'down...'
    """
    line = printable(" ".join(text.split()))
    return line if len(line) <= width else f"{line[: width - 3]}..."


def count(number: float) -> str:
    """Return a number with its digits up to a million, and rounded from there on.

    >>> count(82240), count(134_515_008), count(70e9)
    ('82,240', '134.5 M', '70.0 B')
    """
    for size, letter in ((1e9, "B"), (1e6, "M")):
        if number >= size:
            return f"{number / size:,.1f} {letter}"
    return f"{number:,.0f}"


def share(part: float) -> str:
    """Return a share in percent.

    >>> share(0.5)
    '50.0 %'
    """
    return f"{part:.1%}".replace("%", " %")


def zeros(num_zeros: int, num_elements: int, num_parameters: int | None) -> str:
    """Return the sparsity of a model: the share of zeros of its prunable weights, and of all, if their number is known.

    >>> zeros(50, 100, 200)
    '50.0 % of 100 prunable weights, 25.0 % of all 200'
    """
    of_all = f", {share(num_zeros / max(num_parameters, 1))} of all {count(num_parameters)}" if num_parameters else ""
    return f"{share(num_zeros / max(num_elements, 1))} of {count(num_elements)} prunable weights{of_all}"


def took(seconds: float, num_rounds: int, num_bytes: int) -> str:
    """Return what a call took.

    >>> took(0.5, 5, 20480)
    '0.50 s, 5 rounds and 20,480 bytes a rank'
    """
    return f"{seconds:.2f} s, {num_rounds:,} rounds and {count(num_bytes)} bytes a rank"


def worst(
    what: str,
    items: Iterable[_Item],
    name: Callable[[_Item], str],
    value: Callable[[_Item], float | None],
    shown: Callable[[float], str],
) -> list[str]:
    """Return lines that list the five ``items`` with the highest ``value``, if there are any; ``None`` is left out.

    >>> worst("longest", ["ab", "a"], str, len, str)
    ['  longest:', '    2  ab', '    1  a']
    """
    listed = [(number, name(item)) for item in items if (number := value(item)) is not None]
    highest = sorted(listed, key=lambda pair: -pair[0])[:_NUM_WORST]
    lines = [f"    {shown(number)}  {cut(text, _WIDTH - 20)}" for number, text in highest]
    return [f"  {what}:", *lines] if lines else []


def gibibytes(num_bytes: float) -> str:
    """Return ``num_bytes`` as text.

    >>> gibibytes(3 << 28)
    '0.75 GiB'
    """
    return f"{num_bytes / 2**30:.3g} GiB"
