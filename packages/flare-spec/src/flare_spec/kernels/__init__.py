"""CUDA kernels for drafting: products with quantised heads, and the Markov walk of a block.

Sources are compiled where they run (NVRTC through cuda-python). Importing this package loads no torch; its modules do.
Everything here has an eager reference elsewhere, which stays the path for other devices and shapes.
"""
