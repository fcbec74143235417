"""The benchmark's tables and its chart, from the results."""


def table(found: dict) -> str:
    lines = [f"Commit {found['commit']}, {found['seeds']} seeds per case.", ""]
    exact = {name: scores["all"].table() for name, scores in found["exactness"].items()}
    if exact:
        lines += grid("metric", exact)
    if found["latency"]:
        lines += ["", *grid("latency, ms", found["latency"])]
    lines += ["", *(f"Left out: {name} ({why})" for name, why in found["absent"].items())]
    return "\n".join(lines) + "\n"


def grid(corner: str, columns: dict[str, dict[str, str]]) -> list[str]:
    names = list(columns)
    rows = list(dict.fromkeys(key for column in columns.values() for key in column))
    head = [f"| {corner} | {' | '.join(names)} |", "|---|" + "---|" * len(names)]
    body = [f"| {r} | {' | '.join(str(columns[n].get(r, '-')) for n in names)} |" for r in rows]
    return head + body


def chart(found: dict) -> str:
    """Rows per fewest rows and added latency by context, one colour per system."""
    colours = ["#2563eb", "#dc2626", "#ca8a04", "#16a34a", "#7c3aed"]
    names = list(found["latency"])
    parts, y = [], 30
    most = max((abs(v) for n in names for k, v in found["latency"][n].items()
                if k.startswith("added p50")), default=1) or 1  # fmt: skip
    for context in ("1k", "8k", "32k", "128k"):
        parts.append(f'<text x="8" y="{y + 12}" font-weight="bold">{context} tokens</text>')
        for name, colour in zip(names, colours, strict=False):
            value = found["latency"][name].get(f"added p50, {context}", 0.0)
            width = max(2, 430 * max(value, 0) / most)
            parts.append(f'<rect x="90" y="{y}" width="{width:.0f}" height="14" fill="{colour}"/>')
            label = f"{value} ms  {name}"
            parts.append(f'<text x="{96 + width:.0f}" y="{y + 12}">{label}</text>')
            y += 18
        y += 10
    head = (f'<svg xmlns="http://www.w3.org/2000/svg" width="760" height="{y}" '
            'font-family="sans-serif" font-size="12">'
            '<rect width="100%" height="100%" fill="white"/>'
            '<text x="8" y="18" font-size="14">Added latency per request, p50</text>')  # fmt: skip
    return head + "".join(parts) + "</svg>\n"
