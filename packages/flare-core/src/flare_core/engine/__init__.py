"""The engine: scheduler, page pool, device prefix index and the loop that drives a model runner. No torch."""
