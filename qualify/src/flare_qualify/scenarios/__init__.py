"""The scenarios: each module declares some, and is found by its place here."""
