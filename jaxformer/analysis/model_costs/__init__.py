"""What a whole model costs: its own program counted by part, and the same products by formula."""
