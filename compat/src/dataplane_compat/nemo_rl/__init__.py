"""NeMo RL on dataplane: `activate` makes its factory build the adapter where the config says ``impl: dataplane``.

The driver calls `activate`, or is started by ``python -m dataplane_compat.nemo_rl SCRIPT``. Its workers need
nothing: they unpickle a `Section` or a client, which activates. Importing this package does not import NeMo RL.
"""

from dataplane_compat.nemo_rl.adapter import NemoRLAdapter, Section, activate, client_class

__all__ = ["NemoRLAdapter", "Section", "activate", "client_class"]
