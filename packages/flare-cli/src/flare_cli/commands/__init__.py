"""The subcommands of ``flare``, one file each. Importing one loads click and little else; bodies import the rest."""
