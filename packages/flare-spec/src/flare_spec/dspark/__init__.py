"""Block drafters DSpark (arXiv 2607.05147) and DFlash: one forward pass drafts a block. Importing loads no torch."""
