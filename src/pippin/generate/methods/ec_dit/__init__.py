"""EC-DIT: diffusion transformers with expert-choice routing.

The network is `pippin.generate.diffusion.dit`, with ``feed_forward="expert_choice"``, and the routing
`pippin.nn.feedforward.expert_choice`; here are the compute that an image gets by place, and sparse networks made from
dense ones.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
