"""The subcommands of ``flare``, one file each. Importing one loads click and nothing heavy; bodies import what they run."""
