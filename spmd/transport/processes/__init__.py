"""Workers that are processes, of one host or several."""
