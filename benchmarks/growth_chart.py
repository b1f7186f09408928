"""Seconds by size on logarithmic axes, with a line of slope one to compare by."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

Series = Mapping[str, Sequence[tuple[float, float]]]


def growth_svg(series: Series, x_title: str = "RNICs", y_title: str = "CPU seconds") -> str:
    """Each series as (size, seconds); the grey line grows as the sizes do, from the first point of the first series."""
    width, height, left, bottom, top, right = 640, 400, 60, 50, 20, 20
    points = [p for s in series.values() for p in s if p[1] > 0]
    x0, x1 = (math.log10(f(x for x, _ in points)) for f in (min, max))
    y0, y1 = math.floor(math.log10(min(y for _, y in points))), math.ceil(math.log10(max(y for _, y in points)))
    x0, x1 = x0 - 0.1, max(x1, x0 + 1) + 0.1

    def x(size: float) -> float:
        return left + (math.log10(size) - x0) / (x1 - x0) * (width - left - right)

    def y(seconds: float) -> float:
        return height - bottom - (math.log10(seconds) - y0) / max(y1 - y0, 1) * (height - bottom - top)

    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif"'
        ' font-size="12">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
    ]
    for decade in range(y0, y1 + 1):
        at = y(10.0**decade)
        out.append(f'<path d="M{left} {at:.1f}H{width - right}" stroke="#ddd"/>')
        out.append(f'<text x="{left - 6}" y="{at + 4:.1f}" text-anchor="end">{10.0**decade:g}</text>')
    for size in sorted({size for size, _ in points}):
        out.append(f'<path d="M{x(size):.1f} {top}V{height - bottom}" stroke="#ddd"/>')
        out.append(f'<text x="{x(size):.1f}" y="{height - bottom + 16}" text-anchor="middle">{size:,}</text>')
    out.append(f'<text x="{width / 2}" y="{height - 12}" text-anchor="middle">{x_title}</text>')
    out.append(
        f'<text x="14" y="{height / 2}" transform="rotate(-90 14 {height / 2})" text-anchor="middle">{y_title}</text>'
    )
    first = next(iter(series.values()))
    (a, seconds), (b, _) = first[0], first[-1]
    out.append(
        f'<path d="M{x(a):.1f} {y(seconds):.1f}L{x(b):.1f} {y(seconds * b / a):.1f}" stroke="#999"'
        ' stroke-dasharray="4 4"/>'
    )
    for i, ((name, line), colour) in enumerate(zip(series.items(), ("#1f5fa8", "#c2571a", "#3a7d44"), strict=False)):
        drawn = [(x(size), y(s)) for size, s in line if s > 0]
        out.append(
            f'<polyline points="{" ".join(f"{a:.1f},{b:.1f}" for a, b in drawn)}" fill="none" stroke="{colour}"'
            ' stroke-width="2"/>'
        )
        out += [f'<circle cx="{a:.1f}" cy="{b:.1f}" r="3" fill="{colour}"/>' for a, b in drawn]
        out.append(
            f'<text x="{width - right - 8}" y="{height - bottom - 12 - 16 * i}" text-anchor="end" fill="{colour}">'
            f"{name}</text>"
        )
    return "\n".join([*out, "</svg>"]) + "\n"
