"""Curves and bars as inline SVG, coloured by the page's style sheet."""

from __future__ import annotations

from dataclasses import dataclass
from html import escape

_WIDTH, _HEIGHT = 360, 200
_LEFT, _RIGHT, _TOP, _BOTTOM = 40, 12, 10, 34
_MOST_TICKS = 8


@dataclass(frozen=True)
class Curve:
    """Shares by position.

    Attributes:
        name: whose.
        style: the class that colours it.
        hits: counts at position 1, 2, ...
        tries: out of how many; the curve leaves out positions where there were none.
    """

    name: str
    style: str
    hits: list[int]
    tries: list[int]

    @property
    def points(self) -> list[tuple[int, float]]:
        """Positions and shares, where there is one."""
        pairs = zip(self.hits, self.tries, strict=True)
        return [(i, hit / tried) for i, (hit, tried) in enumerate(pairs, start=1) if tried]


def curves(shown: list[Curve], label: str) -> str:
    """A chart of shares between 0 and 100 % against positions.

    Args:
        shown: at least one curve with a point.
        label: what it shows, for those who cannot see it.
    """
    last = max(position for curve in shown for position, _ in curve.points)
    parts = [f'<svg class="chart" viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{escape(label)}">']
    for share in (0, 0.25, 0.5, 0.75, 1):
        y = _y(share)
        parts.append(f'<line class="grid" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y}" y2="{y}"/>')
        parts.append(f'<text x="{_LEFT - 6}" y="{y + 4}" text-anchor="end">{share:.0%}</text>')
    step = -(-last // _MOST_TICKS)
    for position in range(1, last + 1, step):
        x = _x(position, last)
        parts.append(f'<text x="{x}" y="{_HEIGHT - _BOTTOM + 16}" text-anchor="middle">{position}</text>')
    middle = (_LEFT + _WIDTH - _RIGHT) / 2
    parts.append(f'<text x="{middle}" y="{_HEIGHT - 3}" text-anchor="middle">position in the draft</text>')
    parts += [_curve(curve, last) for curve in shown if curve.points]
    return "".join([*parts, "</svg>"])


def sample(style: str) -> str:
    """A bit of a curve, for a legend."""
    return (
        f'<svg class="sample" viewBox="0 0 36 12" aria-hidden="true"><g class="curve {style}">'
        '<path d="M1 6H35"/><circle cx="18" cy="6" r="3.5"/></g></svg>'
    )


def bar(share: float, style: str = "ink") -> str:
    """A bar as long as a share of its place."""
    return (
        '<svg class="bar" viewBox="0 0 100 8" preserveAspectRatio="none" aria-hidden="true">'
        f'<rect class="fill {style}" width="{100 * share:.2f}" height="8"/></svg>'
    )


def _curve(curve: Curve, last: int) -> str:
    points = [(position, _x(position, last), _y(share)) for position, share in curve.points]
    path = "M" + "L".join(f"{x} {y}" for _, x, y in points)
    dots, most = [], max(curve.tries)
    for position, x, y in points:
        hits, tries = curve.hits[position - 1], curve.tries[position - 1]
        radius = round(2 + 2.5 * (tries / most) ** 0.5, 1)
        title = f"{curve.name}, position {position}: {hits} of {tries} ({hits / tries:.0%})"
        dots.append(f'<circle cx="{x}" cy="{y}" r="{radius}"><title>{escape(title)}</title></circle>')
    return f'<g class="curve {curve.style}"><path d="{path}"/>{"".join(dots)}</g>'


def _x(position: int, last: int) -> float:
    room = _WIDTH - _LEFT - _RIGHT
    return round(_LEFT + room * (position - 0.5) / last, 1)


def _y(share: float) -> float:
    return round(_HEIGHT - _BOTTOM - (_HEIGHT - _TOP - _BOTTOM) * share, 1)
