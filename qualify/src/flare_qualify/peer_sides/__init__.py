"""Other systems' sides of a comparison, run by their own interpreters as plain files: they import nothing of flare."""
