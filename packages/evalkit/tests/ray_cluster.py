"""A local Ray cluster for test_ray.py, in a process of its own: `ray_cluster.py GB NODES`.

Says its address; then kills a node at each line that it reads, and all at the end of its input.
"""

import sys

from ray.cluster_utils import Cluster

gb, count = map(float, sys.argv[1:])
options = {"num_cpus": 1, "object_store_memory": 80 * 2**20}
made = Cluster(
    initialize_head=True, head_node_args={**options, "memory": 1, "include_dashboard": False}
)
nodes = [made.add_node(**options, memory=int(gb * 2**30)) for _ in range(int(count))]
made.wait_for_nodes()
sys.stdout.write(f"{made.address}\n")
sys.stdout.flush()
for _ in sys.stdin:
    made.remove_node(nodes.pop(), allow_graceful=False)
made.shutdown()
