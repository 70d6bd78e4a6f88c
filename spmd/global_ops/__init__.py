"""NumPy's functions of global arrays: each is a map whose specs follow from the layouts of its operands."""
