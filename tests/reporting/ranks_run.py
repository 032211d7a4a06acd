"""One of two ranks: gathers, and gives up a rank that stays away. See test_ranks.py."""

from __future__ import annotations

import os
import sys
import time
from datetime import timedelta

from torch import distributed

from lightning_memtools.reporting.ranks import RankGather, RankPosts

GROUP = timedelta(minutes=5)
"""The time limit of the process group: who waits for a rank that does not come waits so long."""


def main(store: str) -> None:
    rank = int(os.environ["LOCAL_RANK"])
    distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2, timeout=GROUP)
    gather = RankGather(GROUP)
    assert gather.objects({"rank": rank}) == [{"rank": 0}, {"rank": 1}]
    assert gather.objects("only one" if rank else None) == ["only one"]
    gather.close()
    gather.close()
    assert gather.objects(rank) == [rank]
    empty = RankPosts("nothing to write")
    if rank == 0:  # rank 1 never ends its points
        assert empty.finish(patience_s=GROUP.total_seconds()) == [None, None]
    impatient = RankGather(timedelta(seconds=3))
    if rank == 1:
        begin = time.monotonic()
        assert impatient.objects("alone") == ["alone"]
        assert impatient.objects(1.0) == [1.0]  # without waiting again
        assert 2 < time.monotonic() - begin < GROUP.total_seconds()
        sys.stdout.write("gave up\n")
    distributed.barrier()
    impatient.close()


if __name__ == "__main__":
    main(sys.argv[1])
