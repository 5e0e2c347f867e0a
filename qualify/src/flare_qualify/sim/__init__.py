"""The deterministic simulator: every rank's real machines in one process, on simulated links, disks, devices and time.

``python -m flare_qualify.sim run`` runs seeds; :func:`flare_qualify.sim.run.run_seeds` is the same for other suites.
"""
