"""One file a peer: `side(case)` makes its ways of generating, called alike wherever they do alike."""
