"""The mixers: projections, order and plain maths of each kind, over the functions of a backend."""
