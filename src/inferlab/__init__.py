"""inferlab: measure compressed variants of a language model, and decide which one to serve."""

import logging
import os

# Libraries must not wait for a hub that may not be there; the hub source turns this off.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("HF_DATASETS_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

# These speak while they are imported, of optional parts that no stage uses.
for _name in ("torchao", "torch.utils._pytree"):
    logging.getLogger(_name).setLevel(logging.ERROR)
