"""Fuzz targets for everything of flare that reads what others wrote, and the loops that drive them."""
