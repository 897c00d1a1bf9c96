"""One rank of an all-reduce, run as a script of its own: ``rank_worker.py BACKEND RANK WORLD STORE``.

It imports nothing of the project. Rank r contributes (r + 1) i at position i, so that the exact sum is known, then
times the all-reduce of a larger tensor. It prints the sums and the time as JSON.
"""

import json
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist

CHECKED = 16
LARGE = {"gloo": 2**20, "nccl": 2**26}  # float32 numbers: 4 MiB, 256 MiB
REPEATS = 5


def main(backend: str, rank: int, world: int, store: str) -> None:
    device = torch.device("cuda", rank) if backend == "nccl" else torch.device("cpu")
    if backend == "nccl":
        torch.cuda.set_device(device)
    wait = timedelta(seconds=100)
    dist.init_process_group(backend, init_method=f"file://{store}", rank=rank, world_size=world, timeout=wait)
    small = (rank + 1) * torch.arange(CHECKED, dtype=torch.float32, device=device)
    dist.all_reduce(small)
    large = torch.ones(LARGE[backend], device=device)
    times = []
    for _ in range(REPEATS):
        large.fill_(1.0)
        dist.barrier()
        start = time.perf_counter()
        dist.all_reduce(large)
        wrong = int((large != world).sum())  # reads the result, so the time includes its end on a GPU
        times.append(time.perf_counter() - start)
        assert not wrong, f"{wrong} of {len(large)} sums are wrong"
    seconds = min(times)
    size = large.numel() * large.itemsize
    dist.destroy_process_group()
    print(json.dumps({"sums": small.tolist(), "seconds": seconds, "bytes": size}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
