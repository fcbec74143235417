"""The benchmark's tables and its chart, from the results."""

COLOURS = ["#2563eb", "#dc2626", "#ca8a04", "#16a34a", "#7c3aed", "#64748b"]
CONTEXTS = ("1k", "8k", "32k", "128k")


def table(found: dict) -> str:
    """`found`: the results as JSON has them."""
    lines: list[str] = []
    exact = {
        n: {"commit": s["commit"], "conversations": s["all"]["conversations"], **s["all"]["table"]}
        for n, s in found["exactness"].items()
    }
    if exact:
        lines += grid("metric", exact)
    if found.get("latency"):
        lines += ["", *grid("latency, ms", found["latency"])]
    lines += ["", *(f"- Left out: {name}: {why}" for name, why in found["absent"].items())]
    return "\n".join(lines) + "\n"


def grid(corner: str, columns: dict[str, dict[str, str]]) -> list[str]:
    names = list(columns)
    rows = list(dict.fromkeys(key for column in columns.values() for key in column))
    head = [f"| {corner} | {' | '.join(names)} |", "|---|" + "---|" * len(names)]
    body = [f"| {r} | {' | '.join(str(columns[n].get(r, '-')) for n in names)} |" for r in rows]
    return head + body


def chart(found: dict) -> str:
    """Rows over the fewest possible, and added latency by context, one colour per system."""
    rows = {
        name: float(scores["all"]["table"]["E4 rows / fewest"])
        for name, scores in found.get("exactness", {}).items()
        if "," not in name
    }
    latency = found.get("latency", {})
    colour = dict(zip(dict.fromkeys([*rows, *latency]), COLOURS, strict=False))
    parts: list[str] = []
    y = bars(parts, 24, "Rows over the fewest possible (1 is best)", rows, colour, "")
    for context in CONTEXTS:
        added = {n: found.get(f"added p50, {context}") for n, found in latency.items()}
        known = {n: v for n, v in added.items() if v is not None}
        y = bars(parts, y + 14, f"Added latency, p50, {context} tokens", known, colour, " ms")
    return (f'<svg xmlns="http://www.w3.org/2000/svg" width="760" height="{y}" '
            'font-family="sans-serif" font-size="12"><rect width="100%" height="100%" '
            f'fill="white"/>{"".join(parts)}</svg>\n')  # fmt: skip


def bars(parts: list[str], y: int, title: str, values: dict, colour: dict, unit: str) -> int:
    """A group of bars on a scale of its own; where the next may begin."""
    parts.append(f'<text x="8" y="{y}" font-weight="bold">{title}</text>')
    most = max(values.values(), default=1) or 1
    for name, value in values.items():
        y += 18
        width = max(2, 380 * max(value, 0) / most)
        parts.append(f'<text x="8" y="{y + 2}">{name}</text>')
        shape = f'x="190" y="{y - 9}" width="{width:.0f}" height="13"'
        parts.append(f'<rect {shape} fill="{colour[name]}"/>')
        parts.append(f'<text x="{196 + width:.0f}" y="{y + 2}">{value:g}{unit}</text>')
    return y + 16
