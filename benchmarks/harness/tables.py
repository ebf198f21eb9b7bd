"""Markdown tables."""


def head(*titles: str) -> list[str]:
    """Return a table's two first lines."""
    return [row(*titles).replace("|  ", "| "), "|" + "---|" * len(titles)]


def row(*cells: str) -> str:
    """Return a table's line."""
    return f"| {' | '.join(cells)} |"
