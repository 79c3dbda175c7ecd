"""Several machines, with Ray: cluster membership, placement of workers, and verification.

Ray places, starts, monitors and restarts processes. Plimsoll plans and limits the memory of each process. The commands
``plimsoll join``, ``leave``, ``cluster`` and ``verify`` are in :mod:`plimsoll.ray.__main__`. Needs Ray:
``pip install 'plimsoll-train[ray]'``.

=====================  ==============================================================================
module                 content
=====================  ==============================================================================
``membership``         joins and leaves a cluster
``local_state``        the raylets that this machine has started, and their record
``devices``, ``ports`` the devices that a machine contributes, and the ports that it uses
``cluster``            the state of the cluster
``verification``       the test of devices and links
``run_helper``         the helper process between a run and Ray
``failures``           error messages for exceptions
=====================  ==============================================================================
"""
