"""Collectives as point-to-point flows and in closed form, their equivalence classes, and their run on a fabric."""
