"""TPU chips, as libtpu describes them."""

import os
from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any

from jax.experimental import topologies

# Without these libtpu asks the cloud for a description of the machine, and lets one process at a
# time compile.
_ENVIRONMENT = {
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v5litepod-1",
    "TPU_WORKER_HOSTNAMES": "localhost",
}
_NEEDED = "compiling for TPU needs libtpu, not a TPU: pip install 'jax[tpu]'"


def described(topology: str) -> Sequence[Any]:
    """Return the devices of a topology such as `"v5e:2x2"`.

    Raises:
        ImportError: if libtpu is not installed.
    """
    if find_spec("libtpu") is None:
        raise ImportError(_NEEDED)
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    return topologies.get_topology_desc(platform="tpu", topology_name=topology).devices
