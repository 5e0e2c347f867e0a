"""Training and evaluation of block drafters: prompts, the target's answers, its taps, the loop, acceptance lengths."""
