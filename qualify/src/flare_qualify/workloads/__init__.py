"""What is asked of a group while faults are injected: prompts, hostile requests, clients."""
