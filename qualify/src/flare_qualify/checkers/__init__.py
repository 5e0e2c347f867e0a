"""What is held against a group afterwards: answers, records on every rank, pages, processes."""
