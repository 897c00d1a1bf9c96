"""A CUDA device without a GPU: tensors that say they are on cuda:0 and are computed on the CPU.

    with fake_cuda() as device:
        x = torch.ones(3, device="cuda")
        with device.counting() as counts:
            y = (2 * x).sum().item()
    assert counts.launches.total() == 2
    assert counts.synchronizations == {"tests/example.py:4 _local_scalar_dense": 1}

It finds what depends on the device and not on its speed: tensors on different devices, kernel launches, and places
where the host waits for the device. Its numbers are those of a CPU. It patches ``torch.cuda`` and Triton's interpreter,
so tests run it in a process of its own: `on_fake_cuda` forks one.

How it differs from a GPU:

- There is one stream, and nothing runs ahead. Memory is not limited and its statistics are 0.
- An op of PyTorch counts as one launch, also where a GPU runs several kernels (sorting, scans), and a view as none. A
  Triton kernel counts as one, and runs in Triton's interpreter (``TRITON_INTERPRET=1``). A custom op counts what its
  Python code launches, and one if that is nothing.
- There is no NCCL, so nothing is sharded: `training_on_fake_cuda` keeps the parameters in the compute dtype, without
  FSDP2's master weights.
- ``torch.compile``, activation checkpointing, and threads that compute on the device, as those of rewards, are not
  supported.

Read `device.py` first. `emulated.py` has the ops that PyTorch has only on a GPU, `counting.py` the counters, and
`machine.py` the patches and the process.
"""

from support.fake_cuda.counting import Counts
from support.fake_cuda.device import CudaTensor, FakeCuda
from support.fake_cuda.machine import fake_cuda, on_fake_cuda, training_on_fake_cuda

__all__ = ["Counts", "CudaTensor", "FakeCuda", "fake_cuda", "on_fake_cuda", "training_on_fake_cuda"]
