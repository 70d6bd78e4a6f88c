"""Data movement as linear operators, each declared once together with its adjoint."""
