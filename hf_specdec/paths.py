"""Draft trees as lists: for every token the place of the one it follows, an earlier one, or -1 for the text."""

from __future__ import annotations


def chain_of(num_tokens: int) -> list[int]:
    """The parents of a chain."""
    return list(range(-1, num_tokens - 1))


def products(values: list[float], parents: list[int]) -> list[float]:
    """The value of every token times those of all that it follows."""
    found: list[float] = []
    for value, parent in zip(values, parents, strict=True):
        found.append(value if parent < 0 else value * found[parent])
    return found


def largest(values: list[float], parents: list[int], count: int) -> tuple[list[int], list[int]]:
    """The tokens with the largest values, of which none exceeds that of the token it follows; of equals the earlier.

    Args:
        values: one a token.
        parents: of all tokens.
        count: tokens to keep.

    Returns:
        Their places, and the parents among them.
    """
    kept = sorted(sorted(range(len(values)), key=lambda place: (-values[place], place))[:count])
    places = {-1: -1} | {place: index for index, place in enumerate(kept)}
    return kept, [places[parents[place]] for place in kept]


def united(
    tokens: list[int], parents: list[int], other_tokens: list[int], other_parents: list[int]
) -> tuple[list[int], list[int], list[int]]:
    """Two trees in one, that holds every path of both once.

    Returns:
        Tokens, parents, and where the other tree's tokens are; those of the first stay where they were.
    """
    tokens, parents = list(tokens), list(parents)
    known = {edge: place for place, edge in enumerate(zip(parents, tokens, strict=True))}
    places: list[int] = []
    for token, parent in zip(other_tokens, other_parents, strict=True):
        edge = (-1 if parent < 0 else places[parent]), token
        if edge not in known:
            known[edge] = len(tokens)
            tokens.append(token)
            parents.append(edge[0])
        places.append(known[edge])
    return tokens, parents, places
