"""Objects of inference engines, read by their names and attributes: none of the engines is ever imported."""
