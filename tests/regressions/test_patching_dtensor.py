"""Public faults of tensor-parallel weights."""

import pytest
import torch
import torch.distributed as dist
from toystack import ToyStack

from voxfuse.patches.engine import apply_patches

pytestmark = pytest.mark.skipif(not dist.is_available(), reason="this torch has no distributed package")


@pytest.fixture
def mesh():
    from torch.distributed.device_mesh import init_device_mesh

    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


@pytest.mark.parametrize("backend", ["reference", "interpreter"])
def test_distributed_tensors_run_upstreams_chain(toy: ToyStack, mesh, backend: str) -> None:
    """Liger-Kernel #826: DTensor weights of tensor parallelism broke the kernel. They are declared unsupported."""
    from torch.distributed.tensor import DTensor, Shard, distribute_module, distribute_tensor

    model, x = toy.voice(), torch.randn(2, 8)
    with torch.no_grad():
        expected = model(x)
        distribute_module(model, mesh)
        with apply_patches(model, policy="all", backend=backend) as patches:
            result = model(distribute_tensor(x, mesh, [Shard(0)]))
            (receipt,) = patches.receipts
    assert isinstance(result, DTensor)
    torch.testing.assert_close(result.full_tensor(), expected)
    assert receipt.calls == 0
    assert receipt.fallbacks == {"a tensor is a DTensor: fused ops have no sharding rules": 2}
