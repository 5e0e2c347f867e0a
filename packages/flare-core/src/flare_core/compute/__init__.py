"""The model runner on torch: checkpoints, sharded models, paged attention, sampling, collectives.

Importing this package loads no torch; its modules do, apart from :mod:`flare_core.compute.model_config`.
"""
