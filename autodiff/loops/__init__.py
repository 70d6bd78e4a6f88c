"""Loops on tapes: their derivatives without one node for each operation of each step."""
