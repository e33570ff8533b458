"""How text is laid out for people, in one place: aligned columns, numbers with units, HTML pages. Knows no subject."""
