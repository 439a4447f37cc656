"""Pictures of plans as SVG, made of text alone: no library, no script, nothing to load."""
