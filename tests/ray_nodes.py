"""A Ray cluster of two nodes on loopback, each with one processor, until standard input closes.

`python tests/ray_nodes.py` prints the cluster's address once both nodes are there.
"""

import os
import sys

# Read when Ray is imported: without it a node takes the address of a network card.
os.environ |= {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0", "RAY_USAGE_STATS_ENABLED": "0"}

from ray.cluster_utils import Cluster

NODE = {"num_cpus": 1, "object_store_memory": 80_000_000}


def main() -> None:
    cluster = Cluster(initialize_head=True, head_node_args=NODE | {"include_dashboard": False})
    try:
        cluster.add_node(**NODE)
        print(cluster.address, flush=True)
        sys.stdin.read()
    finally:
        cluster.shutdown()


if __name__ == "__main__":
    main()
