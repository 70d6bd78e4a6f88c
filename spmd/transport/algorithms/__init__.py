"""The algorithms of collectives as data: what each member sends in which round, and to whom."""
