"""Several machines, on Ray: who belongs to the cluster, what it has, and whether it works.

Ray places, starts, watches and restarts processes; what each of them holds in bytes is planned and kept by Plimsoll. The
commands ``plimsoll join``, ``leave``, ``cluster`` and ``verify`` are :mod:`plimsoll.ray.__main__`. Needs Ray:
``pip install 'plimsoll-train[ray]'``.
"""
