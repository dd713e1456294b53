"""Escape characters of other people's text that a terminal or a page acts on instead of showing them."""

#: Control characters but for tabs and line ends; marks that change the direction of text; separators of lines.
_ACTING = (
    *(code for code in range(32) if chr(code) not in "\t\n"),
    *range(0x7F, 0xA0),
    *(0x061C, 0x200E, 0x200F, *range(0x2028, 0x202F), *range(0x2066, 0x206A)),
)
_ESCAPED = {code: f"\\u{code:04x}" for code in _ACTING}


def printable(text: str) -> str:
    r"""Return the text with control and bidirectional characters as JSON writes them; twice changes nothing more.

    >>> print(printable("fc\x1b[31m.weight"), printable("pass\u202egnp"))
    fc\u001b[31m.weight pass\u202egnp
    """
    return text.translate(_ESCAPED)
