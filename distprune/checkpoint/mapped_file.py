"""Which file is mapped to an address: to be named where it has become shorter than its map, and cannot be read."""

from __future__ import annotations


def mapped_file_at(address: int) -> str:
    """Return the path of the file that this process has mapped to where ``address`` is, or ``""``. Linux; local."""
    try:
        with open("/proc/self/maps", encoding="utf-8", errors="replace") as maps:
            for line in maps:
                bounds, *others = line.split(maxsplit=5)
                start, stop = (int(bound, 16) for bound in bounds.split("-"))
                if start <= address < stop:
                    return others[4].strip() if len(others) == 5 else ""
    except OSError:  # another system
        pass
    return ""
