"""The oracle model and in-memory doubles of the ports; numpy only. For tests, simulators and demonstrations."""
