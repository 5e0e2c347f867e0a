"""Faults injected for real: each a small module with a context manager or a function, and evidence that it fired.

Faults know processes, sockets, mounts and files; they know no scenario and no checker. What this machine does not
allow is told by :mod:`flare_qualify.faults.probes`. Everything that a fault makes outside its directory has a name by
:mod:`flare_qualify.faults.names`, so that what a killed run left behind is found and removed by the next.
"""
