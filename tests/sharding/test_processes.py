"""Weights of folders on two processes with two devices each: reads of each, writes of the first."""

import filecmp
import json
import socket
import subprocess
import sys
from pathlib import Path

from flax import nnx

from flax_attn import Llama, LlamaConfig

CONFIG = LlamaConfig(
    16, 24, num_heads=4, num_layers=2, num_kv_heads=2, context_length=8, vocab_size=12
)
PROCESS = """
import json, sys
import jax
folder, port, index = sys.argv[1], sys.argv[2], int(sys.argv[3])
jax.config.update("jax_num_cpu_devices", 2)
jax.config.update("jax_cpu_collectives_implementation", "gloo")
jax.distributed.initialize(f"127.0.0.1:{port}", 2, index)
from flax import nnx
from flax_attn import Llama
from flax_attn.models.hugging_face import values
part, read = values._part, []
values._part = lambda *call: read.append(part(*call)) or read[-1]
mesh = jax.make_mesh((2, 2), ("fsdp", "tensor"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
model = Llama.from_pretrained(f"{folder}/one", mesh=mesh, scan_layers=True)
model.save_pretrained(f"{folder}/back")
params = jax.tree.leaves(nnx.state(model, nnx.Param))
own = sum(sum({str(s.index): s.data.nbytes for s in x.addressable_shards}.values()) for x in params)
print(json.dumps([sum(x.nbytes for x in read), own, sum(x.nbytes for x in params)]))
"""


def free_port():
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        return server.getsockname()[1]


def test_each_process_reads_its_share_and_the_first_writes_the_same_files(tmp_path):
    Llama(CONFIG, rngs=nnx.Rngs(0)).save_pretrained(tmp_path / "one")
    command = [sys.executable, "-c", PROCESS, str(tmp_path), str(free_port())]
    options = {"stdout": subprocess.PIPE, "text": True, "cwd": Path(__file__).parents[2]}
    processes = [subprocess.Popen([*command, str(i)], **options) for i in range(2)]
    found = [process.communicate(timeout=120)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0]
    for output in found:
        read, own, whole = json.loads(output.splitlines()[-1])
        assert read == own < 0.52 * whole
    for name in ("config.json", "model.safetensors"):
        assert filecmp.cmp(tmp_path / "one" / name, tmp_path / "back" / name, shallow=False), name
