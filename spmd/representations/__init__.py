"""How objects show themselves: one report of tables and pictures, as text, as HTML and for rich."""
